"""An engine for measurements: it runs whole batches with `submit` and `step`, and times the model's calls."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from nanovllm.engine.init_state import init_state
from nanovllm.engine.requests import submit
from nanovllm.engine.step import step
from nanovllm.entrypoints.cli.bench.workloads import Spent, random_tokens
from nanovllm.executor.decode_carry import DecodeCarry
from nanovllm.executor.executor import Drawn, Executor, Masks, runtime_of
from nanovllm.executor.scoring import Scored
from nanovllm.models.model import Model
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import KVState

HOST_PROMPT = 32  # tokens before the steps of `host_time`


class Stopwatch:
    """An executor that measures another executor: the seconds inside the model's calls, and the number of decode steps.

    The seconds count from the launch to the tokens on the host. All other work of an engine is host time: scheduling, page tables, loading
    rows, post-processing of tokens. On a GPU, host work overlaps the next step. It costs time only if the model's seconds are near zero,
    because then the host never waits for the GPU.
    """

    def __init__(self, inner: Executor):
        self.inner, self.seconds, self.steps = inner, 0.0, 0

    def prefill(self, model: Model, kv: KVState, rows: Any, **options: Any) -> tuple[Drawn | None, KVState]:
        """Donates `kv`. Run prompts with the inner executor, and add the time."""
        start = time.perf_counter()
        result = self.inner.prefill(model, kv, rows, **options)
        self.seconds += time.perf_counter() - start
        return result

    def score(self, model: Model, kv: KVState, rows: Any, asked: Any, **options: Any) -> tuple[Scored, KVState]:
        """Donates `kv`. Score given tokens with the inner executor, and add the time to the launch of the work."""
        start = time.perf_counter()
        result = self.inner.score(model, kv, rows, asked, **options)
        self.seconds += time.perf_counter() - start
        return result

    def load(self, model: Model, kv: KVState, rows: Any, **options: Any) -> DecodeCarry:
        """Donates `kv`. Load rows into a decode carry with the inner executor."""
        return self.inner.load(model, kv, rows, **options)

    def refresh(self, model: Model, carry: DecodeCarry, rows: Any, **options: Any) -> DecodeCarry:
        """Donates `carry`. Update the rows of a decode carry with the inner executor."""
        return self.inner.refresh(model, carry, rows, **options)

    def narrow(self, model: Model, carry: DecodeCarry, keep: Any, rows: Any, **options: Any) -> DecodeCarry:
        """Donates `carry`. Keep some rows of a decode carry with the inner executor."""
        return self.inner.narrow(model, carry, keep, rows, **options)

    def decode(self, model: Model, carry: DecodeCarry, masks: Masks | None = None) -> tuple[DecodeCarry, Drawn]:
        """Donates `carry`. Run a decode step with the inner executor, add the time and count the step."""
        start = time.perf_counter()
        result = self.inner.decode(model, carry, masks)
        self.seconds += time.perf_counter() - start
        self.steps += 1
        return result

    def take_discarded_count(self) -> int:
        """The tokens that the inner executor ran ahead and did not use, since the last call; counts from zero again."""
        return self.inner.take_discarded_count()

    def begin(self, model: Model, kv: KVState, rows: Any, ticket: int, **options: Any) -> DecodeCarry:
        """Donates `kv`. Begin a decode session with the inner executor."""
        return self.inner.begin(model, kv, rows, ticket, **options)

    def end(self, ticket: int) -> None:
        """End a decode session with the inner executor."""
        self.inner.end(ticket)

    def captured(self, function: Callable[..., Any], carry: DecodeCarry, *inputs: Any) -> Callable[..., Any]:
        """The function as the inner executor captures it."""
        return self.inner.captured(function, carry, *inputs)


@contextmanager
def watched(state: EngineState) -> Iterator[Stopwatch]:
    """Replace the engine's executor by a stopwatch inside this block. The executor is restored at the end, also after an error."""
    runtime = runtime_of(state)
    watch = Stopwatch(runtime.executor)
    runtime.executor = watch
    try:
        yield watch
    finally:
        runtime.executor = watch.inner


class Engine:
    """An engine for measurements: its state, and the cost of its calls so far."""

    name = "nanovllm"

    def __init__(self, model: Model, state: EngineState | None = None, **limits: Any):
        """Start an engine, or take one that runs. `limits` are options of `init_state`."""
        self.model, self.state = model, init_state(model, **limits) if state is None else state
        self.spent = Spent()

    def generate(self, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[list[int]]:
        """Generate `max_tokens[i]` tokens after each prompt, ignoring the end-of-sequence token. Returns token ids in order."""
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
    """Times of single decode steps, in seconds: of the whole step, and inside the model's calls."""

    whole: np.ndarray
    model: np.ndarray

    @property
    def host(self) -> np.ndarray:
        """Seconds of each step outside the model's calls."""
        return self.whole - self.model


def start_decoding(model: Model, state: EngineState, prompts: Sequence[list[int]], room: int) -> tuple[EngineState, tuple[int, ...]]:
    """Submit greedy requests for `room` tokens, run their prompts and one decode step. Returns the state and the requests' ids."""
    limit, ids = SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True), []
    for prompt in prompts:
        state, rid = submit(model, state, prompt, limit)
        ids.append(rid)
    while state.waiting or any(s.todo > 1 for s in state.running):
        state, _ = step(model, state)
    state, _ = step(model, state)
    return state, tuple(ids)


def room_for(rows: int, length: int, steps: int, max_num_batched_tokens: int) -> int:
    """The `max_tokens` with which all rows decode for at least `steps` steps. Early rows decode while other rows' prompts still run."""
    return steps + 8 + -(-rows * length // max(1, max_num_batched_tokens - rows))


def time_steps(model: Model, state: EngineState, count: int) -> tuple[EngineState, StepTimes]:
    """Time up to `count` steps of requests that all decode. It stops when a request ends."""
    size, whole, inside = len(state.running), [], []
    with watched(state) as watch:
        while len(state.running) == size and len(whole) < count:
            before, start = watch.seconds, time.perf_counter()
            state, _ = step(model, state)
            whole.append(time.perf_counter() - start)
            inside.append(watch.seconds - before)
    return state, StepTimes(whole=np.array(whole), model=np.array(inside))


def host_time(model: Model, state: EngineState, size: int, steps: int = 200) -> tuple[EngineState, dict[str, float]]:
    """Measure microseconds per decode step at batch `size`: the whole step, and its part outside the model's calls.

    Returns:
        The state, and medians of both. For the host part also the mean, which includes rare work such as the end of all rows in the last
        step.
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
