"""How much KV memory a model needs per token, and for how many tokens an engine has memory by default."""

from collections import Counter
from dataclasses import dataclass

import torch

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.init_state import default_tokens
from nanovllm.errors import OutOfPagesError
from nanovllm.executor.device_memory import Room, room
from nanovllm.executor.kv_budget import CPU_KV_BYTES
from nanovllm.state.kv_cache import bytes_per_page
from nanovllm.state.pool_sizes import pool_sizes

PAGE_SIZE, MAX_NUM_SEQS = 16, 256  # the defaults of `init_state`


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
