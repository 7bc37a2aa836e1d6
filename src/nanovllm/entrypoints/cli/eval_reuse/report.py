"""The report: rows of means over questions, as a table and as JSON."""

import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch

from nanovllm.entrypoints.cli.eval_reuse.measure import Reading
from nanovllm.entrypoints.display.tables import aligned
from nanovllm.models.model import Model

SCHEMA = 2
FULL, GUESSED = "full prefill", "no context"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method on one group of questions.

    Attributes:
        experiment: The name of the experiment.
        group: The group of questions.
        method: The method of reuse.
        questions: The number of questions.
        recall: The share of right replies, 0 to 1.
        kl: Mean KL divergence in nats; None if nothing was compared.
        diverged: The share of replies that differ from the full prefill's; None if nothing was compared.
        diverged_at: The median of the first token that differs; None if half of the replies or more do not differ, or if not compared.
        tokens_run: Mean number of tokens that ran through the model.
        tokens_full: Mean number of all tokens.
        cost: The work as a share of a full prefill's.
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
    """All rows, their metadata, and the experiments that the model could not run.

    `separators` are rows of which only the recall is shown, one line per group.
    """

    metadata: dict[str, Any]
    rows: tuple[Row, ...]
    separators: tuple[Row, ...] = ()
    skipped: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """A JSON object: the metadata, the rows, and the skipped experiments."""
        rows = {"rows": [asdict(row) for row in self.rows], "separators": [asdict(row) for row in self.separators]}
        return {"schema": SCHEMA, **self.metadata, **rows, "skipped": list(self.skipped)}


def metadata(model: Model, settings: Any, kv_dtype: str | None = None) -> dict[str, Any]:
    """The model, the device, the versions and the settings that the figures depend on."""
    cuda = model.device.type == "cuda"
    return {
        "model": model.name,
        "fingerprint": model.fingerprint,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(model.device) if cuda else platform.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "settings": asdict(settings),
        **({} if kv_dtype is None else {"kv_dtype": kv_dtype}),
    }


def summarise(readings: Iterable[Reading]) -> tuple[Row, ...]:
    """One row for each experiment, group and method, in order of appearance."""
    groups: dict[tuple[str, str, str], list[Reading]] = {}
    for reading in readings:
        groups.setdefault((reading.experiment, reading.group, reading.method), []).append(reading)
    return tuple(_row(*key, some) for key, some in groups.items())


def _row(experiment: str, group: str, method: str, readings: Sequence[Reading]) -> Row:
    compared = [reading for reading in readings if reading.kl is not None]
    places = sorted(reading.diverged_at for reading in compared if reading.diverged_at is not None)
    middle = (len(compared) - 1) // 2  # the lower median; replies that never diverge sort last
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
    """The rows in aligned columns, one experiment after another."""
    head = ("", "", "questions", "recall", "KL, nats", "diverged", "first", "tokens run", "work")
    settings = report.metadata["settings"]
    about = f"seed {settings['seed']}, separator {json.dumps(settings['separator'])}"
    lines = [
        f"{report.metadata['model']}, {report.metadata['dtype']}, {about}",
        *_aligned(head, 2, [(row.experiment, row.group, _cells(row)) for row in report.rows]),
        *_recalls(report.separators),
    ]
    lines += [f"\nskipped: {name} (in no chat did the model think and then answer)" for name in report.skipped]
    return "\n".join(lines)


def _recalls(rows: Sequence[Row]) -> list[str]:
    """The recall of the rows: one line per group, one column per method."""
    methods = tuple(dict.fromkeys(row.method for row in rows))
    recalls = {(row.group, row.method): f"{row.recall:.1%}" for row in rows}
    groups = dict.fromkeys((row.experiment, row.group) for row in rows)
    return _aligned(("", *methods), 1, [(name, group, tuple(recalls[group, method] for method in methods)) for name, group in groups])


def _aligned(head: tuple[str, ...], num_left: int, entries: Iterable[tuple[str, str, tuple[str, ...]]]) -> list[str]:
    """Entries of experiment, group and cells as aligned lines.

    Each experiment begins with its name and `head`, and each group is named once. The first `num_left` columns are left-aligned.
    """
    cells: list[tuple[str, ...] | str] = []
    last = ("", "")
    for experiment, group, rest in entries:
        if experiment != last[0]:
            cells += [experiment, head]
        cells.append((group if (experiment, group) != last else "", *rest))
        last = (experiment, group)
    rows = [row for row in cells if not isinstance(row, str)]
    shown = iter(aligned(head, rows, left=range(num_left))[1:] if rows else [])
    return [line for cell in cells for line in (("", cell) if isinstance(cell, str) else (next(shown),))]


def _cells(row: Row) -> tuple[str, ...]:
    work = (f"{row.tokens_run:.0f} of {row.tokens_full:.0f}", f"{row.cost:.0%}")
    if row.kl is None or row.diverged is None:
        return row.method, str(row.questions), f"{row.recall:.1%}", "-", "-", "-", *work
    first = "never" if row.diverged_at is None else str(row.diverged_at)
    return row.method, str(row.questions), f"{row.recall:.1%}", f"{row.kl:.1e}", f"{row.diverged:.1%}", first, *work
