"""The kernels that a decode step launches for a model, as values that need no GPU. They are the kernels that can be tuned."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nanovllm.config import ModelConfig
from nanovllm.models.registry import REGISTRY
from nanovllm.ops.linear.norm_linear import FEW, fits, goes_wide

Form = Literal["few", "many", "sum", "attend"]  # `norm_linear` of few rows and of many, `linear_add_norm`, `rope_attend`


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The properties of a GPU that limit tile configurations: its multiprocessors, and bytes of shared memory per program."""

    processors: int
    memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One kernel of a decode step.

    Attributes:
        part: The field of `StepCuts` with the kernel's tile configuration.
        form: The kernel.
        rows: Rows of the decode step.
        outputs: Outputs of a product; query heads of attention.
        width: Inputs of a product; channels of a head of attention.
        gated: Whether a product has two matrices, gate and up.
        norm: Whether the kernel also computes the norm of its input.
    """

    part: str
    form: Form
    rows: int
    outputs: int
    width: int
    gated: bool = False
    norm: bool = False


def works(config: ModelConfig, rows: int, machine: Machine) -> Iterator[Work]:
    """The tunable kernels of a decode step of `rows` rows, in the forms that `models/fast/fused.py` chooses."""
    hidden, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
    products = {
        "qkv": ((heads + 2 * config.num_kv_heads) * head_dim, hidden, False),
        "o": (hidden, heads * head_dim, False),
        "gate_up": (config.intermediate_size, hidden, True),
        "down": (hidden, config.intermediate_size, False),
    }
    closely = all(fits(rows, width, gated, machine.memory) for _, width, gated in products.values())
    closely = closely and (rows <= FEW or not _norms_behind(config))
    yield Work(part="attend", form="attend", rows=rows, outputs=heads, width=head_dim)
    for part, (outputs, width, gated) in products.items():
        before = part in ("qkv", "gate_up")  # a norm comes before these products; for the others it comes after the residual sum
        form: Form = "few" if closely else "sum" if not before else "many" if goes_wide(rows, width, gated, machine.memory) else "few"
        yield Work(part=part, form=form, rows=rows, outputs=outputs, width=width, gated=gated, norm=closely and before)
    if rows <= FEW and fits(rows, hidden, False, machine.memory):
        yield Work(part="head", form="few", rows=rows, outputs=config.vocab_size, width=hidden, norm=True)


@functools.cache
def _norms_behind(config: ModelConfig) -> bool:
    """Whether norms come after attention and MLP. Then steps of more than `FEW` rows run `wide_layer`."""
    return REGISTRY[config.architecture].param_table(config).layers[0].o_norm is not None
