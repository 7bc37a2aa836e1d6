"""Which cut of one kernel is taken: a search over candidates by their measured times, that knows nothing of GPUs.

The default stays unless another cut is faster by a margin, twice: in the search, and beside the default again at its end.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import fmean

from nanovllm.errors import NanoVLLMError
from nanovllm.ops.cuts import Cut

MARGIN = 0.01  # of a layer's time by the default, by which another cut must make it faster
ROUNDS = 6  # of steps from the best cut so far
WORTH = 0.003  # of the best time, below which a step is noise

Times = tuple[float, ...]  # microseconds, in each of the settings that are measured: of a layer that the kernel is part of
Measure = Callable[[Cut], Times]


class Unfit(NanoVLLMError):
    """A candidate that is out of the question: no kernel can be made of it, or its results are wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The cut to take, empty for the default; mean microseconds of both; how many were measured, and what was left out, and why."""

    cut: Cut
    default_us: float
    chosen_us: float
    measured: int
    skipped: tuple[tuple[Cut, str], ...]


def search(default: Cut, starts: Seq[Cut], neighbours: Callable[[Cut], Seq[Cut]], measure: Measure, *, margin: float = MARGIN) -> Found:
    """Climb from the best of the default and `starts` to the best of its neighbours, as long as one is faster.

    `measure(())` measures the default, which `default` spells out; `measure` raises `Unfit` for a candidate to leave out, and what it
    raises else goes through. A cut that is slower than the default by the margin in any setting is not taken, nor one that cannot be
    measured again.
    """
    usual = measure(())
    scores: dict[Cut, float] = {default: 1.0}
    skipped: dict[Cut, str] = {}

    def look(cuts: Seq[Cut]) -> None:
        for cut in cuts:
            if cut in scores or cut in skipped:
                continue
            try:
                scores[cut] = score(measure(cut), usual, margin)
            except Unfit as error:
                skipped[cut] = str(error)

    look(starts)
    best = min(scores, key=scores.__getitem__)
    for _ in range(ROUNDS):
        look(neighbours(best))
        better = min(scores, key=scores.__getitem__)
        if scores[better] >= scores[best] * (1 - WORTH):
            break
        best = better
    chosen, default_us, chosen_us = (), fmean(usual), fmean(usual)
    if scores[best] <= 1 - margin:
        try:
            again, mine = measure(()), measure(best)
        except Unfit as error:
            skipped[best] = str(error)
        else:
            default_us = fmean(again)
            chosen, chosen_us = (best, fmean(mine)) if score(mine, again, margin) <= 1 - margin else ((), default_us)
    return Found(cut=chosen, default_us=default_us, chosen_us=chosen_us, measured=len(scores), skipped=tuple(skipped.items()))


def score(times: Times, usual: Times, margin: float) -> float:
    """The times over the usual ones, all settings together; where one of them is slower by the margin, what is lost there."""
    worst = max(mine / theirs for mine, theirs in zip(times, usual, strict=True))
    return worst if worst > 1 + margin else fmean(times) / fmean(usual)
