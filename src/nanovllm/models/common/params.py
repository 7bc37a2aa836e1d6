"""`Params`: the weights of a decoder as a pytree, and the table that describes them.

The same dataclasses hold tensors and descriptions, so the two always have the same structure. `forward` takes tensors
(`Params[Tensor]`). Loading and random initialisation read descriptions (`Params[ParamInfo]`, the table).
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import torch
from torch.utils import _pytree as pytree

from nanovllm.config import RopeConfig
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.types import Tensor, brief_fields, register_value

P = TypeVar("P")


Ranges = tuple[tuple[int, int], ...]  # first and last (exclusive) of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one of several ranks has of a parameter; see `models/common/sharding.py`.

    Attributes:
        axis: The axis that is cut, from the end: -1 for columns, -2 for the rows of a matrix. None: the rank has the whole parameter.
        ranges: The ranges of that axis which the rank has, in their order.
        missing: How many rows of zeros follow, so that all ranks have as many.
        zero: Whether the rank has zeros, because rank 0 has the values.
    """

    axis: int | None = None
    ranges: Ranges = ()
    missing: int = 0
    zero: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """The description of one parameter: its shape, its checkpoint tensors, and how it is initialised at random.

    The parameter is the concatenation of its checkpoint tensors, after the changes that `transposed`, `offset` and `channels` describe.

    Attributes:
        shape: The shape of the parameter in the model.
        kind: `matrix` (a factor of a product), `table` (indexed by row), `gain` (a norm weight, starts near 1), `bias` (starts near 0) or
            `rope` (rotation speeds, computed and not loaded).
        sources: Names of the checkpoint tensors, in the order of concatenation.
        source_shapes: Shapes of the checkpoint tensors, in the order of `sources`.
        dtype: The narrowest dtype that may hold the parameter; None means the model's dtype.
        transposed: Whether the checkpoint has the axes swapped.
        offset: A number that is added to the checkpoint's values.
        channels: For each channel of a rotated head, the stored channel that it is taken from, or -1 for zero. Empty: no change.
        stored_dim: Channels of a head in the checkpoint.
        turned: How many heads, counted from the first, have their channels reordered by `channels`. The other heads keep the stored order,
            padded with zeros at the end.
        columns: Whether heads lie along axis 1 in place of axis 0.
        rope: The rotary embedding whose speeds are computed, for `kind="rope"`.
        part: What this rank has of the parameter. All other fields then describe that part.
        taken: For each checkpoint tensor, the ranges of rows and the ranges of columns that are read. Empty: all is read.

    Examples:
        >>> info = model.spec.param_table(model.config).layers[0].qkv
        >>> info.shape, info.kind
        ((512, 256), 'matrix')
        >>> info.sources[0]
        'model.layers.0.self_attn.q_proj.weight'
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
    part: Part = Part()
    taken: tuple[tuple[Ranges, Ranges], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Generic[P]):
    """The experts of a layer and their router. `bias` changes which experts are chosen, not the weights of the chosen experts."""

    router: P  # [E, M]
    bias: P | None  # [E], float32
    gate_up: P  # [E, 2F, M]
    down: P  # [E, M, F]

    def __repr__(self) -> str:
        return brief_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(Generic[P]):
    """The weights of one decoder layer. Matrices are `[out, in]`; None marks a weight that the architecture does not have.

    `qkv` is q, k and v stacked along axis 0; `gate_up` is gate and up. `gate_up` and `down` are None if the layer has only experts. In a
    half-precision model, a float32 norm weight is multiplied before the norm is rounded.

    Examples:
        >>> layer = model.params.layers[0]
        >>> tuple(layer.qkv.shape), layer.qkv_bias
        ((512, 256), None)
    """

    input_norm: P  # [M]
    input_norm_bias: P | None = None  # [M]
    qkv: P  # [(H + 2K) D, M]
    qkv_bias: P | None  # [(H + 2K) D]
    q_norm: P | None  # [D]
    k_norm: P | None  # [D]
    o: P  # [M, H D]
    o_bias: P | None  # [M]
    o_norm: P | None = None  # [M], of the output of attention, before the residual sum
    post_norm: P  # [M]
    post_norm_bias: P | None = None  # [M]
    gate_up: P | None  # [2F, M]; [F, M] without a gate
    gate_up_bias: P | None  # [2F]
    down: P | None  # [M, F]
    down_bias: P | None  # [M]
    down_norm: P | None = None  # [M], of the output of the feed-forward layer, before the residual sum
    experts: Experts[P] | None = None

    def __repr__(self) -> str:
        return brief_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(Generic[P]):
    """All weights of a decoder, as a pytree. `head` is None if the embedding table is also the head (tied embeddings).

    `Params[Tensor]` holds the weights. `Params[ParamInfo]`, the table, describes them.

    Attributes:
        embed: The embedding table, `[V, M]`.
        positions: Learned position embeddings, `[max_position_embeddings, M]`; None with a rotary embedding.
        layers: The weights of each decoder layer.
        final_norm: The weight of the final norm, `[M]`.
        final_norm_bias: The bias of the final norm, `[M]`, or None.
        head: The output matrix, `[V, M]`, or None.
        inv_freq: Rotation speed of each pair of channels, `[D/2]`, float32, in radians per position.
        local_inv_freq: The same for sliding-window layers, if their rotary embedding differs.

    Examples:
        >>> model.params
        Params(8 layers, 5,772,544 parameters, float32 on cpu)
        >>> tuple(model.params.embed.shape), model.params.head
        ((4096, 256), None)
    """

    embed: P  # [V, M]
    positions: P | None = None  # [max_position_embeddings, M], learned
    layers: tuple[Layer[P], ...]
    final_norm: P  # [M]
    final_norm_bias: P | None = None  # [M]
    head: P | None  # [V, M]
    inv_freq: P  # [D/2], float32
    local_inv_freq: P | None = None  # [D/2], float32, of sliding-window layers with a rotary embedding of their own

    def __repr__(self) -> str:
        layers = len(self.layers) if isinstance(self.layers, tuple | list) else 0
        where = f", {str(self.embed.dtype).removeprefix('torch.')} on {self.embed.device}" if isinstance(self.embed, Tensor) else ""
        return f"Params({layers} layers, {brief_count(self)}{where})"


def brief_count(params: Any) -> str:
    """The number of parameters, as text. Computed fields, such as the rotation speeds, are not counted."""
    computed = ("inv_freq", "local_inv_freq", "buffers")
    names = params.__dataclass_fields__ if isinstance(params, Params) else ()
    counted = [getattr(params, name) for name in names if name not in computed]
    leaves = pytree.tree_leaves(counted, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))
    leaves = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor | ParamInfo | QuantisedMatrix)}  # tied weights count once
    count = sum(math.prod(leaf.shape) for leaf in leaves.values())
    return f"{count:,} parameters" if isinstance(count, int) else "symbolic shapes"


def matrices(layer: Layer[P]) -> tuple[P, ...]:
    """The matrices of a layer that may be quantised: those of attention, MLP and experts. The router is not."""
    experts = () if layer.experts is None else (layer.experts.gate_up, layer.experts.down)
    return tuple(each for each in (layer.qkv, layer.o, layer.gate_up, layer.down, *experts) if each is not None)


def two_of_each(params: Params[Tensor]) -> Params[Tensor]:
    """The weights with at most two layers of each form: enough layers to build every kernel that the model launches.

    Layers of the same form launch the same kernels. Two are kept because the last layer of a prompt may launch other kernels.
    """
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
    """The description of a parameter that is stacked from checkpoint tensors along axis 0.

    Args:
        kind: The kind of the parameter, see `ParamInfo`.
        *sources: Name and shape of each checkpoint tensor.
        shape: The shape of the parameter, if it is not the stacked shape.
        **how: Other fields of `ParamInfo`.
    """
    shapes = tuple(shape for _, shape in sources)
    whole = shape or (sum(shape[0] for shape in shapes), *shapes[0][1:])
    return ParamInfo(shape=whole, kind=kind, sources=tuple(name for name, _ in sources), source_shapes=shapes, **how)


def rope_info(rope: RopeConfig, head_dim: int) -> ParamInfo:
    """The description of the rotation speeds, which are computed and not loaded."""
    return ParamInfo(shape=(head_dim // 2,), kind="rope", dtype=torch.float32, rope=rope)


def as_kept(info: ParamInfo, stored: Tensor) -> Tensor:
    """The parameter from `stored`, the concatenation of its checkpoint tensors, flat. May overwrite `stored` and share its memory."""
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
    """The checkpoint tensors of a parameter: the inverse of `as_kept`. They are views of `kept` if the values are the same."""
    flat = kept.T.contiguous() if info.transposed else kept - info.offset if info.offset else kept.contiguous()
    if info.channels:
        flat = kept.new_empty(sum(math.prod(shape) for shape in info.source_shapes))
        shape = (*info.shape[:1], -1) if info.columns else (-1, *info.shape[1:])
        for to, where, by, which in _moves(info, kept, flat.view(shape)):
            by[:, which] = to[:, where]
    sizes = [math.prod(shape) for shape in info.source_shapes]
    return [part.view(shape) for part, shape in zip(flat.view(-1).split(sizes), info.source_shapes, strict=True)]


def _moves(info: ParamInfo, kept: Tensor, stored: Tensor) -> list[tuple[Tensor, list[int], Tensor, list[int]]]:
    """Views of both tensors as heads x channels, with the channels that correspond: for the rotated heads, then for the others."""
    if info.columns:
        kept, stored = kept.T, stored.T
    kept, stored = kept.unflatten(0, (-1, len(info.channels))), stored.unflatten(0, (-1, info.stored_dim))
    where = [place for place, channel in enumerate(info.channels) if channel >= 0]
    plain = list(range(info.stored_dim))
    return [
        (kept[: info.turned], where, stored[: info.turned], [info.channels[place] for place in where]),
        (kept[info.turned :], plain, stored[info.turned :], plain),
    ]
