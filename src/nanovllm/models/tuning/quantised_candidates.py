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
    rows_tile,
    split_tile,
    tile_fits,
    usual_tile,
)

STAGES = (2, 6)  # least and greatest values to try
DOUBLED = ("outputs", "rows", "tail", "depth", "warps", "parts")  # fields whose values are powers of two


def default_cut(work: Work, machine: Machine) -> Cut:
    """The default tile configuration, spelled out."""
    sizes = machine.processors, machine.memory
    return astuple(usual_tile(work.matrix, work.rows, _gated(work, machine), *sizes, split=_split(work), hopper=machine.hopper))


def valid(work: Work, cut: Cut, machine: Machine) -> bool:
    """Whether a kernel can run with this tile configuration on this GPU."""
    if len(cut) not in KERNEL:
        return False
    if KERNEL[len(cut)] is DirectTile and not machine.hopper:
        return False
    gated = _gated(work, machine, cut)
    return tile_fits(named(KERNEL[len(cut)], cut), work.matrix, work.rows, gated, machine.memory, split=_split(work))


def others(work: Work, machine: Machine) -> list[Cut]:
    """The default tile configurations of all kernels."""
    matrix, sizes, split, gated = work.matrix, (machine.processors, machine.memory), _split(work), _gated(work, machine)
    tiles = [
        split_tile(matrix, work.rows, gated, *sizes, split=split),
        many_tile(matrix, work.rows, gated, *sizes, split=split),
        rows_tile(matrix, work.rows, work.gated, *sizes),
        direct_tile(matrix, work.rows, gated),
        *([few_tile(matrix, gated)] if regular(matrix) else []),
    ]
    return [cut for tile in tiles if valid(work, cut := astuple(tile), machine)]


def steps(cut: Cut) -> Iterator[Cut]:
    """The tile configurations that differ in one field by one step. Some may not fit."""
    tile = named(KERNEL[len(cut)], cut)
    for name, value in asdict(tile).items():
        if name in DOUBLED:
            for near in (value // 2, value * 2):
                if near >= 1:
                    yield astuple(replace(tile, **{name: near}))
        else:
            for near in (value - 1, value + 1):
                if STAGES[0] <= near <= STAGES[1]:
                    yield astuple(replace(tile, **{name: near}))


def _gated(work: Work, machine: Machine, cut: Cut = ()) -> bool:
    return work.gated and gates_alone(work.matrix, work.rows, cut, hopper=machine.hopper)


def _split(work: Work) -> bool:
    return work.form == "sum"
