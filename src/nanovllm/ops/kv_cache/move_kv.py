"""`move_kv`: the KV of tokens copied to other slots, their keys turned for other positions."""

import torch

from nanovllm.ops.backends import installed
from nanovllm.types import Float, Float32, Int32, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define(
    "move_kv(Tensor(a!) pages, Tensor src, Tensor dst, Tensor shift, Tensor inv_freq) -> ()", tags=(torch.Tag.pt2_compliant_tag,)
)


def move_kv(
    pages: Float[Tensor, "L N 2 K S D"],
    src: Int32[Tensor, "T"],
    dst: Int32[Tensor, "T"],
    shift: Int32[Tensor, "T"],
    inv_freq: Float32[Tensor, "half"],
) -> None:
    """Copy token t's keys and values, all layers, from slot `src[t]` to slot `dst[t]`, the keys as if `shift[t]` positions later.

    A rotary key of position p becomes that of p + d by one more rotation of d (Su et al., 2021), computed in float32 and rounded once; a
    shift of 0 copies the bits. `inv_freq` `[D/2]` is in radians a position; a magnitude factor (YaRN's) is in the keys already.
    A slot is `page * page_size + offset`. No destination is a source; destinations are distinct. A slot outside the pool raises
    `IndexError` on a CPU and is undefined on a GPU, where the op moves every byte once.
    """
    torch.ops.nanovllm.move_kv.default(pages, src, dst, shift, inv_freq)


@torch.library.register_fake("nanovllm::move_kv", lib=_LIBRARY)
def _fake(pages: Tensor, src: Tensor, dst: Tensor, shift: Tensor, inv_freq: Tensor) -> None:
    return None


def _reference(pages: Tensor, src: Tensor, dst: Tensor, shift: Tensor, inv_freq: Tensor) -> None:
    page_size, half = pages.shape[4], inv_freq.shape[0]
    angles = shift.to(torch.float32)[:, None, None] * inv_freq  # T 1 D/2
    cos, sin = angles.cos(), angles.sin()
    kept = (shift == 0)[:, None, None]
    for layer in pages:
        by_slot = layer.permute(0, 3, 1, 2, 4)  # N S 2 K D
        kv = by_slot[src // page_size, src % page_size]  # T 2 K D
        keys = kv[:, 0].to(torch.promote_types(kv.dtype, torch.float32))
        low, high = keys[..., :half], keys[..., half:]
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(kv.dtype)
        kv[:, 0] = torch.where(kept, kv[:, 0], turned)
        by_slot[dst // page_size, dst % page_size] = kv


def _cuda(pages: Tensor, src: Tensor, dst: Tensor, shift: Tensor, inv_freq: Tensor) -> None:
    if not installed("triton"):
        return _reference(pages, src, dst, shift, inv_freq)
    from nanovllm.ops.kv_cache import triton_kv

    return triton_kv.move_kv(pages, src, dst, shift, inv_freq)


_LIBRARY.impl("move_kv", _reference, "CPU")
_LIBRARY.impl("move_kv", _cuda, "CUDA")
