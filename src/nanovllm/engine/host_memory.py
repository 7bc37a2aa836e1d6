"""Host memory for evicted pages: whether an engine can have it, and how fast it is compared with running prompts.

Each of several ranks keeps its own heads of a page. All ranks plan alike, so they have equally many host pages, and the rates of rank 0.
"""

import math
import reprlib
import time
from typing import Any

import torch
from immutables import Map

from nanovllm.config import EngineConfig
from nanovllm.engine.prefill_rate import prompt_rates, seconds_of_step
from nanovllm.errors import InvalidRequestError, OutOfPagesError
from nanovllm.executor.device_memory import room
from nanovllm.executor.distributed import agreed, least
from nanovllm.executor.executor import Executor
from nanovllm.executor.kv_offload import LANDING_BYTES, NUM_STAGES, STAGE_BYTES, HostMemory
from nanovllm.models.model import Model
from nanovllm.state.kv_cache import KVState, bytes_by_group, bytes_per_page, stored_dtype
from nanovllm.state.offload import HostPages, Moves, Rates, init_host
from nanovllm.state.pool import Pool

AUTO, SHARE = "auto", 4  # with "auto", one of `SHARE` bytes of free memory is used
COPIED = {"cuda": 4 * STAGE_BYTES, "cpu": STAGE_BYTES}  # bytes of the measured copies: so many that what they cost once counts little
REPEATS = 3  # of the measured copies, of which the fastest counts: the first one may compile
PROMPT = {"cuda": 4096, "cpu": 128}  # tokens of the shorter one of two measured prompts; the host bounds small models with few tokens


def require_host_kv(model: Model, host_kv_gib: Any, limits: EngineConfig) -> int:
    """The number of host pages for an engine; 0 if it uses no host memory. Ranks, which call this at the same time, divide the memory.

    With "auto" it is a quarter of the memory that is free, or less: see `bounded_auto`.

    Raises:
        InvalidRequestError: The size is invalid or less than one page.
    """
    gib: Any = _auto_gib() if isinstance(host_kv_gib, str) and host_kv_gib == AUTO else host_kv_gib
    number = isinstance(gib, int | float) and not isinstance(gib, bool)
    if not number or not 0 <= gib < math.inf:
        told = f"host_kv_gib={reprlib.repr(host_kv_gib)} must be a number of GiB of at least 0, or 'auto'; 0 uses no host memory"
        raise InvalidRequestError(told)
    config = model.config
    page = bytes_per_page(config, page_size=limits.page_size, dtype=stored_dtype(limits, model.dtype))
    page *= 1 if config.mesh is None else config.mesh.size
    (count,) = least(config.mesh, [int(gib * 2**30) // page])
    if gib and not count:
        few = f"host_kv_gib={host_kv_gib} is less than one page of {page / 2**30:.6f} GiB"
        raise InvalidRequestError(
            f"{few}, on this or another rank: make it larger, or 0" if config.mesh else f"{few}: make it larger, or 0"
        )
    return count


def _auto_gib() -> float:
    """GiB of host memory for "auto".

    Raises:
        InvalidRequestError: The system does not report its memory.
    """
    host = room(torch.device("cpu"))
    if host is None:
        raise InvalidRequestError("host_kv_gib='auto': this system does not tell how much memory is free: give a number of GiB")
    return host.free / SHARE / 2**30


def bounded_auto(host_kv_gib: Any, num_host_pages: int, num_pages: int) -> int:
    """The number of host pages of `require_host_kv` for an engine with so many pages: with "auto" at most twice as many."""
    return min(num_host_pages, 2 * num_pages) if host_kv_gib == AUTO else num_host_pages


def stage_bytes(model: Model, num_host_pages: int) -> int:
    """Bytes of device memory that the copies of an engine need."""
    return NUM_STAGES * STAGE_BYTES if num_host_pages and model.device.type == "cuda" else 0


def add_host_memory(
    model: Model, limits: EngineConfig, executor: Executor, kv: KVState, pool: Pool, num_host_pages: int
) -> tuple[HostMemory, HostPages, KVState]:
    """Donates `kv`. Make host memory for an engine without requests, and measure how fast prompts and copies are.

    Raises:
        OutOfPagesError: The machine has too little memory, on this or another rank.
    """
    memory = _on_all_ranks(model, kv, num_host_pages)
    tokens, doubling, kv = prompt_rates(model, limits, executor, kv, pool, PROMPT[model.device.type])
    sizes = {"page_size": limits.page_size, "dtype": stored_dtype(limits, model.dtype)}
    page, (_, frame) = bytes_per_page(model.config, **sizes), bytes_by_group(model.config, **sizes)
    most, frames = pool.pages.num_pages, pool.frames
    if frames is not None:  # the same numbers address pages and frames
        most = frames.num_frames if frames.alone else min(most, frames.num_frames)
    count = min(num_host_pages, most, max(1, COPIED[model.device.type] // page))
    pairs, took = tuple((at, at) for at in range(count)), math.inf
    kv = memory.move(kv, Moves(out=Map(pairs), frames_out=Map(pairs)))
    for _ in range(REPEATS):
        _synchronize(model.device)
        start = time.perf_counter()
        kv = memory.move(kv, Moves(into=pairs, frames_into=pairs))
        _synchronize(model.device)
        took = min(took, time.perf_counter() - start)
    copied = agreed(model.config.mesh, count * page / max(took, 1e-9))
    step, kv = seconds_of_step(model, limits, executor, kv, pool)
    rates = Rates(
        tokens_per_second=tokens, bytes_per_second=copied, step_seconds=min(step, LANDING_BYTES / copied), context_doubling=doubling,
        most_context=float(model.config.widest_window) if model.config.all_windowed else math.inf,
    )  # fmt: skip
    return memory, init_host(num_host_pages, page, rates, frame), kv


def _on_all_ranks(model: Model, kv: KVState, num_host_pages: int) -> HostMemory:
    """Host memory, if all ranks get it. Those that do would wait for one that does not."""
    memory, short = None, None
    try:
        memory = HostMemory(kv, num_host_pages)
    except (OutOfPagesError, torch.OutOfMemoryError) as error:
        short = error
    (got,) = least(model.config.mesh, [int(memory is not None)])
    if short is not None:
        raise short
    if memory is None or not got:
        raise OutOfPagesError("another rank of this engine gets too little host memory: lower host_kv_gib")
    return memory


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
