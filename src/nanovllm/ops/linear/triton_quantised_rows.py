"""The Triton kernel of products of dozens to hundreds of rows with a quantised matrix. Import this module only if Triton is installed.

One program multiplies all rows by its outputs, so that each code is read and converted once. Codes are the left factor, in registers, and
the inputs the right one, in shared memory. A step is one product: the fields of its elements are put side by side in registers, in the
order of their columns. So there is one accumulator that nothing but products touches, and tensor cores multiply one step while the next one
is converted. For this a scale of a group is multiplied into the weights, which are then rounded as dequantised weights are.

A gate and its up projection are one tile, whose rows alternate by 8: a thread then has both numbers of an output.
"""

# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false
# (names bound in a compile-time branch, loop ranges without `__next__`, compile-time constants, and types of kernels' arguments)

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.linear.quantised_tiles import RowsTile
from nanovllm.ops.linear.triton_codes import fields_of, grouping, numbers, operands, results, span_of, unit_of
from nanovllm.ops.linear.triton_many_rows import ask
from nanovllm.ops.triton_parts import activated, launch_options, rounded
from nanovllm.types import Float, Tensor

LINE = 128  # bytes of a cache line of L2
MOST_ASKED = 512  # bytes of each output's codes that a program prefetches into L2 before it waits


@triton.jit
def _side_by_side(tiles, NIBBLES: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    """Put the fields `[BN, D]` of elements side by side: `[BN, fields * D]`. No number changes its thread."""
    if NIBBLES:
        both = tl.join(tl.join(tiles[0], tiles[2]), tl.join(tiles[1], tiles[3]))
        whole = tl.reshape(tl.permute(both, (0, 2, 3, 1)), (BN, 4 * D))
    else:
        whole = tl.reshape(tl.permute(tl.join(tiles[0], tiles[1]), (0, 2, 1)), (BN, 2 * D))
    return whole


@triton.jit
def _weights(
    elements, scale, zero, NIBBLES: tl.constexpr, FP8: tl.constexpr, GROUPED: tl.constexpr, ZEROS: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Convert elements of codes `[BN, D]` to weights `[BN, fields * D]`, times scales `[BN]` if `GROUPED`; `unit_of` is left out if not.

    With `ASM`, products in bfloat16 take less instructions than in float32. A scale of more bits is then two numbers, so that the weight is
    rounded once: of the smaller product only a small part is lost. Float16 has too few exponents for this.
    """
    whole = _side_by_side(numbers(elements, dtype, NIBBLES, FP8, ASM), NIBBLES, BN, D)
    UNIT: tl.constexpr = unit_of(dtype, NIBBLES, ASM)
    if ZEROS:
        whole -= (zero.to(tl.float32) * (1 / UNIT)).to(dtype)[:, None]
    if GROUPED:
        wide = scale.to(tl.float32) * UNIT
        if not ASM or dtype != tl.bfloat16:
            whole = (whole.to(tl.float32) * wide[:, None]).to(dtype)
        elif scale.dtype == dtype:
            whole *= wide.to(dtype)[:, None]
        else:
            first = wide.to(dtype)
            rest = (wide - first.to(tl.float32)).to(dtype)
            whole = tl.fma(whole, first[:, None], whole * rest[:, None])
    return whole


@triton.jit
def _stored(
    acc, y, scales, up_scales, biases, b, B, N, part, BN: tl.constexpr, BP: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store the products `[BN, BP]` of a tile for the rows `b`, scaled. Those of a gate and its up projection become half as many."""
    H: tl.constexpr = BN // 2 if GATED else BN
    n = tl.program_id(0) * H + tl.arange(0, H)
    there = (b < B)[None, :] & (n < N)[:, None]
    to = y + (part * B + b).to(tl.int64)[None, :] * N + n[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BN // 16, 2, 8, BP)), (0, 2, 3, 1)))
        gate, up = tl.reshape(gate, (H, BP)) * scales[:, None], tl.reshape(up, (H, BP)) * up_scales[:, None]
        acc = activated(gate, up, y.dtype.element_ty, ACT)
    else:
        acc *= scales[:, None]
    if PARTS > 1:
        tl.store(to, acc, mask=there)
    else:
        tl.store(to, rounded(acc, biases, acc, y.dtype.element_ty, BIAS, False), mask=there)


@triton.jit(do_not_specialize=["B"])  # the number of rows: one kernel for all
def _rows_product(
    x, codes, scales, zeros, bias, y, B, N, K: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, BP: tl.constexpr,
    TAIL: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr, NIBBLES: tl.constexpr, FP8: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (outputs, rows, part) computes BN outputs of BP + TAIL rows over PART elements of codes, D in a step.

    Partial sums are stored in float32. N counts the results of a row; a gated tile has BN / 2 of them, and as many gates. No step reaches
    beyond the codes, or over the end of a group.
    """
    if PDL:
        gdc_launch_dependents()
    dtype: tl.constexpr = x.dtype.element_ty
    SPAN: tl.constexpr = span_of(NIBBLES)
    GROUPED: tl.constexpr = GROUPS > 1
    UNIT: tl.constexpr = 1.0 if GROUPED else unit_of(dtype, NIBBLES, ASM)
    H: tl.constexpr = BN // 2 if GATED else BN
    i, d, c = tl.arange(0, BN), tl.arange(0, D), tl.arange(0, D * fields_of(NIBBLES))
    if GATED:
        row = tl.minimum(tl.program_id(0) * H + i // 16 * 8 + i % 8, N - 1) + i // 8 % 2 * N
    else:
        row = tl.minimum(tl.program_id(0) * BN + i, N - 1)  # what is read for outputs beyond the last is not stored
    part = tl.program_id(2)
    b = tl.program_id(1) * (BP + TAIL) + tl.arange(0, BP)
    own = codes + row.to(tl.int64)[:, None] * WIDTH + d[None, :]
    scale_row = row // ROWS
    columns = (c // D * SPAN + c % D)[:, None]  # a field is SPAN columns from the next one
    source, on = x + b.to(tl.int64)[None, :] * K + columns, (b < B)[None, :]
    b_tail = tl.program_id(1) * (BP + TAIL) + BP + tl.arange(0, TAIL if TAIL else 16)
    source_tail, on_tail = x + b_tail.to(tl.int64)[None, :] * K + columns, (b_tail < B)[None, :]
    last = tl.minimum(tl.program_id(0) * H + tl.arange(0, H), N - 1)
    biases = tl.load(bias + last)[:, None] if BIAS else 0.0
    start = part * PART
    if PDL:
        if LINES:
            ask(codes + row.to(tl.int64)[:, None] * WIDTH + start + tl.arange(0, LINES)[None, :] * 64)  # elements of a `LINE`
        gdc_wait()
    acc = tl.zeros([BN, BP], tl.float32)
    tail = tl.zeros([BN, TAIL if TAIL else 16], tl.float32)
    for at in tl.range(start, start + PART, D, num_stages=STAGES):
        # Not by `column_of`: Triton forgets the alignment of what a call returns, and would load input by input.
        column = tl.multiple_of(at // SPAN * 128 + at % SPAN, D)
        elements = tl.load(own + at)
        taken = tl.load(source + column, mask=on, other=0.0)
        scale = tl.load(scales + scale_row * GROUPS + column // GROUP) if GROUPED else 1.0
        zero = tl.load(zeros + scale_row * GROUPS + column // GROUP) if ZEROS else 0.0
        weights = _weights(elements, scale, zero, NIBBLES, FP8, GROUPED, ZEROS, BN, D, dtype, ASM)
        acc = tl.dot(weights, taken, acc)
        if TAIL:
            tail = tl.dot(weights, tl.load(source_tail + column, mask=on_tail, other=0.0), tail)
    if GROUPED:
        own_scales = tl.full([H], 1.0, tl.float32)
        up_scales = own_scales
    else:
        own_scales = tl.load(scales + last // ROWS).to(tl.float32) * UNIT
        up_scales = tl.load(scales + (last + N) // ROWS).to(tl.float32) * UNIT if GATED else own_scales
    _stored(acc, y, own_scales, up_scales, biases, b, B, N, part, BN, BP, BIAS, GATED, ACT, PARTS)
    if TAIL:
        _stored(tail, y, own_scales, up_scales, biases, b_tail, B, N, part, BN, TAIL, BIAS, GATED, ACT, PARTS)


def product(
    x: Float[Tensor, "B K"],
    weight: QuantisedMatrix,
    bias: Float[Tensor, "out"] | None,
    gated: bool,
    tile: RowsTile,
    pdl: bool,
    act: str = "silu",
    asm: bool = False,
) -> Float[Tensor, "*parts B N"]:
    """Compute `x @ weight.T + bias`, or `act(gate) * up` for a gate and an up projection stacked in `weight`.

    If `tile.parts` is more than 1, compute the partial sums of `x @ weight.T` over parts of K, in float32 `[parts, B, N]`. All tensors are
    contiguous, `weight` is `in_gpu_layout` and has no order, and the tile fits (`rows_fits`). `asm` is as in `triton_quantised_few.launch`.
    """
    (rows, columns), width = x.shape, weight.width
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    y, biased = results(x, outputs, tile.parts), bias is not None and tile.parts == 1
    part, taken = width // tile.parts, tile.rows + tile.tail
    lines = min(MOST_ASKED, (part & -part) * 2) // LINE if rows <= taken else 0  # a power of two; none if programs share codes
    kernel: Any = _rows_product
    with torch.cuda.device_of(x):
        kernel[(triton.cdiv(outputs, tile.outputs // 2 if gated else tile.outputs), triton.cdiv(rows, taken), tile.parts)](
            x, *operands(weight), bias if biased else x, y, rows, outputs, columns, width, part, tile.rows, tile.tail, tile.outputs,
            tile.depth, tile.stages, weight.bits == 4, weight.kind == "fp8", *grouping(weight), biased, gated, act, tile.parts, lines, asm,
            pdl, **launch_options(tile.warps, pdl),
        )  # fmt: skip
    return y
