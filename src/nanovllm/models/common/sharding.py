"""How a model is cut for the ranks of a mesh: tensor parallelism (Shoeybi et al., 2019, "Megatron-LM").

The first matrices of a layer (q, k and v; gate and up) are cut by their rows, by whole heads or by channels, and the second ones (o; down)
by their columns. So a layer sums its output over the ranks twice. The embedding table and the head are cut by tokens.

If there are fewer KV heads than ranks, several ranks have the same head.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch

from nanovllm.config import Mesh, ModelConfig
from nanovllm.errors import InvalidRequestError
from nanovllm.models.common.params import Experts, Layer, ParamInfo, Params, Part, Ranges
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.linear.quantised_ranges import column_range, row_ranges
from nanovllm.types import Tensor

P = TypeVar("P")
Q = TypeVar("Q")
Partition = Literal["heads", "channels", "inputs", "tokens", "once", "whole"]

# By the field of a parameter: rows by heads, rows by halves of a gated layer, columns, rows by tokens, on rank 0 alone. The rest is whole.
PARTITIONS: Mapping[str, Partition] = MappingProxyType(
    {
        "qkv": "heads", "qkv_bias": "heads", "o": "inputs", "o_bias": "once", "gate_up": "channels", "gate_up_bias": "channels",
        "down": "inputs", "down_bias": "once", "embed": "tokens", "head": "tokens",
    }
)  # fmt: skip
UNGATED = ("GPT2LMHeadModel",)  # architectures whose `gate_up` is one block of rows


def sharded_config(config: ModelConfig, mesh: Mesh) -> ModelConfig:
    """The config of one rank: its own heads and channels, and the mesh.

    Args:
        config: The config of the whole model.
        mesh: The ranks.

    Raises:
        InvalidRequestError: A size cannot be divided among the ranks.

    Examples:
        >>> part = sharded_config(model.config, nv.Mesh(size=2, rank=0, group=7))
        >>> part.num_heads, part.num_kv_heads, part.intermediate_size
        (2, 1, 320)
    """
    if config.mesh is not None:
        raise InvalidRequestError(f"the config is that of rank {config.mesh.rank} of {config.mesh.size} already")
    size, moe = mesh.size, config.moe
    sizes = {"num_heads": config.num_heads, "intermediate_size": config.intermediate_size}
    if moe is not None:
        sizes |= {"intermediate_size of the experts": moe.intermediate_size, "shared_size of the experts": moe.shared_size}
        if len(moe.layers) == config.num_layers and moe.shared_size != config.intermediate_size:
            del sizes["intermediate_size"]  # no layer has it
    for name, value in sizes.items():
        if value % size:
            raise InvalidRequestError(f"{size} ranks cannot share {name}={value}: choose a number of ranks that divides it")
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise InvalidRequestError(
            f"{size} ranks cannot share num_kv_heads={config.num_kv_heads}: choose a number of ranks that divides it or is a multiple of it"
        )
    experts = {} if moe is None else {"intermediate_size": moe.intermediate_size // size, "shared_size": moe.shared_size // size}
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        kv_copies=max(1, size // config.num_kv_heads),
        intermediate_size=config.intermediate_size // size if config.intermediate_size % size == 0 else config.intermediate_size,
        moe=None if moe is None else replace(moe, **experts),
        mesh=mesh,
    )


def in_parts(config: ModelConfig) -> ModelConfig:
    """The config with which the model's function gives each rank the logits of its own tokens. Without a mesh, `config` itself."""
    return config if config.mesh is None else replace(config, mesh=replace(config.mesh, gathers=False))


def part_of(field: str, shape: tuple[int, ...], config: ModelConfig, mesh: Mesh) -> Part:
    """What a rank has of the parameter in a field of `Layer`, `Experts` or `Params`.

    Args:
        field: The name of the field.
        shape: The shape of the whole parameter.
        config: The config of the whole model.
        mesh: The ranks, and which of them.
    """
    size, rank, partition = mesh.size, mesh.rank, PARTITIONS.get(field, "whole")
    rows = -1 if len(shape) == 1 else -2
    match partition:
        case "heads":
            width = shape[0] // (config.num_heads + 2 * config.num_kv_heads)
            own, kv = config.num_heads // size, max(1, config.num_kv_heads // size)
            first = rank * config.num_kv_heads // size
            starts = (rank * own, config.num_heads + first, config.num_heads + config.num_kv_heads + first)
            return Part(axis=rows, ranges=tuple((at * width, (at + n) * width) for at, n in zip(starts, (own, kv, kv), strict=True)))
        case "channels":
            whole = shape[rows]
            halves = 1 if config.architecture in UNGATED else 2
            width = whole // halves
            return Part(axis=rows, ranges=tuple(_share(width, mesh, half * width) for half in range(halves)))
        case "inputs":
            return Part(axis=-1, ranges=(_share(shape[-1], mesh),))
        case "tokens":
            most = -(-shape[0] // size)
            first, last = min(rank * most, shape[0]), min((rank + 1) * most, shape[0])
            return Part(axis=-2, ranges=((first, last),), missing=most - (last - first))
        case "once":
            return Part(zero=rank > 0)
    return Part()


def _share(width: int, mesh: Mesh, start: int = 0) -> tuple[int, int]:
    own = width // mesh.size
    return start + mesh.rank * own, start + (mesh.rank + 1) * own


def cut(part: Part, whole: Tensor | QuantisedMatrix) -> Tensor | QuantisedMatrix:
    """The part of a parameter that a rank has, in memory of its own.

    Raises:
        InvalidRequestError: A quantised matrix cannot be cut there.
    """
    if part.zero:
        assert isinstance(whole, Tensor)
        return torch.zeros_like(whole)
    if part.axis is None:
        return whole
    if isinstance(whole, QuantisedMatrix):
        if part.missing:
            raise InvalidRequestError(
                "a quantised head cannot be filled with rows of zeros: choose a number of ranks that divides vocab_size"
            )
        return row_ranges(whole, part.ranges) if part.axis == -2 else column_range(whole, *part.ranges[0])
    own = torch.cat([whole.narrow(part.axis, first, last - first) for first, last in part.ranges], part.axis)
    return own if not part.missing else torch.cat([own, own.new_zeros((part.missing, *own.shape[1:]))])


def by_field(function: Callable[[str, P], Q], params: Params[P]) -> Params[Q]:
    """Apply a function to the name of the field and the value of each parameter that is there."""

    def inside(value: Any) -> Any:
        return type(value)(**{each.name: _applied(function, inside, each.name, getattr(value, each.name)) for each in fields(value)})

    return inside(params)


def _applied(function: Callable[[str, Any], Any], inside: Callable[[Any], Any], name: str, value: Any) -> Any:
    match value:
        case None:
            return None
        case tuple():
            return tuple(inside(each) for each in value)
        case Layer() | Experts() | Params():
            return inside(value)
        case _:
            return function(name, value)


def sharded_params(params: Params[Tensor], config: ModelConfig, mesh: Mesh) -> Params[Tensor]:
    """The weights of one rank, cut from those of the whole model.

    Args:
        params: The whole weights.
        config: The config of the whole model.
        mesh: The ranks.

    Raises:
        InvalidRequestError: A quantised matrix cannot be cut between two ranks.
    """

    def own(field: str, whole: Any) -> Any:
        try:
            return cut(part_of(field, tuple(whole.shape), config, mesh), whole)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{field}: {error}") from None

    return by_field(own, params)


def sharded_table(table: Params[ParamInfo], config: ModelConfig, mesh: Mesh) -> Params[ParamInfo]:
    """The table of one rank: what it has of each parameter, and what it reads of each checkpoint tensor.

    Args:
        table: The table of the whole model.
        config: The config of the whole model.
        mesh: The ranks.
    """
    return by_field(lambda field, info: _own(info, part_of(field, info.shape, config, mesh)), table)


def _own(info: ParamInfo, part: Part) -> ParamInfo:
    if part.axis is None or not info.sources:
        return replace(info, part=part)
    axis, shape = part.axis, list(info.shape)
    shape[axis] = sum(last - first for first, last in part.ranges) + part.missing
    stored = part.ranges
    if info.channels:  # heads are narrower in the checkpoint
        kept, narrow = len(info.channels), info.stored_dim
        stored = tuple((first // kept * narrow, last // kept * narrow) for first, last in stored)
    turned = info.turned and _before(part.ranges, info.turned * len(info.channels)) // len(info.channels)
    taken = _taken(info, stored, columns=(axis == -1 and len(shape) > 1) != info.transposed)
    shapes = tuple(_shape(one, *ranges) for one, ranges in zip(info.source_shapes, taken, strict=True))
    return replace(info, shape=tuple(shape), part=part, taken=taken, source_shapes=shapes, turned=turned)


def _before(ranges: Ranges, end: int) -> int:
    """How much of some ranges lies before `end`."""
    return sum(max(0, min(last, end) - first) for first, last in ranges)


def _taken(info: ParamInfo, ranges: Ranges, *, columns: bool) -> tuple[tuple[Ranges, Ranges], ...]:
    """What is read of each checkpoint tensor: ranges of columns are the same for all, ranges of rows count through those of a matrix."""
    shapes = info.source_shapes
    if columns:
        return tuple((((0, shape[0]),), ranges) for shape in shapes)
    each = len(shapes) // info.shape[0] if len(info.shape) == 3 else len(shapes)  # tensors of one expert, or of the matrix
    found: list[tuple[Ranges, Ranges]] = []
    for first in range(0, len(shapes), each):
        start = 0
        for shape in shapes[first : first + each]:
            rows = [(max(a, start) - start, min(b, start + shape[0]) - start) for a, b in ranges]
            found.append((tuple((a, b) for a, b in rows if a < b), ((0, math.prod(shape[1:])),)))
            start += shape[0]
    return tuple(found)


def _shape(whole: tuple[int, ...], rows: Ranges, columns: Ranges) -> tuple[int, ...]:
    height, width = (sum(last - first for first, last in ranges) for ranges in (rows, columns))
    return (height, width) if len(whole) == 2 else (height,)
