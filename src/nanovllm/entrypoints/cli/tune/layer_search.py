"""The search for the tile configurations of all kernels of a layer, one kernel after another. It needs no GPU.

Consecutive kernels overlap: the next kernel's programs start when the registers of waiting programs leave room. So a tile configuration is
fast or slow only within its layer, and it changes which tile configurations are fast for the other kernels.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from immutables import Map

from nanovllm.entrypoints.cli.tune.kernel_search import MARGIN, Found, Measure, Times, Unfit, score, search
from nanovllm.models.fast.cuts import DEFAULT, StepCuts
from nanovllm.models.tuning.candidates import default_cut, neighbours, starts
from nanovllm.models.tuning.launches import Machine, Work
from nanovllm.ops.cuts import Cut

TURNS = 2  # most passes over all kernels

StepMeasure = Callable[[StepCuts], Times]  # times of all kernels together; raises `Unfit` if one kernel cannot be used


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What measures the kernels of a step.

    Attributes:
        measure: Measures all kernels together.
        prepare: Is called with a kernel's part, and with the candidates for it that will be measured next.
    """

    measure: StepMeasure
    prepare: Callable[[str, Seq[Cut]], object] = lambda part, cuts: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """The result of a search over all kernels of a layer.

    Attributes:
        cuts: The chosen tile configurations.
        default_us: Mean microseconds of all kernels together with the defaults.
        chosen_us: Mean microseconds of all kernels together with `cuts`.
        parts: The result for each kernel: microseconds of all kernels together, with its default and with its chosen tile configuration.
            The other kernels have their chosen tile configurations in both.
    """

    cuts: StepCuts
    default_us: float
    chosen_us: float
    parts: Map[str, Found]


def search_together(
    works: Seq[Work],
    machine: Machine,
    bench: Bench,
    *,
    before: Mapping[str, Cut] | None = None,
    margin: float = MARGIN,
    tell: Callable[[Work], object] = lambda work: None,
) -> Together:
    """Search the kernels of a step one by one, then search again each kernel whose neighbours have changed since.

    Args:
        works: The kernels.
        machine: The GPU.
        bench: Measures all kernels together.
        before: The best tile configuration of each kernel for fewer rows. It is tried too.
        margin: The fraction of time that a tile configuration must save.
        tell: Is called with each kernel before its search.

    Raises:
        Unfit: The defaults cannot be measured.
    """
    measure = bench.measure
    cuts, searched, found = DEFAULT, dict[str, StepCuts](), dict[str, Found]()
    for _ in range(TURNS):
        for work in works:
            others = _with(cuts, work.part, ())
            if searched.get(work.part) == others:
                continue
            searched[work.part] = others
            tell(work)
            tried = starts(work, machine, (before or {}).get(work.part, ()))
            kept = getattr(cuts, work.part)
            more = [kept] * (kept not in ((), *tried))
            with_others = _measure_with(measure, others, work.part)
            default, near = default_cut(work, machine), partial(neighbours, work, machine=machine)
            try:
                one = search(default, [*tried, *more], near, with_others, margin=margin, prepare=partial(bench.prepare, work.part))
            except Unfit as error:
                if others == DEFAULT:
                    raise
                # The times are filled in by `_pruned`.
                one = Found(cut=kept, default_us=0.0, chosen_us=0.0, measured=0, skipped=(((), str(error)),))
            found[work.part] = _joined(found.get(work.part), one)
            cuts = _with(cuts, work.part, one.cut)
    return _pruned(cuts, found, measure, margin)


def _pruned(cuts: StepCuts, found: Mapping[str, Found], measure: StepMeasure, margin: float) -> Together:
    """Remove the tile configurations that do not help, one by one, and compare the rest with the defaults.

    A tile configuration is removed if the layer is not slower without it. If the layer cannot be measured at all, one is removed without
    which it can. All are removed if together they do not save the margin.
    """
    mine, without = None, dict[str, Times]()
    while cuts != DEFAULT:
        mine = _tried(measure, cuts)
        left = {part: _tried(measure, _with(cuts, part, ())) for part in found if getattr(cuts, part)}
        without = {part: times for part, times in left.items() if times is not None}
        if mine is None:
            cuts = _with(cuts, next(iter(without)), ()) if without else DEFAULT
            continue
        worth = {part: score(mine, times, margin) for part, times in without.items()}
        idle = max(worth, key=worth.__getitem__, default=None)
        if idle is None or worth[idle] < 1:
            break
        cuts = _with(cuts, idle, ())
    usual = measure(DEFAULT)
    if mine is None or cuts == DEFAULT or score(mine, usual, margin) > 1 - margin:
        cuts, without, mine = DEFAULT, {}, usual
    parts = {
        part: replace(one, cut=getattr(cuts, part), default_us=fmean(without.get(part, mine)), chosen_us=fmean(mine))
        for part, one in found.items()
    }
    return Together(cuts=cuts, default_us=fmean(usual), chosen_us=fmean(mine), parts=Map(parts))


def _tried(measure: StepMeasure, cuts: StepCuts) -> Times | None:
    try:
        return measure(cuts)
    except Unfit:
        return None


def _measure_with(measure: StepMeasure, others: StepCuts, part: str) -> Measure:
    return lambda cut: measure(_with(others, part, cut))


def _with(cuts: StepCuts, part: str, cut: Cut) -> StepCuts:
    return replace(cuts, **{part: cut})


def _joined(first: Found | None, second: Found) -> Found:
    """The results of two searches of one kernel: the second choice, and the candidates of both."""
    if first is None:
        return second
    skipped = dict(first.skipped) | dict(second.skipped)
    return replace(second, measured=first.measured + second.measured, skipped=tuple(skipped.items()))
