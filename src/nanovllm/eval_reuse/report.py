"""What was measured, in rows: as a table, as JSON, as a picture."""

import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch

from ..model import Model
from .measure import Reading

SCHEMA = 1
FULL, GUESSED = "full prefill", "no context"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method on one group of questions: shares of all questions, and means over them.

    `recall` [0, 1]; `kl` in nats; `diverged`: the share of replies that are not the full prefill's; `diverged_at`: the median of the first
    token that differs, None where half of the replies or more never differ. The three are None where nothing was compared.
    `tokens_run` of `tokens_full` went through the model; `cost` is the share of a full prefill's work.
    """

    experiment: str
    group: str
    method: str
    questions: int
    recall: float
    kl: float | None
    diverged: float | None
    diverged_at: int | None
    tokens_run: float
    tokens_full: float
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All rows, what they were measured with, and the experiments that this model could not take."""

    metadata: dict[str, Any]
    rows: tuple[Row, ...]
    skipped: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """A JSON object: the metadata, the rows, and what was skipped."""
        return {"schema": SCHEMA, **self.metadata, "rows": [asdict(row) for row in self.rows], "skipped": list(self.skipped)}


def metadata(model: Model, settings: Any) -> dict[str, Any]:
    """What the figures depend on."""
    cuda = model.device.type == "cuda"
    return {
        "model": model.name,
        "fingerprint": model.fingerprint,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(model.device) if cuda else platform.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "settings": asdict(settings),
    }


def summarise(readings: Iterable[Reading]) -> tuple[Row, ...]:
    """A row for each experiment, group and method, in order of appearance."""
    found: dict[tuple[str, str, str], list[Reading]] = {}
    for reading in readings:
        found.setdefault((reading.experiment, reading.group, reading.method), []).append(reading)
    return tuple(_row(*key, some) for key, some in found.items())


def _row(experiment: str, group: str, method: str, readings: Sequence[Reading]) -> Row:
    compared = [reading for reading in readings if reading.kl is not None]
    places = sorted(reading.diverged_at for reading in compared if reading.diverged_at is not None)
    middle = (len(compared) - 1) // 2  # the lower median; those that never diverge stand behind all others
    return Row(
        experiment=experiment,
        group=group,
        method=method,
        questions=len(readings),
        recall=fmean(reading.right for reading in readings),
        kl=fmean(reading.kl for reading in compared if reading.kl is not None) if compared else None,
        diverged=len(places) / len(compared) if compared else None,
        diverged_at=places[middle] if compared and middle < len(places) else None,
        tokens_run=fmean(reading.tokens_run for reading in readings),
        tokens_full=fmean(reading.tokens_full for reading in readings),
        cost=sum(reading.cost for reading in readings) / sum(reading.tokens_full for reading in readings),
    )


def table(report: Report) -> str:
    """The rows in aligned columns, an experiment after another."""
    head = ("", "", "questions", "recall", "KL, nats", "diverged", "first", "tokens run", "work")
    cells: list[tuple[str, ...] | str] = []
    experiment = group = ""
    for row in report.rows:
        if row.experiment != experiment:
            experiment, group = row.experiment, ""
            cells += [experiment, head]
        cells.append((row.group if row.group != group else "", *_cells(row)))
        group = row.group
    rows = [row for row in cells if not isinstance(row, str)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))] if rows else []
    lines = [f"{report.metadata['model']}, {report.metadata['dtype']}, seed {report.metadata['settings']['seed']}"]
    for row in cells:
        if isinstance(row, str):
            lines += ["", row]
        else:
            left = [row[i].ljust(widths[i]) for i in range(2)]
            lines.append("  ".join([*left, *(row[i].rjust(widths[i]) for i in range(2, len(row)))]).rstrip())
    lines += [f"\nskipped: {name} (no chat in which the model thought and then answered)" for name in report.skipped]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    work = (f"{row.tokens_run:.0f} of {row.tokens_full:.0f}", f"{row.cost:.0%}")
    if row.kl is None or row.diverged is None:
        return row.method, str(row.questions), f"{row.recall:.1%}", "-", "-", "-", *work
    first = "never" if row.diverged_at is None else str(row.diverged_at)
    return row.method, str(row.questions), f"{row.recall:.1%}", f"{row.kl:.1e}", f"{row.diverged:.1%}", first, *work
