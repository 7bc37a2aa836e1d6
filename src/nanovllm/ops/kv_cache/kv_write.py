"""`kv_write`: the keys and values of a step's tokens into their pages."""

import torch

from nanovllm.ops.backends import installed
from nanovllm.types import Float, Int32, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define("kv_write(Tensor(a!) pages, SymInt layer, Tensor k, Tensor v, Tensor slots) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


def kv_write(
    pages: Float[Tensor, "L N 2 K S D"],
    layer: int,
    k: Float[Tensor, "T K D"],
    v: Float[Tensor, "T K D"],
    slots: Int32[Tensor, "T"],
) -> None:
    """Write token t's key and value heads into slot `slots[t]` of one layer; `pages` changes in place.

    A slot is `page * page_size + offset`. Slots of real tokens are distinct; padding goes to the dummy page, where the last of
    several writers is unspecified. k and v may be views of a fused projection. A slot outside the pool raises `IndexError` on a CPU
    and is undefined on a GPU. One launch on a GPU: FlashInfer's append wants a page and an offset, which is two more.
    """
    torch.ops.nanovllm.kv_write.default(pages, layer, k, v, slots)


@torch.library.register_fake("nanovllm::kv_write", lib=_LIBRARY)
def _fake(pages: Tensor, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    return None


def _reference(pages: Tensor, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
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
