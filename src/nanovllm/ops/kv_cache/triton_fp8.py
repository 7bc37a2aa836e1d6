"""Functions of Triton kernels over pages in FP8, whose layout `ops/kv_cache/fp8.py` describes.

Import this module only if Triton is installed.
"""

import triton
import triton.language as tl

from nanovllm.ops.kv_cache import fp8

SCALE_BYTES = tl.constexpr(fp8.SCALE_BYTES)
LARGEST, PER_LARGEST = tl.constexpr(fp8.LARGEST), tl.constexpr(fp8.PER_LARGEST)
LEAST, MOST = tl.constexpr(fp8.LEAST), tl.constexpr(fp8.MOST)


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
    wide: tl.constexpr = tl.bfloat16 if dtype == tl.float16 else dtype  # pyright: ignore[reportAssignmentType]
    return tl.dot((weights * value_scales[None, :]).to(wide), values.to(wide), mixed, input_precision=PRECISION)
