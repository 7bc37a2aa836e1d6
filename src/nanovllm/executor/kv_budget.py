"""What the largest steps of an engine hold on a GPU beside weights and KV: measured by running them, before the pool takes what is left."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.errors import OutOfPagesError
from nanovllm.executor.attention_plans import Attention
from nanovllm.executor.batch import sample_prompts, to_device
from nanovllm.executor.compiled import fused_forward
from nanovllm.models.common.params import two_of_each
from nanovllm.models.fast import fused
from nanovllm.models.fast.choice import FastChoice
from nanovllm.models.fast.cuts import Cuts
from nanovllm.models.model import Model
from nanovllm.sampling import sampler, tensors
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.kv_cache import bytes_per_page, init_kv
from nanovllm.state.pool_sizes import pool_sizes

GRAPHS = 512 << 20  # bytes for what comes later: captured graphs, kernels that are loaded when they first run
FILTERED = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1)  # draws that hold the most
CPU_KV_BYTES = 4 << 30  # unless told otherwise
PAGE_SIZE, MAX_NUM_SEQS = 16, 256  # an engine's, unless told otherwise
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # of version 2; a container has its own there


@torch.no_grad()
def measured(model: Model, limits: EngineConfig, choice: FastChoice | None, cuts: Cuts | None) -> int:
    """Bytes: the most that a step full of prompt tokens, or a draw for `max_num_seqs` rows, holds at once, and room for captured graphs.

    Two layers of each form run, or all where some have windows, for a layer's memory is used again by the next. Raises
    `torch.OutOfMemoryError` where a step does not fit, and `AttentionUnavailableError`.
    """
    with torch.cuda.device(model.device):
        held = _held(model.device, lambda: _prompts(model, limits, choice, cuts)), _held(model.device, lambda: _draw(model, limits))
        return max(held) + GRAPHS


def _held(device: torch.device, call: Callable[[], object]) -> int:
    """The most bytes that a call holds, beyond what was held before."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    most = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return most - before


def _prompts(model: Model, limits: EngineConfig, choice: FastChoice | None, cuts: Cuts | None) -> None:
    """A step full of prompt tokens, on pages that hold nothing."""
    small = replace(limits, num_pages=1, num_frames=min(1, limits.num_frames))
    served = fused.serves(model.params, model.config) and (choice is None or choice.all_layers)
    forward = fused_forward(model, choice, cuts) if served else model.spec.forward
    attention = Attention(model, small, None)  # no rows share what is worth reading once
    where = {"page_size": small.page_size, "dtype": model.dtype, "device": model.device}
    kv = init_kv(model.config, num_pages=1, num_frames=small.num_frames or None, **where)
    rows = -(-small.max_num_batched_tokens // small.max_model_len)
    for host in sample_prompts(small, [(rows, small.max_num_batched_tokens // rows)], model.config):
        plan, windowed = attention.plan_prompt(host, together=served)
        params = model.params if model.config.windows else two_of_each(model.params)
        forward(params, kv, to_device(host, model.device, plan, windowed), model.config)


def _draw(model: Model, limits: EngineConfig) -> None:
    """A draw for as many rows as may run at once."""
    row: tensors.Row = (FILTERED, 0, tensors.NO_IDS, tensors.NO_IDS)
    sampling = tensors.build([row] * limits.max_num_seqs, model.config.vocab_size, model.device)
    logits = torch.zeros(limits.max_num_seqs, model.config.vocab_size, dtype=model.dtype, device=model.device)
    positions = torch.from_numpy(np.ones(limits.max_num_seqs, np.int32)).to(model.device)
    sampler.sample(logits, sampling, positions)


def default_tokens(device: torch.device) -> int:
    """Tokens of a step, unless told otherwise."""
    large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= 64 << 30
    return 16384 + 512 if large else 8192


def device_budget(model: Model, memory_fraction: float) -> int:
    """Bytes that may be held beside what is held now."""
    if model.device.type != "cuda":
        return CPU_KV_BYTES
    free, total = torch.cuda.mem_get_info(model.device)
    return int(total * memory_fraction) - (total - free)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes of a device's memory: all that there is, and what nobody holds."""

    total: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that see equally many tokens, `window` (0: all), and the bytes of a token's KV in all of them."""

    layers: int
    window: int
    token_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of KV a token, by groups of layers too; what is `left` for KV beside the weights, and for how many `tokens` an engine makes
    room by default; where only some layers have a window, for how many `window_tokens` in these. None: the system does not tell how much
    memory is free."""

    token_bytes: int
    groups: tuple[Group, ...]
    room: Room | None
    left: int | None
    tokens: int | None
    window_tokens: int | None


def room(device: torch.device) -> Room | None:
    """The memory of a GPU, or of the host as this process may use it; None where the system does not tell."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Room(total=total, free=free)
    known = _numbers(MEMINFO)
    if not {"MemTotal", "MemAvailable"} <= known.keys():
        return None
    host = Room(total=1024 * known["MemTotal"], free=1024 * known["MemAvailable"])
    try:
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no container, or one without a limit
        return host
    # Pages of files are given back where memory is short.
    free = limit - used + _numbers(CGROUP / "memory.stat").get("inactive_file", 0)
    return Room(total=min(host.total, limit), free=max(0, min(host.free, free)))


def kv_memory(config: ModelConfig, held: int, device: torch.device, dtype: torch.dtype, fraction: float, more: int) -> Memory:
    """What KV takes of a device, and what of it fits beside weights of `held` bytes and `more` that an engine leaves for its steps: within
    `fraction` of a GPU's memory, and within what an engine takes at most on a CPU."""
    a_layer = bytes_per_page(config, page_size=1, dtype=dtype) // config.num_layers
    counts = Counter(config.window(layer) for layer in range(config.num_layers))
    found = room(device)
    if found is None:
        left = None
    elif device.type == "cuda":
        left = int(found.total * fraction) - (found.total - found.free) - held - more
    else:
        left = min(CPU_KV_BYTES, found.free - held)
    pages, frames = (None, None) if left is None else _pools(config, left, device, dtype)
    return Memory(
        token_bytes=a_layer * config.num_layers,
        groups=tuple(Group(layers=count, window=window, token_bytes=count * a_layer) for window, count in sorted(counts.items())),
        room=found,
        left=left,
        tokens=None if pages is None else PAGE_SIZE * pages,
        window_tokens=None if frames is None else PAGE_SIZE * frames,
    )


def _pools(config: ModelConfig, left: int, device: torch.device, dtype: torch.dtype) -> tuple[int, int | None]:
    """The pages that an engine's first KV pool has by default, and those of its second, None where there is one alone."""
    limits = EngineConfig(
        num_pages=1,
        num_frames=1 if config.widest_window else 0,
        page_size=PAGE_SIZE,
        max_model_len=config.max_position_embeddings,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=default_tokens(device),
        seed=0,
    )
    try:
        pages, frames = pool_sizes(config, limits, None, None, left, dtype)
    except OutOfPagesError:
        pages, frames = 0, 0
    if config.all_windowed:
        return frames, None
    return pages, frames if config.widest_window else None


def _numbers(file: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number in every line."""
    try:
        parts = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {part[0].rstrip(":"): int(part[1]) for part in parts if len(part) > 1 and part[1].isdecimal()}
