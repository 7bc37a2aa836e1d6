"""The search for the tile configuration of one kernel, by measured times. It needs no GPU.

The default stays unless another tile configuration is faster by a margin, twice: in the search, and in a second comparison at its end.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import fmean

from nanovllm.errors import NanoVLLMError
from nanovllm.ops.cuts import Cut

MARGIN = 0.01  # fraction of a layer's time that another tile configuration must save
ROUNDS = 6  # most rounds of steps from the best tile configuration so far
WORTH = 0.003  # fraction of the best time below which a gain is noise

Times = tuple[float, ...]  # microseconds of a layer that has the kernel, one for each measured setting
Measure = Callable[[Cut], Times]
Prepare = Callable[[Seq[Cut]], object]  # compiles the kernels of several candidates at once, before they are measured


class Unfit(NanoVLLMError):
    """A candidate that cannot be used: the kernel cannot be built or launched with it, or gives wrong results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a search.

    Attributes:
        cut: The chosen tile configuration; empty for the default.
        default_us: Mean microseconds with the default.
        chosen_us: Mean microseconds with the chosen tile configuration.
        measured: How many tile configurations were measured.
        skipped: The candidates that cannot be used, each with a reason.
    """

    cut: Cut
    default_us: float
    chosen_us: float
    measured: int
    skipped: tuple[tuple[Cut, str], ...]


def search(
    default: Cut,
    starts: Seq[Cut],
    neighbours: Callable[[Cut], Seq[Cut]],
    measure: Measure,
    *,
    margin: float = MARGIN,
    prepare: Prepare = lambda cuts: None,
) -> Found:
    """Hill climbing: begin with the best of the default and `starts`, and move to the best neighbour as long as it is faster.

    A candidate is rejected if it is slower than the default by the margin in any setting, or if the second measurement fails.

    Args:
        default: The default tile configuration, spelled out.
        starts: Other tile configurations to begin with.
        neighbours: The candidates one step away from a tile configuration.
        measure: Measures a tile configuration; `()` is the default. It raises `Unfit` for a candidate to skip.
        margin: The fraction of time that a candidate must save.
        prepare: Is called with the candidates that will be measured next.

    Raises:
        Unfit: The default cannot be measured.
    """
    usual = measure(())
    scores: dict[Cut, float] = {default: 1.0}
    skipped: dict[Cut, str] = {}

    def look(cuts: Seq[Cut]) -> None:
        new = [cut for cut in dict.fromkeys(cuts) if cut not in scores and cut not in skipped]
        prepare(new)
        for cut in new:
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
    """The mean time divided by the default's mean time. If a setting is slower by the margin, the ratio of the slowest setting."""
    worst = max(mine / theirs for mine, theirs in zip(times, usual, strict=True))
    return worst if worst > 1 + margin else fmean(times) / fmean(usual)
