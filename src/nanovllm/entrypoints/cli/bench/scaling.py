"""How the time of a decode step grows with the batch, the context, the pool, and the requests that have ended.

The first two curves run the measured model. The pool and ended requests cost only host time. These curves run a minimal model on the
CPU, where a pool of a million pages fits into memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

import numpy as np

from nanovllm.config import EngineConfig, ModelConfig, RopeConfig
from nanovllm.engine.requests import cancel
from nanovllm.entrypoints.cli.bench.model_shapes import random_model
from nanovllm.entrypoints.cli.bench.roofline import Ceiling, decode_work, held_bytes, limit_seconds, step_bytes
from nanovllm.entrypoints.cli.bench.stopwatch import Engine, StepTimes, room_for, start_decoding, time_steps
from nanovllm.entrypoints.cli.bench.workloads import random_tokens
from nanovllm.models.model import Model
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import pages_for, stored_dtype

LEAST = ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=64, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=2, rms_norm_eps=1e-6, rope=RopeConfig(), tie_word_embeddings=True, max_position_embeddings=1024,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The points of the curves.

    Attributes:
        batches: Numbers of rows, at `context` tokens.
        context: Tokens of context of the batch curve.
        contexts: Tokens of context, at each of `rows` rows.
        rows: Numbers of rows of the context curves.
        pools: Pages of the pool.
        ended: Requests that have ended.
        host_rows: Rows of the pool curve and of the curve of ended requests.
        steps: Steps per point; the point is their median.
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
    """One point: a decode step of `rows` rows of about `context` tokens.

    Attributes:
        rows: Rows of the batch.
        context: Tokens of context per row.
        tok_s: Tokens per second.
        step_us: Microseconds per step.
        host_us: Microseconds per step outside the model's calls.
        step_bytes: Bytes that a step must read.
        limit_us: The least microseconds per step, by the roofline.
        roofline_percent: `limit_us` in percent of `step_us`.
    """

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
    """The host's microseconds per decode step in a pool of `num_pages` pages, after `ended` requests have ended.

    `num_cached` of the pages are in the prefix index.
    """

    num_pages: int
    ended: int
    num_cached: int
    host_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A point of a curve that the engine has no room for, and the reason."""

    curve: str
    rows: int
    context: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """All curves, and the points that were left out."""

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
    """The `max_model_len` of an engine for all curves, at most the model's positions."""
    return min(limits.max_position_embeddings, max((*settings.contexts, settings.context)) + 256)


def grow(engine: Engine, ceiling: Ceiling, settings: Settings) -> Iterator[tuple[str, Growth]]:
    """Measure the curves one by one on an engine without requests. Yields the name of each curve, and all curves so far."""
    growth = Growth(settings=settings)
    sizes = {
        "batch": [(rows, settings.context) for rows in settings.batches],
        "context": [(rows, context) for rows in settings.rows for context in settings.contexts],
    }
    for curve, asked in sizes.items():
        kept, left = [], []
        for rows, context in asked:
            if why := obstacle(engine.state.config, rows, _prompt_len(context, settings.steps), settings.steps):
                left.append(LeftOut(curve=curve, rows=rows, context=context, why=why))
            else:
                kept.append((rows, context))
        growth = replace(growth, left_out=(*growth.left_out, *left), **{curve: tuple(points(engine, ceiling, kept, settings.steps))})
        yield curve, growth
    pools = {
        "pool": [(num_pages, 0) for num_pages in settings.pools],
        "ended": [(max(settings.pools), ended) for ended in settings.ended],
    }
    for curve, asked in pools.items():
        growth = replace(growth, **{curve: tuple(host_point(num_pages, ended, settings) for num_pages, ended in asked)})
        yield curve, growth


def host_point(num_pages: int, ended: int, settings: Settings) -> HostPoint:
    """Measure the host's time per step in a new engine of a minimal model, after requests of two pages each have ended."""
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


def points(engine: Engine, ceiling: Ceiling, sizes: Sequence[tuple[int, int]], steps: int) -> Iterator[Point]:
    """Measure a point for each pair of rows and tokens of context. All of them must fit."""
    model, random = engine.model, Random(4)
    config, dtype, held = model.config, model.dtype, held_bytes(model.params, model.config, stored_dtype(engine.state.config, model.dtype))
    for rows, context in sizes:
        prompts = [random_tokens(random, _prompt_len(context, steps), config.vocab_size) for _ in range(rows)]
        engine.state, times = _decode_times(model, engine.state, prompts, steps)
        seconds = float(np.median(times.whole))
        limit = limit_seconds(config, dtype, decode_work([context - 1] * rows, [2] * rows), ceiling, held)
        yield Point(
            rows=rows,
            context=context,
            tok_s=round(rows / seconds, 1),
            step_us=round(1e6 * seconds, 1),
            host_us=round(1e6 * float(np.median(times.host)), 1),
            step_bytes=step_bytes(config, dtype, rows, context, held=held),
            limit_us=round(1e6 * limit, 1),
            roofline_percent=round(100 * limit / seconds, 1),
        )


def _prompt_len(context: int, steps: int) -> int:
    return max(1, context - steps // 2)  # the middle step then has exactly this context


def obstacle(limits: EngineConfig, rows: int, length: int, steps: int) -> str | None:
    """The reason why `steps` steps of `rows` rows after prompts of `length` tokens do not fit into an engine; None if they fit."""
    if rows > limits.max_num_seqs:
        return f"the engine runs at most {limits.max_num_seqs:,} rows"
    whole = length + room_for(rows, length, steps, limits.max_num_batched_tokens)
    if whole > limits.max_model_len:
        return f"with its steps a row takes {whole:,} tokens, the context has {limits.max_model_len:,}"
    pages = rows * pages_for(whole + 64, limits.page_size)  # 64: a sequence allocates pages in advance
    available = min(limits.num_pages, limits.num_frames or limits.num_pages)
    return f"its KV takes {pages:,} pages, the pool has {available:,}" if pages > available else None


def _decode_times(model: Model, state: EngineState, prompts: Sequence[list[int]], steps: int) -> tuple[EngineState, StepTimes]:
    """Measure `steps` decode steps of these prompts, then cancel the requests."""
    room = room_for(len(prompts), len(prompts[0]), steps, state.config.max_num_batched_tokens)
    state, ids = start_decoding(model, state, prompts, room)
    state, times = time_steps(model, state, steps)
    for rid in ids:
        state = cancel(state, rid)
    return state, times
