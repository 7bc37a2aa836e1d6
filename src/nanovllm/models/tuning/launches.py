"""The kernels that a decode step launches for a model, as values that need no GPU. They are the kernels that can be tuned."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from immutables import Map

from nanovllm.config import ModelConfig
from nanovllm.models.common.params import Layer, Params
from nanovllm.models.registry import REGISTRY
from nanovllm.ops.linear.norm_linear import FEW, fits, goes_wide
from nanovllm.ops.linear.quantised import GPU_CODES, QuantisedMatrix
from nanovllm.ops.linear.quantised_tiles import serves_closely
from nanovllm.types import Tensor

Form = Literal["few", "many", "sum", "attend"]  # `norm_linear` of few rows and of many, `linear_add_norm`, `rope_attend`
PRODUCTS = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The properties of a GPU that limit tile configurations: its multiprocessors, and bytes of shared memory per program.

    `hopper` is as in `quantised_tiles.given_tile`.
    """

    processors: int
    memory: int
    hopper: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """How a matrix is quantised, as far as it limits tile configurations: the fields of `QuantisedMatrix` of these names.

    `zeros` says whether there are zero points. Inputs are in the order of the codes before they reach a kernel.
    """

    kind: str
    group: int
    rows: int
    zeros: bool

    @classmethod
    def of(cls, matrix: QuantisedMatrix) -> "Codes":
        """How a matrix is quantised."""
        return cls(kind=matrix.kind, group=matrix.group, rows=matrix.rows, zeros=matrix.zeros is not None)

    def matrix(self, outputs: int, columns: int) -> QuantisedMatrix:
        """Such a matrix of these sizes, without codes and without memory."""
        grid = -(-outputs // self.rows), -(-columns // self.group)
        return QuantisedMatrix(
            codes=torch.empty(outputs, 0, dtype=GPU_CODES[self.kind], device="meta"),
            scales=torch.empty(grid, device="meta"),
            zeros=torch.empty(grid, dtype=torch.int16, device="meta") if self.zeros else None,
            columns=columns,
            group=self.group,
            rows=self.rows,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One kernel of a decode step.

    Attributes:
        part: The field of `StepCuts` with the kernel's tile configuration.
        form: The kernel.
        rows: Rows of the decode step.
        outputs: Outputs of a product; query heads of attention.
        width: Inputs of a product; channels of a head of attention.
        kv_heads: KV heads of attention; not used for a product.
        gated: Whether a product has two matrices, gate and up.
        norm: Whether the kernel also computes the norm of its input.
        codes: How the matrix is quantised; None if it is not.
    """

    part: str
    form: Form
    rows: int
    outputs: int
    width: int
    kv_heads: int = 1
    gated: bool = False
    norm: bool = False
    codes: Codes | None = None

    @property
    def matrix(self) -> QuantisedMatrix:
        """The quantised matrix, without memory."""
        assert self.codes is not None
        return self.codes.matrix(self.outputs * (2 if self.gated else 1), self.width)


def codes_of(params: Params[Tensor]) -> Map[str, Codes]:
    """How the matrices of a layer and the head are quantised, by the name of the kernel. Matrices that are not quantised are left out."""
    each = {**{part: getattr(params.layers[0], part) for part in PRODUCTS}, "head": params.head}
    return Map({part: Codes.of(matrix) for part, matrix in each.items() if isinstance(matrix, QuantisedMatrix)})


def alike(params: Params[Tensor]) -> bool:
    """Whether all layers are quantised as the first one is. Tile configurations are measured for its matrices and serve all layers."""

    def forms(layer: Layer[Tensor]) -> tuple[Codes | None, ...]:
        each = (getattr(layer, part) for part in PRODUCTS)
        return tuple(Codes.of(matrix) if isinstance(matrix, QuantisedMatrix) else None for matrix in each)

    return len({forms(layer) for layer in params.layers}) <= 1


def works(config: ModelConfig, rows: int, machine: Machine, codes: Mapping[str, Codes] = Map()) -> Iterator[Work]:
    """The tunable kernels of a decode step of `rows` rows, in the forms that `models/fast/fused.py` chooses.

    Args:
        config: The sizes of the model.
        rows: Rows of the step.
        machine: The GPU.
        codes: How matrices are quantised, as `codes_of` returns it.
    """
    hidden, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
    products = {
        "qkv": ((heads + 2 * config.num_kv_heads) * head_dim, hidden, False),
        "o": (hidden, heads * head_dim, False),
        "gate_up": (config.intermediate_size, hidden, True),
        "down": (hidden, config.intermediate_size, False),
    }

    def few(part: str, outputs: int, width: int, gated: bool) -> bool:
        if part in codes:
            return serves_closely(codes[part].matrix(outputs * (2 if gated else 1), width), rows, gated, hopper=machine.hopper)
        return fits(rows, width, gated, machine.memory)

    closely = all(few(part, *sizes) for part, sizes in products.items())
    closely = closely and (rows <= FEW or not _norms_behind(config))
    yield Work(part="attend", form="attend", rows=rows, outputs=heads, width=head_dim, kv_heads=config.num_kv_heads)
    for part, (outputs, width, gated) in products.items():
        before = part in ("qkv", "gate_up")  # a norm comes before these products; for the others it comes after the residual sum
        wide = part in codes or goes_wide(rows, width, gated, machine.memory)
        form: Form = "few" if closely else "sum" if not before else "many" if wide else "few"
        how = codes.get(part)
        yield Work(part=part, form=form, rows=rows, outputs=outputs, width=width, gated=gated, norm=closely and before, codes=how)
    if rows <= FEW and ("head" in codes or fits(rows, hidden, False, machine.memory)):
        yield Work(part="head", form="few", rows=rows, outputs=config.vocab_size, width=hidden, norm=True, codes=codes.get("head"))


@functools.cache
def _norms_behind(config: ModelConfig) -> bool:
    """Whether norms come after attention and MLP. Then steps of more than `FEW` rows run `wide_layer`."""
    return REGISTRY[config.architecture].param_table(config).layers[0].o_norm is not None
