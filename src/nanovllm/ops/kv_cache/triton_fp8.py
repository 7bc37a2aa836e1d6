"""Functions of Triton kernels over pages in FP8, whose layout `ops/kv_cache/fp8.py` describes.

Kernels of decode steps read two codes at once, as one number of 16 bits. Such numbers come from shared memory in the layout of tensor
cores, which single bytes do not. In registers they become two tensors of float16: the channels with an even number, and those with an odd
one. A product with queries is then the sum of two products, and a sum of values is two sums.

Import this module only if Triton is installed.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (assembly kept as `tl.constexpr`, and functions that return several tensors)

import triton
import triton.language as tl

from nanovllm.ops.kv_cache import fp8
from nanovllm.types import Tensor

SCALE_BYTES = tl.constexpr(fp8.SCALE_BYTES)
LARGEST, PER_LARGEST = tl.constexpr(fp8.LARGEST), tl.constexpr(fp8.PER_LARGEST)
LEAST, MOST = tl.constexpr(fp8.LEAST), tl.constexpr(fp8.MOST)
# A register has two pairs of codes. The lower codes of both become neighbours, and so do the upper ones. The GPU converts neighbours at
# once (compute capability 8.9 or more).
CODES = tl.constexpr("""{
    .reg .b32 apart;
    .reg .b16 lower, upper;
    prmt.b32 apart, $2, 0, 0x3120;
    mov.b32 {lower, upper}, apart;
    cvt.rn.f16x2.e4m3x2 $0, lower;
    cvt.rn.f16x2.e4m3x2 $1, upper;
}""")
# The exponent of e4m3 has 4 bits, and that of float16 has 5, with a bias larger by 8. So a code in the bits of float16 is the code / 256.
PER_CODE = tl.constexpr(256.0)


def on_gpu(x: Tensor) -> bool:
    """Return whether kernels over a tensor may have PTX in them: `ASM` of `codes_of`."""
    return x.is_cuda


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


@triton.jit
def parted(x, M: tl.constexpr, D: tl.constexpr):
    """Return the even and the odd channels of rows `[M, D]`."""
    return tl.split(tl.reshape(x, [M, D // 2, 2]))


@triton.jit
def whole(even, odd, M: tl.constexpr, D: tl.constexpr):
    """Return rows `[M, D]` from their even and odd channels."""
    return tl.reshape(tl.join(even, odd), [M, D])


@triton.jit
def narrow_queries(q, M: tl.constexpr, D: tl.constexpr):
    """Return the even and odd channels of queries in float16, divided by their largest magnitude, and the factor of their scores."""
    wide = q.to(tl.float32)
    top = tl.maximum(tl.max(tl.abs(wide), 1), LEAST)
    even, odd = parted((wide / top[:, None]).to(tl.float16), M, D)
    return even, odd, top


@triton.jit
def as_pairs(pages):
    """Return a pointer to codes as a pointer to pairs of codes."""
    return pages.to(tl.pointer_type(tl.uint16), bitcast=True)


@triton.jit
def codes_of(pairs, ASM: tl.constexpr):
    """Return the lower and the upper codes of pairs in float16, which has all of them exactly.

    `ASM` selects PTX; without it the same numbers are computed by plain operations, which Triton's interpreter can run.
    """
    if ASM:
        lower, upper = tl.inline_asm_elementwise(
            CODES, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )  # fmt: skip
    else:
        lower = (((pairs & 0x80) << 8) | ((pairs & 0x7F) << 7)).to(tl.uint16).to(tl.float16, bitcast=True) * PER_CODE
        upper = ((pairs & 0x8000) | ((pairs & 0x7F00) >> 1)).to(tl.uint16).to(tl.float16, bitcast=True) * PER_CODE
    return lower.to(tl.float16), upper.to(tl.float16)


@triton.jit
def scores_of_pairs(even, odd, factor, keys, key_scales, ASM: tl.constexpr):
    """Return the products of queries, as `narrow_queries` returns them, and keys, which are pairs of codes."""
    lower, upper = codes_of(keys, ASM)
    return tl.dot(odd, tl.trans(upper), tl.dot(even, tl.trans(lower))) * key_scales[None, :] * factor[:, None]


@triton.jit
def mixed_with_pairs(even, odd, weights, values, value_scales, ASM: tl.constexpr):
    """Return the even and odd channels of a sum plus the values, which are pairs of codes, by their weights.

    The weights times the scales are in float16 relative to the tile's largest scale, so that their range does not matter.
    """
    top = tl.maximum(tl.max(value_scales, 0), LEAST)
    narrow = (weights * (value_scales / top)[None, :]).to(tl.float16)
    lower, upper = codes_of(values, ASM)
    return even + tl.dot(narrow, lower) * top, odd + tl.dot(narrow, upper) * top
