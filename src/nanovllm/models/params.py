"""`Params`: the weights of a decoder as a pytree, and the table that describes them.

The same dataclasses hold tensors (`Params[Tensor]`, what `forward` takes) and descriptions (`Params[ParamInfo]`, the table that drives
loading, random initialisation and later sharding), so that the two always have the same structure.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import torch
from torch.utils import _pytree as pytree

from ..config import RopeConfig
from ..types import Tensor, brief_fields, register_value

P = TypeVar("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """One parameter: its shape, the checkpoint tensors that make it when laid one behind the other, and how it starts at random.

    `source_shapes` are the checkpoint's shapes, in the order of `sources`. `dtype`: the least that holds it; None: the model's own.
    `kind`: a `matrix` is multiplied with, a `table` indexed by row, a `gain` starts near one, a `bias` near zero; `rope` are the speeds of
    `rope`, computed and not loaded. What is kept differs from what is stored where `transposed` (axes swapped), by `offset` (added), and
    where `channels` name the order in which each head's channels are kept in the first `turned` entries of axis 0.
    """

    shape: tuple[int, ...]
    kind: Literal["matrix", "table", "gain", "bias", "rope"]
    sources: tuple[str, ...] = ()
    source_shapes: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype | None = None
    transposed: bool = False
    offset: float = 0.0
    channels: tuple[int, ...] = ()
    turned: int = 0
    rope: RopeConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Generic[P]):
    """The experts of a layer, and what chooses among them. `bias` corrects the choice, not the weights of the chosen."""

    router: P  # [E, M]
    bias: P | None  # [E], float32
    gate_up: P  # [E, 2F, M]
    down: P  # [E, M, F]

    def __repr__(self) -> str:
        return brief_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(Generic[P]):
    """One decoder layer. Matrices are `[out, in]`; `qkv` is q, k and v stacked along axis 0, `gate_up` gate and up.

    `gate_up` and `down` are None where a layer has experts alone. Gains in float32, where the model is in half precision, are multiplied
    before the norm is rounded.
    """

    input_norm: P  # [M]
    input_norm_bias: P | None = None  # [M]
    qkv: P  # [(H + 2K) D, M]
    qkv_bias: P | None  # [(H + 2K) D]
    q_norm: P | None  # [D]
    k_norm: P | None  # [D]
    o: P  # [M, H D]
    o_bias: P | None  # [M]
    o_norm: P | None = None  # [M], of attention's output before it is added
    post_norm: P  # [M]
    post_norm_bias: P | None = None  # [M]
    gate_up: P | None  # [2F, M]; [F, M] where there is no gate
    gate_up_bias: P | None  # [2F]
    down: P | None  # [M, F]
    down_bias: P | None  # [M]
    down_norm: P | None = None  # [M], of the feed-forward layer's output before it is added
    experts: Experts[P] | None = None

    def __repr__(self) -> str:
        return brief_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(Generic[P]):
    """All weights of a decoder. `head` None: the embedding table serves as the head."""

    embed: P  # [V, M]
    positions: P | None = None  # [max_position_embeddings, M], where positions are learned
    layers: tuple[Layer[P], ...]
    final_norm: P  # [M]
    final_norm_bias: P | None = None  # [M]
    head: P | None  # [V, M]
    inv_freq: P  # [D/2], float32
    local_inv_freq: P | None = None  # [D/2], float32, of layers with a window where these turn otherwise

    def __repr__(self) -> str:
        layers = len(self.layers) if isinstance(self.layers, tuple | list) else 0
        held = f", {str(self.embed.dtype).removeprefix('torch.')} on {self.embed.device}" if isinstance(self.embed, Tensor) else ""
        return f"Params({layers} layers, {brief_count(self)}{held})"


def brief_count(params: Any) -> str:
    """How many parameters there are; what is computed, as the speeds of rotation are, is left out."""
    computed = ("inv_freq", "local_inv_freq", "buffers")
    names = params.__dataclass_fields__ if isinstance(params, Params) else ()
    held = [getattr(params, name) for name in names if name not in computed]
    leaves = {id(leaf): leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, Tensor | ParamInfo)}  # tied ones count once
    count = sum(math.prod(leaf.shape) for leaf in leaves.values())
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


register_value(Experts)
register_value(Layer)
register_value(Params)


def loaded(
    kind: Literal["matrix", "table", "gain", "bias"], *sources: tuple[str, tuple[int, ...]], shape: tuple[int, ...] = (), **how: Any
) -> ParamInfo:
    """The description of a parameter made of `(name, shape)` checkpoint tensors, stacked along axis 0, or of this `shape` altogether.
    `how` are other fields."""
    shapes = tuple(shape for _, shape in sources)
    whole = shape or (sum(shape[0] for shape in shapes), *shapes[0][1:])
    return ParamInfo(shape=whole, kind=kind, sources=tuple(name for name, _ in sources), source_shapes=shapes, **how)


def rope_info(rope: RopeConfig, head_dim: int) -> ParamInfo:
    """The description of the rotation speeds, which are computed and not loaded."""
    return ParamInfo(shape=(head_dim // 2,), kind="rope", dtype=torch.float32, rope=rope)


def as_kept(info: ParamInfo, stored: Tensor) -> Tensor:
    """What is kept of a parameter whose checkpoint tensors, one behind the other, are `stored`; may write into its memory."""
    kept = stored.view(info.shape[::-1]).T.contiguous() if info.transposed else stored.view(info.shape)
    if info.channels:
        heads = kept[: info.turned].unflatten(0, (-1, len(info.channels)))
        heads.copy_(heads[:, list(info.channels)])
    return kept.add_(info.offset) if info.offset else kept


def as_stored(info: ParamInfo, kept: Tensor) -> list[Tensor]:
    """The checkpoint tensors of a parameter: `as_kept` backwards. Views of it where nothing stands between."""
    if info.offset:
        kept = kept - info.offset
    if info.channels:
        kept = kept.clone()
        heads = kept[: info.turned].unflatten(0, (-1, len(info.channels)))
        heads[:, list(info.channels)] = heads.clone()
    flat = (kept.T.contiguous() if info.transposed else kept.contiguous()).view(-1)
    sizes = [math.prod(shape) for shape in info.source_shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), info.source_shapes, strict=True)]
