"""A run's JSON object as an SVG picture: each workload compared with its roofline, and the curves of growth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log2, log10
from typing import Any

from nanovllm.entrypoints.cli.bench.report import about
from nanovllm.entrypoints.display.svg import FAINT, INK, LINE, Length, document, rect, text

WIDTH, MARGIN = 1000, 32
INNER = WIDTH - 2 * MARGIN
NAMED, BAR, GAP = 300, 15, 12  # bars: width of the names, height of a bar, distance between workloads
COLOURS = ("#2567a8", "#ee8427", "#6c489f", "#4f7f2f", "#b03a48")
ROOF = "#e6edf5"
PLOT, SPACE, ROOM = 210, 62, 26  # panels: height, width of the numbers on the left, least distance of the numbers below
Points = Sequence[tuple[Length, Length]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line through points with positive coordinates. A dashed line is a roofline."""

    name: str
    points: Points
    colour: str
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Curves over a logarithmic horizontal axis. The vertical axis is logarithmic (`log`) or begins at 0.

    `names_below`: the legend is at the bottom of the panel, where such curves leave room.
    """

    title: str
    across: str
    curves: tuple[Curve, ...]
    log: bool
    names_below: bool = False


def draw(result: Mapping[str, Any]) -> str:
    """The SVG picture of a run. `result` is its JSON object."""
    parts = [text(MARGIN, 40, f"nanovllm, {result['model']}", size=20, weight=600), text(MARGIN, 60, about(result), FAINT)]
    drawn, height = _bars(result, 92)
    parts += drawn
    panels = _panels(result.get("growth", {}))
    per_row = 3 if len(panels) != 4 else 2
    for i, panel in enumerate(panels):
        x, y = MARGIN + i % per_row * INNER / per_row, height + i // per_row * (PLOT + 90)
        parts += _panel(panel, x, y, INNER / per_row - 24)
    height += -(-len(panels) // per_row) * (PLOT + 90)
    return document(WIDTH, height + 10, f"The speed of {result['model']}", parts)


def _bars(result: Mapping[str, Any], top: Length) -> tuple[list[str], Length]:
    """One row per workload: a pale bar for the roofline, our share of it, and each peer's share."""
    rows, peers = result.get("workloads", ()), result.get("peers", {})
    if not rows:
        return [], top
    names = ("nanovllm", *peers)
    most = max(100.0, *(one["roofline_percent"] for one in rows))
    unit = (INNER - NAMED - 200) / most
    parts, x = [text(MARGIN, top, "Workloads compared with their roofline", size=14, weight=600)], float(WIDTH - MARGIN)
    for name, colour in reversed([*zip(names, COLOURS, strict=False), ("roofline", ROOF)]):
        x -= 7 * len(name) + 26
        parts += [rect(x, top - 10, 12, 12, colour), text(x + 17, top, name, FAINT)]
    top += 16
    for one in rows:
        rate, tall = "tok_s" in one, BAR * len(names)
        middle = top + tall / 2 + 4
        parts += [text(MARGIN, middle, one["workload"], weight=600), text(MARGIN + 74, middle, one["what"], FAINT)]
        limit = f"{one['roofline_tok_s']:,.0f} tok/s" if rate else f"{one['roofline_ms']:,.2f} ms"
        parts.append(rect(MARGIN + NAMED, top, 100 * unit, tall, ROOF, f"roofline: {limit}"))
        ours = one["tok_s"] if rate else one["step_ms"]
        for i, name in enumerate(names):
            figure = ours if not i else peers[name].get(one["key"])
            if figure is None:
                continue
            share = one["roofline_percent"] * (figure / ours if rate else ours / figure)
            shown = f"{figure:,.0f} tok/s" if rate else f"{figure:,.2f} ms"
            parts.append(rect(MARGIN + NAMED, top + i * BAR + 1, share * unit, BAR - 2, COLOURS[i % len(COLOURS)], f"{name}: {shown}"))
            end = MARGIN + NAMED + max(share, 100.0) * unit + 8
            of = f"{share:.0f}%" if share >= 1 else f"{share:.1f}%"
            parts.append(text(end, top + i * BAR + 12, f"{shown}, {of}" + ("" if i else f" of {limit}")))
        top += tall + GAP
    return parts, top + 30


def _panels(growth: Mapping[str, Any]) -> list[Panel]:
    panels = []
    if batch := growth.get("batch"):
        curves = [
            Curve(name="measured", points=[(p["rows"], p["tok_s"]) for p in batch], colour=COLOURS[0]),
            Curve(name="roofline", points=[(p["rows"], 1e6 * p["rows"] / p["limit_us"]) for p in batch], colour=COLOURS[0], dashed=True),
        ]
        title = f"Tokens per second, context {batch[0]['context']:,}"
        panels.append(Panel(title=title, across="rows in the batch", curves=tuple(curves), log=True))
    if context := growth.get("context"):
        curves = []
        for i, rows in enumerate(dict.fromkeys(p["rows"] for p in context)):
            some, colour = [p for p in context if p["rows"] == rows], COLOURS[i % len(COLOURS)]
            name = f"{rows} row{'s' * (rows > 1)}"
            curves.append(Curve(name=name, points=[(p["context"], p["step_us"] / 1e3) for p in some], colour=colour))
            curves.append(Curve(name="", points=[(p["context"], p["limit_us"] / 1e3) for p in some], colour=colour, dashed=True))
        panels.append(Panel(title="Milliseconds per step", across="tokens of context (dashed: roofline)", curves=tuple(curves), log=False))
    hosts = [
        (growth.get("pool"), "num_pages", "over pages in the pool"),
        ([p for p in growth.get("ended", ()) if p["ended"]], "ended", "over requests ended"),
    ]
    curves = [
        Curve(name=name, points=[(p[key], p["host_us"]) for p in points], colour=COLOURS[i])
        for i, (points, key, name) in enumerate(hosts)
        if points
    ]
    if curves:
        title, across = "Host microseconds per step", "pages, or requests"
        panels.append(Panel(title=title, across=across, curves=tuple(curves), log=False, names_below=True))
    return panels


def _panel(panel: Panel, left: Length, top: Length, width: Length) -> list[str]:
    x0, y0, wide = left + SPACE, top + 22, width - SPACE
    xs = [x for curve in panel.curves for x, _ in curve.points]
    ys = [y for curve in panel.curves for _, y in curve.points]
    low_x, high_x = log2(min(xs)), max(log2(max(xs)), log2(min(xs)) + 1)
    ticks = decades(min(ys), max(ys)) if panel.log else steps(max(ys))

    def at_x(x: Length) -> float:
        return x0 + wide * (log2(x) - low_x) / (high_x - low_x)

    def at_y(y: Length) -> float:
        if panel.log:
            y, low, high = log10(max(y, ticks[0])), log10(ticks[0]), log10(ticks[-1])
            return y0 + PLOT * (1 - (y - low) / (high - low))
        return y0 + PLOT * (1 - y / ticks[-1])

    parts = [text(left, top + 4, panel.title, size=14, weight=600)]
    for tick in ticks:
        y = at_y(tick)
        parts += [_line([(x0, y), (x0 + wide, y)], LINE, 0.6), text(x0 - 7, y + 4, number(tick), FAINT, size=11, anchor="end")]
    last = -ROOM
    for tick in sorted(set(xs)):
        if at_x(tick) - last >= ROOM:
            last = at_x(tick)
            parts.append(text(last, y0 + PLOT + 16, number(tick), FAINT, size=11, anchor="middle"))
    parts.append(text(x0 + wide / 2, y0 + PLOT + 34, panel.across, FAINT, anchor="middle"))
    named = 0
    for curve in panel.curves:
        places = [(at_x(x), at_y(y)) for x, y in curve.points]
        parts.append(_line(places, curve.colour, 1.6, dashed=curve.dashed))
        if not curve.dashed:
            labels = (f"{x:,.0f}: {y:,.4g}" for x, y in curve.points)
            parts += [_dot(x, y, curve.colour, label) for (x, y), label in zip(places, labels, strict=True)]
        if curve.name:
            y = y0 + (PLOT - 10 - 16 * (len(panel.curves) - 1) if panel.names_below else 14) + 16 * named
            parts += [
                _line([(x0 + 10, y), (x0 + 34, y)], curve.colour, 1.6, dashed=curve.dashed),
                text(x0 + 40, y + 4, curve.name, INK, size=11),
            ]
            named += 1
    return parts


def decades(low: Length, high: Length) -> list[float]:
    """The powers of ten around a positive range, at least two."""
    first = floor(log10(low))
    return [10.0**power for power in range(first, max(ceil(log10(high)), first + 1) + 1)]


def steps(high: Length) -> list[float]:
    """Four to seven round numbers from 0 up to `high` or slightly more."""
    unit = 10.0 ** floor(log10(high))
    step = next(unit * part for part in (0.2, 0.25, 0.5, 1.0, 2.0) if high / (unit * part) <= 6)
    return [step * i for i in range(ceil(high / step - 1e-9) + 1)]


def number(value: Length) -> str:
    """A number in few characters: 0.25, 12, 8k, 1M. 8192 is 8k, and 8000 is 8k too."""
    for size, name in ((1 << 20, "M"), (10**6, "M"), (1 << 10, "k"), (10**3, "k")):
        if value >= size and value % size == 0:
            return f"{value / size:,.0f}{name}"
    return f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"


def _line(points: Points, colour: str, width: float, *, dashed: bool = False) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>'


def _dot(x: Length, y: Length, colour: str, label: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{label}</title></circle>'
