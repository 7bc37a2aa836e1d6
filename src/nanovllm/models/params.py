"""`Params`: the weights of a decoder as a pytree, and the table that describes them.

The same dataclasses hold tensors (`Params[Tensor]`, what `forward` takes) and descriptions (`Params[ParamInfo]`, the table that drives
loading, random initialisation and later sharding), so that the two always have the same structure.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import torch
from torch.utils import _pytree as pytree

from ..types import Tensor, brief_fields, register_value

P = TypeVar("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """One parameter: its shape, the checkpoint tensors that make it when concatenated along axis 0, and how it starts at random.

    `source_shapes` are the checkpoint's shapes, in the order of `sources`. `dtype` None means the model's own. `kind`: a `matrix` is
    multiplied with, a `table` indexed by row, a `gain` starts near one, a `bias` near zero; `rope` is computed, not loaded.
    """

    shape: tuple[int, ...]
    kind: Literal["matrix", "table", "gain", "bias", "rope"]
    sources: tuple[str, ...] = ()
    source_shapes: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(Generic[P]):
    """One decoder layer. Matrices are `[out, in]`; `qkv` is q, k and v stacked along axis 0, `gate_up` gate and up."""

    input_norm: P  # [M]
    qkv: P  # [(H + 2K) D, M]
    qkv_bias: P | None  # [(H + 2K) D]
    q_norm: P | None  # [D]
    k_norm: P | None  # [D]
    o: P  # [M, H D]
    o_bias: P | None  # [M]
    post_norm: P  # [M]
    gate_up: P  # [2F, M]
    gate_up_bias: P | None  # [2F]
    down: P  # [M, F]
    down_bias: P | None  # [M]

    def __repr__(self) -> str:
        return brief_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(Generic[P]):
    """All weights of a decoder. `head` None: the embedding table serves as the head."""

    embed: P  # [V, M]
    layers: tuple[Layer[P], ...]
    final_norm: P  # [M]
    head: P | None  # [V, M]
    inv_freq: P  # [D/2], float32

    def __repr__(self) -> str:
        layers = len(self.layers) if isinstance(self.layers, tuple | list) else 0
        held = f", {str(self.embed.dtype).removeprefix('torch.')} on {self.embed.device}" if isinstance(self.embed, Tensor) else ""
        return f"Params({layers} layers, {brief_count(self)}{held})"


def brief_count(params: Any) -> str:
    """How many parameters there are, `inv_freq`, which is computed, left out."""
    held = (params.embed, params.layers, params.final_norm, params.head) if isinstance(params, Params) else ()
    count = sum(math.prod(leaf.shape) for leaf in pytree.tree_leaves(held) if isinstance(leaf, Tensor | ParamInfo))
    return f"{count:,} parameters" if isinstance(count, int) else "symbolic shapes"


def two_of_each(params: Params[Tensor]) -> Params[Tensor]:
    """The weights with the first two layers of each form alone: the others run the same kernels, for of a prompt the last layer may run
    others than the rest."""
    forms: dict[tuple[Any, ...], list[Layer[Tensor]]] = {}

    def form(layer: Layer[Tensor]) -> tuple[Any, ...]:
        return tuple([None if w is None else (w.shape, w.dtype, w.data_ptr() % 16) for w in pytree.tree_leaves(layer)])

    for layer in params.layers:
        forms.setdefault(form(layer), []).append(layer)
    return replace(params, layers=tuple(layer for alike in forms.values() for layer in alike[:2]))


register_value(Layer)
register_value(Params)


def loaded(kind: Literal["matrix", "table", "gain", "bias"], *sources: tuple[str, tuple[int, ...]]) -> ParamInfo:
    """The description of a parameter made of `(name, shape)` checkpoint tensors, stacked along axis 0."""
    shapes = tuple(shape for _, shape in sources)
    return ParamInfo(
        shape=(sum(shape[0] for shape in shapes), *shapes[0][1:]),
        kind=kind,
        sources=tuple(name for name, _ in sources),
        source_shapes=shapes,
    )


def rope_info(head_dim: int) -> ParamInfo:
    """The description of the rotation speeds, which are computed and not loaded."""
    return ParamInfo(shape=(head_dim // 2,), kind="rope", dtype=torch.float32)
