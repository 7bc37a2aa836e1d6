"""An engine under measurement: whole batches by `submit` and `step`, and a stopwatch around what the model does."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from nanovllm.engine.init_state import init_state
from nanovllm.engine.requests import submit
from nanovllm.engine.step import step
from nanovllm.entrypoints.cli.bench.workloads import Spent, random_tokens
from nanovllm.executor.decode import DecodeCarry
from nanovllm.executor.executor import Drawn, Executor, runtime_of
from nanovllm.models.model import Model
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import KVState

HOST_PROMPT = 32  # tokens before the steps of `host_time`


class Stopwatch:
    """An executor that adds up the seconds inside the model's calls, from launch to tokens on the host, and counts the decode steps.

    All else that an engine does is the host's: scheduling, page tables, loading rows, settling tokens. On a GPU the next step runs
    meanwhile, so that the host costs time only where these seconds come near to none: then nobody waits for the GPU.
    """

    def __init__(self, inner: Executor):
        self.inner, self.seconds, self.steps = inner, 0.0, 0

    def prefill(self, model: Model, kv: KVState, rows: Any, **options: Any) -> tuple[Drawn | None, KVState]:
        """See `Executor`."""
        start = time.perf_counter()
        result = self.inner.prefill(model, kv, rows, **options)
        self.seconds += time.perf_counter() - start
        return result

    def load(self, model: Model, kv: KVState, rows: Any, **options: Any) -> DecodeCarry:
        """See `Executor`."""
        return self.inner.load(model, kv, rows, **options)

    def refresh(self, model: Model, carry: DecodeCarry, rows: Any, **options: Any) -> DecodeCarry:
        """See `Executor`."""
        return self.inner.refresh(model, carry, rows, **options)

    def narrow(self, model: Model, carry: DecodeCarry, keep: Any, rows: Any, **options: Any) -> DecodeCarry:
        """See `Executor`."""
        return self.inner.narrow(model, carry, keep, rows, **options)

    def decode(self, model: Model, carry: DecodeCarry) -> tuple[DecodeCarry, Drawn]:
        """See `Executor`."""
        start = time.perf_counter()
        result = self.inner.decode(model, carry)
        self.seconds += time.perf_counter() - start
        self.steps += 1
        return result

    def take_discarded_count(self) -> int:
        """See `Executor`."""
        return self.inner.take_discarded_count()

    def begin(self, model: Model, kv: KVState, rows: Any, ticket: int, **options: Any) -> DecodeCarry:
        """See `Executor`."""
        return self.inner.begin(model, kv, rows, ticket, **options)

    def end(self, ticket: int) -> None:
        """See `Executor`."""
        self.inner.end(ticket)


@contextmanager
def watched(state: EngineState) -> Iterator[Stopwatch]:
    """A stopwatch in the place of the engine's executor, which returns at the end, whatever happens."""
    runtime = runtime_of(state)
    watch = Stopwatch(runtime.executor)
    runtime.executor = watch
    try:
        yield watch
    finally:
        runtime.executor = watch.inner


class Engine:
    """An engine under measurement: the state of the last call, and what its calls have cost."""

    name = "nanovllm"

    def __init__(self, model: Model, **limits: Any):
        """`limits` are those of `init_state`."""
        self.model, self.state = model, init_state(model, **limits)
        self.spent = Spent()

    def generate(self, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[list[int]]:
        """Token ids in and out, in order; the end-of-sequence token is ignored."""
        order = []
        for prompt, count in zip(prompts, max_tokens, strict=True):
            params = SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True)
            self.state, rid = submit(self.model, self.state, prompt, params)
            order.append(rid)
        done: dict[int, list[int]] = {}
        with watched(self.state) as watch:
            while len(done) < len(order):
                self.state, outs = step(self.model, self.state)
                done.update({out.request_id: out.output.token_ids for out in outs if out.output is not None})
        self.spent = Spent(steps=self.spent.steps + watch.steps, model_seconds=self.spent.model_seconds + watch.seconds)
        return [done[rid] for rid in order]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Decode steps one by one: seconds of each as a whole, and of these inside the model's calls."""

    whole: np.ndarray
    model: np.ndarray

    @property
    def host(self) -> np.ndarray:
        """Seconds of each step outside the model's calls."""
        return self.whole - self.model


def start_decoding(model: Model, state: EngineState, prompts: Sequence[list[int]], room: int) -> tuple[EngineState, tuple[int, ...]]:
    """Submit greedy requests for `room` tokens and run their prompts and one decode step more. Returns the requests' ids."""
    limit, ids = SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True), []
    for prompt in prompts:
        state, rid = submit(model, state, prompt, limit)
        ids.append(rid)
    while state.waiting or any(s.todo > 1 for s in state.running):
        state, _ = step(model, state)
    state, _ = step(model, state)
    return state, tuple(ids)


def room_for(rows: int, length: int, steps: int, max_num_batched_tokens: int) -> int:
    """Tokens that a row must be allowed to draw so that all of them decode for so many steps: some more while other rows' prompts run."""
    return steps + 8 + -(-rows * length // max(1, max_num_batched_tokens - rows))


def time_steps(model: Model, state: EngineState, count: int) -> tuple[EngineState, StepTimes]:
    """Run `count` steps of requests that all decode, or fewer where one of them ends."""
    size, whole, inside = len(state.running), [], []
    with watched(state) as watch:
        while len(state.running) == size and len(whole) < count:
            before, start = watch.seconds, time.perf_counter()
            state, _ = step(model, state)
            whole.append(time.perf_counter() - start)
            inside.append(watch.seconds - before)
    return state, StepTimes(whole=np.array(whole), model=np.array(inside))


def host_time(model: Model, state: EngineState, size: int, steps: int = 200) -> tuple[EngineState, dict[str, float]]:
    """Microseconds a decode step at batch `size`: the whole step, and what of it is outside the model (scheduling, tables, settling).

    Medians of the steps; the host's mean too, which has in it what few steps do, the last one above all, where all rows end.
    """
    random = Random(2)
    prompts = [random_tokens(random, HOST_PROMPT, model.config.vocab_size) for _ in range(size)]
    state, _ = start_decoding(model, state, prompts, steps + 8)
    state, times = time_steps(model, state, steps + 8)
    while state.running or state.waiting:
        state, _ = step(model, state)
    return state, {
        f"b{size}_step_us": round(1e6 * float(np.median(times.whole)), 1),
        f"b{size}_host_us": round(1e6 * float(np.median(times.host)), 1),
        f"b{size}_host_mean_us": round(1e6 * float(times.host.mean()), 1),
    }
