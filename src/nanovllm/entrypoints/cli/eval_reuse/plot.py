"""The report as a picture: recall and KL divergence over work. Needs matplotlib, which is not a dependency of the package."""

from pathlib import Path
from typing import Any

from nanovllm.entrypoints.cli.eval_reuse.report import FULL, GUESSED, Report, Row
from nanovllm.errors import InvalidRequestError

NOISE = 1e-9  # KL below this is rounding
COLOURS = ("#e08a1e", "#2b7bba", "#1d3f6e", "#7a2f8f", "#4f7f2f", "#b03a48")
MARKERS = ("o", "^", "s", "D", "*", "v", "P", "X", "h")


def draw(report: Report, path: Path) -> None:
    """Write the picture: recall above, KL below, one column per experiment. The path's suffix chooses the format.

    Raises `InvalidRequestError` if matplotlib is missing or does not know the format.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidRequestError("matplotlib, which draws the picture, is not installed: pip install matplotlib") from None
    experiments = list(dict.fromkeys(row.experiment for row in report.rows))
    floor = min((row.kl for row in report.rows if row.kl is not None and row.kl > NOISE), default=1.0) / 4
    with rc_context({"svg.hashsalt": "nanovllm", "font.size": 9.5, "axes.titlesize": 10}):
        figure = Figure(figsize=(3.6 * len(experiments) + 0.6, 6.2), layout="constrained")
        axes = figure.subplots(2, len(experiments), squeeze=False, sharex=True, sharey="row")
        for column, name in enumerate(experiments):
            _column(axes[0][column], axes[1][column], name, [row for row in report.rows if row.experiment == name], floor)
        axes[0][0].set_ylabel("facts recalled")
        axes[1][0].set_ylabel("KL from full prefill, nats")
        axes[1][0].text(-0.02, 0, "exact", transform=axes[1][0].transAxes, ha="right", va="center")
        figure.suptitle(f"Loss of quality from reused KV ({report.metadata['model']}, {report.metadata['dtype']})", fontsize=12)
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        except ValueError as error:
            raise InvalidRequestError(f"{path}: {error}") from None


def _column(above: Any, below: Any, name: str, rows: list[Row], floor: float) -> None:
    groups = list(dict.fromkeys(row.group for row in rows))
    methods = [method for method in dict.fromkeys(row.method for row in rows) if method not in (FULL, GUESSED)]
    for row in rows:
        colour = COLOURS[groups.index(row.group) % len(COLOURS)]
        if row.method == FULL:
            above.axhline(row.recall, color=colour, linewidth=0.9, linestyle=":", zorder=1)
        elif row.method != GUESSED:
            marker = MARKERS[methods.index(row.method) % len(MARKERS)]
            for axis, value in ((above, row.recall), (below, _kl(row, floor))):
                axis.plot(100 * row.cost, value, marker, color=colour, markersize=9 if marker == "*" else 6.5,
                          markeredgecolor="white", markeredgewidth=0.6, zorder=3, clip_on=False)  # fmt: skip
    for place, group in enumerate(groups):
        colour = COLOURS[place % len(COLOURS)]
        line = sorted((r for r in rows if r.group == group and _of_first_tokens(r)), key=lambda row: row.cost)
        above.plot([100 * row.cost for row in line], [row.recall for row in line], color=colour, linewidth=1.2, zorder=2, label=group)
        below.plot([100 * row.cost for row in line], [_kl(row, floor) for row in line], color=colour, linewidth=1.2, zorder=2)
    for place, method in enumerate(methods):
        below.plot([], [], MARKERS[place % len(MARKERS)], color="#666666", markersize=6, label=method)
    above.set(title=name.replace(", ", ",\n").replace(" kept without", "\nkept without"), ylim=(0, 1.02), xlim=(0, 100))
    above.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    below.set(yscale="log", xlabel="work, % of a full prefill", ylim=(floor, 60))  # room for the legend
    for axis, place in ((above, "lower right"), (below, "upper right")):
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8, framealpha=0.85, loc=place)


def _of_first_tokens(row: Row) -> bool:
    """Whether the method recomputes a number of first tokens. A line joins these methods, from 0 to all."""
    return row.method.startswith("recompute=") and "deviation" not in row.method


def _kl(row: Row, floor: float) -> float:
    return max(floor, row.kl or 0.0)
