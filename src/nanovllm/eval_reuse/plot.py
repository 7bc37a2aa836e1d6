"""The report as a picture: what is lost over what is run. Needs matplotlib, which the package itself does not."""

from pathlib import Path
from typing import Any

from ..errors import InvalidRequestError
from .report import FULL, GUESSED, Report, Row

FLOOR = 1e-12  # of the logarithmic axis: below it stand rounding errors
COLOURS = ("#7fb8da", "#2f7fb8", "#0b3c5d", "#c2571a", "#7a2f8f", "#4f7f2f")
MARKERS = ("o", "^", "s", "v", "P", "X", "h", "<", ">")


def draw(report: Report, path: Path) -> None:
    """Write the picture, in the format that the path ends with; recall above, KL below, a column an experiment.

    Raises `InvalidRequestError` where matplotlib is missing or knows no such format.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidRequestError("drawing needs matplotlib: pip install matplotlib") from None
    experiments = list(dict.fromkeys(row.experiment for row in report.rows))
    with rc_context({"svg.hashsalt": "nanovllm", "font.size": 9, "svg.fonttype": "path"}):
        figure = Figure(figsize=(4.1 * len(experiments), 6.4), layout="constrained")
        axes = figure.subplots(2, len(experiments), squeeze=False, sharex="col")
        for column, name in enumerate(experiments):
            rows = [row for row in report.rows if row.experiment == name]
            _column(axes[0][column], axes[1][column], name, rows)
        axes[0][0].set_ylabel("recall")
        axes[1][0].set_ylabel("KL from full prefill, nats (log)")
        figure.suptitle(f"What reuse of KV costs: {report.metadata['model']}, {report.metadata['dtype']}")
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        except ValueError as error:
            raise InvalidRequestError(f"{path}: {error}") from None


def _column(above: Any, below: Any, name: str, rows: list[Row]) -> None:
    groups = list(dict.fromkeys(row.group for row in rows))
    methods = [m for m in dict.fromkeys(row.method for row in rows) if m not in (FULL, GUESSED)]
    for place, group in enumerate(groups):
        colour = COLOURS[place % len(COLOURS)]
        mine = [row for row in rows if row.group == group and row.method in methods]
        line = sorted((row for row in mine if "deviation" not in row.method), key=lambda row: row.cost)
        for axis, value in ((above, _recall), (below, _kl)):
            axis.plot([100 * row.cost for row in line], [value(row) for row in line], color=colour, linewidth=1.2, zorder=2)
            for row in mine:
                marker = MARKERS[methods.index(row.method) % len(MARKERS)]
                axis.plot(100 * row.cost, value(row), marker, color=colour, markersize=6, markeredgecolor="white", zorder=3)
        full = next((row for row in rows if row.group == group and row.method == FULL), None)
        if full is not None:
            above.axhline(full.recall, color=colour, linewidth=0.8, linestyle=":", zorder=1)
        above.plot([], [], color=colour, label=group)
    for method in methods:
        below.plot([], [], MARKERS[methods.index(method) % len(MARKERS)], color="#555555", markersize=6, label=method)
    above.set(title=name.replace(", ", ",\n"))
    above.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    below.set(yscale="log", xlabel="work, % of a full prefill")
    for axis in (above, below):
        axis.grid(alpha=0.25, which="major")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=7.5, framealpha=0.9, loc="best")


def _recall(row: Row) -> float:
    return row.recall


def _kl(row: Row) -> float:
    return max(FLOOR, row.kl or 0.0)
