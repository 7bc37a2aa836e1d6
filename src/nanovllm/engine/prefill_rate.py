"""How many prompt tokens take how long: measured once, at the start of an engine that bounds steps or has KV in host memory."""

import math
import reprlib
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch

from nanovllm.config import EngineConfig, Mesh
from nanovllm.engine.prompt_room import LEAST
from nanovllm.errors import InvalidRequestError, OutOfPagesError
from nanovllm.executor.agreed_memory import SharedShortage
from nanovllm.executor.distributed import agreed, left
from nanovllm.executor.executor import Executor
from nanovllm.models.model import Model
from nanovllm.sampling.params import SamplingParams
from nanovllm.state import pool as pools
from nanovllm.state.device_errors import chain
from nanovllm.state.kv_cache import KVState, pages_for
from nanovllm.state.pool import Pool
from nanovllm.state.request import Request, Sequence
from nanovllm.state.vector import IntVector

REPEATS = 3  # of each measurement, whose least counts: the first one may compile, and another may be late
STEADY = 0.25  # seconds for which the chosen piece is repeated: a GPU under load lowers its clocks within a few steps
CONTEXT = 8192  # tokens of context with which a piece is measured again
MOST_MS = 1e9  # eleven days: whoever wants longer steps wants no bound
LEAST_ALONE = 4  # a token without context takes at least the time of one of the shorter measured prompt, divided by this
FAINT = 1 << 20  # the tokens of context with which a token counts twice, where context hardly matters


def require_step_ms(max_step_ms: Any) -> None:
    """Require a time for a step, or None.

    Raises:
        InvalidRequestError: It is no positive number, or neither infinity nor at most `MOST_MS`.
    """
    if max_step_ms is None:
        return
    number = isinstance(max_step_ms, int | float) and not isinstance(max_step_ms, bool)
    if not number or not (0 < max_step_ms <= MOST_MS or max_step_ms == math.inf):
        given = reprlib.repr(max_step_ms)
        raise InvalidRequestError(f"max_step_ms={given} must be a number of milliseconds above 0 up to {MOST_MS:.0e}, infinity, or None")


@torch.no_grad()
def bounded(
    model: Model, limits: EngineConfig, executor: Executor, kv: KVState, pool: Pool, max_step_ms: float
) -> tuple[EngineConfig, KVState]:
    """Donates `kv`. The limits with a bound on prompt tokens by which a step takes about `max_step_ms` milliseconds.

    A step for one token tells what the replies of a step take. Pieces of a prompt are doubled from `LEAST` tokens on until one takes as
    long as the rest of the step may. This piece is repeated for a while, as in an engine under load, and then again after `CONTEXT` tokens.
    What is written is in free pages.

    Returns:
        The limits, and the KV memory. The bound is a multiple of `LEAST` tokens, and at least so many.
    """
    longest = min(limits.max_model_len, pool.num_available * limits.page_size) - 1
    most = min(limits.max_num_batched_tokens, longest)
    if most < 1:
        return replace(limits, max_prefill_tokens=LEAST), kv
    count, took, rest, doubling = min(LEAST, most), 0.0, 0.0, 0
    try:
        alone, kv = _milliseconds(model, executor, kv, pool, 0, 1)
        rest = max(0.0, max_step_ms - alone)
        took, kv = _milliseconds(model, executor, kv, pool, 0, count)
        with suppress(torch.OutOfMemoryError):  # the last piece that fits is the largest one
            while took < rest and count < most:
                longer, kv = _milliseconds(model, executor, kv, pool, 0, min(2 * count, most))
                count, took = min(2 * count, most), longer
        took, kv = _milliseconds(model, executor, kv, pool, 0, count, STEADY)
        context = min(CONTEXT, longest - count)
        if pool.frames is None and context >= LEAST:
            longer, kv = _milliseconds(model, executor, kv, pool, context, count, STEADY)
            doubling = _doubling(took, longer, context)
    except torch.OutOfMemoryError:
        if not took:
            return replace(limits, max_prefill_tokens=LEAST), kv
    tokens = int(rest * count / took) // LEAST * LEAST
    return replace(limits, max_prefill_tokens=max(LEAST, tokens), context_doubling=doubling), kv


@torch.no_grad()
def prompt_rates(
    model: Model, limits: EngineConfig, executor: Executor, kv: KVState, pool: Pool, num_tokens: int
) -> tuple[float, float, KVState]:
    """Donates `kv`. How many tokens of a prompt run per second, and with how many tokens of context one takes twice as long.

    A prompt of `num_tokens` is measured, and one that is twice as long; shorter ones if these do not fit into a step or the pool. What is
    written is in free pages. If not even the first one fits into the device's memory, prompts count as slow. Where the second one does not
    fit, context counts as nothing.

    Returns:
        Tokens per second as if there were no context, tokens of context, and the KV memory.
    """
    most = min(limits.max_model_len - 1, pool.num_available * limits.page_size - 1, limits.max_num_batched_tokens)
    count = min(num_tokens, most // 2) or most
    if count < 1:
        return 1.0, math.inf, kv
    try:
        took, kv = _milliseconds(model, executor, kv, pool, 0, count)
    except torch.OutOfMemoryError:
        return 1.0, math.inf, kv
    each = took / count / 1e3
    if 2 * count > most:
        return 1 / each, math.inf, kv
    try:
        longer, kv = _milliseconds(model, executor, kv, pool, 0, 2 * count)
    except torch.OutOfMemoryError:
        return 1 / each, math.inf, kv
    # Context less than doubles the time of a token. If more was measured, the run was late.
    of_longer = min(longer / (2 * count) / 1e3, (2 - 1 / LEAST_ALONE) * each)
    if of_longer <= each:
        return 1 / of_longer, math.inf, kv
    alone = each - (of_longer - each)  # each half of the longer prompt makes a token slower by as much
    return 1 / alone, count * alone / (of_longer - alone), kv


@torch.no_grad()
def seconds_of_step(model: Model, limits: EngineConfig, executor: Executor, kv: KVState, pool: Pool) -> tuple[float, KVState]:
    """Donates `kv`. The seconds of a step for one token, which a decode step of one sequence takes, and the KV memory.

    What is written is in free pages. If the pool has too few, or the device too little memory, it is infinity.
    """
    if min(limits.max_model_len, pool.num_available * limits.page_size) < 2:
        return math.inf, kv
    try:
        took, kv = _milliseconds(model, executor, kv, pool, 0, 1)
    except torch.OutOfMemoryError:
        return math.inf, kv
    return took / 1e3, kv


def _doubling(took: float, longer: float, context: int) -> int:
    """The tokens of context with which a token takes twice as long as without, given the times of a piece without and with a context."""
    return FAINT if longer <= took else min(FAINT, max(1, math.ceil(context * took / (longer - took))))


@contextmanager
def _shared(mesh: Mesh | None) -> Iterator[None]:
    """Let a shortage of memory that other ranks do not know of end the start: they would wait for this rank, which goes on otherwise."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if mesh is None or mesh.size == 1 or any(isinstance(one, SharedShortage) for one in chain(error)):
            raise
        left(mesh)  # the others may wait in the middle of the pass
        raise OutOfPagesError(f"rank {mesh.rank} has too little memory for the prompt that is measured at the start: {error}") from error


def _milliseconds(
    model: Model, executor: Executor, kv: KVState, pool: Pool, context: int, count: int, seconds: float = 0.0
) -> tuple[float, KVState]:
    """Donates `kv`. The time of a prompt of `count` tokens after `context` others, and the KV memory.

    It is the least of `REPEATS` times. With `seconds` the prompt is repeated for so long, and the median of the second
    half counts. Ranks take the time of rank 0.
    """
    taken = pools.allocate(pool, pages_for(context + count + 1, pool.prefix.page_size))
    assert taken is not None
    pool, pages = taken
    sampling, times = SamplingParams(temperature=0.0, max_tokens=1), []
    end = time.perf_counter() + seconds
    while agreed(model.config.mesh, len(times) < REPEATS or time.perf_counter() < end):
        request = Request(
            request_id=-1, num_prompt=context + count, sampling=sampling, seed=0, max_len=context + count + 1, stop_ids=frozenset(),
            arrival=0.0,
        )  # fmt: skip
        tokens = IntVector.of(np.zeros(context + count, np.int32))
        row = Sequence(request=request, tokens=tokens, pages=IntVector.of(pages), num_filled=context)
        start = time.perf_counter()
        with _shared(model.config.mesh):
            drawn, kv = executor.prefill(model, kv, [(row, count)], frames=pool.frames)
        assert drawn is not None  # the token is on the host, so the device has ended
        times.append(time.perf_counter() - start)
    return agreed(model.config.mesh, 1e3 * (median(times[len(times) // 2 :]) if seconds else min(times))), kv
