"""The Triton kernels of products of many rows with a quantised matrix, and the kernel that dequantises one. They need Triton.

The product is pipelined, on tensor cores: codes come to shared memory as they are, become numbers in registers, and multiply the inputs.
The matrix is the left factor, so that few rows need little padding. If there are few outputs, the inputs are divided between programs,
whose sums `triton_many_rows.sum_norm` adds in a fixed order.
"""

# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# (names bound in a compile-time branch, and loop ranges without `__next__`)

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.linear.quantised_tiles import ManyTile, scale_form
from nanovllm.ops.linear.triton_code_loop import column_of, first_scales, summed_products, weight_tiles
from nanovllm.ops.linear.triton_codes import fields_of, grouping, operands, results, span_of
from nanovllm.ops.linear.triton_many_rows import ask
from nanovllm.ops.triton_parts import activated, launch_options, rounded
from nanovllm.types import Float, Tensor

LINE = 128  # bytes of a cache line of L2
MOST_ASKED = 1024  # bytes of each output's codes that a program prefetches into L2 before it waits
WRITTEN = 32  # elements of codes of a row that a program of `_dequantise` reads
HEIGHT = 16  # rows of a program of `_dequantise`


@triton.jit(do_not_specialize=["B"])  # the number of rows: one kernel for all
def _product(
    x, codes, scales, zeros, bias, y, B, N, K: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, STAGES: tl.constexpr, NIBBLES: tl.constexpr, FP8: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    PARTS: tl.constexpr, WHOLE: tl.constexpr, LINES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (outputs, rows, part) computes `[BN, BP]` outputs over PART elements of codes; partial sums are stored in float32.

    It takes D elements of each output's codes per step. `WHOLE`: no step reaches beyond the codes or the inputs.
    """
    if PDL:
        gdc_launch_dependents()
    n, b, part = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BP + tl.arange(0, BP), tl.program_id(2)
    d = tl.arange(0, D)
    on, there = (b < B)[None, :], (n < N)[:, None]
    row = tl.minimum(n, N - 1)  # what is read for outputs beyond the last is not stored
    own = codes + row.to(tl.int64)[:, None] * WIDTH + d[None, :]
    scale_row = row // ROWS
    up_own = own + N.to(tl.int64) * WIDTH
    up_row = (row + N) // ROWS
    source = x + b.to(tl.int64)[None, :] * K + d[:, None]
    biases = tl.load(bias + row)[:, None] if BIAS else 0.0
    start = part * PART
    first = first_scales(
        scales, scale_row, up_row, column_of(start, NIBBLES), K, NIBBLES, FORM, GROUP, GROUPS, GATED, x.dtype.element_ty, ASM
    )  # fmt: skip
    if PDL:
        if LINES:
            lines = start + tl.arange(0, LINES)[None, :] * 64  # elements of a `LINE`
            ask(codes + row.to(tl.int64)[:, None] * WIDTH + lines)
            if GATED:
                ask(codes + (row + N).to(tl.int64)[:, None] * WIDTH + lines)
        gdc_wait()
    acc, other = summed_products(
        source, on, own, up_own, scales, zeros, scale_row, up_row, first, start, start + PART, K, WIDTH, BP, BN, D, STAGES, NIBBLES, FP8,
        FORM, GROUP, GROUPS, ZEROS, GATED, WHOLE, ASM,
    )  # fmt: skip
    to = y + (part * B + b).to(tl.int64)[None, :] * N + n[:, None]
    if PARTS > 1:
        tl.store(to, acc, mask=on & there)
    else:
        if GATED:
            acc = activated(acc, other, y.dtype.element_ty, ACT)
        tl.store(to, rounded(acc, biases, acc, y.dtype.element_ty, BIAS, False), mask=on & there)


@triton.jit
def _dequantise(
    codes, scales, zeros, out, N, first, K: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr, D: tl.constexpr, NIBBLES: tl.constexpr,
    FP8: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, ZEROS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Program (rows, columns) writes H rows of D elements of codes as weights: rows `first` ... `first` + N - 1 of the matrix to `out`."""
    n, d = tl.program_id(0) * H + tl.arange(0, H), tl.program_id(1) * D + tl.arange(0, D)
    row = first + tl.minimum(n, N - 1)
    tile = tl.load(codes + row.to(tl.int64)[:, None] * WIDTH + d[None, :], mask=(d < WIDTH)[None, :], other=0)
    column = column_of(tl.program_id(1) * D, NIBBLES)
    dtype: tl.constexpr = out.dtype.element_ty
    tiles = weight_tiles(tile, scales, zeros, row // ROWS, column, K, NIBBLES, FP8, "spread", GROUP, GROUPS, ZEROS, D, dtype, ASM)
    for field in tl.static_range(fields_of(NIBBLES)):
        columns = column + field * span_of(NIBBLES) + tl.arange(0, D)
        to = out + n.to(tl.int64)[:, None] * K + columns[None, :]
        tl.store(to, tiles[field], mask=(n < N)[:, None] & (columns < K)[None, :])


def product(
    x: Float[Tensor, "B K"],
    weight: QuantisedMatrix,
    bias: Float[Tensor, "out"] | None,
    gated: bool,
    tile: ManyTile,
    pdl: bool,
    act: str = "silu",
    asm: bool = False,
) -> Float[Tensor, "*parts B N"]:
    """Compute `x @ weight.T + bias`, or `act(gate) * up` for a gate and an up projection stacked in `weight`.

    If `tile.parts` is more than 1, compute the partial sums of `x @ weight.T` over parts of K, in float32 `[parts, B, N]`. All tensors are
    contiguous, and `weight` is `in_gpu_layout` and has no order. `asm` is as in `triton_quantised_few.launch`.
    """
    (rows, columns), width = x.shape, weight.width
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    y, biased = results(x, outputs, tile.parts), bias is not None and tile.parts == 1
    part = triton.cdiv(triton.cdiv(width, tile.depth), tile.parts) * tile.depth
    whole = width == part * tile.parts and columns == weight.fields * width
    asked = min(MOST_ASKED, (part & -part) * 2) // LINE  # a power of two
    lines = 0 if rows > tile.rows or not whole else asked  # none if programs share codes
    options = launch_options(tile.warps, pdl)
    kernel: Any = _product
    with torch.cuda.device_of(x):
        kernel[(triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, tile.rows), tile.parts)](
            x, *operands(weight), bias if biased else x, y, rows, outputs, columns, width, part, tile.rows, tile.outputs, tile.depth,
            tile.stages, weight.bits == 4, weight.kind == "fp8", scale_form(weight, tile.depth), *grouping(weight), biased, gated, act,
            tile.parts, whole, lines, asm, pdl, **options,
        )  # fmt: skip
    return y


def dequantise(weight: QuantisedMatrix, first: int, out: Float[Tensor, "N K"], asm: bool = False) -> None:
    """Donates `out`. Write rows `first` ... of the matrix in the dtype of `out`, with columns in the order of the codes."""
    (rows, columns), width = out.shape, weight.width
    kernel: Any = _dequantise
    with torch.cuda.device_of(out):
        kernel[(triton.cdiv(rows, HEIGHT), triton.cdiv(width, WRITTEN))](
            *operands(weight), out, rows, first, columns, width, HEIGHT, WRITTEN, weight.bits == 4, weight.kind == "fp8", *grouping(weight),
            asm,
        )  # fmt: skip
