"""`KVState`: the KV memory of all layers, and the arithmetic of pages and slots."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from nanovllm import ops
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.errors import InvalidRequestError
from nanovllm.ops.kv_cache.fp8 import FP8, SCALE_BYTES, stored_width
from nanovllm.types import Float, Tensor, brief_fields, register_value


@dataclass(frozen=True, slots=True, kw_only=True)
class KVState:
    """Donated. The KV memory of all layers.

    Attributes:
        pools: One tensor per group of layers: first the layers without a sliding window, then those with one. A group without layers has no
            tensor. Each has the shape `[L, N, 2, K, S, D]`: layers, pages, keys and values, KV heads, token slots of a page, head size.
            Pages address the first pool. Frames (the KV memory of sliding-window pages) address the second. N includes one dummy page at
            the end, which takes the writes of padding and of tokens that run again. In FP8 the last axis is D + 4, with the layout of
            `ops/kv_cache/fp8.py`.

    Examples:
        >>> [list(pool.shape) for pool in state.kv.pools]
        [[8, 65, 2, 2, 16, 64]]
    """

    pools: tuple[Float[Tensor, "_L _N 2 K S W"], ...]

    def __repr__(self) -> str:
        return brief_fields(self)


register_value(KVState)


def init_kv(
    config: ModelConfig, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device, num_frames: int | None = None
) -> KVState:
    """Allocate zeroed KV memory for `num_pages` pages and the dummy page.

    Zeros matter: a masked read of a slot that was never written must not give NaN.

    Args:
        config: The model's config.
        num_pages: Pages, without the dummy page.
        page_size: Tokens per page.
        dtype: The dtype of keys and values; see `stored_dtype`.
        device: Where the memory is.
        num_frames: Frames of the layers with a sliding window, without the dummy frame. None: one frame per page, with the page's number.
    """
    frames = num_pages if num_frames is None else num_frames
    counts = (frames,) if config.all_windowed else (num_pages, frames)

    def pool(layers: int, count: int) -> Tensor:
        shape = (layers, count + 1, 2, config.num_kv_heads, page_size, stored_width(config.head_dim, dtype))
        return _lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)

    return KVState(pools=tuple(pool(*sizes) for sizes in zip(config.pool_sizes, counts, strict=False)))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU whose memory the system provides at the first write. `torch.zeros` would touch every page of a large pool."""
    size = math.prod(shape) * dtype.itemsize
    try:
        raw = np.zeros(size + 64, np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: the size exceeds the address space
        raise torch.OutOfMemoryError(str(error)) from error
    start = -raw.ctypes.data % 64  # a cache line, as torch's own allocator aligns
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)


def stored_dtype(limits: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of an engine's KV pools, given the dtype of its model.

    Examples:
        >>> stored_dtype(state.config, torch.bfloat16), stored_dtype(replace(state.config, kv_dtype="fp8"), torch.bfloat16)
        (torch.bfloat16, torch.float8_e4m3fn)
    """
    return dtype if limits.kv_dtype is None else FP8


def require_kv_dtype(config: ModelConfig, kv_dtype: str | None, device: torch.device) -> None:
    """Require that a model's KV can have the dtype that the option of `init_state` asks for.

    Raises:
        InvalidRequestError: FP8 was asked for, and the heads or the GPU do not allow it.
    """
    if kv_dtype is None:
        return
    if config.head_dim % SCALE_BYTES:
        why = f"a head_dim that is a multiple of {SCALE_BYTES}, and this model has {config.head_dim}"
        raise InvalidRequestError(f"kv_dtype={kv_dtype!r} needs {why}: leave kv_dtype out")
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < (8, 9):
        why = f"a GPU of compute capability 8.9 or more, and {device} has {'.'.join(map(str, found))}"
        raise InvalidRequestError(f"kv_dtype={kv_dtype!r} needs {why}: leave kv_dtype out")


def bytes_per_page(config: ModelConfig, *, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers, its frame included."""
    return config.num_layers * 2 * config.num_kv_heads * page_size * stored_width(config.head_dim, dtype) * dtype.itemsize


def bytes_by_group(config: ModelConfig, *, page_size: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of one page over the layers without a sliding window, and bytes of one frame over the layers with one."""
    a_layer = bytes_per_page(config, page_size=page_size, dtype=dtype) // config.num_layers
    windowed = sum(map(bool, config.windows))
    return (config.num_layers - windowed) * a_layer, windowed * a_layer


def same_memory(one: KVState, other: KVState) -> bool:
    """Whether two values are over the same KV memory."""
    return one is other or [pool.data_ptr() for pool in one.pools] == [pool.data_ptr() for pool in other.pools]


def pages_for(num_tokens: int, page_size: int) -> int:
    """The number of pages that `num_tokens` tokens need."""
    return -(-num_tokens // page_size)


def copy_pages(kv: KVState, copies: tuple[tuple[int, int], ...], frame_copies: tuple[tuple[int, int], ...] = ()) -> KVState:
    """Donates `kv`. Copy whole pages in all layers, from the first to the second page of each pair.

    `frame_copies` are the frames of the same pairs.
    """
    if copies:
        of_pools = (copies,) * len(kv.pools) if not frame_copies else (copies, frame_copies)[-len(kv.pools) :]
        for pages, pairs in zip(kv.pools, of_pools, strict=True):
            source, target = torch.tensor(pairs, dtype=torch.int32).to(pages.device).unbind(1)
            ops.copy_pages(pages, source.contiguous(), target.contiguous())
    return kv
