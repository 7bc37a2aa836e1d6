"""`gather_pages` and `scatter_pages`: whole pages of all layers, each as one contiguous block (an *image*), and back into a pool.

A page of a pool is one piece per layer. Copies between the device and host memory are fast only for large pieces, so they copy images.
"""

import torch

from nanovllm.ops.backends import installed
from nanovllm.ops.kv_cache.fp8 import as_bytes
from nanovllm.types import Float, Int32, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define("gather_pages(Tensor pages, Tensor ids, Tensor(a!) images) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define("scatter_pages(Tensor(a!) pages, Tensor ids, Tensor images) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


def gather_pages(pages: Float[Tensor, "L N 2 K S W"], ids: Int32[Tensor, "n"], images: Float[Tensor, "n L 2 K S W"]) -> None:
    """Donates `images`, which changes in place: image i becomes page `ids[i]` of all layers.

    Schema: `nanovllm::gather_pages(Tensor pages, Tensor ids, Tensor(a!) images) -> ()`.
    Reference: `images[:] = pages[:, ids].transpose(0, 1)`, in any floating-point dtype; pages in FP8 are copied with their scales.

    Args:
        pages: One KV pool, `[L, N, 2, K, S, D]`.
        ids: Page numbers, int32 `[n]`.
        images: Where the images are written, `[n, L, 2, K, S, D]`, contiguous.

    Raises:
        IndexError: A page number is outside the pool. Checked on a CPU only: on a GPU the result is undefined.
    """
    torch.ops.nanovllm.gather_pages.default(pages, ids, images)


def scatter_pages(pages: Float[Tensor, "L N 2 K S W"], ids: Int32[Tensor, "n"], images: Float[Tensor, "n L 2 K S W"]) -> None:
    """Donates `pages`, which changes in place: page `ids[i]` of all layers becomes image i.

    Schema: `nanovllm::scatter_pages(Tensor(a!) pages, Tensor ids, Tensor images) -> ()`.
    Reference: `pages[:, ids] = images.transpose(0, 1)`, in any floating-point dtype; pages in FP8 are copied with their scales.

    Args:
        pages: One KV pool, `[L, N, 2, K, S, D]`.
        ids: Page numbers, int32 `[n]`. They are distinct.
        images: The images, `[n, L, 2, K, S, D]`, contiguous.

    Raises:
        IndexError: A page number is outside the pool. Checked on a CPU only: on a GPU the result is undefined.
    """
    torch.ops.nanovllm.scatter_pages.default(pages, ids, images)


@torch.library.register_fake("nanovllm::gather_pages", lib=_LIBRARY)
def _gather_fake(pages: Tensor, ids: Tensor, images: Tensor) -> None:
    return None


@torch.library.register_fake("nanovllm::scatter_pages", lib=_LIBRARY)
def _scatter_fake(pages: Tensor, ids: Tensor, images: Tensor) -> None:
    return None


def _gather(pages: Tensor, ids: Tensor, images: Tensor) -> None:
    as_bytes(images)[:] = as_bytes(pages)[:, ids].transpose(0, 1)


def _scatter(pages: Tensor, ids: Tensor, images: Tensor) -> None:
    as_bytes(pages)[:, ids] = as_bytes(images).transpose(0, 1)


def _gather_cuda(pages: Tensor, ids: Tensor, images: Tensor) -> None:
    if not installed("triton"):
        return _gather(pages, ids, images)
    from nanovllm.ops.kv_cache import triton_kv

    return triton_kv.move_images(as_bytes(pages), ids, as_bytes(images), gathered=True)


def _scatter_cuda(pages: Tensor, ids: Tensor, images: Tensor) -> None:
    if not installed("triton"):
        return _scatter(pages, ids, images)
    from nanovllm.ops.kv_cache import triton_kv

    return triton_kv.move_images(as_bytes(pages), ids, as_bytes(images), gathered=False)


_LIBRARY.impl("gather_pages", _gather, "CPU")
_LIBRARY.impl("scatter_pages", _scatter, "CPU")
_LIBRARY.impl("gather_pages", _gather_cuda, "CUDA")
_LIBRARY.impl("scatter_pages", _scatter_cuda, "CUDA")
