"""Microseconds of the host: what the engine does around the model's steps, measured with an executor that does nothing.

    python benchmarks/host.py --output benchmarks/results/host.json

Seven questions: how long requests over one cached prefix take from the first `submit` to the first prompt run, and from the last step to
the last reply; the same of one request by itself, whose prompt is there but for a page; what the end of a reply costs, and a page that has
to be evicted; what a decode step costs, by rows; what one costs in which rows get pages, and its tensors; whether a step depends on the
size of the pool or on the requests served before; and what the host's part of `nanovllm bench --which offline` comes to. Tokens are always
0. Figures are medians of the repeats but for `offline_ms`, the least of them. The collector runs once before, as in `nanovllm generate`.
"""

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np

import nanovllm as nv
from nanovllm.entrypoints.arguments import positive
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.workloads import random_tokens
from nanovllm.entrypoints.process import freeze
from nanovllm.executor.batch import decode_batch, to_device
from nanovllm.executor.executor import Drawn
from nanovllm.testing.models import random_model, tiny_config

MICRO = 1e6
VOCABULARY = 16384  # ids as large as a real model's: Python keeps the small ones ready


class Nothing:
    """An `Executor` that runs nothing and draws token 0; notes when prompts and decode steps began, in seconds, and rows that got pages."""

    def __init__(self) -> None:
        self.prompts: list[float] = []
        self.steps: list[float] = []
        self.refreshed: Any = None

    def prefill(self, model: nv.Model, kv: Any, rows: Any, *, draw: bool = True, frames: Any = None) -> tuple[Drawn | None, Any]:
        """See `Executor`, as for all that follows."""
        self.prompts.append(time.perf_counter())
        whole = sum(count == sequence.todo for sequence, count in rows)
        return (_zeros(whole) if draw and whole else None), kv

    def load(self, model: nv.Model, kv: Any, rows: Any, *, frames: Any = None) -> Any:
        """The number of rows stands for the carry."""
        return len(rows)

    def refresh(self, model: nv.Model, carry: Any, rows: Any, *, frames: Any = None) -> Any:
        """The same rows."""
        self.refreshed = rows
        return len(rows)

    def narrow(self, model: nv.Model, carry: Any, keep: Any, rows: Any, *, frames: Any = None) -> Any:
        """Those that are left."""
        return len(rows)

    def decode(self, model: nv.Model, carry: Any) -> tuple[Any, Drawn]:
        """Zeros."""
        self.steps.append(time.perf_counter())
        return carry, _zeros(carry)

    def take_discarded_count(self) -> int:
        """Nothing runs ahead."""
        return 0

    def begin(self, model: nv.Model, kv: Any, rows: Any, ticket: int, *, frames: Any = None) -> Any:
        """As `load`."""
        return len(rows)

    def end(self, ticket: int) -> None:
        """Nothing is held."""


def _zeros(count: int) -> Drawn:
    return Drawn(token_ids=np.zeros(count, np.int32))


class Engine:
    """The state of the last call, and whole batches of greedy replies by `submit` and `step`."""

    def __init__(self, model: nv.Model, **limits: int) -> None:
        self.model, self.state = model, nv.init_state(model, **limits)

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> None:
        """Run them to their ends."""
        for prompt, count in zip(prompts, max_tokens, strict=True):
            params = nv.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            self.state, _ = nv.submit(self.model, self.state, prompt, params)
        while self.state.running or self.state.waiting:
            self.state, _ = nv.step(self.model, self.state)


def engine_of(num_pages: int, max_num_seqs: int = 256) -> tuple[Engine, Nothing]:
    """An engine whose steps cost nothing but the host's time."""
    config = tiny_config(
        vocab_size=VOCABULARY, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4, hidden_size=4, intermediate_size=4,
        max_position_embeddings=32768,
    )  # fmt: skip
    model = replace(random_model(config), tokenizer=None)  # what a library takes for the text of a reply is not looked at
    engine, nothing = Engine(model, num_pages=num_pages, page_size=16, max_num_seqs=max_num_seqs), Nothing()
    engine.state.runtime.executor = cast(Any, nothing)
    return engine, nothing


def shared_prompt(repeats: int, requests: int = 32, prefix: int = 16384, own: int = 32, count: int = 64) -> dict[str, float]:
    """Milliseconds before the first prompt runs, and after the last step, of requests that come at once over a cached prefix."""
    engine, nothing = engine_of(40_000)
    random, before, submits, after = Random(0), [], [], []
    for _ in range(repeats + 1):
        shared = random_tokens(random, prefix, VOCABULARY)
        engine.generate([[*shared, 1]], [1])
        prompts = [shared + random_tokens(random, own, VOCABULARY) for _ in range(requests)]
        nothing.prompts.clear()
        start = time.perf_counter()
        params = nv.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        for prompt in prompts:
            engine.state, _ = nv.submit(engine.model, engine.state, prompt, params)
        submitted = time.perf_counter()
        while engine.state.running or engine.state.waiting:
            engine.state, _ = nv.step(engine.model, engine.state)
        end = time.perf_counter()
        submits.append(submitted - start)
        before.append(nothing.prompts[0] - submitted)
        after.append(end - nothing.steps[-1])
    times = {"submit": submits, "admit": before, "end": after}
    return {f"shared16k_x{requests}_{name}_ms": _median(values[1:], 1e3) for name, values in times.items()}


def cached(repeats: int, prefix: int = 16384, own: int = 16) -> dict[str, float]:
    """Microseconds of a request for one token whose prompt is in the index but for its end: its `submit`, from there to the launch of its
    prompt, and from there to its reply. The pool is large enough to evict nothing."""
    engine, nothing = engine_of(2 * (repeats + 1) * (prefix + 2 * own) // 16)
    random, submits, before, after = Random(2), [], [], []
    for _ in range(repeats + 1):
        shared = random_tokens(random, prefix, VOCABULARY)
        engine.generate([shared + random_tokens(random, own, VOCABULARY)], [1])
        prompt = shared + random_tokens(random, own, VOCABULARY)
        nothing.prompts.clear()
        start = time.perf_counter()
        params = nv.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        engine.state, _ = nv.submit(engine.model, engine.state, prompt, params)
        submitted = time.perf_counter()
        engine.state, (out,) = nv.step(engine.model, engine.state)
        end = time.perf_counter()
        assert out.output is not None and out.output.num_cached_tokens == prefix
        submits.append(submitted - start)
        before.append(nothing.prompts[0] - submitted)
        after.append(end - nothing.prompts[0])
    times = {"submit": submits, "admit": before, "end": after}
    return {f"cached16k_{name}_us": _median(values[1:], MICRO) for name, values in times.items()}


def ends(repeats: int, rows: int = 64, prompt: int = 128, reply: int = 512) -> dict[str, float]:
    """Microseconds a reply from the last decode step of `rows` requests, which end together, to their replies."""
    random, times = Random(3), []
    engine, nothing = engine_of((repeats + 1) * rows * (prompt + reply + 64) // 16)
    for _ in range(repeats + 1):
        engine.generate([random_tokens(random, prompt, VOCABULARY) for _ in range(rows)], [reply] * rows)
        times.append((time.perf_counter() - nothing.steps[-1]) / rows)
    return {f"end_x{rows}_us": _median(times[1:], MICRO)}


def evicting(repeats: int, rows: int = 64, length: int = 64, prompt: int = 8192) -> dict[str, float]:
    """Microseconds a page until a prompt is launched for which as many pages have to be evicted, those of requests of `length` tokens in
    and out."""
    random, times, params = Random(4), [], nv.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    count = prompt // 16
    engine, nothing = engine_of(4 * count)
    for _ in range(repeats + 1):
        for _ in range(0, 8 * count, rows * length // 16):
            engine.generate([random_tokens(random, length, VOCABULARY) for _ in range(rows)], [length] * rows)
        engine.state, _ = nv.submit(engine.model, engine.state, random_tokens(random, prompt, VOCABULARY), params)
        start = time.perf_counter()
        engine.state, _ = nv.step(engine.model, engine.state)
        times.append((nothing.prompts[-1] - start) / count)
    return {"evict_page_us": _median(times[1:], MICRO)}


def decode_step(engine: Engine, nothing: Nothing, rows: int, steps: int = 256) -> float:
    """Microseconds from one decode step to the next, the median over a run of `rows` requests."""
    random = Random(rows)
    nothing.steps.clear()
    engine.generate([random_tokens(random, 32, VOCABULARY) for _ in range(rows)], [steps] * rows)
    return _median(np.diff(nothing.steps), MICRO)


def decode_steps(repeats: int, sizes: Iterable[int]) -> dict[str, float]:
    """Microseconds of a decode step by its rows."""
    engine, nothing = engine_of(8_192)
    return {f"decode_x{rows}_us": _median([decode_step(engine, nothing, rows) for _ in range(repeats)]) for rows in sizes}


def taking_pages(repeats: int, rows: int = 256, longest: int = 1024, reply: int = 512) -> dict[str, float]:
    """Microseconds of the decode steps in which rows get pages, from call to return, and of making their tensors, on the CPU."""
    random, steps, tensors = Random(5), [], []
    num_pages = rows * (longest + reply + 64) // 16
    for _ in range(repeats):
        engine, nothing = engine_of(num_pages, rows)
        params = nv.SamplingParams(temperature=0.0, max_tokens=reply, ignore_eos=True)
        for _ in range(rows):
            prompt = random_tokens(random, random.randint(1, longest), VOCABULARY)
            engine.state, _ = nv.submit(engine.model, engine.state, prompt, params)
        while engine.state.running or engine.state.waiting:
            start = time.perf_counter()
            engine.state, _ = nv.step(engine.model, engine.state)
            end = time.perf_counter()
            if nothing.refreshed is not None:
                steps.append(end - start)
                to_device(decode_batch(nothing.refreshed, page_size=16, dummy_page=num_pages), engine.model.device)
                tensors.append(time.perf_counter() - end)
                nothing.refreshed = None
    return {f"pages_x{rows}_us": _median(steps, MICRO), f"tensors_x{rows}_us": _median(tensors, MICRO)}


def by_pool_size(repeats: int, sizes: Iterable[int], rows: int = 64) -> dict[str, float]:
    """Microseconds of a decode step by the pages of the pool."""
    engines = {size: engine_of(size) for size in sizes}
    return {f"decode_x{rows}_pool{n}_us": _median([decode_step(*engine, rows) for _ in range(repeats)]) for n, engine in engines.items()}


def by_finished(repeats: int, counts: Iterable[int], rows: int = 64) -> dict[str, float]:
    """Microseconds of a decode step by the requests that the engine has served before, in ascending order."""
    engine, nothing = engine_of(65_536)
    random, served, out = Random(1), 0, {}
    for count in sorted(counts):
        for _ in range(served, count, rows):
            engine.generate([random_tokens(random, 64, VOCABULARY) for _ in range(rows)], [2] * rows)
        served = max(served, count)
        out[f"decode_x{rows}_after{count}_us"] = _median([decode_step(engine, nothing, rows) for _ in range(repeats)])
        served += rows * repeats
    return out


def offline(repeats: int, requests: int = 256) -> dict[str, float]:
    """The whole of `nanovllm bench --which offline`, in milliseconds: requests of 100 ... 1,024 tokens in, and as many out."""
    draw, times, steps = Random(0), [], 0
    prompts = [random_tokens(draw, draw.randint(100, 1024), VOCABULARY) for _ in range(requests)]
    counts = [draw.randint(100, 1024) for _ in range(requests)]
    for _ in range(repeats):
        engine, nothing = engine_of(40_000)
        start = time.perf_counter()
        engine.generate(prompts, counts)
        times.append(time.perf_counter() - start)
        steps = len(nothing.steps)
    return {"offline_ms": round(1e3 * min(times), 1), "offline_steps": steps}


def _median(values: Any, scale: float = 1.0) -> float:
    return round(scale * float(np.median(values)), 2)


def measure(repeats: int) -> dict[str, float]:
    """All figures."""
    freeze()
    return {
        **shared_prompt(repeats),
        **cached(repeats),
        **ends(repeats),
        **evicting(repeats),
        **decode_steps(repeats, (1, 8, 32, 64, 256)),
        **taking_pages(repeats),
        **by_pool_size(repeats, (4_096, 32_768, 262_144)),
        **by_finished(repeats, (0, 2_048, 8_192)),
        **offline(repeats),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--commit", help="recorded in place of what git says")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    command = f"python benchmarks/host.py --repeats {options.repeats}"
    result = record(engine_of(1)[0].model, measure(options.repeats), command, options.commit)
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
