"""What Triton kernels of several files share: rounding, activations, norm weights, score scales and soft caps."""

import triton
import triton.language as tl

LOG2E = 1.4426950408889634


def score_scales(scale: float, softcap: float) -> tuple[float, float]:
    """`scale` and `SOFTCAP` as kernels take them: scores in base 2 are `scale * q.k`, with a cap `SOFTCAP * tanh(scale * q.k)`."""
    return (scale / softcap, softcap * LOG2E) if softcap else (scale * LOG2E, 0.0)


@triton.jit
def soft_capped(scores, scale, SOFTCAP: tl.constexpr):
    """`SOFTCAP * tanh(scale * scores)`; the exponential may be 0 or infinite, the result is neither then."""
    return SOFTCAP - 2.0 * SOFTCAP / (1.0 + tl.exp2(scores * (scale * 2.8853900817779268)))


@triton.jit
def rounded(acc, bias, residual, dtype: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr):
    """Round as the plain product does, before the residual is added."""
    if BIAS:
        acc += bias.to(tl.float32)
    acc = acc.to(dtype)
    if RESIDUAL:
        acc = (acc.to(tl.float32) + residual.to(tl.float32)).to(dtype)
    return acc


@triton.jit
def activated(gate, up, dtype: tl.constexpr, ACT: tl.constexpr):
    """`act(gate) * up`, rounded where the plain functions round, but at the end."""
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
    """A float32 norm times its gain: rounded before, where the gain has the model's dtype, and else behind it alone (`plain.rms_norm`)."""
    return normed.to(dtype) * gains if gains.dtype == dtype else (normed * gains).to(dtype)
