"""`copy_pages`: copy whole pages within a pool, so that two owners of a partial page do not write into the same memory."""

import torch

from nanovllm.ops.backends import installed
from nanovllm.ops.kv_cache.fp8 import as_bytes
from nanovllm.types import Float, Int32, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define("copy_pages(Tensor(a!) pages, Tensor src, Tensor dst) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


def copy_pages(pages: Float[Tensor, "L N 2 K S W"], src: Int32[Tensor, "n"], dst: Int32[Tensor, "n"]) -> None:
    """Donates `pages`, which changes in place: copy page `src[i]` to page `dst[i]` in every layer.

    Schema: `nanovllm::copy_pages(Tensor(a!) pages, Tensor src, Tensor dst) -> ()`.
    Reference: `pages[:, dst] = pages[:, src]`, in any floating-point dtype; pages in FP8 are copied with their scales.

    Args:
        pages: One KV pool, `[L, N, 2, K, S, D]`.
        src: Page numbers to read, int32 `[n]`.
        dst: Page numbers to write, int32 `[n]`. They are distinct, and none of them is in `src`.

    Raises:
        IndexError: A page number is outside the pool. Checked on a CPU only: on a GPU the result is undefined.

    Examples:
        >>> from nanovllm.ops import copy_pages
        >>> pages = torch.zeros(1, 3, 2, 1, 2, 2)
        >>> pages[:, 0] = 7
        >>> copy_pages(pages, torch.tensor([0], dtype=torch.int32), torch.tensor([2], dtype=torch.int32))
        >>> pages[0, :, 0, 0, 0, 0].tolist()
        [7.0, 0.0, 7.0]
    """
    torch.ops.nanovllm.copy_pages.default(pages, src, dst)


@torch.library.register_fake("nanovllm::copy_pages", lib=_LIBRARY)
def _fake(pages: Tensor, src: Tensor, dst: Tensor) -> None:
    return None


def _reference(pages: Tensor, src: Tensor, dst: Tensor) -> None:
    pages = as_bytes(pages)
    pages[:, dst] = pages[:, src]


def _cuda(pages: Tensor, src: Tensor, dst: Tensor) -> None:
    if not installed("triton"):
        return _reference(pages, src, dst)
    from nanovllm.ops.kv_cache import triton_kv

    return triton_kv.copy_pages(as_bytes(pages), src, dst)


_LIBRARY.impl("copy_pages", _reference, "CPU")
_LIBRARY.impl("copy_pages", _cuda, "CUDA")
