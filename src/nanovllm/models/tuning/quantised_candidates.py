"""The tile configurations that `nanovllm tune` tries for products with quantised matrices. Some are of another kernel than the default.

The number of integers of a cut names its kernel (`ops/linear/quantised_tiles.py`).
"""

from collections.abc import Iterator
from dataclasses import asdict, astuple, replace

from nanovllm.models.tuning.launches import Machine, Work
from nanovllm.ops.cuts import Cut, named
from nanovllm.ops.linear.quantised_tiles import (
    KERNEL,
    DirectTile,
    direct_tile,
    few_tile,
    gates_alone,
    many_tile,
    regular,
    split_tile,
    tile_fits,
    usual_tile,
)

STAGES = (2, 6)  # least and greatest values to try
REGISTERS = (128, 168)  # of a thread: then 4 and 3 programs of 4 warps share a multiprocessor
DOUBLED = ("outputs", "rows", "depth", "warps", "parts")  # fields whose values are powers of two


def default_cut(work: Work, machine: Machine) -> Cut:
    """The default tile configuration, spelled out."""
    sizes = machine.processors, machine.memory
    return astuple(usual_tile(work.matrix, work.rows, _gated(work), *sizes, split=_split(work), hopper=machine.hopper))


def valid(work: Work, cut: Cut, machine: Machine) -> bool:
    """Whether a kernel can run with this tile configuration on this GPU."""
    if len(cut) not in KERNEL:
        return False
    tile = named(KERNEL[len(cut)], cut)
    there = machine.hopper or not isinstance(tile, DirectTile)
    return there and tile_fits(tile, work.matrix, work.rows, _gated(work), machine.memory, split=_split(work))


def others(work: Work, machine: Machine) -> list[Cut]:
    """The default tile configurations of all kernels."""
    matrix, sizes, split, gated = work.matrix, (machine.processors, machine.memory), _split(work), _gated(work)
    tiles = [
        split_tile(matrix, work.rows, gated, *sizes, split=split),
        many_tile(matrix, work.rows, gated, *sizes, split=split),
        direct_tile(matrix, work.rows, gated),
        *([few_tile(matrix, gated)] if regular(matrix) else []),
    ]
    return [cut for tile in tiles if valid(work, cut := astuple(tile), machine)]


def steps(cut: Cut) -> Iterator[Cut]:
    """The tile configurations that differ in one field by one step. Some may not fit."""
    tile = named(KERNEL[len(cut)], cut)
    for name, value in asdict(tile).items():
        if name == "registers":
            yield from (astuple(replace(tile, registers=near)) for near in REGISTERS if near != value)
        elif name in DOUBLED:
            for near in (value // 2, value * 2):
                if near >= 1:
                    yield astuple(replace(tile, **{name: near}))
        else:
            for near in (value - 1, value + 1):
                if STAGES[0] <= near <= STAGES[1]:
                    yield astuple(replace(tile, **{name: near}))


def _gated(work: Work) -> bool:
    return work.gated and gates_alone(work.matrix, work.rows)


def _split(work: Work) -> bool:
    return work.form == "sum"
