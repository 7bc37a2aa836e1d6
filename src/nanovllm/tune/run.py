"""A tuning run: every kernel of every step searched in turn, whoever measures."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from immutables import Map

from ..config import ModelConfig
from ..models.cuts import StepCuts
from .candidates import default_cut, neighbours, starts
from .search import MARGIN, Found, Measure, Unfit, search
from .work import Machine, Work, works

Measuring = Callable[[Work], AbstractContextManager[Measure]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was found for one kernel; None, and `why`, where not even the default could be measured."""

    work: Work
    found: Found | None
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        told: dict[str, Any] = {"part": self.work.part, "rows": self.work.rows}
        if self.found is None:
            return told | {"why": self.why}
        found = asdict(self.found)
        times = {name: round(found[name], 3) for name in ("default_us", "chosen_us")}
        return told | times | {"cut": list(self.found.cut), "measured": self.found.measured, "skipped": len(self.found.skipped)}


def plan(config: ModelConfig, batches: Seq[int], machine: Machine) -> tuple[Work, ...]:
    """All kernels of steps of these numbers of rows, in ascending order of them."""
    return tuple(work for rows in sorted(set(batches)) for work in works(config, rows, machine))


def run(planned: Seq[Work], machine: Machine, measuring: Measuring, *, margin: float = MARGIN) -> Iterator[Result]:
    """Search them one by one. A cut that won for fewer rows is tried for more."""
    won: dict[tuple[str, str], tuple[int, ...]] = {}
    for work in planned:
        default, others = default_cut(work, machine), starts(work, machine, won.get((work.part, work.form), ()))
        try:
            with measuring(work) as measure:
                found = search(default, others, partial(neighbours, work, machine=machine), measure, margin=margin)
        except Unfit as error:
            yield Result(work=work, found=None, why=str(error))
            continue
        won[work.part, work.form] = found.cut
        yield Result(work=work, found=found)


def chosen(results: Seq[Result]) -> Map[int, StepCuts]:
    """The cuts that replace a default, by rows."""
    steps: dict[int, StepCuts] = {}
    for result in results:
        if result.found is not None and result.found.cut:
            rows = result.work.rows
            steps[rows] = replace(steps.get(rows, StepCuts()), **{result.work.part: result.found.cut})
    return Map(steps)
