"""A tuning run: every number of rows in turn, its layers and then its head, whoever measures."""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from immutables import Map

from nanovllm.config import ModelConfig
from nanovllm.entrypoints.cli.tune.kernel_search import MARGIN, Found, Unfit
from nanovllm.entrypoints.cli.tune.layer_search import StepMeasure, Together, search_together
from nanovllm.models.fast.cuts import DEFAULT, StepCuts
from nanovllm.models.tuning.launches import Machine, Work, works
from nanovllm.ops.cuts import Cut

HEAD_MARGIN = 0.03  # of the head's launch, which is timed by itself

Works = tuple[Work, ...]
Measuring = Callable[[Works], AbstractContextManager[StepMeasure]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was found for the kernels of a layer, or for the head; None, and `why`, where not even the defaults could be measured."""

    works: Works
    found: Together | None
    why: str = ""

    @property
    def rows(self) -> int:
        """Of the step that the kernels are part of."""
        return self.works[0].rows

    @property
    def lines(self) -> tuple[tuple[str, Found | None], ...]:
        """Each kernel and what was found for it; before those of a layer, the layer as a whole."""
        each = [(work.part, None if self.found is None else self.found.parts[work.part]) for work in self.works]
        if self.found is None or self.works[0].part == "head":
            return tuple(each)
        whole = Found(cut=(), default_us=self.found.default_us, chosen_us=self.found.chosen_us, measured=0, skipped=())
        return (("layer", whole), *each)

    def as_json(self) -> list[dict[str, Any]]:
        """JSON objects, one a line."""
        return [self._told(part, found) for part, found in self.lines]

    def _told(self, part: str, found: Found | None) -> dict[str, Any]:
        told: dict[str, Any] = {"part": part, "rows": self.rows}
        if found is None:
            return told | {"why": self.why}
        told |= {name: round(getattr(found, name), 3) for name in ("default_us", "chosen_us")}
        if part == "layer":
            return told
        return told | {"cut": list(found.cut), "measured": found.measured, "skipped": len(found.skipped)}


def plan(config: ModelConfig, batches: Seq[int], machine: Machine) -> tuple[Works, ...]:
    """The kernels that are timed together, a layer's or the head, of steps of these numbers of rows, in ascending order of them."""
    each = (work for rows in sorted(set(batches)) for work in works(config, rows, machine))
    return tuple(tuple(group) for _, group in groupby(each, key=lambda work: (work.rows, work.part == "head")))


def run(
    planned: Seq[Works], machine: Machine, measuring: Measuring, *, margin: float = MARGIN, tell: Callable[[Work], object] = lambda _: None
) -> Iterator[Result]:
    """Search them one by one. A cut that won for fewer rows is tried for more. `tell` hears which kernel is next."""
    won: dict[tuple[str, str], Cut] = {}
    for group in planned:
        before = {work.part: won.get((work.part, work.form), ()) for work in group}
        needed = HEAD_MARGIN if group[0].part == "head" else margin
        try:
            with measuring(group) as measure:
                found = search_together(group, machine, measure, before=before, margin=needed, tell=tell)
        except Unfit as error:
            yield Result(works=group, found=None, why=str(error))
            continue
        won |= {(work.part, work.form): found.parts[work.part].cut for work in group}
        yield Result(works=group, found=found)


def chosen(results: Seq[Result], before: Mapping[int, StepCuts] | None = None) -> Map[int, StepCuts]:
    """The cuts that replace a default, by rows. `before`: those of an older run, which stand where nothing was measured now."""
    steps = dict(before or {})
    for result in results:
        if result.found is not None:
            cuts = {part: found.cut for part, found in result.found.parts.items()}
            steps[result.rows] = replace(steps.get(result.rows, DEFAULT), **cuts)
    return Map({rows: step for rows, step in steps.items() if step != DEFAULT})


def told(results: Seq[Result], before: Seq[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """JSON objects of all that was measured, by rows. `before`: those of an older run, which stand where nothing was measured now."""
    mine = [line for result in results for line in result.as_json()]
    measured = {(part, result.rows) for result in results if result.found is not None for part, _ in result.lines}
    kept = [line for line in before if (line["part"], line["rows"]) not in measured]
    again = {(line["part"], line["rows"]) for line in kept}
    return sorted([*kept, *(line for line in mine if (line["part"], line["rows"]) not in again)], key=lambda line: line["rows"])
