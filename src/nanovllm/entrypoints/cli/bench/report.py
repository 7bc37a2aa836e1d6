"""The figures of one run: as rows of its JSON object, and the object as tables for a terminal or for a document."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from nanovllm.config import ModelConfig
from nanovllm.entrypoints.cli.bench.roofline import Ceiling, HeldBytes, decode_bytes, limit_seconds, prompt_bytes
from nanovllm.entrypoints.cli.bench.workloads import PROMPT, Measured
from nanovllm.entrypoints.display.tables import Cells, aligned
from nanovllm.models.fast.cuts import SHIPPED

WHERE_TO = re.compile(r" --(?:output|plot|commit)[ =]\S+| --json| --download")  # options that do not change any figure
HOST = (
    "host: the share of the time outside the model's calls (scheduling, page tables, post-processing). On a GPU this work\n"
    "overlaps the next step, so it costs time only if the share is near 100%."
)


def row(one: Measured, config: ModelConfig, dtype: torch.dtype, ceiling: Ceiling, held: HeldBytes | None = None) -> dict[str, Any]:
    """A measured workload and its roofline, as a JSON object.

    `step_ms` is the mean time of a decode step, and `step_bytes` the bytes that it must read. For a time to the first token, they are
    the time and the bytes of the whole. `roofline_percent` is the least possible time divided by the measured time. `held` are the bytes of
    the matrices and the KV; None if all are in `dtype`.
    """
    limit = limit_seconds(config, dtype, one.work, ceiling, held)
    steps = one.steps or one.work.steps or 1
    moved = (decode_bytes if one.work.steps else prompt_bytes)(config, dtype, one.work, held)
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
    """The ceiling in GB/s and TFLOP/s."""
    return {"read_gb_s": round(ceiling.read_bytes / 1e9, 1), "matmul_tflop_s": round(ceiling.flops / 1e12, 3)}


def text(result: Mapping[str, Any]) -> str:
    """A run's JSON object as tables for a terminal."""
    lines = [about(result)]
    for title, head, rows in sections(result):
        lines += ["", *([title] if title else []), *aligned(head, rows)]
    lines += ["", *left] if (left := left_out(result)) else []
    if any(one["host_percent"] is not None for one in result.get("workloads", ())):
        lines += ["", HOST]
    return "\n".join(lines)


def markdown(result: Mapping[str, Any]) -> str:
    """A run's JSON object in Markdown: the environment, then one table per section."""
    lines = [f"{about(result)} (`{WHERE_TO.sub('', result['command']).strip()}`)."]
    for title, head, rows in sections(result):
        shown = (title[0].upper() + title[1:] + ":") if title else "Workloads:"
        lines += ["", shown, "", *table(head, rows)]
    lines += ["", *(f"- {one}" for one in left)] if (left := left_out(result)) else []
    return "\n".join(lines)


def about(result: Mapping[str, Any]) -> str:
    """Model, quantisation, device, commit and ceiling of one device in one line."""
    how = f" and {result['quantization']}" if result.get("quantization") else ""
    how += f", KV in {result['kv_dtype']}" if result.get("kv_dtype") else ""
    ranks = f"{result['ranks']} ranks, each on " if "ranks" in result else ""
    line = f"{result['model']}, {result['dtype']}{how}, {ranks}{result['gpu'] or result['cpu']}, commit {result['commit']}"
    if tuning := result.get("tuning"):
        line += ", tuned by the shipped file" if tuning.endswith(SHIPPED) else ", tuned"
    line += ", cut short" if result.get("unfinished") else ""
    ceiling = result.get("roofline")
    return f"{line}; reads {ceiling['read_gb_s']:,.0f} GB/s, multiplies {ceiling['matmul_tflop_s']:,.2f} TFLOP/s" if ceiling else line


def left_out(result: Mapping[str, Any]) -> list[str]:
    """One line, with the reason, for each workload that was not run and for each point that is missing in a curve."""
    points = [
        {**one, "workload": f"growth with the {one['curve']} at {one['rows']} row{'s' * (one['rows'] > 1)} of {one['context']:,} tokens"}
        for one in result.get("growth", {}).get("left_out", ())
    ]
    return [f"left out: {one['workload']} ({one['why']})" for one in (*result.get("left_out", ()), *points)]


def sections(result: Mapping[str, Any]) -> Iterable[tuple[str, Cells, list[Cells]]]:
    """Title, head and rows of each table that the run has figures for."""
    peers: Mapping[str, Mapping[str, float]] = result.get("peers", {})
    rows = result.get("workloads", ())
    rates, firsts = [one for one in rows if "tok_s" in one], [one for one in rows if "tok_s" not in one]
    if rates:
        head = ("workload", "", "tok/s", "ms per step", "MB per step", "roofline tok/s", "of roofline", "host", *peers)
        yield "", head, [_rate(one, peers) for one in rates]
    if firsts:
        head = ("workload", "", "ms", "roofline ms", "of roofline", "host", *peers)
        yield "first token", head, [_first(one, peers) for one in firsts]
    for kind, caches in (("start", "warm caches"), ("bare_start", "empty caches, as on a new machine")):
        if kind in result:
            starts = {name: figures[f"{kind}_s"] for name, figures in peers.items() if f"{kind}_s" in figures}
            head = ("", "s", "imports", "weights", "engine", "first token", *starts)
            parts = [f"{result[kind][name]:,.2f}" for name in ("imports_s", "weights_s", "engine_s", "first_token_s")]
            cells = (f"{PROMPT} in, 1 out", f"{result[f'{kind}_s']:,.2f}", *parts, *(f"{seconds:,.1f}" for seconds in starts.values()))
            yield f"from the start of a process to its first token, with {caches}", head, [cells]
    hosts = [size for size in (1, 64) if f"b{size}_host_us" in result]
    if hosts:
        # In older files, without the key of the mean, these keys hold means.
        title = "host time of a decode step" + (", medians" if f"b{hosts[0]}_host_mean_us" in result else ", means")
        cells = [(f"{n} row{'s' * (n > 1)}", f"{result[f'b{n}_step_us']:,.0f}", f"{result[f'b{n}_host_us']:,.0f}") for n in hosts]
        yield title, ("", "us per step", "host us per step"), cells
    growth = result.get("growth", {})
    for name in ("batch", "context"):
        if growth.get(name):
            head = ("rows", "context", "tok/s", "us per step", "roofline us", "of roofline", "MB per step", "host us")
            yield f"growth with the {name}", head, [_point(point) for point in growth[name]]
    for name, title in (("pool", "the pool"), ("ended", "the requests that have ended")):
        if growth.get(name):
            head = ("pages", "requests ended", "pages in the index", "host us per step")
            cells = [(f"{p['num_pages']:,}", f"{p['ended']:,}", f"{p['num_cached']:,}", f"{p['host_us']:,.0f}") for p in growth[name]]
            yield f"growth with {title} (a minimal model)", head, cells


def table(head: Cells, rows: Sequence[Cells]) -> list[str]:
    """A Markdown table."""
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
