"""The Triton kernel of products of up to 16 rows with a quantised matrix, whose warps divide the inputs. It needs Triton.

A matrix has few outputs for so many multiprocessors: with 16 outputs per warp and all inputs, most schedulers would have one warp, which
waits for its own results. So the warps of a program take the same outputs and a part of the inputs each, and their sums are added at the
end in a fixed order. As in `triton_quantised_many`, codes come to shared memory as they are and become numbers in registers.
"""

# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false, reportOptionalSubscript=false
# (names bound in a compile-time branch, and loop ranges without `__next__`)

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.linear.quantised_tiles import SplitTile, scale_form, split_columns
from nanovllm.ops.linear.triton_codes import fields_of, grouping, half_of, numbers, operands, results, span_of, unit_of
from nanovllm.ops.linear.triton_many_rows import ask
from nanovllm.ops.linear.triton_quantised_many import LINE, MOST_ASKED
from nanovllm.ops.triton_parts import activated, launch_options, rounded
from nanovllm.types import Float, Tensor


@triton.jit
def _factors(
    values, row, column, NIBBLES: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, TIMES: tl.constexpr
):  # fmt: skip
    """Load the scales or zeros of a step, times `TIMES`, `[KS, BN]`: one for all fields, or with `FORM` "fields" one for each."""
    found = ()
    for field in tl.static_range(fields_of(NIBBLES) if FORM == "fields" else 1):
        at = row[None, :] * GROUPS + (column + field * span_of(NIBBLES))[:, None] // GROUP
        found += (tl.load(values + at).to(tl.float32) * TIMES,)
    return found


@triton.jit
def _multiplied(
    sums, codes, inputs, scale, zeros, row, column, NIBBLES: tl.constexpr, FP8: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, ZEROS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return the sums `[KS, BN, BP]` with the products of a step added."""
    dtype: tl.constexpr = inputs[0].dtype
    HALF: tl.constexpr = half_of(dtype, FP8, ASM)
    tiles = numbers(codes, dtype, NIBBLES, FP8, ASM)
    zero = ()
    if ZEROS:
        zero = _factors(zeros, row, column, NIBBLES, FORM, GROUP, GROUPS, 1 / unit_of(dtype, NIBBLES, ASM))
    total = sums if FORM != "step" else tl.zeros(sums.shape, tl.float32)
    for field in tl.static_range(fields_of(NIBBLES)):
        tile = tiles[field]
        if ZEROS:
            tile -= zero[field if FORM == "fields" else 0].to(dtype)[:, :, None]
        if FORM == "fields":
            total += tl.dot(tile, inputs[field]) * (scale[field] * HALF)[:, :, None]
        else:
            total = tl.dot(tile, inputs[field], total)
    if FORM == "step":
        total = sums + total * (scale[0] * HALF)[:, :, None]
    return total


@triton.jit(do_not_specialize=["B"])  # the number of rows: one kernel for all
def _split_product(
    x, codes, scales, zeros, bias, y, B, N, K: tl.constexpr, WIDTH: tl.constexpr, OWN: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    KS: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr, NIBBLES: tl.constexpr, FP8: tl.constexpr, FORM: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (outputs, part) computes `[BN, BP]` outputs. Each of its KS warps takes OWN elements of each output's codes, D in a step.

    `OWN` is a multiple of a block, and together the warps of all parts take a whole row of codes. Partial sums are stored in float32.
    """
    if PDL:
        gdc_launch_dependents()
    FIELDS: tl.constexpr = fields_of(NIBBLES)
    SPAN: tl.constexpr = span_of(NIBBLES)
    UNIT: tl.constexpr = unit_of(x.dtype.element_ty, NIBBLES, ASM)
    HALF: tl.constexpr = half_of(x.dtype.element_ty, FP8, ASM)
    EACH: tl.constexpr = FORM != "row"
    n, part, b = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1), tl.arange(0, BP)
    on, row = b < B, tl.minimum(n, N - 1)  # what is read for outputs beyond the last is not stored
    s, d = part * KS + tl.arange(0, KS), tl.arange(0, D)
    first = s * (OWN * FIELDS)  # columns of the warps
    own = codes + row.to(tl.int64)[None, :, None] * WIDTH + (s * OWN)[:, None, None] + d[None, None, :]
    up_own = own + N.to(tl.int64) * WIDTH
    source = x + b.to(tl.int64)[None, None, :] * K + first[:, None, None] + d[None, :, None]
    scale_row, up_row = row // ROWS, (row + N) // ROWS
    biases = tl.load(bias + row)[:, None] if BIAS else 0.0
    scale, up_scale = (), ()
    if EACH:
        scale = _factors(scales, scale_row, first, NIBBLES, FORM, GROUP, GROUPS, UNIT)
        if GATED:
            up_scale = _factors(scales, up_row, first, NIBBLES, FORM, GROUP, GROUPS, UNIT)
    if PDL:
        lines = tl.arange(0, LINES)[None, None, :] * 64  # elements of a `LINE`
        start = row.to(tl.int64)[None, :, None] * WIDTH + (s * OWN)[:, None, None]
        ask(codes + start + lines)
        if GATED:
            ask(codes + N.to(tl.int64) * WIDTH + start + lines)
        gdc_wait()
    acc = tl.zeros([KS, BN, BP], tl.float32)
    other = tl.zeros([KS, BN, BP], tl.float32)
    for at in tl.range(0, OWN, D, num_stages=STAGES):
        column = tl.multiple_of(at // SPAN * 128 + at % SPAN, D)
        later = tl.minimum(at + D, OWN - D)  # after the last step there is none: its own scales are read again
        after = first + (later // SPAN * 128 + later % SPAN)
        next_scale, next_up = (), ()
        if EACH:
            next_scale = _factors(scales, scale_row, after, NIBBLES, FORM, GROUP, GROUPS, UNIT)
            if GATED:
                next_up = _factors(scales, up_row, after, NIBBLES, FORM, GROUP, GROUPS, UNIT)
        inputs = ()
        gate_codes = tl.load(own + at)
        for field in tl.static_range(FIELDS):
            inputs += (tl.load(source + column + field * SPAN, mask=on[None, None, :], other=0.0),)
        now = first + column
        acc = _multiplied(acc, gate_codes, inputs, scale, zeros, scale_row, now, NIBBLES, FP8, FORM, GROUP, GROUPS, ZEROS, ASM)
        if GATED:
            up_codes = tl.load(up_own + at)
            other = _multiplied(other, up_codes, inputs, up_scale, zeros, up_row, now, NIBBLES, FP8, FORM, GROUP, GROUPS, ZEROS, ASM)
        if EACH:
            scale, up_scale = next_scale, next_up
    whole = tl.sum(acc, 0)
    if FORM == "row":
        whole *= tl.load(scales + scale_row).to(tl.float32)[:, None] * (UNIT * HALF)
    whole *= HALF
    to = y + (part * B + b).to(tl.int64)[None, :] * N + n[:, None]
    mask = on[None, :] & (n < N)[:, None]
    if PARTS > 1:
        tl.store(to, whole, mask=mask)
    else:
        if GATED:
            ups = tl.sum(other, 0)
            if FORM == "row":
                ups *= tl.load(scales + up_row).to(tl.float32)[:, None] * (UNIT * HALF)
            ups *= HALF
            whole = activated(whole, ups, y.dtype.element_ty, ACT)
        tl.store(to, rounded(whole, biases, whole, y.dtype.element_ty, BIAS, False), mask=mask)


def product(
    x: Float[Tensor, "B K"],
    weight: QuantisedMatrix,
    bias: Float[Tensor, "out"] | None,
    gated: bool,
    tile: SplitTile,
    pdl: bool,
    act: str = "silu",
    asm: bool = False,
) -> Float[Tensor, "*parts B N"]:
    """Compute what `triton_quantised_many.product` computes, for at most `SPLIT_ROWS` rows and a tile that `split_fits`."""
    (rows, columns), width, form = x.shape, weight.width, scale_form(weight, tile.depth)
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    y, biased = results(x, outputs, tile.parts), bias is not None and tile.parts == 1
    own = width // (tile.parts * tile.warps)
    lines = max(1, min(MOST_ASKED // tile.warps, (own & -own) * 2) // LINE)  # a power of two
    kernel: Any = _split_product
    with torch.cuda.device_of(x):
        kernel[(triton.cdiv(outputs, tile.outputs), tile.parts)](
            x, *operands(weight), bias if biased else x, y, rows, outputs, columns, width, own, split_columns(rows), tile.outputs,
            tile.warps, tile.depth, tile.stages, weight.bits == 4, weight.kind == "fp8", form, *grouping(weight), biased, gated, act,
            tile.parts, lines, asm, pdl, **launch_options(tile.warps, pdl),
        )  # fmt: skip
    return y
