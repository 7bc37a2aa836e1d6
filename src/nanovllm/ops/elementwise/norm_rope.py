"""Norm, rotary embedding, activations and soft caps in plain torch. Models use them, and fused ops are tested against them.

Shape suffixes: T tokens · M the last axis · X any heads · D head_dim.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from nanovllm.types import Float, Float32, Tensor

ACTS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "gelu": F.gelu}


def rms_norm(x: Float[Tensor, "*rows M"], gain: Float[Tensor, "..."], eps: float) -> Float[Tensor, "*rows M"]:
    """Compute the root-mean-square norm over the last axis (Zhang & Sennrich, 2019), with statistics in float32 or wider.

    `gain` is the norm weight, which broadcasts over `x`. If it has the dtype of `x`, the norm is rounded before the product. If it is
    wider, only the product is rounded.
    """
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, x.shape[-1:], None, eps) * gain
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    # The casts are at the places where the reference implementations round: large norm weights would amplify a difference.
    return gain * wide.to(x.dtype) if gain.dtype == x.dtype else (gain * wide).to(x.dtype)


def apply_rope(x_TXD: Float[Tensor, "T X D"], cos: Float32[Tensor, "T 1 D"], sin: Float32[Tensor, "T 1 D"]) -> Float[Tensor, "T X D"]:
    """Rotate channels i and i + D/2 together, in float32 or wider, and round once."""
    wide = x_TXD.to(torch.promote_types(x_TXD.dtype, torch.float32))
    return torch.addcmul(wide * cos, wide.roll(x_TXD.shape[-1] // 2, -1), sin).to(x_TXD.dtype)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Compute `cap * tanh(logits / cap)` in float32 or wider and round once; 0.0 returns the logits unchanged."""
    if not cap:
        return logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return ((wide / cap).tanh() * cap).to(logits.dtype)
