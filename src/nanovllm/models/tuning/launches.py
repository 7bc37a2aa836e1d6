"""What there is to cut: the kernels that a decode step of so many rows launches for a model, as values that need no GPU."""

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
    """What bounds a cut on a GPU: its multiprocessors, and the bytes of shared memory that a program may use."""

    processors: int
    memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One kernel of a step: `part` is the field of `StepCuts` that says how it is cut.

    A product has `outputs` and `width` inputs; `gated`: twice the weights; `norm`: of its input, in the same launch. For attention
    `outputs` are query heads, `width` is the width of a head.
    """

    part: str
    form: Form
    rows: int
    outputs: int
    width: int
    gated: bool = False
    norm: bool = False


def works(config: ModelConfig, rows: int, machine: Machine) -> Iterator[Work]:
    """The kernels of one decode step of so many rows that can be cut in more than one way; the choices of `models/fast/fused.py`."""
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
        before = part in ("qkv", "gate_up")  # a norm stands before the product, and for the others behind the residual
        form: Form = "few" if closely else "sum" if not before else "many" if goes_wide(rows, width, gated, machine.memory) else "few"
        yield Work(part=part, form=form, rows=rows, outputs=outputs, width=width, gated=gated, norm=closely and before)
    if rows <= FEW and fits(rows, hidden, False, machine.memory):
        yield Work(part="head", form="few", rows=rows, outputs=config.vocab_size, width=hidden, norm=True)


@functools.cache
def _norms_behind(config: ModelConfig) -> bool:
    """Whether norms stand behind attention and MLP: their layers of few rows are `wide_layer`s beyond `FEW`."""
    return REGISTRY[config.architecture].param_table(config).layers[0].o_norm is not None
