"""What several Triton kernels share: options of launches, rounding, activations, norm weights, score scales and soft caps."""

from typing import Any

import triton
import triton.language as tl

LOG2E = 1.4426950408889634


def launch_options(warps: int, pdl: bool) -> dict[str, Any]:
    """Return the options of a launch with this number of warps; with `pdl`, it may begin before the kernel before it has ended."""
    return {"num_warps": warps} | ({"launch_pdl": True} if pdl else {})


def score_scales(scale: float, softcap: float) -> tuple[float, float]:
    """Return `scale` and `SOFTCAP` for kernels. Scores in base 2 are `scale * q.k`; with a cap they are `SOFTCAP * tanh(scale * q.k)`."""
    return (scale / softcap, softcap * LOG2E) if softcap else (scale * LOG2E, 0.0)


@triton.jit
def soft_capped(scores, scale, SOFTCAP: tl.constexpr):
    """Compute `SOFTCAP * tanh(scale * scores)`. The result is finite even if the exponential is 0 or infinite."""
    return SOFTCAP - 2.0 * SOFTCAP / (1.0 + tl.exp2(scores * (scale * 2.8853900817779268)))


@triton.jit
def rounded(acc, bias, residual, dtype: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr):
    """Add the bias and round as the plain product does, then add the residual and round again."""
    if BIAS:
        acc += bias.to(tl.float32)
    acc = acc.to(dtype)
    if RESIDUAL:
        acc = (acc.to(tl.float32) + residual.to(tl.float32)).to(dtype)
    return acc


@triton.jit
def activated(gate, up, dtype: tl.constexpr, ACT: tl.constexpr):
    """Compute `act(gate) * up`, rounded where the plain functions round, except for the final rounding."""
    gate = gate.to(dtype).to(tl.float32)
    if ACT == "silu":
        on = gate * tl.sigmoid(gate)
    elif ACT == "gelu_tanh":  # (1 + tanh(u)) / 2 is sigmoid(2 u)
        on = gate * tl.sigmoid(1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate))
    else:
        on = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    return on.to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit
def gained(normed, gains, dtype: tl.constexpr):
    """Multiply a float32 norm by its weights, as `rms_norm` does.

    The norm is rounded before the product if the weights have the model's dtype. Else only the product is rounded.
    """
    return normed.to(dtype) * gains if gains.dtype == dtype else (normed * gains).to(dtype)
