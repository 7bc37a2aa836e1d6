"""The figures in README.md and docs/, from the JSON files of `nanovllm bench`: tables and pictures between markers.

    nanovllm bench --output benchmarks/results/h200-bench.json
    nanovllm bench --model qwen3-8b --output benchmarks/results/h200-8b.json
    python benchmarks/write_docs.py

Tables and pictures are in blocks between markers. A document may have any number of blocks, and the text inside a block is replaced.

- `<!-- bench: NAME.json -->` ... `<!-- /bench -->`: all tables and the picture of a run; NAME.json is a file in benchmarks/results.
- `<!-- brief: NAME.json -->` ... `<!-- /brief -->`: a short table of a run.
- `<!-- families: NAME.json -->` ... `<!-- /families -->`: a row for each model in a file of `benchmarks/families.py`.
- `<!-- embed: NAME.json -->` ... `<!-- /embed -->`: the steps of a caller's program, from a file of `benchmarks/embed.py`.
- `<!-- http: NAME.json -->` ... `<!-- /http -->`: a row for each number of streams in a file of `benchmarks/http_bench.py`.
- `<!-- faults: NAME.json -->` ... `<!-- /faults -->`: a row for each fault in a file of `benchmarks/http_faults.py`.
- `<!-- kv-faults: NAME.json -->` ... `<!-- /kv-faults -->`: kills, damaged files and full disks, from a file of `benchmarks/kv_faults.py`.
- `<!-- host: NAME.json -->` ... `<!-- /host -->`: a row for each kind of client in a file of `benchmarks/host.py`.
- `<!-- formats: NAME.json -->` ... `<!-- /formats -->`: what quantised weights and KV cost, from a file of `benchmarks/formats.py`.
- `<!-- past: NAME.json -->`, `<!-- past-parts: NAME.json -->`, `<!-- past-measured: NAME.json -->`, `<!-- past-alone: NAME.json -->`,
  `<!-- all-reduces: NAME.json -->` and `<!-- fits: NAME.json -->`, each with its end: rates on several GPUs, what they are made of, those
  that were measured, those of one rank alone, latencies, and the memory, from a file of `benchmarks/past_one_gpu.py`.
- `<!-- break-even: NAME.json -->` ... `<!-- /break-even -->`: when loading KV beats running, from a file of `benchmarks/break_even.py`.
- `<!-- fleet: NAME.json -->`, `<!-- failures: NAME.json -->`, `<!-- keys: NAME.json -->` and `<!-- fit: NAME.json -->`, each with its end:
  routing policies by workload and load, around failures, keys of prefix hashes, and the modelled device, from a file of
  `benchmarks/router/simulate.py`.

Numbers of other engines from other runs come from the files NAME-peers.json in the same folder, if GPU, model and dtype are the same. Those
of quantised weights are for runs whose `quantization` the file lists in `quantizations`; files without the list are for other runs.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from nanovllm.entrypoints.cli.bench.plot import draw
from nanovllm.entrypoints.cli.bench.report import markdown, table
from nanovllm.entrypoints.display.svg import FAINT, document, rect, text

ROOT = Path(__file__).resolve().parents[1]
EXPLANATION = ROOT / "docs/explanation"
HOW_TO = ROOT / "docs/how-to"
PAGES = (
    EXPLANATION / "steps-in-your-program.md",
    HOW_TO / "serve-safely.md",
    HOW_TO / "keep-kv-on-disk.md",
    EXPLANATION / "past-these-machines.md",
)
DOCUMENTS = (ROOT / "docs/explanation/performance.md", ROOT / "docs/reference/figures.md", ROOT / "README.md", *PAGES)
KINDS = "bench|brief|formats|families|embed|http|kv-faults|faults|host|break-even|fleet|failures|keys|fit"
SEVERAL = "past-parts|past-measured|past-alone|past|all-reduces|fits"  # GPUs
BLOCK = re.compile(rf"(<!-- ({KINDS}|{SEVERAL}): ([\w.-]+)\.json -->\n).*?(<!-- /\2 -->)", re.S)
NONE = "No figures yet.\n"
BRIEF = {
    "b1_decode_tok_s": "decode, 1 sequence (128 tokens in, 512 out)",
    "b8_decode_tok_s": "8 sequences (256 out)",
    "b64_decode_tok_s": "64 sequences (256 out)",
    "offline_tok_s": "256 requests, 100-1024 tokens in and out, temperature 0.6",
    "shared16k_x32_tok_s": "32 sequences over one 16k prefix, 256 out",
    "fewshot_16x8_tok_s": "16 beginnings of 1,000 tokens x 8 questions at once, 100 out",
    "burst_300_tok_s": "300 requests at once, 20-300 in, 10-500 out",
    **{f"ttft_{length}_ms": f"first token, prompt of {length:,} tokens" for length in (64, 256, 768, 1500, 3000)},
    "ttft_16k_cold_ms": "16k prompt to the first token, cold",
    "ttft_16k_warm_ms": "the same after its prefix was run",
    "start_s": "from the start of a process to its first token, caches warm",
    "bare_start_s": "the same on a machine that has built no kernels",
}

EMBED = {
    "engine": "`generate_many`, its prompts of 128 tokens included",
    "mixed": "`generate_many` with a `process_logits` that mixes pairs of prompts",
    "eager": "`decode_step`, called as it is",
    "compiled": "`decode_step` in `torch.compile(fullgraph=True)`",
    "reduce_overhead": 'the same with `mode="reduce-overhead"`',
    "captured": "`decode_step`, captured by `capture`",
    "loop": "`decode_loop` over a captured step",
    "beam": "a step of a beam search with `split_rows`, captured",
}
EMBED_SECONDS = {"compile": "time of the first two calls of the compiled step", "capture": "time of `capture`"}

KV_FAULTS = {
    "when it is read": "digest or header, when it is read",
    "when it is read, an error is counted": "an error of the disk, when it is read",
    "at the start, stderr": "a line on stderr, before a client asks",
    "in use, `chunk_file`": "error `chunk_file`",
    "in use, `chunk_not_found`": "error `chunk_not_found`",
    "at the start": "the chunk has no name at the start",
    "no start: InvalidRequestError": "no start, `InvalidRequestError`",
    "chunk_file": "error `chunk_file`",
}

HOST = {
    "plain": "replies and nothing else",
    "stop": "two stop strings for each row",
    "logprobs": "log-probabilities of five tokens, which nobody reads before the reply ends",
    "stop_logprobs": "both",
    "read_logprobs": "log-probabilities of five tokens, read in every step (`StepOutput.logprobs`)",
    "stream": "text, read in every step",
    "broken": "the same, and the reply is bytes that are no text",
}


def read(file: Path) -> dict[str, Any]:
    """Read the result of a run, and add numbers of other engines from other runs, which are named as such."""
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    peers = dict(result.get("peers", {}))
    for other in sorted(file.parent.glob("*-peers.json")):
        run = json.loads(other.read_text(encoding="utf-8"))
        alike = (run["gpu"], run["dtype"]) == (result["gpu"], result["dtype"])
        if alike and result.get("quantization") in run.get("quantizations", [None]):
            peers |= {f"{name} (other run)": figures for name, figures in run["models"].get(result["model"], {}).items()}
    return result | ({"peers": peers} if peers else {})


def filled(words: str, results: Path) -> str:
    """Return the document with the tables of each block's file in `results`. Pictures are in the document's folder."""

    def block(found: re.Match[str]) -> str:
        begin, kind, name, end = found.groups()
        file = results / f"{name}.json"
        if not file.exists():
            return begin + NONE + end
        if kind in SIMPLE:
            return begin + SIMPLE[kind](json.loads(file.read_text(encoding="utf-8"))) + end
        result = read(file)
        if kind == "brief":
            return f"{begin}{brief(result)}\n{end}"
        picture = f"![Workloads compared with the roofline, and how a step's time grows](performance-{name}.svg)"
        return f"{begin}{picture}\n\n{markdown(result)}\n{end}"

    return BLOCK.sub(block, words)


def brief(result: dict[str, Any]) -> str:
    """Return the main numbers in one table: ours, those of other engines, and the share of the roofline."""
    peers, rows = result.get("peers", {}), {one["key"]: one for one in result.get("workloads", ())}
    head = ("workload", "nanovllm", *(name.removesuffix(" (other run)") for name in peers), "of the roofline")
    lines = []
    for key, workload in BRIEF.items():
        if key in result:
            any_peer = any(key in figures for figures in peers.values())
            theirs = [_figure(figures[key], key, of_a_peer=True) if key in figures else "-" * any_peer for figures in peers.values()]
            share = f"{rows[key]['roofline_percent']:.0f}%" if key in rows else ""
            lines.append((workload, _figure(result[key], key), *theirs, share))
    return "\n".join(table(head, lines))


def families(result: dict[str, Any]) -> str:
    """Return a table with a row per model: tokens per second, the share of the roofline, and its kernels."""
    lines = []
    for name, one in result["models"].items():
        rows = [one[f"{batch}_decode_tok_s"] for batch in ("b1", "b8", "b64")]
        path = f"{one['decode'].removesuffix(' in CUDA graphs')}{': ' * bool(one['against'])}{one['against']}"
        lines.append((name, *(f"{row['tok_s']:,.0f} ({row['roofline_percent']:.0f}%)" for row in rows), path))
    where, how = result["gpu"] or result["cpu"], f"commit {result['commit']} (`{result['command']}`)"
    about = f"{where}, {result['dtype']}, {how}; tokens/s, and the share of the roofline:"
    return "\n".join((about, "", *table(("model", "1 row", "8", "64", "steps run by"), lines))) + "\n"


def embed(result: dict[str, Any]) -> str:
    """Return a table of the milliseconds of a step, with a row per way to run it and a column per number of rows."""
    rows = sorted({int(found[1]) for key in result if (found := re.fullmatch(r"engine_b(\d+)_ms", key))})
    made = [(name, *(f"{result[f'{key}_b{count}_ms']:.2f}" for count in rows)) for key, name in EMBED.items()]
    times = [(name, *(f"{result[f'{key}_b{count}_s']:g} s" for count in rows)) for key, name in EMBED_SECONDS.items()]
    head = f"{result['model']} on {result['gpu'] or result['cpu']}: milliseconds of a step"
    lines = table((head, *(f"{count} row{'s' * (count > 1)}" for count in rows)), [*made, *times])
    return "\n".join(lines) + f"\n\nCommit {result['commit'][:7]}, PyTorch {result['versions']['torch']}.\n"


def http(result: dict[str, Any]) -> str:
    """Return a table with a row per number of streams: what clients see, and the shares of a core that the server's processes take."""
    lines = []
    for one in result["rows"]:
        fronts = " + ".join(f"{share:.0%}" for share in one["front_end_cores"])
        times = (f"{one[f'{name}_ms']:.1f} ({one[f'{name}_p99']:.1f})" for name in ("ttft", "gap"))
        rate, share, engine = f"{one['tok_s']:,.0f}", f"{one['of_library']:.0%}", f"{one['engine_cores']:.0%}"
        lines.append((str(one["streams"]), rate, share, *times, engine, fronts))
    head = ("streams", "tokens/s", "of the library", "first token, ms (p99)", "between events, ms (p99)", "engine", "front ends")
    where = f"{result['model']} on {result['gpu'] or result['cpu']}"
    about = f"{where}, prompts of {result['prompt_tokens']} tokens, commit {result['commit']}:"
    return "\n".join((about, "", *table(head, lines))) + "\n"


def faults(result: dict[str, Any]) -> str:
    """Return a table with a row per fault: what clients are told, and what it costs the server."""
    lines = []
    for one in result["rows"]:
        grown = "a new process" if one["grown_mb"] is None else f"{one['grown_mb']:+.1f} MB"
        lines.append((one["fault"], one["told"], f"{one['told_s']:.2f} s", f"{one['right_s']:.2f} s", grown, str(one["pages"])))
    head = ("fault", "what its clients get", "after", "a right answer comes after", "memory of the processes", "pages that are lost")
    about = f"The packaged model on {result['cpu']}, commit {result['commit']}:"
    return "\n".join((about, "", *table(head, lines))) + "\n"


def kv_faults(result: dict[str, Any]) -> str:
    """Return three tables of servers with KV on disk: those that were killed, those with damaged files, and those with full disks."""

    def of_all(one: dict[str, Any]) -> tuple[str, str]:
        return f"{one['right']:,} of {one['replies']:,}", str(one["wrong"])

    def told(counts: dict[str, int]) -> str:
        return "; ".join(f"{KV_FAULTS.get(what, what)}: {count}" for what, count in sorted(counts.items(), key=lambda item: -item[1]))

    kills = [
        (name, str(one["kills"]), str(one["restarts"]), *of_all(one), f"{one['lost']}, {one['stale']}", f"{one['read_tokens']:,}",
         f"{one['temporary_left']}, {one['temporary_after']}", f"{one['start_ms']} ms ({one['longest_start_ms']})")
        for name, one in result["crash"].items()
    ]  # fmt: skip
    damages = [
        (name, str(one["tried"]), str(one["crashes"]), told(one["how"]), *of_all(one))
        for name, one in result["corruption"].items()
        if name != "none"
    ]
    full = [
        (name, str(one["tried"]), str(one["replies_meanwhile"]), f"{one['errors']}", told(one["refused"]), *of_all(one))
        for name, one in result["full_disk"].items()
    ]
    right = ("right replies of the next server", "wrong replies")
    chunks = "saved chunks that are missing, deleted ones that are there"
    parts = (
        f"The packaged model on {result['cpu']}, commit {result['commit']} (`{result['command']}`). Servers that were killed:",
        table(
            ("killed", "kills", "restarts", *right, chunks, "tokens read", "temporary files left, after", "start, median (longest)"), kills
        ),
        ["Damaged files:"],
        table(("file", "damages", "crashes", "how they are found, and how often", *right), damages),
        ["Disks that are full:"],
        table(("writes fail", "servers", "replies meanwhile", "errors that are counted", "what is refused", *right), full),
    )
    return "\n\n".join(part if isinstance(part, str) else "\n".join(part) for part in parts) + "\n"


def host(result: dict[str, Any]) -> str:
    """Return a table of the host's microseconds in a decode step, with a row per kind of client and a column per number of rows."""
    rows = sorted({int(found[1]) for key in result if (found := re.fullmatch(r"plain_x(\d+)_us", key))})
    lines = [(what, *(f"{result[f'{client}_x{count}_us']:,.0f}" for count in rows)) for client, what in HOST.items()]
    where = f"{result['cpu']}, Python {result['versions']['python']}"
    about = f"{where}, commit {result['commit']} (`{result['command']}`); the host's microseconds in a decode step:"
    return "\n".join((about, "", *table(("clients ask for", *(f"{count} row{'s' * (count > 1)}" for count in rows)), lines))) + "\n"


def formats(result: dict[str, Any]) -> str:
    """Return two tables of what formats cost: the packaged model, and random weights by shape."""
    moved, lines = ("MB of weights", "worst layer", "divergence, nats", "same token"), list[tuple[str, ...]]()
    cases = {one["cases"] for one in result["formats"].values()}
    for name, one in result["formats"].items():
        apart = f"{one['points']:+.2f} ({one['points_error']:.2f})" if one["changed"] else "0"
        lines.append((name, f"{one['recall']:.2%}", apart, *_moves(one)))
    about = f"Packaged model, {result['cpu']}, commit {result['commit']} (`{result['command']}`), {max(cases):,} questions:"
    head = ("weights or KV", "right answers", "points from bfloat16 (standard error)", *moved)
    shapes = [
        (f"{shape}, {each['layers']} layers", name, *_moves(one))
        for shape, each in result["shapes"].items()
        for name, one in each["formats"].items()
    ]
    parts = (about, "", *table(head, lines), "", "Random weights:", "", *table(("widths of", "weights", *moved), shapes))
    return "\n".join(parts) + "\n"


def _moves(one: dict[str, Any]) -> tuple[str, ...]:
    if "bytes" not in one:
        return ("", "", "", "")
    same = f"{one['same_tokens'] / one['tokens']:.1%}"
    return f"{one['bytes'] / 1e6:,.1f}", f"{one['worst_layer']:.1%}", f"{one['divergence']:.2g}" if one["divergence"] else "0", same


def past(result: dict[str, Any]) -> str:
    """Return a table of derived tokens per second: a row per model, dtype and number of GPUs, each cell from one estimate to the other."""
    columns = [(card, batch) for card in result["rates"] for batch in ("b1", "b64")]
    cells: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
    for one in result["rows"]:
        rate = _between(*sorted((one["share_tok_s"], one["layer_tok_s"])))
        cells.setdefault((one["model"], one["dtype"], str(one["gpus"])), {})[one["card"], one["batch"]] = rate if one["fits"] else "-"
    head = ("model", "weights", "GPUs", *(f"{card}, {batch}" for card, batch in columns))
    return "\n".join(table(head, [(*key, *(row[column] for column in columns)) for key, row in cells.items()])) + "\n"


def _between(low: float, high: float) -> str:
    return f"{low:,.0f} to {high:,.0f}" if round(low) != round(high) else f"{low:,.0f}"


def past_parts(result: dict[str, Any]) -> str:
    """Return a table of what the steps of the derived rates are made of."""
    lines = []
    for one in result["rows"]:
        where = (one["model"], one["dtype"], f"{one['gpus']} {one['card']}", one["batch"])
        reduced = f"{one['all_reduce_us']:.1f} ({one['all_reduce_by']}, {one['all_reduce_from']})"
        times = (f"{one['gpu_gb']:.1f}", f"{one['roofline_ms']:.2f}", reduced, f"{one['all_reduces_ms']:.2f}")
        lines.append((*where, *times, f"{one['share_ms']:.1f}", f"{one['layer_ms']:.1f}"))
    names = ("GB per GPU", "roofline, ms", "all-reduce, us", "all of them, ms", "step by share, ms", "step by layer, ms")
    return "\n".join(table(("model", "weights", "GPUs", "", *names), lines)) + "\n"


def past_measured(result: dict[str, Any]) -> str:
    """Return a table of measured tokens per second next to the derived ones."""
    lines = []
    for one in result["measured"]:
        low, high = one["derived_tok_s"]
        file = f"[{one['commit']}](../../benchmarks/results/{one['file']})"
        nearest = min(max(one["tok_s"], low), high)
        off = round(100 * (one["tok_s"] / nearest - 1))
        rates = (_between(low, high), f"{one['tok_s']:,.0f}", f"{off:+}%" if off else "none")
        lines.append((one["model"], one["dtype"], f"{one['gpus']} {one['card']}", one["batch"], *rates, file))
    return "\n".join(table(("model", "weights", "GPUs", "", "derived", "measured", "deviation", "commit"), lines)) + "\n"


def past_alone(result: dict[str, Any]) -> str:
    """Return a table of tokens per second by the measured steps of one rank alone."""
    lines = []
    for one in result["alone"]:
        file = f"[{one['commit']}](../../benchmarks/results/{one['file']})"
        measured = "" if one["measured_tok_s"] is None else f"{one['measured_tok_s']:,.0f}"
        figures = (f"{one['alone_ms']:.2f}", f"{one['beyond_ms']:.2f}", f"{one['tok_s']:,.0f}", measured)
        lines.append((one["model"], one["dtype"], f"{one['gpus']} {one['card']}", one["batch"], *figures, file))
    names = ("one rank alone, ms", "sums beyond, ms", "tokens/s", "measured", "commit")
    return "\n".join(table(("model", "weights", "GPUs", "", *names), lines)) + "\n"


def all_reduces(result: dict[str, Any]) -> str:
    """Return a table of the microseconds of all-reduces by size."""
    ways = [(one["gpus"], one["way"], {int(size): us for size, us in one["us"].items()}) for one in result["all_reduces"]]
    sizes = sorted({size for *_, us in ways for size in us})
    lines = [(gpus, way, *(f"{us[size]:.1f}" if size in us else "" for size in sizes)) for gpus, way, us in ways]
    names = (f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB" for size in sizes)
    return "\n".join(table(("GPUs", "microseconds by", *names), lines)) + "\n"


def fits(result: dict[str, Any]) -> str:
    """Return a table of gigabytes of weights per GPU, and of the tokens of KV that fit beside them."""
    lines, cards = dict[tuple[str, ...], list[str]](), list(result["rates"])
    for one in result["fits"]:
        key = (one["model"], one["dtype"], str(one["gpus"]), f"{one['weights_gb']:.1f}")
        lines.setdefault(key, []).append(f"{one['kv_tokens']:,}" if one["kv_tokens"] > 0 else "does not fit")
    head = ("model", "weights", "GPUs", "GB of weights per GPU", *(f"tokens of KV, {card}" for card in cards))
    return "\n".join(table(head, [(*key, *row) for key, row in lines.items()])) + "\n"


WAYS = {"run": "run all", "read": "read all"}


def break_even(result: dict[str, Any]) -> str:
    """Return a table of when loading begins to pay, and one of a long prompt from disks of several rates."""
    starts, prompts = [], []
    for one in result["rows"]:
        name, rate = f"{one['model']}{'' if one['measured'] else ', derived'}", f"{one['tok_s']:,}"
        first = "never" if one["host_from_tokens"] is None else f"{one['host_from_tokens']} tokens"
        starts.append((name, f"{one['kv_bytes'] / 1024:.0f} KiB", rate, f"{one['break_even_gb_s']:.1f} GB/s", first))
        ways = [(disk["ms"], WAYS.get(disk["way"], f"split, run {disk['run_tokens']:,}")) for disk in one["disks"]]
        prompts.append((name, f"{one['run_ms']:,.0f} ms", f"{one['host_ms']:,.0f} ms", *(f"{ms:,.0f} ms: {way}" for ms, way in ways)))
    disks = [f"disk, {disk['gb_s']:.0f} GB/s" for disk in result["rows"][0]["disks"]]
    host = f"host memory, {result['host_gb_s']} GB/s"
    head = ("model", "KV of a token", "prompt tokens/s", "loading alone pays from", "from host memory it pays from")
    return "\n".join((*table(head, starts), "", *table(("model", "run", host, *disks), prompts))) + "\n"


WORKLOADS = {
    "chats": "Chats",
    "tenants": "Tenants with system prompts of their own",
    "shared": "Questions over shared documents and examples",
}


def fleet(result: dict[str, Any]) -> str:
    """Return for each workload a table with a row per policy, and a column per load for each figure."""
    parts = [f"![Hit rates and slow first tokens by policy and workload](fleet-{result['replicas']}.svg)", ""]
    for workload, name in WORKLOADS.items():
        rows = [one for one in result["grid"] if one["workload"] == workload]
        loads, policies = sorted({one["load"] for one in rows}), list(dict.fromkeys(one["policy"] for one in rows))
        found = {(one["policy"], one["load"]): one for one in rows}
        able = result["capacity"][workload]
        rate = result["replicas"] / able["request_s"]
        about = f"capacity {rate:,.0f} requests/s, {able['ideal_hit_rate']:.0%} of the prompts' tokens could be reused"
        parts += [f"**{name}** ({about}).", ""]
        for load in loads:
            lines = [(policy, *_fleet_figures(found[policy, load])) for policy in policies]
            parts += [*table((f"load {load:.0%}", *FLEET), lines), ""]
    return "\n".join(parts[:-1]) + "\n"


def fleet_picture(result: dict[str, Any], load: float = 0.85) -> str:
    """Return a picture with a row per policy: bars of hit rates and of the slowest hundredth of first tokens, by workload."""
    rows = {(one["workload"], one["policy"]): one for one in result["grid"] if one["load"] == load}
    policies, left, wide, high = list(dict.fromkeys(policy for _, policy in rows)), 150, 110, 22
    longest = max(one["ttft_p99_ms"] for one in rows.values())
    parts = [text(12, 24, f"{result['replicas']} replicas, load {load:.0%}: hit rate, and first token p99 in ms", size=14, weight=600)]
    for column, workload in enumerate(WORKLOADS):
        x = left + 2 * column * (wide + 20)
        parts += [text(x, 50, f"{workload}: hit rate", FAINT), text(x + wide + 20, 50, "first token p99", FAINT)]
        for row, policy in enumerate(policies):
            y, one = 60 + row * high, rows[workload, policy]
            parts += [text(12, y + 13, policy)] if not column else []
            bars = (
                (one["hit_rate"], "#2b6cb0", f"{one['hit_rate']:.0%}"),
                (one["ttft_p99_ms"] / longest, "#b7791f", f"{one['ttft_p99_ms']:,.0f}"),
            )
            for place, (share, colour, label) in enumerate(bars):
                at, length = x + place * (wide + 20), max(1.0, 0.68 * wide * share)
                parts += [rect(at, y, length, high - 6, colour), text(at + length + 4, y + 13, label, size=11)]
    return document(left + 6 * (wide + 20), 70 + high * len(policies), "Routing policies compared", parts)


FLEET = ("hit rate", "first token p50, ms", "p99", "gap p99, ms", "requests/s", "unanswered per replica", "imbalance")


def _fleet_figures(one: dict[str, Any]) -> tuple[str, ...]:
    times = (f"{one[key]:,.0f}" for key in ("ttft_p50_ms", "ttft_p99_ms", "gap_p99_ms", "requests_per_s"))
    return f"{one['hit_rate']:.1%}", *times, f"{one['unanswered']:.1f}", f"{one['imbalance']:.1f}"


def failures(result: dict[str, Any]) -> str:
    """Return a table with a row per workload and policy: before and after a death, and after a birth."""
    lines, parts = [], ("before", "after_death", "after_birth")
    for one in result["failures"]:
        hits = (f"{one[part]['hit_rate']:.1%}" for part in parts)
        times = (f"{one[part]['ttft_p99_ms']:,.0f}" for part in parts)
        again = (str(one["sent_again"]), f"{one['share_of_the_new_one']:.2f}")
        lines.append((one["workload"], one["policy"], *hits, *times, *again))
    head = ("workload", "policy", "hit rate before", "after the death", "after the addition", "first token p99 before, ms")
    rest = ("after the death", "after the addition", "sent again", "share of the new one")
    return "\n".join(table((*head, *rest), lines)) + "\n"


def keys(result: dict[str, Any]) -> str:
    """Return a table with a row per workload and kind of prefix hash."""
    load, lines = result["failure_load"], []
    for workload in WORKLOADS:
        rows = [one for one in result["grid"] if one["load"] == load and one["policy"] in ("prefix hash", "bounded prefix hash")]
        for one in (*rows, *result["keys"]):
            if one["workload"] == workload:
                lines.append((workload, one["policy"], *_fleet_figures(one)))
    return "\n".join(table(("workload", f"policy, load {load:.0%}", *FLEET), lines)) + "\n"


def fit(result: dict[str, Any]) -> str:
    """Return a table of the modelled device: its figures, then recorded and modelled milliseconds."""
    device, offline = result["device"], result["offline"]
    told = (
        ("a pass over replies", f"{1e3 * device['base']:.2f} ms"),
        ("each of their rows", f"{1e6 * device['row']:.1f} us"),
        ("each token of their contexts", f"{1e9 * device['context']:.1f} ns"),
        ("a pass over prompts", f"{1e3 * device['launch']:.2f} ms"),
        ("each of their tokens, without context", f"{1e6 * device['token']:.1f} us"),
        ("context that doubles it", f"{device['doubling']:,} tokens"),
    )
    rows = [(key, f"{was:.2f}", f"{now:.2f}", f"{100 * (now / was - 1):+.1f}%") for key, (was, now) in result["fit_ms"].items()]
    was, now = offline["recorded_tok_s"], offline["simulated_tok_s"]
    rows.append(("offline (not fitted), tokens/s", f"{was:,.0f}", f"{now:,.0f}", f"{100 * (now / was - 1):+.1f}%"))
    return "\n".join((*table(("part of a step", "takes"), told), "", *table(("row", "recorded, ms", "modelled, ms", ""), rows))) + "\n"


SIMPLE = {
    "embed": embed, "formats": formats, "families": families, "http": http, "faults": faults, "kv-faults": kv_faults, "host": host,
    "past": past, "past-parts": past_parts, "past-measured": past_measured, "past-alone": past_alone, "all-reduces": all_reduces,
    "fits": fits,
    "break-even": break_even, "fleet": fleet, "failures": failures, "keys": keys, "fit": fit,
}  # fmt: skip


def _figure(value: float, key: str, *, of_a_peer: bool = False) -> str:
    number = f"{value:,.0f}" if value >= 20 else f"{value:.1f}"
    if key.endswith("_tok_s"):
        return number if of_a_peer else f"{number} tokens/s"
    return f"{number} {'ms' if key.endswith('_ms') else 's'}"


def pictures(words: str, results: Path) -> dict[str, str]:
    """Return the pictures that the blocks of a document show, by file name."""
    files = {name: results / f"{name}.json" for _, kind, name, _ in BLOCK.findall(words) if kind == "bench"}
    drawn = {f"performance-{name}.svg": draw(read(file)) for name, file in files.items() if file.exists()}
    for _, kind, name, _ in BLOCK.findall(words):
        if kind == "fleet" and (file := results / f"{name}.json").exists():
            result = json.loads(file.read_text(encoding="utf-8"))
            drawn[f"fleet-{result['replicas']}.svg"] = fleet_picture(result)
    return drawn


def main() -> None:
    """Fill the blocks of the documents and write their pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--document", type=Path, action="append", help="may be given several times (default: all of them)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    options = parser.parse_args()
    for page in options.document or DOCUMENTS:
        words = page.read_text(encoding="utf-8")
        for name, picture in pictures(words, options.results).items():
            (page.parent / name).write_text(picture, encoding="utf-8")
        page.write_text(filled(words, options.results), encoding="utf-8")


if __name__ == "__main__":
    main()
