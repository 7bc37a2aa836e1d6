"""Which cuts of a layer are taken together: part by part, each beside what was found for the others; knows nothing of GPUs either.

Kernels that follow each other closely overlap: what one holds in registers while it waits decides when the next one's programs start. So
a cut is good or bad in the layer that it is part of, and changes what is good for the others.
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

TURNS = 2  # through all parts, at most

StepMeasure = Callable[[StepCuts], Times]  # of all kernels together; raises `Unfit` where one of them is out of the question


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """The cuts to take, and mean microseconds of all kernels together by the defaults and by them.

    `parts`: for each part microseconds of all together by its default and by its cut, the others as chosen.
    """

    cuts: StepCuts
    default_us: float
    chosen_us: float
    parts: Map[str, Found]


def search_together(
    works: Seq[Work],
    machine: Machine,
    measure: StepMeasure,
    *,
    before: Mapping[str, Cut] | None = None,
    margin: float = MARGIN,
    tell: Callable[[Work], object] = lambda work: None,
) -> Together:
    """Search the kernels of a step in turn, a second time those around which something has changed since.

    `before`: cuts that won for fewer rows, which are tried too. `tell` hears which kernel is next. Raises `Unfit` where the defaults
    cannot be measured.
    """
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
            beside = _measure_beside(measure, others, work.part)
            default, near = default_cut(work, machine), partial(neighbours, work, machine=machine)
            try:
                one = search(default, [*tried, *more], near, beside, margin=margin)
            except Unfit as error:
                if others == DEFAULT:
                    raise
                one = Found(cut=kept, default_us=0.0, chosen_us=0.0, measured=0, skipped=(((), str(error)),))  # times come at the end
            found[work.part] = _joined(found.get(work.part), one)
            cuts = _with(cuts, work.part, one.cut)
    return _settled(cuts, found, measure, margin)


def _settled(cuts: StepCuts, found: Mapping[str, Found], measure: StepMeasure, margin: float) -> Together:
    """What remains of the cuts when each is left out in turn: one that nothing is slower without goes, or without which the others can be
    measured, and then all are looked at again. None remains where all of them together are not faster by the margin."""
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


def _measure_beside(measure: StepMeasure, others: StepCuts, part: str) -> Measure:
    return lambda cut: measure(_with(others, part, cut))


def _with(cuts: StepCuts, part: str, cut: Cut) -> StepCuts:
    return replace(cuts, **{part: cut})


def _joined(first: Found | None, second: Found) -> Found:
    """Two turns of one part: what was measured and left out in both."""
    if first is None:
        return second
    skipped = dict(first.skipped) | dict(second.skipped)
    return replace(second, measured=first.measured + second.measured, skipped=tuple(skipped.items()))
