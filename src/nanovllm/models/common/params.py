"""`Params`: the weights of a decoder as a pytree, and the table that describes them.

The same dataclasses hold tensors (`Params[Tensor]`, what `forward` takes) and descriptions (`Params[ParamInfo]`, the table that drives
loading, random initialisation and later sharding), so that the two always have the same structure.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import torch
from torch.utils import _pytree as pytree

from nanovllm.config import RopeConfig
from nanovllm.types import Tensor, brief_fields, register_value

P = TypeVar("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """One parameter: its shape, the checkpoint tensors that make it when laid one behind the other, and how it starts at random.

    `source_shapes` are the checkpoint's shapes, in the order of `sources`. `dtype`: the least that holds it; None: the model's own.
    `kind`: a `matrix` is multiplied with, a `table` indexed by row, a `gain` starts near one, a `bias` near zero; `rope` are the speeds of
    `rope`, computed and not loaded. What is kept differs from what is stored where `transposed` (axes swapped), by `offset` (added), and
    where `channels` say which of a head's `stored_dim` stored channels is kept at each of its places, -1 a zero: in the first `turned`
    heads along axis 0, or 1 where `columns`; in the others they follow in their order, zeros behind them.
    """

    shape: tuple[int, ...]
    kind: Literal["matrix", "table", "gain", "bias", "rope"]
    sources: tuple[str, ...] = ()
    source_shapes: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype | None = None
    transposed: bool = False
    offset: float = 0.0
    channels: tuple[int, ...] = ()
    stored_dim: int = 0
    turned: int = 0
    columns: bool = False
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
    """What is kept of a parameter whose checkpoint tensors, one behind the other, are `stored`, flat; may write into its memory."""
    if info.transposed:
        return stored.view(info.shape[::-1]).T.contiguous()
    if not info.channels:
        kept = stored.view(info.shape)
        return kept.add_(info.offset) if info.offset else kept
    kept = stored.new_zeros(info.shape)
    shape = (*info.shape[:1], -1) if info.columns else (-1, *info.shape[1:])
    for to, where, by, which in _moves(info, kept, stored.view(shape)):
        to[:, where] = by[:, which]
    return kept


def as_stored(info: ParamInfo, kept: Tensor) -> list[Tensor]:
    """The checkpoint tensors of a parameter: `as_kept` backwards. Views of it where nothing stands between."""
    flat = kept.T.contiguous() if info.transposed else kept - info.offset if info.offset else kept.contiguous()
    if info.channels:
        flat = kept.new_empty(sum(math.prod(shape) for shape in info.source_shapes))
        shape = (*info.shape[:1], -1) if info.columns else (-1, *info.shape[1:])
        for to, where, by, which in _moves(info, kept, flat.view(shape)):
            by[:, which] = to[:, where]
    sizes = [math.prod(shape) for shape in info.source_shapes]
    return [part.view(shape) for part, shape in zip(flat.view(-1).split(sizes), info.source_shapes, strict=True)]


def _moves(info: ParamInfo, kept: Tensor, stored: Tensor) -> list[tuple[Tensor, list[int], Tensor, list[int]]]:
    """Heads first, channels second, as views of both: which places hold which stored channels, of heads that turn and of others."""
    if info.columns:
        kept, stored = kept.T, stored.T
    kept, stored = kept.unflatten(0, (-1, len(info.channels))), stored.unflatten(0, (-1, info.stored_dim))
    where = [place for place, channel in enumerate(info.channels) if channel >= 0]
    plain = list(range(info.stored_dim))
    return [
        (kept[: info.turned], where, stored[: info.turned], [info.channels[place] for place in where]),
        (kept[info.turned :], plain, stored[info.turned :], plain),
    ]
