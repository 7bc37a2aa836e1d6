"""How much memory a device has free, and how much KV fits into what a model leaves of it."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.init_state import CPU_KV_BYTES, default_tokens
from nanovllm.errors import OutOfPagesError
from nanovllm.state.kv_cache import bytes_per_page
from nanovllm.state.pool_sizes import pool_sizes

PAGE_SIZE, MAX_NUM_SEQS = 16, 256  # an engine's, unless told otherwise
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # of version 2; a container has its own there


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
