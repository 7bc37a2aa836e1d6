"""One run's figures: as rows for JSON, and from the JSON object as a table for a terminal or for a document."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from nanovllm.config import ModelConfig
from nanovllm.entrypoints.cli.bench.roofline import Ceiling, decode_bytes, limit_seconds, prompt_bytes
from nanovllm.entrypoints.cli.bench.workloads import PROMPT, Measured
from nanovllm.entrypoints.display.tables import Cells, aligned

WHERE_TO = re.compile(r" --(?:output|plot|commit)[ =]\S+| --json")  # options that no figure depends on
HOST = (
    "host: the share of the time outside the model's calls (scheduling, page tables, settling). On a GPU the next step runs\n"
    "meanwhile, so it costs time only where it comes near 100%."
)


def row(one: Measured, config: ModelConfig, dtype: torch.dtype, ceiling: Ceiling) -> dict[str, Any]:
    """A measured workload beside what the ceiling allows, as a JSON object.

    `step_ms` and `step_bytes` are what a decode step took, and must read, on average; for a time to the first token, the whole of it.
    `roofline_percent` is the time that the ceiling allows over the time it took.
    """
    limit = limit_seconds(config, dtype, one.work, ceiling)
    steps = one.steps or one.work.steps or 1
    moved = decode_bytes(config, dtype, one.work) if one.work.steps else prompt_bytes(config, dtype, one.work)
    rates = {"tok_s": one.figure, "roofline_tok_s": round(one.tokens / limit, 1)} if one.work.steps else {}
    return {
        "workload": one.workload,
        "what": one.what,
        "key": one.key,
        **rates,
        "step_ms": round(1e3 * one.seconds / steps, 3),
        "roofline_ms": round(1e3 * limit / steps, 3),
        "step_bytes": round(moved / steps),
        "roofline_percent": round(100 * limit / one.seconds, 1),
        "host_percent": None if one.host is None else round(100 * one.host, 1),
    }


def ceiling_json(ceiling: Ceiling) -> dict[str, float]:
    """The ceiling in the units that people speak of."""
    return {"read_gb_s": round(ceiling.read_bytes / 1e9, 1), "matmul_tflop_s": round(ceiling.flops / 1e12, 3)}


def text(result: Mapping[str, Any]) -> str:
    """A run's JSON object for a terminal."""
    lines = [about(result)]
    for title, head, rows in sections(result):
        lines += ["", *([title] if title else []), *aligned(head, rows)]
    lines += ["", *left] if (left := left_out(result)) else []
    if any(one["host_percent"] is not None for one in result.get("workloads", ())):
        lines += ["", HOST]
    return "\n".join(lines)


def markdown(result: Mapping[str, Any]) -> str:
    """A run's JSON object for a document: what it ran on, and a table a section."""
    lines = [f"{about(result)} (`{WHERE_TO.sub('', result['command']).strip()}`)."]
    for title, head, rows in sections(result):
        shown = (title[0].upper() + title[1:] + ":") if title else "Workloads:"
        lines += ["", shown, "", *table(head, rows)]
    lines += ["", *(f"- {one}" for one in left)] if (left := left_out(result)) else []
    return "\n".join(lines)


def about(result: Mapping[str, Any]) -> str:
    """Model, device, ceiling and commit in a line."""
    told = f"{result['model']}, {result['dtype']}, {result['gpu'] or result['cpu']}, commit {result['commit']}"
    told += ", tuned" if result.get("tuning") else ""
    told += ", cut short" if result.get("unfinished") else ""
    ceiling = result.get("roofline")
    return f"{told}; reads {ceiling['read_gb_s']:,.0f} GB/s, multiplies {ceiling['matmul_tflop_s']:,.2f} TFLOP/s" if ceiling else told


def left_out(result: Mapping[str, Any]) -> list[str]:
    """A line for each workload that was not run and for each point that no curve has, with the reason."""
    points = [
        {**one, "workload": f"growth with the {one['curve']} at {one['rows']} row{'s' * (one['rows'] > 1)} of {one['context']:,} tokens"}
        for one in result.get("growth", {}).get("left_out", ())
    ]
    return [f"left out: {one['workload']} ({one['why']})" for one in (*result.get("left_out", ()), *points)]


def sections(result: Mapping[str, Any]) -> Iterable[tuple[str, Cells, list[Cells]]]:
    """(title, head, rows) of each table that the run has figures for."""
    peers: Mapping[str, Mapping[str, float]] = result.get("peers", {})
    rows = result.get("workloads", ())
    rates, firsts = [one for one in rows if "tok_s" in one], [one for one in rows if "tok_s" not in one]
    if rates:
        head = ("workload", "", "tok/s", "ms a step", "MB a step", "roofline tok/s", "of it", "host", *peers)
        yield "", head, [_rate(one, peers) for one in rates]
    if firsts:
        head = ("workload", "", "ms", "roofline ms", "of it", "host", *peers)
        yield "first token", head, [_first(one, peers) for one in firsts]
    if "start" in result:
        told = {name: figures["start_s"] for name, figures in peers.items() if "start_s" in figures}
        head = ("", "s", "imports", "weights", "engine", "first token", *told)
        parts = [f"{result['start'][name]:,.2f}" for name in ("imports_s", "weights_s", "engine_s", "first_token_s")]
        cells = (f"{PROMPT} in, 1 out", f"{result['start_s']:,.2f}", *parts, *(f"{seconds:,.1f}" for seconds in told.values()))
        yield "from the start of a process to its first token, caches warm", head, [cells]
    hosts = [size for size in (1, 64) if f"b{size}_host_us" in result]
    if hosts:
        # In files from before the mean had a name of its own, these keys hold means.
        title = "host time of a decode step" + (", medians" if f"b{hosts[0]}_host_mean_us" in result else ", means")
        cells = [(f"{n} row{'s' * (n > 1)}", f"{result[f'b{n}_step_us']:,.0f}", f"{result[f'b{n}_host_us']:,.0f}") for n in hosts]
        yield title, ("", "us a step", "us of it the host's"), cells
    growth = result.get("growth", {})
    for name in ("batch", "context"):
        if growth.get(name):
            head = ("rows", "context", "tok/s", "us a step", "roofline us", "of it", "MB a step", "host us")
            yield f"growth with the {name}", head, [_point(point) for point in growth[name]]
    for name, title in (("pool", "the pool"), ("ended", "the requests that have ended")):
        if growth.get(name):
            head = ("pages", "requests ended", "pages in the index", "host us a step")
            cells = [(f"{p['num_pages']:,}", f"{p['ended']:,}", f"{p['num_cached']:,}", f"{p['host_us']:,.0f}") for p in growth[name]]
            yield f"growth with {title} (a model of almost no size)", head, cells


def table(head: Cells, rows: Sequence[Cells]) -> list[str]:
    """A table for a document."""
    return [_bar(head), "|" + "---|" * len(head), *map(_bar, rows)]


def _rate(one: Mapping[str, Any], peers: Mapping[str, Mapping[str, float]]) -> Cells:
    figures = (f"{one['tok_s']:,.0f}", f"{one['step_ms']:,.3f}", f"{one['step_bytes'] / 1e6:,.1f}", f"{one['roofline_tok_s']:,.0f}")
    return one["workload"], one["what"], *figures, *_shares(one), *(_peer(figures, one["key"], ",.0f") for figures in peers.values())


def _first(one: Mapping[str, Any], peers: Mapping[str, Mapping[str, float]]) -> Cells:
    figures = (f"{one['step_ms']:,.2f}", f"{one['roofline_ms']:,.2f}")
    return one["workload"], one["what"], *figures, *_shares(one), *(_peer(figures, one["key"], ",.2f") for figures in peers.values())


def _shares(one: Mapping[str, Any]) -> Cells:
    host = one["host_percent"]
    return f"{one['roofline_percent']:.0f}%", "-" if host is None else f"{host:.0f}%"


def _peer(figures: Mapping[str, float], key: str, form: str) -> str:
    return format(figures[key], form) if key in figures else "-"


def _point(point: Mapping[str, Any]) -> Cells:
    times = (f"{point['step_us']:,.0f}", f"{point['limit_us']:,.0f}", f"{point['roofline_percent']:.0f}%")
    return (
        str(point["rows"]), f"{point['context']:,}", f"{point['tok_s']:,.0f}", *times, f"{point['step_bytes'] / 1e6:,.1f}",
        f"{point['host_us']:,.0f}",
    )  # fmt: skip


def _bar(cells: Cells) -> str:
    return f"| {' | '.join(cells)} |"
