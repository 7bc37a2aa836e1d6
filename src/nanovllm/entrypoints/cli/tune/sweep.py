"""A tuning run: the layer kernels and then the head, for one batch size after another. The measuring function is an argument."""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from immutables import Map

from nanovllm.config import ModelConfig
from nanovllm.entrypoints.cli.tune.kernel_search import MARGIN, Found, Unfit
from nanovllm.entrypoints.cli.tune.layer_search import Bench, Together, search_together
from nanovllm.models.fast.cuts import DEFAULT, StepCuts
from nanovllm.models.tuning.launches import Codes, Machine, Work, works
from nanovllm.ops.cuts import Cut

HEAD_MARGIN = 0.03  # fraction of time that the head, which is timed alone, must save

Works = tuple[Work, ...]
Measuring = Callable[[Works], AbstractContextManager[Bench]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result for the kernels of a layer, or for the head.

    Attributes:
        works: The kernels.
        found: The result of the search; None if the defaults could not be measured.
        why: The reason if `found` is None.
    """

    works: Works
    found: Together | None
    why: str = ""

    @property
    def rows(self) -> int:
        """Rows of the decode step."""
        return self.works[0].rows

    @property
    def lines(self) -> tuple[tuple[str, Found | None], ...]:
        """The name and the result of each kernel; for a layer, the whole layer comes first."""
        each = [(work.part, None if self.found is None else self.found.parts[work.part]) for work in self.works]
        if self.found is None or self.works[0].part == "head":
            return tuple(each)
        whole = Found(cut=(), default_us=self.found.default_us, chosen_us=self.found.chosen_us, measured=0, skipped=())
        return (("layer", whole), *each)

    def as_json(self) -> list[dict[str, Any]]:
        """One JSON object for each of `lines`."""
        return [self._line_as_json(part, found) for part, found in self.lines]

    def _line_as_json(self, part: str, found: Found | None) -> dict[str, Any]:
        line: dict[str, Any] = {"part": part, "rows": self.rows}
        if found is None:
            return line | {"why": self.why}
        line |= {name: round(getattr(found, name), 3) for name in ("default_us", "chosen_us")}
        if part == "layer":
            return line
        return line | {"cut": list(found.cut), "measured": found.measured, "skipped": len(found.skipped)}


def plan(config: ModelConfig, batches: Seq[int], machine: Machine, codes: Mapping[str, Codes] = Map()) -> tuple[Works, ...]:
    """The groups of kernels that are timed together (the kernels of a layer, or the head), for each batch size in ascending order."""
    each = (work for rows in sorted(set(batches)) for work in works(config, rows, machine, codes))
    return tuple(tuple(group) for _, group in groupby(each, key=lambda work: (work.rows, work.part == "head")))


def run(
    planned: Seq[Works], machine: Machine, measuring: Measuring, *, margin: float = MARGIN, tell: Callable[[Work], object] = lambda _: None
) -> Iterator[Result]:
    """Search the groups one by one, and yield each result.

    The best tile configuration for fewer rows is also tried for more rows. `tell` is called with each kernel before its search.
    """
    won: dict[tuple[str, str], Cut] = {}
    for group in planned:
        before = {work.part: won.get((work.part, work.form), ()) for work in group}
        needed = HEAD_MARGIN if group[0].part == "head" else margin
        try:
            with measuring(group) as bench:
                found = search_together(group, machine, bench, before=before, margin=needed, tell=tell)
        except Unfit as error:
            yield Result(works=group, found=None, why=str(error))
            continue
        won |= {(work.part, work.form): found.parts[work.part].cut for work in group}
        yield Result(works=group, found=found)


def chosen(results: Seq[Result], before: Mapping[int, StepCuts] | None = None) -> Map[int, StepCuts]:
    """The tile configurations that replace a default, by batch size.

    `before` holds those of an older run. They are kept for batch sizes that were not measured now.
    """
    steps = dict(before or {})
    for result in results:
        if result.found is not None:
            cuts = {part: found.cut for part, found in result.found.parts.items()}
            steps[result.rows] = replace(steps.get(result.rows, DEFAULT), **cuts)
    return Map({rows: step for rows, step in steps.items() if step != DEFAULT})


def told(results: Seq[Result], before: Seq[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """The measurements as JSON objects, sorted by batch size.

    `before` holds those of an older run. They are kept for kernels and batch sizes that were not measured now.
    """
    mine = [line for result in results for line in result.as_json()]
    measured = {(part, result.rows) for result in results if result.found is not None for part, _ in result.lines}
    kept = [line for line in before if (line["part"], line["rows"]) not in measured]
    again = {(line["part"], line["rows"]) for line in kept}
    return sorted([*kept, *(line for line in mine if (line["part"], line["rows"]) not in again)], key=lambda line: line["rows"])
