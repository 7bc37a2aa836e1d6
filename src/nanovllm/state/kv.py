"""`KVState`: the key/value memory of all layers, and the arithmetic of pages and slots."""

from dataclasses import dataclass

import torch

from ..config import ModelConfig
from ..types import Float, Tensor, register_value


@dataclass(frozen=True, slots=True, kw_only=True)
class KVState:
    """Donated. `pools`: one tensor `[L, N, 2, K, S, D]` (HND; axis 2 is keys, values) for each group of layers that shares a window.

    A pool holds one page more than `num_pages`: the last, the dummy page, takes the writes of padding and of tokens that are run again.
    """

    pools: tuple[Float[Tensor, "L N 2 K S D"], ...]


register_value(KVState)


def init_kv(config: ModelConfig, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> KVState:
    """Zeroed KV memory of `num_pages` pages and the dummy page: a masked read of a slot never written is then never NaN."""
    shape = (config.num_layers, num_pages + 1, 2, config.num_kv_heads, page_size, config.head_dim)
    return KVState(pools=(torch.zeros(shape, dtype=dtype, device=device),))


def bytes_per_page(config: ModelConfig, *, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    return config.num_layers * 2 * config.num_kv_heads * page_size * config.head_dim * dtype.itemsize


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)
