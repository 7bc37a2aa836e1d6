"""Norm, rotation, activations and soft caps in plain torch: what the models compute with, and what the fused ops are references of.

Legend of shape suffixes: T tokens · M the last axis · X any heads · D head_dim.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from nanovllm.types import Float, Float32, Tensor

ACTS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "gelu": F.gelu}


def rms_norm(x: Float[Tensor, "*rows M"], gain: Float[Tensor, "..."], eps: float) -> Float[Tensor, "*rows M"]:
    """Root-mean-square norm over the last axis (Zhang & Sennrich, 2019), its statistics in float32 or wider; `gain` broadcasts over `x`.

    The norm is rounded to x's dtype and then multiplied by a gain of that dtype; a wider gain is multiplied before the norm is rounded.
    """
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, x.shape[-1:], None, eps) * gain
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    # The casts stand where the reference implementations round: large gains amplify a difference.
    return gain * wide.to(x.dtype) if gain.dtype == x.dtype else (gain * wide).to(x.dtype)


def apply_rope(x_TXD: Float[Tensor, "T X D"], cos: Float32[Tensor, "T 1 D"], sin: Float32[Tensor, "T 1 D"]) -> Float[Tensor, "T X D"]:
    """Rotate channel i with channel i + D/2, in float32 or wider, and round once."""
    wide = x_TXD.to(torch.promote_types(x_TXD.dtype, torch.float32))
    return torch.addcmul(wide * cos, wide.roll(x_TXD.shape[-1] // 2, -1), sin).to(x_TXD.dtype)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """`cap * tanh(logits / cap)`, in float32 or wider and rounded once; 0.0: the logits as they are."""
    if not cap:
        return logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return ((wide / cap).tanh() * cap).to(logits.dtype)
