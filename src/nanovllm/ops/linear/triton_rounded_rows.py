"""The Triton kernel that rounds activations to FP8, with a scale per row, in the order of paired codes. It needs Triton."""

from typing import Any, cast

import torch
import triton
import triton.language as tl

from nanovllm.ops.linear.code_layouts import BLOCK, HALF
from nanovllm.ops.triton_parts import launch_options
from nanovllm.types import Float, Float32, Tensor

LARGEST = tl.constexpr(448.0)  # of float8_e4m3fn
SPAN, MIDDLE = tl.constexpr(BLOCK), tl.constexpr(HALF)


@triton.jit
def _round_rows(x, codes, scales, K, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """Program `row` rounds a row of K numbers to `WIDTH` codes, of which those beyond the numbers are 0."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WHOLE)
    column = place // SPAN * SPAN + place % 2 * MIDDLE + place % SPAN // 2  # a pair holds columns j and j + 64
    numbers = tl.load(x + row * K + column, mask=(place < WIDTH) & (column < K), other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(numbers), 0)
    scale = tl.where(largest > 0, tl.div_rn(largest, LARGEST), 1.0)
    rounded = tl.div_rn(numbers, tl.zeros_like(numbers) + scale)
    rounded = tl.clamp(rounded, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)  # a NaN stays one, as in torch
    tl.store(codes + row * WIDTH + place, rounded.to(tl.float8e4nv), mask=place < WIDTH)
    tl.store(scales + row, scale)


def rounded_rows(x: Float[Tensor, "T K"]) -> tuple[Float[Tensor, "T W"], Float32[Tensor, "T 1"]]:
    """Round each row of contiguous activations to FP8, by its largest magnitude.

    Returns:
        The codes, float8_e4m3fn, in the order in which the codes of a paired matrix lie in memory, filled with zeros to whole blocks of
        128; and the scale of each row.
    """
    rows, columns = x.shape
    width = -(-columns // BLOCK) * BLOCK
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    whole = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):
        cast(Any, _round_rows)[(rows,)](x, codes, scales, columns, width, whole, **launch_options(4 if whole <= 4096 else 8, False))
    return codes, scales
