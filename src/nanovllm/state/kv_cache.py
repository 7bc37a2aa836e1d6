"""`KVState`: the key/value memory of all layers, and the arithmetic of pages and slots."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from nanovllm import ops
from nanovllm.config import ModelConfig
from nanovllm.types import Float, Tensor, brief_fields, register_value


@dataclass(frozen=True, slots=True, kw_only=True)
class KVState:
    """Donated. `pools`: a tensor `[L, N, 2, K, S, D]` (HND; axis 2 is keys, values) for the layers without a window, by pages, then one for
    those with a window, by frames (`state/window_frames.py`); a group without layers has none (`ModelConfig.places`).

    A pool holds one page more than `num_pages`: the last, the dummy page, takes the writes of padding and of tokens that are run again.
    """

    pools: tuple[Float[Tensor, "_L _N 2 K S D"], ...]

    def __repr__(self) -> str:
        return brief_fields(self)


register_value(KVState)


def init_kv(
    config: ModelConfig, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device, num_frames: int | None = None
) -> KVState:
    """Zeroed KV memory of `num_pages` pages and the dummy page: a masked read of a slot never written is then never NaN.

    Layers with a window have `num_frames` and a dummy; None: a frame for each page, which has its number.
    """
    frames = num_pages if num_frames is None else num_frames
    counts = (frames,) if config.all_windowed else (num_pages, frames)

    def pool(layers: int, count: int) -> Tensor:
        shape = (layers, count + 1, 2, config.num_kv_heads, page_size, config.head_dim)
        return _lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)

    return KVState(pools=tuple(pool(*sizes) for sizes in zip(config.pool_sizes, counts, strict=False)))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU whose memory the system provides where it is first written: `torch.zeros` would touch every page of a large pool."""
    size = math.prod(shape) * dtype.itemsize
    try:
        raw = np.zeros(size + 64, np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: more than an address holds
        raise torch.OutOfMemoryError(str(error)) from error
    start = -raw.ctypes.data % 64  # a cache line, as torch's own allocator aligns
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)


def bytes_per_page(config: ModelConfig, *, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers, its frame included."""
    return config.num_layers * 2 * config.num_kv_heads * page_size * config.head_dim * dtype.itemsize


def bytes_by_group(config: ModelConfig, *, page_size: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of one page over the layers without a window, and of a frame over those with one."""
    a_layer = bytes_per_page(config, page_size=page_size, dtype=dtype) // config.num_layers
    windowed = sum(map(bool, config.windows))
    return (config.num_layers - windowed) * a_layer, windowed * a_layer


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


def copy_pages(kv: KVState, copies: tuple[tuple[int, int], ...], frame_copies: tuple[tuple[int, int], ...] = ()) -> KVState:
    """Donates `kv`. Copy whole pages, all layers, from the first to the second of each pair; `frame_copies` are these pages' frames."""
    if copies:
        of_pools = (copies,) * len(kv.pools) if not frame_copies else (copies, frame_copies)[-len(kv.pools) :]
        for pages, pairs in zip(kv.pools, of_pools, strict=True):
            source, target = torch.tensor(pairs, dtype=torch.int32).to(pages.device).unbind(1)
            ops.copy_pages(pages, source.contiguous(), target.contiguous())
    return kv
