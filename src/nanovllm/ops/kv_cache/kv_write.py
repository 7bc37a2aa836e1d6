"""`kv_write`: write the keys and values of a step's tokens into their pages."""

import torch

from nanovllm.ops.backends import installed
from nanovllm.ops.kv_cache.fp8 import in_fp8, quantised, write_tokens
from nanovllm.types import Float, Int32, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define("kv_write(Tensor(a!) pages, SymInt layer, Tensor k, Tensor v, Tensor slots) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


def kv_write(
    pages: Float[Tensor, "L N 2 K S W"],
    layer: int,
    k: Float[Tensor, "T K D"],
    v: Float[Tensor, "T K D"],
    slots: Int32[Tensor, "T"],
) -> None:
    """Donates `pages`, which changes in place: write the key and value heads of token t into slot `slots[t]` of one layer.

    Schema: `nanovllm::kv_write(Tensor(a!) pages, SymInt layer, Tensor k, Tensor v, Tensor slots) -> ()`.
    The reference is an indexed assignment in plain torch. A GPU needs one launch. FlashInfer's own append takes pages and offsets
    instead of slots, which would cost two more launches to compute.

    Args:
        pages: One KV pool, `[L, N, 2, K, S, D]`, in the dtype of `k` and `v`; or in FP8 with the layout of `ops/kv_cache/fp8.py`: then
            each head is rounded to codes with a scale of its own.
        layer: The layer's index in this pool.
        k: Keys, `[T, K, D]`. `k` and `v` may be views of a fused projection's output.
        v: Values, `[T, K, D]`.
        slots: The slot of each token, int32 `[T]`; a slot is `page * page_size + offset`. Slots of real tokens are distinct. Padding
            tokens may share a slot of the dummy page, and which of them is written last is unspecified.

    Raises:
        IndexError: A slot is outside the pool. Checked on a CPU only: on a GPU the result is undefined.

    Examples:
        >>> from nanovllm.ops import kv_write
        >>> pages, one = torch.zeros(1, 2, 2, 1, 4, 2), torch.ones(1, 1, 2)
        >>> kv_write(pages, 0, one, 2 * one, torch.tensor([5], dtype=torch.int32))  # page 1, offset 1
        >>> pages[0, 1, :, 0, 1].tolist()
        [[1.0, 1.0], [2.0, 2.0]]
    """
    torch.ops.nanovllm.kv_write.default(pages, layer, k, v, slots)


@torch.library.register_fake("nanovllm::kv_write", lib=_LIBRARY)
def _fake(pages: Tensor, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    return None


def _reference(pages: Tensor, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    if in_fp8(pages):
        return write_tokens(pages[layer], *quantised(torch.stack((k, v), 1)), slots)
    page_size = pages.shape[4]
    by_slot = pages[layer].permute(0, 3, 1, 2, 4)  # N S 2 K D
    by_slot[slots // page_size, slots % page_size] = torch.stack((k, v), 1)


def _cuda(pages: Tensor, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    if not installed("triton"):
        return _reference(pages, layer, k, v, slots)
    from nanovllm.ops.kv_cache import triton_kv

    return triton_kv.kv_write(pages[layer], k, v, slots)


_LIBRARY.impl("kv_write", _reference, "CPU")
_LIBRARY.impl("kv_write", _cuda, "CUDA")
