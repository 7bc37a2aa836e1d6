"""The Triton kernel of products of up to 16 rows with a quantised matrix whose codes go from memory to the registers of tensor cores.

Import this module only if Triton is installed. A program has 16 outputs, or a multiple. Its warps divide the inputs, and each requests
`DEPTH` blocks of 128 columns of every output's codes, with their scales, before it waits for the kernel that makes its input
(programmatic dependent launch). No codes go through shared memory, and nothing waits for another warp before the sums are added.

Threads are written out: a tensor `[T]` has one element for each of the T threads of a program. A thread loads 16 bytes of the codes of
two outputs, 8 apart, and 16 bytes of a row of inputs for each field. These are parts of factors of `mma` as they are, if its 16 inputs
mean other columns than their order says: the same for both factors.

The 8 columns of the right factor are rows of inputs. If there are fewer rows, they are also different blocks of the same row: each block
is multiplied by all columns, and only those that belong to it are added. So inputs take an eighth of the registers for one row.

Codes are not converted to the numbers they stand for. Their bits move to where bfloat16 has them, which takes about half of the
instructions, and makes subnormal numbers or small normal ones: a code of FP8 times 2^-120, an integer times 2^-133. `mma` multiplies
subnormal numbers exactly, too. The inputs are multiplied by 2^60, so that sums in float32 keep all their bits, and the sums by the factor
that is then missing. So inputs of 2^68 or more would overflow. Integers are used minus the lowest one, which makes products too large by
the lowest one times the sum of the inputs. Products of the inputs with ones give this sum, also for zero points.

The norm is applied to the sums: `sum(w x g) / rms(x)`. The products of inputs and norm weights are rounded, and nothing else is. The sums
of squares are the diagonal of a product of the inputs with themselves.
"""

# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportArgumentType=false
# (compile-time constants, tuples that grow in an unrolled loop, names bound in a compile-time branch, and loop ranges without `__next__`)

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.linear.quantised_tiles import DirectTile
from nanovllm.ops.linear.triton_codes import FP8_HIGH, FP8_LOW, fields_of, grouping, operands, span_of
from nanovllm.ops.triton_parts import activated, launch_options, rounded
from nanovllm.types import Float, Tensor

MMA = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)
VECTOR = tl.constexpr(4)  # words of 4 bytes that a thread loads at once
# What sums are to be multiplied by: 2^120 or 2^133 for the codes, without the 2^60 of the inputs.
FP8_UNIT, INTEGER_UNIT = tl.constexpr(2.0**60), tl.constexpr(2.0**73)
# Words of two bfloat16 numbers 2^60, and 2^56 for the inputs of nibbles that stand 4 bits higher.
LIFT, HIGH_LIFT = tl.constexpr(0x5D805D80), tl.constexpr(0x5B805B80)


@triton.jit
def _vector(at, on, MASKED: tl.constexpr, ONCE: tl.constexpr):
    """Load 4 words from each address `[T]` on: 4 tensors `[T]`. `ONCE`: no other program reads them."""
    each = at[:, None] + tl.arange(0, VECTOR)[None, :]
    if ONCE:
        words = tl.load(each, eviction_policy="evict_first")
    elif MASKED:
        words = tl.load(each, mask=on[:, None], other=0)
    else:
        words = tl.load(each)
    even, odd = tl.split(tl.reshape(words, [words.shape[0], 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _halves(pairs):
    """Return the two bfloat16 numbers of words in float32."""
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _paired(low, high):
    """Round float32 numbers to bfloat16, to words of two."""
    low, high = (
        low.to(tl.bfloat16).to(tl.float32).to(tl.int32, bitcast=True),
        high.to(tl.bfloat16).to(tl.float32).to(tl.int32, bitcast=True),
    )
    return ((low >> 16) & 0xFFFF) | (high & -0x10000)


@triton.jit
def _gained(x, gain, ASM: tl.constexpr):
    """Multiply words of two numbers."""
    if ASM:
        y = tl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, gain], dtype=tl.int32, is_pure=True, pack=1)
    else:
        low, high = _halves(x)
        gain_low, gain_high = _halves(gain)
        y = _paired(low * gain_low, high * gain_high)
    return y


@triton.jit
def _numbers(words, NIBBLES: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr):
    """Convert words of codes to words of two bfloat16 numbers for each field: codes of FP8 times 2^-120, or integers times 2^-133.

    Integers are codes minus the lowest one. Those of fields 1 and 3 of nibbles are times 2^-129 (`_is_high`).
    """
    if NIBBLES:
        later = words >> 8
        found = (words & 0x000F000F, words & 0x00F000F0, later & 0x000F000F, later & 0x00F000F0)
    elif not FP8:
        found = ((words ^ 0x00800080) & 0x00FF00FF, ((words >> 8) ^ 0x00800080) & 0x00FF00FF)
    elif ASM:
        low = tl.inline_asm_elementwise(FP8_LOW, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
        high = tl.inline_asm_elementwise(FP8_HIGH, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
        found = (low, high)
    else:
        found = (
            ((words << 8) & -0x7FFF8000) | ((words << 4) & 0x07F007F0), (words & -0x7FFF8000) | ((words >> 4) & 0x07F007F0),
        )  # fmt: skip
    return found


@triton.constexpr_function
def _is_high(word, vecs, nibbles):
    """Return whether a word of inputs belongs to nibbles that stand 4 bits higher than others."""
    return nibbles and word // (4 * vecs) % 2 == 1


@triton.jit
def _input_sums(x, shape: tl.constexpr, NB: tl.constexpr, VECS: tl.constexpr, NIBBLES: tl.constexpr, ASM: tl.constexpr):
    """Return the sums of inputs over blocks, in the unit of products with integers: by 8 rows, those of columns 2t and 2t + 1."""
    found = ()
    for rows in tl.static_range(NB):
        c0 = tl.zeros(shape, tl.float32)
        c1, c2, c3 = c0, c0, c0
        for pair in tl.static_range(8):
            one = tl.full(shape, 0x00100010 if _is_high(2 * pair, VECS, NIBBLES) else 0x00010001, tl.int32)
            c0, c1, c2, c3 = _multiplied(c0, c1, c2, c3, one, one, one, one, x[rows * 16 + 2 * pair], x[rows * 16 + 2 * pair + 1], ASM)
        found += (c0, c1)
    return found


@triton.jit
def _multiplied(c0, c1, c2, c3, a0, a1, a2, a3, b0, b1, ASM: tl.constexpr):
    """Add the products of `[16, 16]` and `[16, 8]` numbers to `[16, 8]` sums, for each warp, in the layout of `mma.m16n8k16`.

    A thread is in group g = 0 ... 7 and has number t = 0 ... 3 in it. Of the left factor it has, by words, (g, 2t), (g + 8, 2t),
    (g, 2t + 8) and (g + 8, 2t + 8), each with the next column. Of the right factor it has (2t, g) and (2t + 8, g), each with the next
    row. Of the sums it has (g, 2t), (g, 2t + 1), (g + 8, 2t) and (g + 8, 2t + 1).
    """
    if ASM:
        c0, c1, c2, c3 = tl.inline_asm_elementwise(
            MMA, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        W: tl.constexpr = c0.shape[0] // 32
        left = tl.join(tl.join(_both(a0), _both(a1)), tl.join(_both(a2), _both(a3)))  # [T, 2 next, 2 lower, 2 later]
        left = tl.reshape(tl.permute(tl.reshape(left, [W, 8, 4, 2, 2, 2]), [0, 4, 1, 5, 2, 3]), [W, 16, 16])
        right = tl.reshape(tl.permute(tl.reshape(tl.join(_both(b0), _both(b1)), [W, 8, 4, 2, 2]), [0, 4, 2, 3, 1]), [W, 16, 8])
        more = tl.sum(left[:, :, :, None] * right[:, None, :, :], 2)
        more = tl.reshape(tl.permute(tl.reshape(more, [W, 2, 8, 4, 2]), [0, 2, 3, 4, 1]), [W * 32, 2, 2])  # [T, 2 next, 2 lower]
        upper, lower = tl.split(more)
        first, second = tl.split(upper)
        third, fourth = tl.split(lower)
        c0, c1, c2, c3 = c0 + first, c1 + second, c2 + third, c3 + fourth
    return c0, c1, c2, c3


@triton.jit
def _both(pairs):
    low, high = _halves(pairs)
    return tl.join(low, high)


@triton.jit
def _codes(
    own, scales, zeros, scale_row, column, N, TILES: tl.constexpr, GATED: tl.constexpr, WORDS: tl.constexpr,
    VECS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Load the codes of a block for each 16 outputs, and their scales and zeros, if blocks have their own.

    Returns a tuple: by tile, output g or g + 8, and vector, 4 words; and a tuple, by tile and output, of scales and then of zeros.
    """
    HALF: tl.constexpr = TILES // 2 if GATED else TILES
    held = ()
    factors = ()
    for tile in tl.static_range(TILES):
        first = own + (tile % HALF) * 16 * WORDS
        if tile >= HALF:
            first += N.to(tl.int64) * WORDS
        for lower in tl.static_range(2):
            for vector in tl.static_range(VECS):
                held += _vector(first + lower * 8 * WORDS + vector * 16, None, False, True)
    if GROUPS > 1:
        for tile in tl.static_range(TILES):
            for lower in tl.static_range(1 if ROWS % 16 == 0 else 2):
                row = scale_row + (tile % HALF) * 16 + lower * 8
                if tile >= HALF:
                    row += N
                at = row // ROWS * GROUPS + column // GROUP
                factors += (tl.load(scales + at),)
                if ZEROS:
                    factors += (tl.load(zeros + at),)
    return held, factors


@triton.jit
def _inputs(at, on, K: tl.constexpr, NB: tl.constexpr, NIBBLES: tl.constexpr, MASKED: tl.constexpr):
    """Load the inputs of a thread's block, or norm weights: by 8 rows and vector, 4 words. `on` has NB masks."""
    SPAN: tl.constexpr = span_of(NIBBLES)
    found = ()
    for rows in tl.static_range(NB):
        for field in tl.static_range(fields_of(NIBBLES)):
            for vector in tl.static_range(SPAN // 32):
                found += _vector(at + rows * 8 * (K // 2) + field * (SPAN // 2) + vector * 16, on[rows], MASKED, False)
    return found


@triton.jit
def _factors(
    factors, NUMBER: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, PER: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr
):
    """Return the scales and zeros of two outputs of a thread for a block, out of those that are held."""
    KINDS: tl.constexpr = 2 if ZEROS else 1
    AT: tl.constexpr = (NUMBER * TILES + TILE) * PER * KINDS if GROUPS > 1 else TILE * 2
    scale, low_scale, zero, low_zero = 1.0, 1.0, 0.0, 0.0
    if GROUPS > 1:
        scale, low_scale = factors[AT].to(tl.float32), factors[AT + (PER - 1) * KINDS].to(tl.float32)
        if ZEROS:
            zero, low_zero = factors[AT + 1].to(tl.float32), factors[AT + (PER - 1) * KINDS + 1].to(tl.float32)
    elif ZEROS:
        zero, low_zero = factors[AT].to(tl.float32), factors[AT + 1].to(tl.float32)
    return scale, low_scale, zero, low_zero


@triton.jit
def _four(values, AT: tl.constexpr):
    return values[AT], values[AT + 1], values[AT + 2], values[AT + 3]


@triton.jit
def _of_block(c0, c1, c2, c3, wide, x, ROWS8: tl.constexpr, FIELDS: tl.constexpr, VECS: tl.constexpr, ASM: tl.constexpr):
    """Add the products of a block: `wide` are numbers by output g or g + 8, vector, word and field, `x` as `_inputs` gives them."""
    LOWER: tl.constexpr = VECS * 4 * FIELDS
    for vector in tl.static_range(VECS):
        for field in tl.static_range(FIELDS):
            for pair in tl.static_range(2):
                c0, c1, c2, c3 = _multiplied(
                    c0, c1, c2, c3, wide[(vector * 4 + 2 * pair) * FIELDS + field], wide[LOWER + (vector * 4 + 2 * pair) * FIELDS + field],
                    wide[(vector * 4 + 2 * pair + 1) * FIELDS + field], wide[LOWER + (vector * 4 + 2 * pair + 1) * FIELDS + field],
                    x[ROWS8 * 16 + (field * VECS + vector) * 4 + 2 * pair], x[ROWS8 * 16 + (field * VECS + vector) * 4 + 2 * pair + 1], ASM,
                )  # fmt: skip
    return c0, c1, c2, c3


@triton.jit
def _turn(
    held, factors, ring, gains, totals, squares, own, scales, zeros, scale_row, column, source, gain, on, place, N,
    K: tl.constexpr, WORDS: tl.constexpr, TILES: tl.constexpr, DEPTH: tl.constexpr, RB: tl.constexpr, NB: tl.constexpr, P: tl.constexpr,
    AHEAD: tl.constexpr, NIBBLES: tl.constexpr, FP8: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    ZEROS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, LAST: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Multiply the DEPTH blocks whose codes are held, and request those DEPTH blocks on in their place unless this is the `LAST` turn.

    `own`, `column`, `source` and `gain` are those of the first block of this turn. Inputs of P blocks are loaded at once, `AHEAD` times
    before they are needed.
    """
    SPAN: tl.constexpr = span_of(NIBBLES)
    FIELDS: tl.constexpr = fields_of(NIBBLES)
    VECS: tl.constexpr = SPAN // 32
    EACH: tl.constexpr = 8 * VECS * TILES  # words of a block
    PER: tl.constexpr = 1 if ROWS % 16 == 0 else 2
    LOADED: tl.constexpr = 4 * 4 * NB  # words of inputs of a batch
    BATCHES: tl.constexpr = DEPTH // P
    LOWEST: tl.constexpr = -8.0 if NIBBLES else -128.0
    new_held = ()
    new_factors = ()
    for batch in tl.static_range(BATCHES):
        x = ()
        for i in tl.static_range(LOADED):
            x += (ring[i],)
        if NORM:
            nothing = tl.zeros(place.shape, tl.int32)
            new_squares = ()
            for rows in tl.static_range(NB):
                s0, s1, s2, s3 = _four(squares, rows * 4)
                for pair in tl.static_range(8):
                    b0, b1 = x[rows * 16 + 2 * pair], x[rows * 16 + 2 * pair + 1]
                    s0, s1, s2, s3 = _multiplied(s0, s1, s2, s3, b0, nothing, b1, nothing, b0, b1, ASM)
                new_squares += (s0, s1, s2, s3)
            squares = new_squares
            products = ()
            for i in tl.static_range(LOADED):
                products += (_gained(x[i], gains[i % 16], ASM),)
            x = products
        lifted = ()
        for i in tl.static_range(LOADED):
            lift = tl.full(place.shape, HIGH_LIFT if _is_high(i % 16, VECS, NIBBLES) else LIFT, tl.int32)
            lifted += (_gained(x[i], lift, ASM),)
        x = lifted
        input_sums = ()
        if not FP8:
            input_sums = _input_sums(x, place.shape, NB, VECS, NIBBLES, ASM)
        for i in tl.static_range(P):
            new_totals = ()
            for tile in tl.static_range(TILES):
                scale, low_scale, zero, low_zero = _factors(factors, batch * P + i, tile, TILES, PER, GROUPS, ZEROS)
                wide = ()
                for word in tl.static_range(8 * VECS):
                    wide += _numbers(held[(batch * P + i) * EACH + tile * 8 * VECS + word], NIBBLES, FP8, ASM)
                for rows in tl.static_range(NB):
                    s0, s1, s2, s3 = _four(totals, (tile * NB + rows) * 4)
                    c0 = tl.zeros(place.shape, tl.float32)
                    c1, c2, c3 = c0, c0, c0
                    if not FP8:
                        less, low_less = LOWEST - zero, LOWEST - low_zero
                        c0, c1 = less * input_sums[2 * rows], less * input_sums[2 * rows + 1]
                        c2, c3 = low_less * input_sums[2 * rows], low_less * input_sums[2 * rows + 1]
                    if P == 1 and GROUPS == 1:
                        if not FP8:
                            s0, s1, s2, s3 = s0 + c0, s1 + c1, s2 + c2, s3 + c3
                        new_totals += _of_block(s0, s1, s2, s3, wide, x, rows, FIELDS, VECS, ASM)
                    else:
                        c0, c1, c2, c3 = _of_block(c0, c1, c2, c3, wide, x, rows, FIELDS, VECS, ASM)
                        if P > 1:  # sums of other blocks with the inputs of this one are left out
                            left, right = place * 2 // RB == i, (place * 2 + 1) // RB == i
                            s0, s1 = s0 + c0 * tl.where(left, scale, 0.0), s1 + c1 * tl.where(right, scale, 0.0)
                            s2, s3 = s2 + c2 * tl.where(left, low_scale, 0.0), s3 + c3 * tl.where(right, low_scale, 0.0)
                        else:
                            s0, s1, s2, s3 = s0 + c0 * scale, s1 + c1 * scale, s2 + c2 * low_scale, s3 + c3 * low_scale
                        new_totals += (s0, s1, s2, s3)
            totals = new_totals
            if not LAST:
                more, more_factors = _codes(
                    own + (batch * P + i + DEPTH) * (16 * VECS), scales, zeros, scale_row, column + (batch * P + i + DEPTH) * 128, N, TILES,
                    GATED, WORDS, VECS, GROUP, GROUPS, ROWS, ZEROS,
                )  # fmt: skip
                new_held += more
                new_factors += more_factors
        # What this batch leaves is refilled with the batch `AHEAD` on, if there is one.
        left_over = ()
        for i in tl.static_range(LOADED, AHEAD * LOADED):
            left_over += (ring[i],)
        left_gains = ()
        if NORM:
            for i in tl.static_range(16, AHEAD * 16):
                left_gains += (gains[i],)
        if LAST and batch + AHEAD >= BATCHES:
            for i in tl.static_range(LOADED):
                left_over += (ring[i],)  # never used
            if NORM:
                for i in tl.static_range(16):
                    left_gains += (gains[i],)
        else:
            left_over += _inputs(source + (batch + AHEAD) * P * 64, on, K, NB, NIBBLES, True)
            if NORM:
                left_gains += _inputs(gain + (batch + AHEAD) * P * 64, on, K, 1, NIBBLES, P * RB < 8)
        ring = left_over
        gains = left_gains
    if LAST:
        new_held = held
        new_factors = factors
    elif GROUPS == 1:
        new_factors = factors
    return new_held, new_factors, ring, gains, totals, squares


@triton.jit
def _whole(c0, c1, c2, c3, RB: tl.constexpr):
    """Add the sums of all warps, and those of the columns that are the same row: `[8, RB, 2]`, output, row and which half of outputs."""
    W: tl.constexpr = c0.shape[0] // 32
    each = tl.join(tl.join(c0, c1), tl.join(c2, c3))  # [T, 2 next, 2 lower]
    columns = tl.reshape(each, [W, 8, 8, 2]) if RB == 8 else tl.sum(tl.reshape(each, [W, 8, 8 // RB, RB, 2]), 2)
    return tl.sum(columns, 0)


@triton.jit
def _mean_square(s0, s1, g, t, K: tl.constexpr, RB: tl.constexpr):
    """Add the diagonal elements of the products of all warps' inputs with themselves, divided by K: `[RB]`."""
    W: tl.constexpr = s0.shape[0] // 32
    own = tl.where(g == 2 * t, s0, 0.0) + tl.where(g == 2 * t + 1, s1, 0.0)
    rows = tl.sum(tl.reshape(own, [W, 8 // RB, RB, 4]), 3)
    return tl.sum(tl.reshape(rows, [W * (8 // RB), RB]), 0) / K


@triton.jit(do_not_specialize=["B"])
def _direct(
    x, gain, codes, scales, zeros, bias, residual, y, B, N, eps, K: tl.constexpr, WORDS: tl.constexpr, W: tl.constexpr, OWN: tl.constexpr,
    R: tl.constexpr, DEPTH: tl.constexpr, RB: tl.constexpr, NB: tl.constexpr, NIBBLES: tl.constexpr, FP8: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, ZEROS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i computes outputs i * 16 R ... (i + 1) * 16 R - 1 of all rows. Each of W warps takes OWN blocks of each output's codes.

    The rows are NB times at most RB. `DEPTH` divides OWN.
    """
    if PDL:
        gdc_launch_dependents()
    SPAN: tl.constexpr = span_of(NIBBLES)
    VECS: tl.constexpr = SPAN // 32
    TILES: tl.constexpr = 2 * R if GATED else R
    P: tl.constexpr = 8 // RB if 8 // RB < DEPTH else DEPTH  # blocks whose inputs are loaded at once
    TURNS: tl.constexpr = OWN // DEPTH
    AHEAD: tl.constexpr = 2 if NB == 1 and DEPTH // P > 1 else 1
    thread = tl.arange(0, 32 * W)
    warp, g, t = thread // 32, thread % 32 // 4, thread % 4
    n0 = tl.program_id(0) * (16 * R)
    scale_row = n0 + g
    own = codes + scale_row.to(tl.int64) * WORDS + (warp * OWN * 16 * VECS + t * 4)
    column = warp * OWN * 128
    held = ()
    factors = ()
    for block in tl.static_range(DEPTH):
        more, more_factors = _codes(
            own + block * 16 * VECS, scales, zeros, scale_row, column + block * 128, N, TILES, GATED, WORDS, VECS, GROUP, GROUPS, ROWS,
            ZEROS,
        )  # fmt: skip
        held += more
        factors += more_factors
    if ZEROS and GROUPS == 1:
        for tile in tl.static_range(TILES):
            for lower in tl.static_range(2):
                row = scale_row + (tile % R) * 16 + lower * 8
                if tile >= R:
                    row += N
                factors += (tl.load(zeros + row // ROWS),)
    first = column // 2 + g // RB * 64 + t * 4  # words of inputs
    gain_words = gain.to(tl.pointer_type(tl.int32)) + first
    on = ()
    for rows in tl.static_range(NB):
        on += ((g % RB + rows * 8 < B) & (g // RB < P),)
    gains = ()
    if NORM:
        for batch in tl.static_range(AHEAD):
            gains += _inputs(gain_words + batch * P * 64, on, K, 1, NIBBLES, P * RB < 8)
    u = tl.arange(0, 8)[:, None, None] + tl.arange(0, 2)[None, None, :] * 8  # outputs of 16
    b = tl.arange(0, RB)[None, :, None]
    biases = ()
    for tile in tl.static_range(R):
        biases += (tl.load(bias + n0 + tile * 16 + u) if BIAS else 0.0,)
    if PDL:
        gdc_wait()
    source = x.to(tl.pointer_type(tl.int32)) + g % RB * (K // 2) + first
    ring = ()
    for batch in tl.static_range(AHEAD):
        ring += _inputs(source + batch * P * 64, on, K, NB, NIBBLES, True)
    before = ()
    for tile in tl.static_range(R):
        for rows in tl.static_range(NB):
            place = residual + (rows * 8 + b) * N + (n0 + tile * 16 + u)
            before += (tl.load(place, mask=rows * 8 + b < B, other=0.0) if RESIDUAL else 0.0,)
    totals = ()
    for _ in tl.static_range(TILES * NB * 4):
        totals += (tl.zeros([32 * W], tl.float32),)
    squares = ()
    for _ in tl.static_range(NB * 4):
        squares += (tl.zeros([32 * W], tl.float32),)
    if TURNS > 1:
        for turn in tl.range(0, TURNS - 1):
            held, factors, ring, gains, totals, squares = _turn(
                held, factors, ring, gains, totals, squares, own + turn * (DEPTH * 16 * VECS), scales, zeros, scale_row,
                column + turn * (DEPTH * 128), source + turn * (DEPTH * 64), gain_words + turn * (DEPTH * 64), on, t, N, K, WORDS, TILES,
                DEPTH, RB, NB, P, AHEAD, NIBBLES, FP8, GROUP, GROUPS, ROWS, ZEROS, NORM, GATED, False, ASM,
            )  # fmt: skip
    held, factors, ring, gains, totals, squares = _turn(
        held, factors, ring, gains, totals, squares, own, scales, zeros, scale_row, column, source + (TURNS - 1) * (DEPTH * 64),
        gain_words + (TURNS - 1) * (DEPTH * 64), on, t, N, K, WORDS, TILES, DEPTH, RB, NB, P, AHEAD, NIBBLES, FP8, GROUP, GROUPS, ROWS,
        ZEROS, NORM, GATED, True, ASM,
    )  # fmt: skip
    UNITS: tl.constexpr = FP8_UNIT if FP8 else INTEGER_UNIT
    for rows in tl.static_range(NB):
        there = (rows * 8 + b < B) & (u >= 0)
        by = UNITS
        if NORM:
            by = (tl.rsqrt(_mean_square(squares[rows * 4], squares[rows * 4 + 1], g, t, K, RB) + eps) * UNITS)[None, :, None]
        for tile in tl.static_range(R):
            n = n0 + tile * 16 + u
            c0, c1, c2, c3 = _four(totals, (tile * NB + rows) * 4)
            acc = _whole(c0, c1, c2, c3, RB) * by
            if GROUPS == 1:
                acc *= tl.load(scales + n // ROWS).to(tl.float32)
            if GATED:
                c0, c1, c2, c3 = _four(totals, ((R + tile) * NB + rows) * 4)
                other = _whole(c0, c1, c2, c3, RB) * by
                if GROUPS == 1:
                    other *= tl.load(scales + (n + N) // ROWS).to(tl.float32)
                acc = activated(acc, other, y.dtype.element_ty, ACT)
            acc = rounded(acc, biases[tile], before[tile * NB + rows], y.dtype.element_ty, BIAS, RESIDUAL)
            tl.store(y + (rows * 8 + b) * N + n, acc, mask=there)


def launch(
    x: Float[Tensor, "B K"],
    weight: QuantisedMatrix,
    gain: Float[Tensor, "K"] | None,
    bias: Float[Tensor, "N"] | None,
    residual: Float[Tensor, "B N"] | None,
    eps: float,
    gated: bool,
    tile: DirectTile,
    pdl: bool,
    act: str = "silu",
    asm: bool = False,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "B N"]:
    """Launch the kernel: what `norm_linear` computes, in bfloat16, for at most `SPLIT_ROWS` rows and a tile that `direct_fits`.

    All tensors are contiguous, and the matrix is `in_gpu_layout`. `asm`: multiply on tensor cores, by PTX of compute capability 9.0, not
    by plain operations. `dtype` is that of the result; None: that of `x`.
    """
    rows, width = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    y = torch.empty((rows, outputs), dtype=dtype or x.dtype, device=x.device)
    kind = (weight.bits == 4, weight.kind == "fp8", *grouping(weight))
    flags = (gain is not None, bias is not None, residual is not None, gated, act, asm, pdl)
    kernel: Any = _direct
    with torch.cuda.device_of(x):
        kernel[(outputs // tile.outputs,)](
            x, x if gain is None else gain, *operands(weight, words=True), x if bias is None else bias, x if residual is None else residual,
            y, rows, outputs, eps, width, weight.width // 2, tile.warps, width // (128 * tile.warps), tile.outputs // 16, tile.depth,
            min(8, triton.next_power_of_2(rows)), triton.cdiv(rows, 8), *kind, *flags,
            **launch_options(tile.warps, pdl), maxnreg=tile.registers,
        )  # fmt: skip
    return y
