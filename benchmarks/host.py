"""Measure the host's time around the model's steps, with an executor that runs nothing.

    OMP_NUM_THREADS=1 python benchmarks/host.py --repeats 9 --output benchmarks/results/cpu-host.json
    python benchmarks/write_docs.py

It measures eight things:

1. requests over one cached prefix: from the first `submit` to the first prompt launch, and from the last step to the last reply;
2. the same for a single request, all of whose prompt except the last page is cached;
3. the end of a reply, and the eviction of a page;
4. a decode step, by number of rows;
5. a decode step in which rows get pages, and the making of its tensors;
6. a decode step by size of the pool, and by number of requests served before;
7. the host's part of `nanovllm bench --which offline`;
8. a decode step by kind of client and number of rows: `plain`, `stop` (two stop texts), `logprobs` (the five most probable tokens), both,
   `read_logprobs` (the log-probabilities of every row are read as they come), `stream` (the text of every row as it comes) and `broken`
   (the same where the tokens are bytes that are no text).

Sampled tokens are always 0, except in the last measurement, where they are those of a text. The numbers are medians of the repeats, except
for `offline_ms`, which is the minimum. The garbage collector runs once before, as in `nanovllm generate`.
"""

import argparse
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch

import nanovllm as nv
from nanovllm.entrypoints.arguments import positive
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.workloads import random_tokens
from nanovllm.entrypoints.process import freeze
from nanovllm.executor.batch import decode_batch, to_device
from nanovllm.executor.executor import Drawn
from nanovllm.executor.scoring import Scored
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.tokenizer.stream import TextStream
from nanovllm.tokenizer.tokenizer import Tokenizer

MICRO = 1e6
VOCABULARY = 16384  # token ids as large as those of real models, because Python caches small integers
CLIENTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(  # the options of every row, by kind of client
    {
        "plain": {},
        "stop": {"stop": ("\n\n", "Question:")},
        "logprobs": {"logprobs": 5},
        "stop_logprobs": {"stop": ("\n\n", "Question:"), "logprobs": 5},
        "read_logprobs": {"logprobs": 5},
        "stream": {},
        "broken": {},
    }
)


class Nothing:
    """An executor that runs nothing and samples token 0. It records when prompts and decode steps began, and the rows that got pages."""

    def __init__(self) -> None:
        self.prompts: list[float] = []
        self.steps: list[float] = []
        self.refreshed: Any = None

    def prefill(self, model: nv.Model, kv: Any, rows: Any, *, draw: bool = True, frames: Any = None) -> tuple[Drawn | None, Any]:
        """Record the time; return zeros for the rows whose prompt is complete."""
        self.prompts.append(time.perf_counter())
        whole = sum(count == sequence.todo for sequence, count in rows)
        return (_zeros(whole) if draw and whole else None), kv

    def score(self, model: nv.Model, kv: Any, rows: Any, asked: Any, *, num_top: int = 0, frames: Any = None) -> tuple[Scored, Any]:
        """Record the time; return zeros."""
        self.prompts.append(time.perf_counter())
        top = torch.zeros(len(asked), num_top)
        return Scored(torch.zeros(len(asked)), top.int(), top), kv

    def load(self, model: nv.Model, kv: Any, rows: Any, *, frames: Any = None) -> Any:
        """Return the number of rows as the carry."""
        return len(rows)

    def refresh(self, model: nv.Model, carry: Any, rows: Any, *, frames: Any = None) -> Any:
        """Record the rows, which got pages; return their number as the carry."""
        self.refreshed = rows
        return len(rows)

    def narrow(self, model: nv.Model, carry: Any, keep: Any, rows: Any, *, grew: bool = False, frames: Any = None) -> Any:
        """Return the number of remaining rows as the carry."""
        return len(rows)

    def decode(self, model: nv.Model, carry: Any, masks: Any = None) -> tuple[Any, Drawn]:
        """Record the time; return zeros."""
        self.steps.append(time.perf_counter())
        return carry, _zeros(carry)

    def take_discarded_count(self) -> int:
        """Nothing runs ahead."""
        return 0

    def begin(self, model: nv.Model, kv: Any, rows: Any, ticket: int, *, frames: Any = None, branching: bool = False) -> Any:
        """Return the number of rows as the carry."""
        return len(rows)

    def end(self, ticket: int) -> None:
        """Do nothing, because a session has no resources."""

    def captured(self, function: Any, carry: Any, *inputs: Any) -> Any:
        """Return the function."""
        return function


def _zeros(count: int) -> Drawn:
    return Drawn(token_ids=np.zeros(count, np.int32))


class Writing(Nothing):
    """An executor that runs nothing and samples the tokens of a text, each row from another place, with log-probabilities if asked."""

    def __init__(self, text: list[int], num_logprobs: int | None) -> None:
        super().__init__()
        self.text, self.num_logprobs = np.array(text, np.int32), num_logprobs

    def decode(self, model: nv.Model, carry: Any, masks: Any = None) -> tuple[Any, Drawn]:
        """Record the time; return the next token of every row."""
        self.steps.append(time.perf_counter())
        token_ids = self.text[(np.arange(carry) * 97 + len(self.steps)) % len(self.text)]
        if self.num_logprobs is None:
            return carry, Drawn(token_ids=token_ids)
        top = np.zeros((carry, self.num_logprobs), np.float32)
        return carry, Drawn(token_ids=token_ids, logprobs=np.zeros(carry, np.float32), top_ids=top.astype(np.int32), top_logprobs=top)


class Engine:
    """An engine that runs whole batches of greedy replies with `submit` and `step`, and keeps the last state."""

    def __init__(self, model: nv.Model, **limits: int) -> None:
        self.model, self.state = model, nv.init_state(model, **limits)

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> None:
        """Run these requests until all have ended."""
        for prompt, count in zip(prompts, max_tokens, strict=True):
            params = nv.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            self.state, _ = nv.submit(self.model, self.state, prompt, params)
        while self.state.running or self.state.waiting:
            self.state, _ = nv.step(self.model, self.state)


def engine_of(num_pages: int, max_num_seqs: int = 256, tokenizer: Tokenizer | None = None) -> tuple[Engine, Nothing]:
    """Return an engine whose steps cost only the host's time, and its executor. Without a tokenizer replies have no text."""
    config = tiny_config(
        vocab_size=VOCABULARY, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4, hidden_size=4, intermediate_size=4,
        max_position_embeddings=32768,
    )  # fmt: skip
    model = replace(random_model(config), tokenizer=tokenizer)
    engine, nothing = Engine(model, num_pages=num_pages, page_size=16, max_num_seqs=max_num_seqs), Nothing()
    engine.state.runtime.executor = cast(Any, nothing)
    return engine, nothing


def shared_prompt(repeats: int, requests: int = 32, prefix: int = 16384, own: int = 32, count: int = 64) -> dict[str, float]:
    """Measure requests submitted together over a cached prefix: milliseconds before the first prompt launch and after the last step."""
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
    """Measure a request for one token whose prompt is cached except for its end.

    The times are its `submit`, then up to the launch of its prompt, then up to its reply, in microseconds. The pool is large enough that
    nothing is evicted.
    """
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
    """Measure the microseconds per reply from the last decode step of `rows` requests, which end together, to their replies."""
    random, times = Random(3), []
    engine, nothing = engine_of((repeats + 1) * rows * (prompt + reply + 64) // 16)
    for _ in range(repeats + 1):
        engine.generate([random_tokens(random, prompt, VOCABULARY) for _ in range(rows)], [reply] * rows)
        times.append((time.perf_counter() - nothing.steps[-1]) / rows)
    return {f"end_x{rows}_us": _median(times[1:], MICRO)}


def evicting(repeats: int, rows: int = 64, length: int = 64, prompt: int = 8192) -> dict[str, float]:
    """Measure the microseconds per evicted page until a prompt is launched that needs all of these pages.

    The evicted pages are those of requests with `length` tokens in and out.
    """
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
    """Measure the microseconds from one decode step to the next, the median over a run of `rows` requests."""
    random = Random(rows)
    nothing.steps.clear()
    engine.generate([random_tokens(random, 32, VOCABULARY) for _ in range(rows)], [steps] * rows)
    return _median(np.diff(nothing.steps), MICRO)


def decode_steps(repeats: int, sizes: Iterable[int]) -> dict[str, float]:
    """Measure the microseconds of a decode step by number of rows."""
    engine, nothing = engine_of(8_192)
    return {f"decode_x{rows}_us": _median([decode_step(engine, nothing, rows) for _ in range(repeats)]) for rows in sizes}


def taking_pages(repeats: int, rows: int = 256, longest: int = 1024, reply: int = 512) -> dict[str, float]:
    """Measure the microseconds of decode steps in which rows get pages, from call to return, and of making their tensors on the CPU."""
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
    """Measure the microseconds of a decode step by number of pages in the pool."""
    engines = {size: engine_of(size) for size in sizes}
    return {f"decode_x{rows}_pool{n}_us": _median([decode_step(*engine, rows) for _ in range(repeats)]) for n, engine in engines.items()}


def by_finished(repeats: int, counts: Iterable[int], rows: int = 64) -> dict[str, float]:
    """Measure the microseconds of a decode step by number of requests that the engine has served before."""
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
    """Measure all of `nanovllm bench --which offline` in milliseconds: requests with 100 to 1,024 tokens in and out."""
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


def by_client(repeats: int, sizes: Iterable[int], count: int = 256) -> dict[str, float]:
    """Measure the microseconds of a decode step by kind of client and number of rows; streams turn the tokens into text as they come."""
    tokenizer, out = nv.load_model("tiny", device="cpu").tokenizer, {}
    assert tokenizer is not None
    text = tokenizer.encode(" ".join((Path(__file__).parent.parent / "README.md").read_text().split()))
    no_text = [tokenizer.backend.token_to_id("\u0122")]  # the byte 0x80
    for client, options in CLIENTS.items():
        params = nv.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **options)
        for rows in sizes:
            times = []
            for _ in range(repeats):
                engine, writing = (
                    engine_of(8_192, tokenizer=tokenizer)[0],
                    Writing(no_text if client == "broken" else text, params.logprobs),
                )
                state, streams = engine.state, {}
                state.runtime.executor = cast(Any, writing)
                for _ in range(rows):
                    state, request_id = nv.submit(engine.model, state, [1, 2, 3], params)
                    streams[request_id] = TextStream.of(tokenizer)
                while state.running or state.waiting:
                    state, outputs = nv.step(engine.model, state)
                    for one in outputs if client == "read_logprobs" else ():
                        assert one.logprobs
                    for one in outputs if client in ("stream", "broken") else ():
                        streams[one.request_id], _ = streams[one.request_id].push(one.token_ids)
                times.append(_median(np.diff(writing.steps), MICRO))
            out[f"{client}_x{rows}_us"] = _median(times)
    return out


def _median(values: Any, scale: float = 1.0) -> float:
    return round(scale * float(np.median(values)), 2)


def measure(repeats: int) -> dict[str, float]:
    """Run all measurements."""
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
        **by_client(repeats, (1, 64, 256)),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=positive, default=5, help="repeats, whose median is reported (default: %(default)s)")
    parser.add_argument("--commit", help="commit to record (default: the commit that git reports)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    threads = os.environ.get("OMP_NUM_THREADS")
    command = f"{f'OMP_NUM_THREADS={threads} ' * bool(threads)}python benchmarks/host.py --repeats {options.repeats}"
    result = record(engine_of(1)[0].model, measure(options.repeats), command, options.commit)
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
