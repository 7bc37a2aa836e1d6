"""`copy_pages`: whole pages within a pool, for a partial page that two owners would otherwise write."""

import torch

from nanovllm.ops.backends import installed
from nanovllm.types import Float, Int32, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define("copy_pages(Tensor(a!) pages, Tensor src, Tensor dst) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


def copy_pages(pages: Float[Tensor, "L N 2 K S D"], src: Int32[Tensor, "n"], dst: Int32[Tensor, "n"]) -> None:
    """Copy page `src[i]` to page `dst[i]` in every layer; `pages` changes in place.

    The destinations are distinct and none is a source. A page outside the pool raises `IndexError` on a CPU and is undefined on a GPU.
    """
    torch.ops.nanovllm.copy_pages.default(pages, src, dst)


@torch.library.register_fake("nanovllm::copy_pages", lib=_LIBRARY)
def _fake(pages: Tensor, src: Tensor, dst: Tensor) -> None:
    return None


def _reference(pages: Tensor, src: Tensor, dst: Tensor) -> None:
    pages[:, dst] = pages[:, src]


def _cuda(pages: Tensor, src: Tensor, dst: Tensor) -> None:
    if not installed("triton"):
        return _reference(pages, src, dst)
    from nanovllm.ops.kv_cache import triton_kv

    return triton_kv.copy_pages(pages, src, dst)


_LIBRARY.impl("copy_pages", _reference, "CPU")
_LIBRARY.impl("copy_pages", _cuda, "CUDA")
