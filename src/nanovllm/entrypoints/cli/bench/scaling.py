"""How the time of a decode step grows: with the batch, with the context, with the pool, and with the requests that have ended.

The first two run the model under measurement. What the pool and ended requests cost is the host's alone, so it is measured on a model of
almost no size, on the CPU, where a pool of a million pages fits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

import numpy as np

from nanovllm.config import EngineConfig, ModelConfig, RopeConfig
from nanovllm.engine.requests import cancel
from nanovllm.entrypoints.cli.bench.model_shapes import random_model
from nanovllm.entrypoints.cli.bench.roofline import Ceiling, decode_work, limit_seconds, step_bytes
from nanovllm.entrypoints.cli.bench.stopwatch import Engine, StepTimes, room_for, start_decoding, time_steps
from nanovllm.entrypoints.cli.bench.workloads import random_tokens
from nanovllm.models.model import Model
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import pages_for

LEAST = ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=64, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=2, rms_norm_eps=1e-6, rope=RopeConfig(), tie_word_embeddings=True, max_position_embeddings=1024,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is varied. Batches run at `context` tokens, contexts at each number of rows; `pools` in pages, `ended` in requests.

    Host times are those of `host_rows` rows. Every point is the median of `steps` steps.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    context: int = 256
    contexts: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    rows: tuple[int, ...] = (1, 8)
    pools: tuple[int, ...] = (1 << 10, 1 << 13, 1 << 16, 1 << 20)
    ended: tuple[int, ...] = (0, 100, 1000, 5000)
    host_rows: int = 8
    steps: int = 48


ON_CPU = Settings(batches=(1, 2, 4, 8, 16, 32, 64), contexts=(256, 512, 1024, 1792))


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One decode step at `rows` rows of about `context` tokens: microseconds as a whole, of these outside the model's calls, and the
    least that the bytes and the arithmetic leave; bytes that it must read."""

    rows: int
    context: int
    tok_s: float
    step_us: float
    host_us: float
    step_bytes: int
    limit_us: float
    roofline_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPoint:
    """The host's microseconds of one decode step in a pool of `num_pages`, `num_cached` of them held by the index for later prompts,
    after `ended` requests."""

    num_pages: int
    ended: int
    num_cached: int
    host_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A point of a curve that the engine has no room for, and what of it is too much."""

    curve: str
    rows: int
    context: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """All curves, and the points that are left out of them."""

    settings: Settings
    batch: tuple[Point, ...] = ()
    context: tuple[Point, ...] = ()
    pool: tuple[HostPoint, ...] = ()
    ended: tuple[HostPoint, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def model_len(settings: Settings, limits: ModelConfig) -> int:
    """The context that an engine needs for all curves, as far as the model has it."""
    return min(limits.max_position_embeddings, max((*settings.contexts, settings.context)) + 256)


def grow(engine: Engine, ceiling: Ceiling, settings: Settings) -> Iterator[tuple[str, Growth]]:
    """The curves of an engine that is at rest, one after the other: the last one's name, and all that there are by then."""
    found = Growth(settings=settings)
    sizes = {
        "batch": [(rows, settings.context) for rows in settings.batches],
        "context": [(rows, context) for rows in settings.rows for context in settings.contexts],
    }
    for curve, points in sizes.items():
        kept, left = [], []
        for rows, context in points:
            if why := obstacle(engine.state.config, rows, _prompt_len(context, settings.steps), settings.steps):
                left.append(LeftOut(curve=curve, rows=rows, context=context, why=why))
            else:
                kept.append((rows, context))
        found = replace(found, left_out=(*found.left_out, *left), **{curve: tuple(_points(engine, ceiling, kept, settings.steps))})
        yield curve, found
    pools = {
        "pool": [(num_pages, 0) for num_pages in settings.pools],
        "ended": [(max(settings.pools), ended) for ended in settings.ended],
    }
    for curve, points in pools.items():
        found = replace(found, **{curve: tuple(host_point(num_pages, ended, settings) for num_pages, ended in points)})
        yield curve, found


def host_point(num_pages: int, ended: int, settings: Settings) -> HostPoint:
    """The host's part of a step, in a fresh engine of a model of almost no size, after requests of two pages each have ended."""
    model = random_model("least", LEAST, device="cpu", dtype="float32")
    engine, random = Engine(model, num_pages=num_pages, compile=False), Random(3)
    length, together = 2 * engine.state.config.page_size, engine.state.config.max_num_seqs
    for start in range(0, ended, together):
        count = min(ended - start, together)
        engine.generate([random_tokens(random, length, LEAST.vocab_size) for _ in range(count)], [1] * count, 0.0)
    cached = num_pages - engine.state.pages.num_free
    prompts = [random_tokens(random, 32, LEAST.vocab_size) for _ in range(settings.host_rows)]
    _, times = _decode_times(model, engine.state, prompts, 4 * settings.steps)
    return HostPoint(num_pages=num_pages, ended=ended, num_cached=cached, host_us=round(1e6 * float(np.median(times.host)), 1))


def _points(engine: Engine, ceiling: Ceiling, sizes: Sequence[tuple[int, int]], steps: int) -> Iterator[Point]:
    """A point for each (rows, tokens of context); all of them fit."""
    model, random = engine.model, Random(4)
    config, dtype = model.config, model.dtype
    for rows, context in sizes:
        prompts = [random_tokens(random, _prompt_len(context, steps), config.vocab_size) for _ in range(rows)]
        engine.state, times = _decode_times(model, engine.state, prompts, steps)
        seconds = float(np.median(times.whole))
        limit = limit_seconds(config, dtype, decode_work([context - 1] * rows, [2] * rows), ceiling)
        yield Point(
            rows=rows,
            context=context,
            tok_s=round(rows / seconds, 1),
            step_us=round(1e6 * seconds, 1),
            host_us=round(1e6 * float(np.median(times.host)), 1),
            step_bytes=step_bytes(config, dtype, rows, context),
            limit_us=round(1e6 * limit, 1),
            roofline_percent=round(100 * limit / seconds, 1),
        )


def _prompt_len(context: int, steps: int) -> int:
    return max(1, context - steps // 2)  # the middle of the steps stands at the context that is asked for


def obstacle(limits: EngineConfig, rows: int, length: int, steps: int) -> str | None:
    """What of `steps` steps of so many rows behind prompts of `length` tokens is more than an engine has; None: they fit."""
    if rows > limits.max_num_seqs:
        return f"the engine runs at most {limits.max_num_seqs:,} rows"
    whole = length + room_for(rows, length, steps, limits.max_num_batched_tokens)
    if whole > limits.max_model_len:
        return f"with its steps a row takes {whole:,} tokens, the context has {limits.max_model_len:,}"
    pages = rows * pages_for(whole + 64, limits.page_size)  # 64: a sequence takes pages ahead
    there = min(limits.num_pages, limits.num_frames or limits.num_pages)
    return f"its KV takes {pages:,} pages, the pool has {there:,}" if pages > there else None


def _decode_times(model: Model, state: EngineState, prompts: Sequence[list[int]], steps: int) -> tuple[EngineState, StepTimes]:
    """The times of `steps` decode steps of these prompts, which are cancelled then."""
    room = room_for(len(prompts), len(prompts[0]), steps, state.config.max_num_batched_tokens)
    state, ids = start_decoding(model, state, prompts, room)
    state, times = time_steps(model, state, steps)
    for rid in ids:
        state = cancel(state, rid)
    return state, times
