"""The tile configurations that `nanovllm tune` tries: neighbours of a kernel's default, step by step, that fit the GPU."""

from collections.abc import Iterator
from dataclasses import astuple, replace

from nanovllm.models.tuning import quantised_candidates as quantised
from nanovllm.models.tuning.launches import Machine, Work
from nanovllm.ops.attention.fused_plan import attention_fits, cut_of
from nanovllm.ops.cuts import Cut, named
from nanovllm.ops.linear.linear_add_norm import BY_LIBRARY, MOST_STAGES, wide_fits, wide_tile
from nanovllm.ops.linear.norm_linear import SUMMED, tile_fits, tile_of
from nanovllm.ops.linear.tiles import Tile, WideTile

WARPS, BLOCK, DEPTH, TILE, SPLITS = (1, 8), (16, 128), (32, 256), (16, 128), (1, 64)  # least and greatest values to try


def default_cut(work: Work, machine: Machine) -> Cut:
    """The kernel's default tile configuration, spelled out."""
    if work.codes is not None:
        return quantised.default_cut(work, machine)
    match work.form:
        case "attend":
            return cut_of(work.rows, work.kv_heads, work.width, machine.memory)
        case "few":
            return astuple(tile_of(work.rows, work.outputs, work.width, work.gated, machine.memory))
        case _:
            tile = wide_tile(work.rows, work.outputs, work.width, work.gated, machine.processors, machine.memory, split=work.form == "sum")
            return BY_LIBRARY if tile is None else astuple(tile)


def valid(work: Work, cut: Cut, machine: Machine) -> bool:
    """Whether the kernel can run with this tile configuration on this GPU."""
    if work.codes is not None:
        return quantised.valid(work, cut, machine)
    match work.form:
        case "attend":
            return attention_fits(cut, work.width, machine.memory)
        case "few":
            return len(cut) == 3 and tile_fits(named(Tile, cut), work.rows, work.width, work.gated, machine.memory)
        case _:
            if cut == BY_LIBRARY:
                return True
            split = work.form == "sum"
            return len(cut) == 6 and wide_fits(named(WideTile, cut), work.outputs, work.width, work.gated, machine.memory, split=split)


def starts(work: Work, machine: Machine, before: Cut = ()) -> tuple[Cut, ...]:
    """Tile configurations that differ much from the default, to begin a search with.

    They use tensor cores if the default does not, or the other way round, and the library in place of our kernel. `before`, the best for
    fewer rows, is one of them if it fits. The default is not one of them.
    """
    default, candidates = default_cut(work, machine), list[Cut]()
    if work.codes is not None:
        candidates += quantised.others(work, machine)
    elif work.form == "few":
        whole, summed = 1 << (work.width - 1).bit_length(), default[-1] == 0
        candidates += [(16, 4, depth) for depth in (256, 128, 64) if summed]
        candidates += [(max(1, 4096 // whole), warps, 0) for warps in (2, 4, 8) if not summed and work.rows <= SUMMED]
    elif work.form != "attend":
        rows = max(16, min(64, 1 << (work.rows - 1).bit_length()))
        tiles = [WideTile(outputs=n, rows=rows, depth=depth, stages=3) for n, depth in ((64, 128), (32, 128), (32, 64), (16, 32))]
        candidates = [BY_LIBRARY, *[astuple(tile) for tile in tiles]]
    kept = [cut for cut in dict.fromkeys(candidates) if cut != default and valid(work, cut, machine)]
    kept = kept[: 2 if work.form in ("many", "sum") or work.codes is not None else 1]
    return tuple(kept) if before in ((), default, *kept) or not reachable(work, before, machine) else (*kept, before)


def reachable(work: Work, cut: Cut, machine: Machine) -> bool:
    """Whether a tile configuration is valid and may replace the default.

    An attention plan must support rows as long as the default's plan does. Otherwise steps with long rows would go to another kernel.
    """
    if not valid(work, cut, machine) or work.form != "attend":
        return valid(work, cut, machine)
    (tile, _, stages, splits), (usual_tile, _, usual_stages, usual_splits) = cut, default_cut(work, machine)
    if bool(stages) != bool(usual_stages):
        return False
    return splits >= usual_splits if stages else tile * splits >= usual_tile * usual_splits


def neighbours(work: Work, cut: Cut, machine: Machine) -> tuple[Cut, ...]:
    """The tile configurations one step away that fit. If a larger block does not fit, fewer blocks are in flight."""
    if cut in ((), BY_LIBRARY):
        return ()
    if work.codes is not None:
        steps = quantised.steps(cut)
    else:
        steps = _attention_steps(cut) if work.form == "attend" else _product_steps(work, cut, machine)
    return tuple(dict.fromkeys(step for step in steps if step != cut and reachable(work, step, machine)))


def _attention_steps(cut: Cut) -> Iterator[Cut]:
    tile, warps, stages, splits = cut
    steps = [(more, warps, stages, splits) for more in _by_two(tile, TILE)]
    steps += [(tile, more, stages, splits) for more in _by_two(warps, WARPS)]
    steps += [(tile, warps, stages, more) for more in _by_two(splits, SPLITS)]
    steps += [(tile * 2, warps, stages, splits // 2), (tile // 2, warps, stages, splits * 2)]
    if stages:
        steps += [(tile, warps, more, splits) for more in (stages - 1, stages + 1) if more >= 2]
        steps += [(tile * 2, warps, fewer, splits) for fewer in range(2, stages) if 2 * tile <= TILE[1]]
    for step in steps:
        if TILE[0] <= step[0] <= TILE[1]:
            yield step


def _product_steps(work: Work, cut: Cut, machine: Machine) -> Iterator[Cut]:
    if work.form == "few":
        tile = named(Tile, cut)
        outputs, depths = ((16, 128), DEPTH) if tile.depth else ((1, 4096), (0, 0))
        for name, span in (("outputs", outputs), ("warps", WARPS), ("depth", depths)):
            for value in _by_two(getattr(tile, name), span):
                yield astuple(replace(tile, **{name: value}))
        return
    wide = named(WideTile, cut)
    for name, span in (("outputs", BLOCK), ("rows", BLOCK), ("depth", DEPTH), ("warps", (2, 8))):
        for value in _by_two(getattr(wide, name), span):
            step = replace(wide, **{name: value})
            yield next((c for c in _fewer_in_flight(step) if valid(work, c, machine)), cut)
    for stages in (wide.stages - 1, wide.stages + 1):
        if 2 <= stages <= MOST_STAGES:
            yield astuple(replace(wide, stages=stages))
    for parts in (wide.parts - 1, wide.parts + 1) if work.form == "sum" else ():
        yield astuple(replace(wide, parts=parts))


def _fewer_in_flight(tile: WideTile) -> Iterator[Cut]:
    yield astuple(tile)
    for stages in range(tile.stages - 1, 1, -1):
        yield astuple(replace(tile, stages=stages))


def _by_two(value: int, span: tuple[int, int]) -> tuple[int, ...]:
    least, most = span
    return tuple(near for near in (value // 2, value * 2) if least <= near <= most and near != value)
