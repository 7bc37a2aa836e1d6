"""The Triton kernel of products of few rows with a quantised matrix, whose time is the time to read the codes.

Import this module only if Triton is installed. A program loads its codes and scales before it waits for the kernel that makes its input
(programmatic dependent launch). Only weights, norm weights and biases may be read before the wait.

A thread loads 8 bytes of each output's codes and the inputs that belong to them, so that nothing moves between threads until the end. It
sums the products of its 8 or 16 codes in float32, and multiplies the sum by their scale. The sums of all threads are added once, in a fixed
order.
"""

# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
# (compile-time constants, tuples that grow in an unrolled loop, names bound in a compile-time branch, and loop ranges without `__next__`)

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.linear.quantised_tiles import FewTile
from nanovllm.ops.linear.triton_codes import fields_of, grouping, in_field, in_word, operands, span_of, summand_of, word_column
from nanovllm.ops.triton_parts import activated, gained, launch_options, rounded
from nanovllm.types import Float, Tensor


@triton.jit
def _scales(scales, zeros, row, group, ZEROS: tl.constexpr):
    """Load scales, and zeros as numbers."""
    scale = tl.load(scales + row + group).to(tl.float32)
    zero = tl.load(zeros + row + group).to(tl.float32) if ZEROS else 0.0
    return scale, zero


@triton.jit
def _few(
    x, gain, codes, scales, zeros, bias, residual, y, N, eps, B: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, T: tl.constexpr,
    BN: tl.constexpr, NIBBLES: tl.constexpr, FP8: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    ZEROS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    WHOLE: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i computes outputs i * BN ... (i + 1) * BN - 1 of every row. T threads share a row of WORDS words of codes, in steps.

    `WHOLE`: no program reaches beyond the outputs, and no step beyond the codes. Which columns a word holds is told in `in_field`.
    """
    if PDL:
        gdc_launch_dependents()
    STEPS: tl.constexpr = (WORDS + 2 * T - 1) // (2 * T)
    PARTS: tl.constexpr = 2 if GATED else 1
    FIELDS: tl.constexpr = fields_of(NIBBLES)
    SPAN: tl.constexpr = span_of(NIBBLES)
    APART: tl.constexpr = GROUP % 128 != 0 and GROUPS > 1  # the fields of a word have different scales
    FACTORS: tl.constexpr = FIELDS if APART else 1
    n, t, v = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, T), tl.arange(0, 2)
    there = n < N
    held = ()
    factors = ()
    for step in tl.static_range(STEPS):
        word = step * 2 * T + (t[:, None] * 2 + v[None, :])
        column = word_column(step * 2 * T + t * 2, NIBBLES)
        for part in tl.static_range(PARTS):
            row = (n + part * N).to(tl.int64)
            at = codes + row[:, None, None] * WORDS + word[None, :, :]
            if WHOLE:
                held += (tl.load(at, eviction_policy="evict_first"),)
            else:
                mask = there[:, None, None] & (word < WORDS)[None, :, :]
                held += (tl.load(at, mask=mask, other=0, eviction_policy="evict_first"),)
            if GROUPS > 1:
                for field in tl.static_range(FACTORS):
                    # Beyond the last output and the last column, any scale will do.
                    group = tl.minimum((column + SPAN * field) // GROUP, GROUPS - 1)[None, :]
                    factors += (_scales(scales, zeros, ((tl.minimum(n, N - 1) + part * N) // ROWS * GROUPS)[:, None], group, ZEROS),)
    if GROUPS == 1:
        for part in tl.static_range(PARTS):
            factors += (_scales(scales, zeros, (tl.minimum(n, N - 1) + part * N) // ROWS, 0, ZEROS),)
    gains = ()
    if NORM:
        for step in tl.static_range(STEPS):
            word = step * 2 * T + (t[:, None] * 2 + v[None, :])
            for field in tl.static_range(FIELDS):
                gains += (in_field(gain, word, field, K, NIBBLES),)
    biases = tl.load(bias + n, mask=there, other=0.0) if BIAS else 0.0
    if PDL:
        gdc_wait()
    rows = ()  # all loads are issued before the first is used: a store between them would delay them
    before = ()
    for step in tl.static_range(STEPS):
        word = step * 2 * T + (t[:, None] * 2 + v[None, :])
        for field in tl.static_range(FIELDS):
            for b in tl.static_range(B):
                rows += (in_field(x + b * K, word, field, K, NIBBLES),)
    norms = ()
    for b in tl.static_range(B):
        before += (tl.load(residual + b * N + n, mask=there, other=0.0) if RESIDUAL else 0.0,)
        if NORM:
            squares = tl.zeros([T, 2], tl.float32)
            for each in tl.static_range(STEPS * FIELDS):
                for i in tl.static_range(2):
                    squares += rows[each * B + b][i] * rows[each * B + b][i]
            norms += (tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps),)
    sums = ()  # part by part, row by row
    for _ in tl.static_range(PARTS * B):
        sums += (tl.zeros([BN, T], tl.float32),)
    totals = ()  # of all inputs, for zeros that serve a whole row
    for _ in tl.static_range(B):
        totals += (tl.zeros([T], tl.float32),)
    for step in tl.static_range(STEPS):
        inputs = ()
        added = ()  # the sums of a thread's inputs
        for field in tl.static_range(FIELDS):
            for b in tl.static_range(B):
                total = tl.zeros([T, 2], tl.float32)
                for i in tl.static_range(2):
                    wide = rows[(step * FIELDS + field) * B + b][i]
                    if NORM:
                        weight = gains[step * FIELDS + field][i].to(gain.dtype.element_ty)
                        wide = gained(wide * norms[b], weight, x.dtype.element_ty).to(tl.float32)
                    inputs += (wide,)
                    total += wide
                added += (tl.sum(total, 1),)
        if ZEROS and GROUPS == 1:
            more = ()
            for b in tl.static_range(B):
                total = totals[b]
                for field in tl.static_range(FIELDS):
                    total += added[field * B + b]
                more += (total,)
            totals = more
        starts = ()  # what the summands of `in_word` have too much, so that sums begin below 0
        for factor in tl.static_range(FACTORS):
            for b in tl.static_range(B):
                start = -0.5 * summand_of(factor, NIBBLES, FP8) * added[factor * B + b]
                if not APART:
                    for field in tl.static_range(1, FIELDS):
                        start -= 0.5 * summand_of(field, NIBBLES, FP8) * added[field * B + b]
                starts += (start,)
        new = ()
        for part in tl.static_range(PARTS):
            products = ()
            for field in tl.static_range(FIELDS):
                wide = in_word(held[step * PARTS + part], field, NIBBLES, FP8, ASM)
                next_products = ()
                for b in tl.static_range(B):
                    if field > 0 and not APART:
                        product = products[b]
                    elif FP8:
                        product = tl.zeros([BN, T, 2], tl.float32)
                    else:
                        product = tl.broadcast_to(starts[field * B + b][None, :, None], [BN, T, 2])
                    for i in tl.static_range(2):
                        product += wide[i] * inputs[(field * B + b) * 2 + i][None, :, :]
                    next_products += (product,)
                products = products + next_products if APART else next_products
            for b in tl.static_range(B):
                total = sums[part * B + b]
                for number in tl.static_range(FACTORS):
                    more = tl.sum(products[number * B + b], 2)
                    if GROUPS > 1:
                        factor = factors[(step * PARTS + part) * FACTORS + number]
                        if ZEROS:
                            every = added[number * B + b]
                            if not APART:
                                for field in tl.static_range(1, FIELDS):
                                    every += added[field * B + b]
                            more -= factor[1] * every[None, :]
                        more *= factor[0]
                    total += more
                new += (total,)
        sums = new
    for b in tl.static_range(B):
        acc = tl.sum(sums[b], 1)
        if GROUPS == 1:
            acc = (acc - factors[0][1] * tl.sum(totals[b], 0)) * factors[0][0] if ZEROS else acc * factors[0][0]
        if GATED:
            other = tl.sum(sums[B + b], 1)
            if GROUPS == 1:
                other = (other - factors[1][1] * tl.sum(totals[b], 0)) * factors[1][0] if ZEROS else other * factors[1][0]
            acc = activated(acc, other, y.dtype.element_ty, ACT)
        tl.store(y + b * N + n, rounded(acc, biases, before[b], y.dtype.element_ty, BIAS, RESIDUAL), mask=there)


def launch(
    x: Float[Tensor, "B K"],
    weight: QuantisedMatrix,
    gain: Float[Tensor, "K"] | None,
    bias: Float[Tensor, "N"] | None,
    residual: Float[Tensor, "B N"] | None,
    eps: float,
    gated: bool,
    tile: FewTile,
    pdl: bool,
    act: str = "silu",
    asm: bool = False,
) -> Float[Tensor, "B N"]:
    """Launch the kernel: what `norm_linear` computes, for at most `SUMMED` rows and a `regular` matrix.

    All tensors are contiguous, and the matrix is `in_gpu_layout`. `asm`: convert codes by PTX of compute capability 9.0, not by plain
    operations.
    """
    rows, width = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    words = weight.width // 2
    threads = min(32 * tile.warps, triton.next_power_of_2(triton.cdiv(words, 2)))
    kind = (weight.bits == 4, weight.kind == "fp8", *grouping(weight))
    whole = outputs % tile.outputs == 0 and words % (2 * threads) == 0
    flags = (gain is not None, bias is not None, residual is not None, gated, act, whole, asm, pdl)
    kernel: Any = _few
    with torch.cuda.device_of(x):
        kernel[(triton.cdiv(outputs, tile.outputs),)](
            x, x if gain is None else gain, *operands(weight, words=True), x if bias is None else bias, x if residual is None else residual,
            y, outputs, eps, rows, width, words, threads, tile.outputs, *kind, *flags, **launch_options(tile.warps, pdl),
        )  # fmt: skip
    return y
