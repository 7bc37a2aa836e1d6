"""Measure what KV that moves between the device and host memory costs others: running replies, and workloads that do not need it.

    python benchmarks/kv_beside.py --model qwen3-8b --host-kv-gib 40 --output benchmarks/results/h200-kv-beside-8b.json
    python benchmarks/kv_beside.py --model tiny --device cpu --host-kv-gib 1 --prompt 512 --visitors 6 --rows 2 --which gaps

`gaps`: `--rows` replies go on all the time. Beside them visitors come at a steady rate, one after the other, each with one of `--visitors`
prompts of `--prompt` tokens that ran before, and get one token. So many come per second that the KV of their prompts has `--rate` bytes per
second. The measurements take `--seconds` seconds each:

- `alone`: no visitor comes;
- `device`: the visitors' KV is on the device, so nothing is copied;
- `host`: the device has room for a quarter of the visitors' prompts, and their KV comes from host memory;
- `run`: the same without host memory, so the prompts run again. Fewer visitors come if the device cannot run so many.

For each there are the milliseconds between two tokens of a reply (`gap_ms`: median, 90th and 99th percentile, the longest), the bytes per
second that were copied in and out, the milliseconds to a visitor's first token, and the tokens per second of the replies. The measurements
take turns for `--repeats` times, and the gaps of all turns count together; `p99_of_each` has the 99th percentile of each turn. `alone` and
`device` are measured on one engine, the others on engines of their own.

`workloads`: the workloads of `nanovllm bench`, on an engine without host memory and on one with it, by turns. `slower_percent` says by how
much the medians of the second are worse. With `--pool` both have pages for so few tokens that the second one must copy pages out.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import nanovllm as nv
from nanovllm.entrypoints.arguments import positive
from nanovllm.entrypoints.cli.bench.command import add_model_arguments, find_model
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.stopwatch import Engine
from nanovllm.entrypoints.cli.bench.workloads import LONGEST, TIMED, measure, random_tokens
from nanovllm.entrypoints.process import freeze
from nanovllm.state.kv_cache import pages_for

PAGE, TAIL = 16, 16  # tokens of a page, and of a visitor's prompt that are new each time
ENGINES = {"alone": "device", "device": "device", "host": "host", "run": "run"}  # by way
SHARE = 0.45  # of the device's memory for one of two engines
REPLY_PROMPT = 128  # tokens before each reply that goes on


class Replies:
    """An engine with replies that go on, and visitors beside them.

    Attributes:
        gaps: Milliseconds between two tokens of a reply.
        firsts: Milliseconds to the first token of a visitor.
        tokens: The tokens of the replies.
    """

    def __init__(self, model: nv.Model, options: argparse.Namespace, way: str) -> None:
        self.model, self.options, self.random = model, options, Random(0)
        self.prompts = [self._tokens(options.prompt) for _ in range(options.visitors)]
        longest, reply = options.prompt + TAIL + 1, REPLY_PROMPT + options.reply + 1
        spare = 2 * options.rows * reply + 2 * longest  # for the replies, and for some that have ended
        # Where the visitors' KV is to stay on the device, replies that end while no visitor comes must not push it out.
        room = 2 * spare + options.visitors * longest if way == "device" else spare + options.visitors * longest // 4
        self.state = nv.init_state(
            model, num_pages=pages_for(room, PAGE), page_size=PAGE, max_num_seqs=2 * options.rows + 8,
            max_model_len=max(longest, reply), host_kv_gib=options.host_kv_gib if way == "host" else 0,
        )  # fmt: skip
        self.gaps, self.firsts, self.tokens = list[float](), list[float](), 0
        self._last, self._since = dict[int, float | None](), dict[int, float]()
        for prompt in self.prompts:
            self._submit(prompt, 1)
            while self.state.running or self.state.waiting:
                self.state, _ = nv.step(model, self.state)
        self._fill()

    def _tokens(self, count: int) -> list[int]:
        return random_tokens(self.random, count, self.model.config.vocab_size)

    def _submit(self, tokens: list[int], max_tokens: int) -> int:
        params = nv.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.state, rid = nv.submit(self.model, self.state, tokens, params)
        return rid

    def _begin(self, length: int) -> None:
        self._last[self._submit(self._tokens(REPLY_PROMPT), length)] = None

    def _fill(self) -> None:
        """Begin the replies, at different lengths so that they do not end together, and run them until each has a token."""
        for row in range(self.options.rows):
            self._begin(max(2, self.options.reply * (row + 1) // self.options.rows))
        while any(value is None for value in self._last.values()):
            self.step()

    def step(self) -> None:
        """Run a step, and put a new reply in the place of each that ended."""
        self.state, outputs = nv.step(self.model, self.state)
        now = time.perf_counter()
        for out in outputs:
            if out.request_id in self._since:
                self.firsts.append(1e3 * (now - self._since.pop(out.request_id)))
            elif out.request_id in self._last:
                last, self._last[out.request_id], self.tokens = self._last[out.request_id], now, self.tokens + 1
                if last is not None:
                    self.gaps.append(1e3 * (now - last))
                if out.finish_reason is not None:
                    del self._last[out.request_id]
                    self._begin(self.options.reply)

    def run(self, seconds: float, per_second: float) -> float:
        """Run for so many seconds in which visitors come at this rate, or as fast as they are served. Returns the seconds."""
        start, come = time.perf_counter(), 0
        while (passed := time.perf_counter() - start) < seconds:
            if per_second and passed * per_second >= come and len(self._since) < 4:
                prompt = self.prompts[come % len(self.prompts)]
                self._since[self._submit([*prompt[: self.options.prompt - TAIL], *self._tokens(TAIL)], 1)] = time.perf_counter()
                come = max(come + 1, int(passed * per_second) - 4)  # a visitor who finds a queue goes away
            self.step()
        return time.perf_counter() - start

    def clear(self) -> None:
        """Forget what was measured, and when the last tokens came."""
        self.gaps, self.firsts, self.tokens, self._last = [], [], 0, dict.fromkeys(self._last)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 90th and 99th percentile, and the largest."""
    spread = {f"p{part}": round(float(np.percentile(values, part)), 3) for part in (50, 90, 99)}
    return spread | {"max": round(max(values), 3)}


def turn(load: Replies, options: argparse.Namespace, way: str) -> dict[str, Any]:
    """One measurement."""
    bytes_per_token = nv.memory(load.state).page_bytes / PAGE
    per_second = 0.0 if way == "alone" else options.rate / (bytes_per_token * options.prompt)
    load.clear()
    load.run(min(1.0, options.seconds), per_second)
    load.clear()
    before = load.state.stats
    took = load.run(options.seconds, per_second)
    after = load.state.stats
    moved = {name: getattr(after, name) - getattr(before, name) for name in ("loaded_tokens", "offloaded_tokens", "prefill_tokens")}
    return {
        "gaps": load.gaps,
        "firsts": load.firsts,
        "seconds": took,
        "tokens": load.tokens,
        "in_bytes": moved["loaded_tokens"] * bytes_per_token,
        "out_bytes": moved["offloaded_tokens"] * bytes_per_token,
        "prompt_tokens": moved["prefill_tokens"],
    }


def told(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the turns of one way."""
    seconds, firsts = sum(one["seconds"] for one in turns), [each for one in turns for each in one["firsts"]]
    found = {
        "gap_ms": percentiles([each for one in turns for each in one["gaps"]]),
        "p99_of_each": [round(float(np.percentile(one["gaps"], 99)), 3) for one in turns],
        "in_gb_per_second": round(sum(one["in_bytes"] for one in turns) / seconds / 1e9, 4),
        "out_gb_per_second": round(sum(one["out_bytes"] for one in turns) / seconds / 1e9, 4),
        "prompt_tokens_per_second": round(sum(one["prompt_tokens"] for one in turns) / seconds),
        "reply_tokens_per_second": round(sum(one["tokens"] for one in turns) / seconds, 1),
    }
    return found | ({"visitors": len(firsts), "first_token_ms": percentiles(firsts)} if firsts else {})


def workloads(model: nv.Model, options: argparse.Namespace) -> dict[str, Any]:
    """The workloads without host memory and with it."""
    names, found = options.workloads.split(","), {"without": dict[str, list[float]](), "with": dict[str, list[float]]()}
    longest = min(model.config.max_position_embeddings, max(LONGEST[name] for name in names) + 1)
    sizes: dict[str, Any] = {"page_size": PAGE, "max_model_len": longest}
    if options.pool:
        sizes["num_pages"] = pages_for(options.pool, PAGE)
    elif model.device.type == "cuda":
        sizes["memory_fraction"] = SHARE
    engines = {"without": Engine(model, **sizes)}
    if "memory_fraction" in sizes:  # of the whole memory, that of the first engine included
        sizes = {key: value for key, value in sizes.items() if key != "memory_fraction"} | {
            "num_pages": engines["without"].state.config.num_pages
        }
    engines["with"] = Engine(model, **sizes, host_kv_gib=options.host_kv_gib)
    for _ in range(options.repeats):
        for name, engine in engines.items():
            for one in measure(engine.generate, names, model.config.vocab_size, 1, lambda engine=engine: engine.spent):
                found[name].setdefault(one.key, []).append(one.figure)
    copied = engines["with"].state.stats.offloaded_tokens
    medians = {name: {key: float(np.median(each)) for key, each in figures.items()} for name, figures in found.items()}
    slower = {
        key: round(100 * (1 - medians["with"][key] / plain if key.endswith("_tok_s") else medians["with"][key] / plain - 1), 2)
        for key, plain in medians["without"].items()
    }
    pages = engines["with"].state.config.num_pages
    return {"slower_percent": slower, **medians, "each": found, "offloaded_tokens": copied, "num_pages": pages}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--host-kv-gib", type=float, default=16.0, help="GiB of host memory (default: %(default)s)")
    parser.add_argument("--rows", type=positive, default=16, help="replies that go on (default: %(default)s)")
    parser.add_argument("--reply", type=positive, default=1000, help="tokens of such a reply (default: %(default)s)")
    parser.add_argument("--prompt", type=positive, default=16384, help="tokens of a visitor's prompt (default: %(default)s)")
    parser.add_argument("--visitors", type=positive, default=12, help="different prompts of visitors (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=13e9, help="bytes per second that visitors need (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of a measurement (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=3, help="turns of each way and of the workloads (default: %(default)s)")
    parser.add_argument("--ways", default=",".join(ENGINES), metavar="WAY,...", help="which ways (default: %(default)s)")
    parser.add_argument("--workloads", default="b1,b8,b64,offline", metavar="NAME,...", help="which workloads (default: %(default)s)")
    parser.add_argument("--pool", type=positive, help="tokens of the pool for workloads (default: as many as the device gives)")
    parser.add_argument("--which", default="gaps,workloads", metavar="NAME,...", help="what to measure (default: %(default)s)")
    parser.add_argument("--commit", help="commit to record (default: the commit that git reports)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args(arguments)
    for name, known in (("ways", ENGINES), ("which", ("gaps", "workloads")), ("workloads", TIMED)):
        if unknown := set(getattr(options, name).split(",")) - set(known):
            parser.error(f"--{name}: unknown {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    model, name = find_model(options)
    freeze()
    command = f"python benchmarks/kv_beside.py --model {name} --host-kv-gib {options.host_kv_gib}"
    for option in ("rows", "reply", "prompt", "visitors", "rate", "seconds", "repeats", "ways", "workloads", "pool", "which"):
        if getattr(options, option) != parser.get_default(option):
            command += f" --{option} {getattr(options, option)}"
    results = dict[str, Any]()

    def note(key: str, found: dict[str, Any]) -> None:
        """Print and write what there is so far: a run may be ended."""
        results[key] = found
        print(key, json.dumps(found), flush=True)
        if options.output:
            options.output.write_text(json.dumps(record(model, {"kv_beside": results}, command, options.commit), indent=1) + "\n")

    if "gaps" in options.which.split(","):
        turns: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways.split(",")}
        loads = {name: Replies(model, options, name) for name in dict.fromkeys(ENGINES[way] for way in turns)}
        for _ in range(options.repeats):
            for way, done in turns.items():
                done.append(turn(loads[ENGINES[way]], options, way))
            note("gaps", {way: told(done) for way, done in turns.items()})
        loads.clear()  # before the engines of workloads take the device's memory
    if "workloads" in options.which.split(","):
        note("workloads", workloads(model, options))


if __name__ == "__main__":
    main()
