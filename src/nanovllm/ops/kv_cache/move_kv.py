"""`move_kv`: copy the KV of tokens to other slots, with keys rotated for other positions."""

import torch

from nanovllm.ops.backends import installed
from nanovllm.ops.kv_cache.fp8 import FP8, in_fp8, quantised, read_tokens, write_tokens
from nanovllm.types import Float, Float32, Int32, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define(
    "move_kv(Tensor(a!) pages, Tensor src, Tensor dst, Tensor shift, Tensor inv_freq) -> ()", tags=(torch.Tag.pt2_compliant_tag,)
)


def move_kv(
    pages: Float[Tensor, "L N 2 K S W"],
    src: Int32[Tensor, "T"],
    dst: Int32[Tensor, "T"],
    shift: Int32[Tensor, "T"],
    inv_freq: Float32[Tensor, "half"],
) -> None:
    """Donates `pages`, which changes in place: copy keys and values from slot `src[t]` to slot `dst[t]` and move keys by `shift[t]`.

    The op copies all layers. Rotating a key of position p by d more positions gives the key of position p + d (Su et al., 2021). The
    rotation is computed in float32 and rounded once. A shift of 0 copies the bits. A rotated key in FP8 gets a new scale.

    Schema: `nanovllm::move_kv(Tensor(a!) pages, Tensor src, Tensor dst, Tensor shift, Tensor inv_freq) -> ()`.
    The reference is a loop over layers in plain torch. On a GPU one kernel moves every byte once.

    Args:
        pages: One KV pool, `[L, N, 2, K, S, D]`, or in FP8 with the layout of `ops/kv_cache/fp8.py`.
        src: Slots to read, int32 `[T]`; a slot is `page * page_size + offset`.
        dst: Slots to write, int32 `[T]`. They are distinct, and none of them is in `src`.
        shift: By how many positions each key moves, int32 `[T]`. It may be negative.
        inv_freq: Rotation speeds, float32 `[D/2]`, in radians per position. Keys already include a magnitude factor such as YaRN's.

    Raises:
        IndexError: A slot is outside the pool. Checked on a CPU only: on a GPU the result is undefined.

    Examples:
        >>> from nanovllm.ops import move_kv
        >>> pages = torch.zeros(1, 2, 2, 1, 1, 2)
        >>> pages[0, 0, :, 0, 0] = torch.tensor([[1.0, 0.0], [5.0, 6.0]])  # a key and a value in slot 0
        >>> src, dst, shift = torch.tensor([[0], [1], [1]], dtype=torch.int32)
        >>> move_kv(pages, src, dst, shift, torch.tensor([torch.pi / 2]))  # a quarter turn per position
        >>> pages[0, 1, :, 0, 0].round().abs().tolist()
        [[0.0, 1.0], [5.0, 6.0]]
    """
    torch.ops.nanovllm.move_kv.default(pages, src, dst, shift, inv_freq)


@torch.library.register_fake("nanovllm::move_kv", lib=_LIBRARY)
def _fake(pages: Tensor, src: Tensor, dst: Tensor, shift: Tensor, inv_freq: Tensor) -> None:
    return None


def _reference(pages: Tensor, src: Tensor, dst: Tensor, shift: Tensor, inv_freq: Tensor) -> None:
    page_size = pages.shape[4]
    angles = shift.to(torch.float32)[:, None, None] * inv_freq  # T 1 D/2
    cos, sin = angles.cos(), angles.sin()
    kept = (shift == 0)[:, None, None]
    for layer in pages:
        if in_fp8(pages):
            codes, scales = read_tokens(layer, src)
            turned, scale = quantised(_rotated(codes[:, 0].to(torch.float32) * scales[:, 0], cos, sin))
            as_bytes = codes.view(torch.uint8)
            as_bytes[:, 0] = torch.where(kept, as_bytes[:, 0], turned.view(torch.uint8))
            scales[:, 0] = torch.where(kept, scales[:, 0], scale)
            write_tokens(layer, as_bytes.view(FP8), scales, dst)
            continue
        by_slot = layer.permute(0, 3, 1, 2, 4)  # N S 2 K D
        kv = by_slot[src // page_size, src % page_size]  # T 2 K D
        keys = kv[:, 0].to(torch.promote_types(kv.dtype, torch.float32))
        kv[:, 0] = torch.where(kept, kv[:, 0], _rotated(keys, cos, sin).to(kv.dtype))
        by_slot[dst // page_size, dst % page_size] = kv


def _rotated(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = keys[..., : cos.shape[-1]], keys[..., cos.shape[-1] :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _cuda(pages: Tensor, src: Tensor, dst: Tensor, shift: Tensor, inv_freq: Tensor) -> None:
    if not installed("triton"):
        return _reference(pages, src, dst, shift, inv_freq)
    from nanovllm.ops.kv_cache import triton_kv

    return triton_kv.move_kv(pages, src, dst, shift, inv_freq)


_LIBRARY.impl("move_kv", _reference, "CPU")
_LIBRARY.impl("move_kv", _cuda, "CUDA")
