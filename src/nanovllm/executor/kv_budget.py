"""How many bytes are left for KV: the device's free memory, and what the largest steps hold, measured before the KV pool is made."""

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

GRAPHS = 512 << 20  # bytes for later: captured graphs, and kernels that are loaded when they first run
FILTERED = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1)  # the sampling that needs the most memory
CPU_KV_BYTES = 4 << 30  # the default on a CPU
PAGE_SIZE, MAX_NUM_SEQS = 16, 256  # an engine's defaults
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # version 2; in a container, of the container


@torch.no_grad()
def measured(model: Model, limits: EngineConfig, choice: FastChoice | None, cuts: Cuts | None) -> int:
    """Run the largest steps and return the most bytes that they hold at once, with room for captured graphs.

    The steps are a full prefill, and sampling for `max_num_seqs` rows. Two layers of each form run, since a layer's memory is reused by the
    next one. If some layers have a sliding window, all of them run.

    Raises:
        torch.OutOfMemoryError: A step does not fit.
        AttentionUnavailableError: FlashInfer cannot serve the model on this machine.
    """
    with torch.cuda.device(model.device):
        held = _held(model.device, lambda: _prompts(model, limits, choice, cuts)), _held(model.device, lambda: _draw(model, limits))
        return max(held) + GRAPHS


def _held(device: torch.device, call: Callable[[], object]) -> int:
    """The most bytes that a call holds in addition to those held before."""
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
    """Run a step full of prompt tokens, on empty pages."""
    small = replace(limits, num_pages=1, num_frames=min(1, limits.num_frames))
    served = fused.serves(model.params, model.config) and (choice is None or choice.all_layers)
    forward = fused_forward(model, choice, cuts) if served else model.spec.forward
    attention = Attention(model, small, None)  # no rows share pages
    where = {"page_size": small.page_size, "dtype": model.dtype, "device": model.device}
    kv = init_kv(model.config, num_pages=1, num_frames=small.num_frames or None, **where)
    rows = -(-small.max_num_batched_tokens // small.max_model_len)
    for host in sample_prompts(small, [(rows, small.max_num_batched_tokens // rows)], model.config):
        plan, windowed = attention.plan_prompt(host, together=served)
        params = model.params if model.config.windows else two_of_each(model.params)
        forward(params, kv, to_device(host, model.device, plan, windowed), model.config)


def _draw(model: Model, limits: EngineConfig) -> None:
    """Sample for as many rows as may run at once."""
    row: tensors.Row = (FILTERED, 0, tensors.NO_IDS, tensors.NO_IDS)
    sampling = tensors.build([row] * limits.max_num_seqs, model.config.vocab_size, model.device)
    logits = torch.zeros(limits.max_num_seqs, model.config.vocab_size, dtype=model.dtype, device=model.device)
    positions = torch.from_numpy(np.ones(limits.max_num_seqs, np.int32)).to(model.device)
    sampler.sample(logits, sampling, positions)


def default_tokens(device: torch.device) -> int:
    """The default of `max_num_batched_tokens` on this device."""
    large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= 64 << 30
    return 16384 + 512 if large else 8192


def device_budget(model: Model, memory_fraction: float) -> int:
    """Bytes that may be allocated in addition to those held now."""
    if model.device.type != "cuda":
        return CPU_KV_BYTES
    free, total = torch.cuda.mem_get_info(model.device)
    return int(total * memory_fraction) - (total - free)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes of a device's memory: in total, and free."""

    total: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that attend to equally many tokens.

    Attributes:
        layers: How many layers.
        window: Tokens that they see; 0: all.
        token_bytes: Bytes of one token's KV in all of them.
    """

    layers: int
    window: int
    token_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The KV memory of a model on a device.

    Attributes:
        token_bytes: Bytes of KV per token.
        groups: The same by groups of layers.
        room: The device's memory; None if the system does not report it.
        left: Bytes left for KV after the weights; None if unknown.
        tokens: For how many tokens an engine allocates KV by default; None if unknown.
        window_tokens: The same for layers with a sliding window; None if all layers, or none, have one, or if unknown.
    """

    token_bytes: int
    groups: tuple[Group, ...]
    room: Room | None
    left: int | None
    tokens: int | None
    window_tokens: int | None


def room(device: torch.device) -> Room | None:
    """The memory of a GPU, or of the host as far as this process may use it. None if the system does not report it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Room(total=total, free=free)
    known = _numbers(MEMINFO)
    if not {"MemTotal", "MemAvailable"} <= known.keys():
        return None
    host = Room(total=1024 * known["MemTotal"], free=1024 * known["MemAvailable"])
    try:
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # not in a container, or in one without a limit
        return host
    # The system frees cached file pages when memory is short.
    free = limit - used + _numbers(CGROUP / "memory.stat").get("inactive_file", 0)
    return Room(total=min(host.total, limit), free=max(0, min(host.free, free)))


def kv_memory(config: ModelConfig, held: int, device: torch.device, dtype: torch.dtype, fraction: float, more: int) -> Memory:
    """How much KV memory a model needs per token, and how much fits on a device.

    Args:
        config: The model's config.
        held: Bytes of the weights.
        device: The device.
        dtype: The dtype of keys and values.
        fraction: The share of a GPU's memory that an engine may use. On a CPU the limit is the engine's default.
        more: Bytes that an engine leaves for its steps.
    """
    a_layer = bytes_per_page(config, page_size=1, dtype=dtype) // config.num_layers
    counts = Counter(config.window(layer) for layer in range(config.num_layers))
    memory = room(device)
    if memory is None:
        left = None
    elif device.type == "cuda":
        left = int(memory.total * fraction) - (memory.total - memory.free) - held - more
    else:
        left = min(CPU_KV_BYTES, memory.free - held)
    pages, frames = (None, None) if left is None else _pools(config, left, device, dtype)
    return Memory(
        token_bytes=a_layer * config.num_layers,
        groups=tuple(Group(layers=count, window=window, token_bytes=count * a_layer) for window, count in sorted(counts.items())),
        room=memory,
        left=left,
        tokens=None if pages is None else PAGE_SIZE * pages,
        window_tokens=None if frames is None else PAGE_SIZE * frames,
    )


def _pools(config: ModelConfig, left: int, device: torch.device, dtype: torch.dtype) -> tuple[int, int | None]:
    """The pages of an engine's first KV pool by default, and the frames of its second, which is None if there is only one pool."""
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
    """The numbers of a file that has a name and a number on every line."""
    try:
        parts = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {part[0].rstrip(":"): int(part[1]) for part in parts if len(part) > 1 and part[1].isdecimal()}
