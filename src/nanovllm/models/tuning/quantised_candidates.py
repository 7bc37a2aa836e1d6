"""The tile configurations that `nanovllm tune` tries for products with quantised matrices. Some are of another kernel than the default.

The number of integers of a cut names its kernel (`ops/linear/quantised_tiles.py`).
"""

from collections.abc import Iterator
from dataclasses import asdict, astuple, replace

from nanovllm.models.tuning.launches import Machine, Work
from nanovllm.ops.cuts import Cut, named
from nanovllm.ops.linear.quantised_tiles import (
    KERNEL,
    few_tile,
    gates_alone,
    many_tile,
    regular,
    split_tile,
    tile_fits,
    usual_tile,
)

STAGES = (2, 6)  # least and greatest values to try
DOUBLED = ("outputs", "rows", "depth", "warps", "parts")  # fields whose values are powers of two


def default_cut(work: Work, machine: Machine) -> Cut:
    """The default tile configuration, spelled out."""
    return astuple(usual_tile(work.matrix, work.rows, _gated(work), machine.processors, machine.memory, split=_split(work)))


def valid(work: Work, cut: Cut, machine: Machine) -> bool:
    """Whether a kernel can run with this tile configuration on this GPU."""
    if len(cut) not in KERNEL:
        return False
    return tile_fits(named(KERNEL[len(cut)], cut), work.matrix, work.rows, _gated(work), machine.memory, split=_split(work))


def others(work: Work, machine: Machine) -> list[Cut]:
    """The default tile configurations of all kernels."""
    matrix, sizes, split = work.matrix, (machine.processors, machine.memory), _split(work)
    tiles = [
        split_tile(matrix, work.rows, _gated(work), *sizes, split=split),
        many_tile(matrix, work.rows, _gated(work), *sizes, split=split),
        *([few_tile(matrix, _gated(work))] if regular(matrix) else []),
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


def _gated(work: Work) -> bool:
    return work.gated and gates_alone(work.matrix, work.rows)


def _split(work: Work) -> bool:
    return work.form == "sum"
