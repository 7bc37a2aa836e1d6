"""Functions that several Triton kernels share: rounding, activations, norm weights, score scales and soft caps."""

import triton
import triton.language as tl

from nanovllm.ops.kv_cache import fp8

LOG2E = 1.4426950408889634
SCALE_BYTES = tl.constexpr(fp8.SCALE_BYTES)
LARGEST, PER_LARGEST = tl.constexpr(fp8.LARGEST), tl.constexpr(fp8.PER_LARGEST)
LEAST, MOST = tl.constexpr(fp8.LEAST), tl.constexpr(fp8.MOST)


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


@triton.jit
def quantised_heads(x):
    """Return the codes and the scale of each row of heads, as `quantised` of `ops/kv_cache/fp8.py` computes them."""
    wide = x.to(tl.float32)
    wide = tl.where(wide == wide, wide, 0.0)  # NaN  # noqa: PLR0124
    wide = tl.minimum(tl.maximum(wide, -MOST), MOST)
    scale = tl.maximum(tl.max(tl.abs(wide), 1) * PER_LARGEST, LEAST)
    codes = tl.div_rn(wide, tl.broadcast_to(scale[:, None], wide.shape))
    return tl.minimum(tl.maximum(codes, -LARGEST), LARGEST).to(tl.float8e4nv), scale


@triton.jit
def slot_of_head(k, s, S: tl.constexpr, D: tl.constexpr, FP8: tl.constexpr):
    """Return where the numbers of head k begin, in slot s of a page: elements from the beginning of the page."""
    return k * (S * (D + SCALE_BYTES)) + s * D if FP8 else (k * S + s) * D


@triton.jit
def scales_of(pages, k, s, S: tl.constexpr, D: tl.constexpr):
    """Return pointers to the scales of head k in slots s of FP8 pages, given pointers to the beginnings of the pages."""
    at = pages + (k * (S * (D + SCALE_BYTES)) + S * D + s * SCALE_BYTES)
    return at.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def scores_of(q, keys, key_scales, FP8: tl.constexpr, PRECISION: tl.constexpr):
    """Return the products of queries and keys. Codes of FP8 are exact in the dtype of the queries; their scales come after the product."""
    if not FP8:
        return tl.dot(q, tl.trans(keys), input_precision=PRECISION)
    return tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision=PRECISION) * key_scales[None, :]


@triton.jit
def mixed_with(mixed, weights, values, value_scales, dtype: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr):
    """Return `mixed` plus the values by their weights. In FP8 the scales are in the weights, which float16 has no range for."""
    if not FP8:
        return tl.dot(weights.to(values.dtype), values, mixed, input_precision=PRECISION)
    wide: tl.constexpr = tl.bfloat16 if dtype == tl.float16 else dtype
    return tl.dot((weights * value_scales[None, :]).to(wide), values.to(wide), mixed, input_precision=PRECISION)
