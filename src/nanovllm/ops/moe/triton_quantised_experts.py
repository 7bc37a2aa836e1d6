"""The Triton kernels of `quantised_experts`. Import this module only if Triton is installed.

The forms are those of `triton_experts`, whose `_sort` and `_combine` they use. For few tokens, each pair of a token and an expert reads its
expert's codes by itself; a thread sums the products of its codes in float32, as in `triton_quantised_few`. For many tokens, blocks of pairs
of one expert run on tensor cores; the codes are the left factor and become numbers in registers, as in `triton_quantised_many`.

Kernels start while the kernel before them still runs (programmatic dependent launch), and wait for it before they read codes. For few
tokens, the first product lets the second one start only after the routing has ended. So the second one reads the routing, its scales and
the residual before it waits. Codes that it reads while the first product still runs slow that down by as much as they gain. For many
tokens, the second product reads its table before it waits.
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
from nanovllm.ops.linear.quantised_tiles import FewTile, ManyTile, scale_form
from nanovllm.ops.linear.triton_code_loop import first_scales, summed_products
from nanovllm.ops.linear.triton_codes import fields_of, in_field, in_word, operands, span_of, summand_of, word_column
from nanovllm.ops.moe.tiles import QuantisedFewTiles, QuantisedGroupedTiles
from nanovllm.ops.moe.triton_experts import GROUP, combine, sort
from nanovllm.ops.triton_parts import activated, launch_options, rounded
from nanovllm.types import Float, Int32, Int64, Tensor


@triton.jit
def _words(codes, row, there, step: tl.constexpr, WORDS: tl.constexpr, T: tl.constexpr, WHOLE: tl.constexpr):
    """Load two words of each row for each thread: `[BN, T, 2]`. `WHOLE`: all rows exist, and no step reaches beyond the codes."""
    word = step * 2 * T + (tl.arange(0, T)[:, None] * 2 + tl.arange(0, 2)[None, :])
    at = codes + row.to(tl.int64)[:, None, None] * WORDS + word[None, :, :]
    if WHOLE:
        words = tl.load(at, eviction_policy="evict_first")
    else:
        words = tl.load(at, mask=there[:, None, None] & (word < WORDS)[None, :, :], other=0, eviction_policy="evict_first")
    return words


@triton.jit
def _factor(
    scales, zeros, row, step: tl.constexpr, T: tl.constexpr, NIBBLES: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, ZEROS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Load the scale and the zero of each thread's two words, `[BN, T]`; if `APART`, those of each field, one after another.

    With one group the result is `[BN, 1]`. Beyond the last column, any scale will do.
    """
    found = ()
    for field in tl.static_range(fields_of(NIBBLES) if APART else 1):
        column = word_column(step * 2 * T + tl.arange(0, T) * 2, NIBBLES) + field * span_of(NIBBLES)
        group = tl.minimum(column // GROUP, GROUPS - 1)[None, :]
        at = (row // ROWS)[:, None] if GROUPS == 1 else (row // ROWS * GROUPS)[:, None] + group
        found += (tl.load(scales + at).to(tl.float32), tl.load(zeros + at).to(tl.float32) if ZEROS else 0.0)
    return found


@triton.jit
def _inputs(x, step: tl.constexpr, K: tl.constexpr, T: tl.constexpr, NIBBLES: tl.constexpr):
    """Load the inputs that belong to two words per thread: for each field two tensors `[T, 2]` of float32, as in `in_field`."""
    found = ()
    for field in tl.static_range(fields_of(NIBBLES)):
        found += (in_field(x, step * 2 * T + (tl.arange(0, T)[:, None] * 2 + tl.arange(0, 2)[None, :]), field, K, NIBBLES),)
    return found


@triton.jit
def _sums(
    words, inputs, factor, T: tl.constexpr, BN: tl.constexpr, NIBBLES: tl.constexpr, FP8: tl.constexpr, GROUPS: tl.constexpr,
    ZEROS: tl.constexpr, APART: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Sum the products of two words per thread with their inputs: `[BN, T]`. A single scale of all columns is not applied.

    Codes of integers have a summand (`in_word`), which is subtracted from the start: half of it in each of the two words.
    """
    FIELDS: tl.constexpr = fields_of(NIBBLES)
    added = ()  # the sums of a thread's inputs by field
    start = tl.zeros([T], tl.float32)
    every = tl.zeros([T], tl.float32)
    for field in tl.static_range(FIELDS):
        more = tl.sum(inputs[field][0] + inputs[field][1], 1)
        start -= 0.5 * summand_of(field, NIBBLES, FP8) * more
        every += more
        added += (more,)
    total = tl.zeros([BN, T], tl.float32)
    product = tl.broadcast_to(start[None, :, None], [BN, T, 2])
    for field in tl.static_range(FIELDS):
        if APART:
            product = tl.broadcast_to((-0.5 * summand_of(field, NIBBLES, FP8) * added[field])[None, :, None], [BN, T, 2])
        wide = in_word(words, field, NIBBLES, FP8, ASM)
        for i in tl.static_range(2):
            product += wide[i] * inputs[field][i][None, :, :]
        if APART:
            part = tl.sum(product, 2)
            if ZEROS:
                part -= factor[2 * field + 1] * added[field][None, :]
            total += part * factor[2 * field]
    if not APART:
        total = tl.sum(product, 2)
        if ZEROS:
            total -= factor[1] * every[None, :]
        if GROUPS > 1:
            total *= factor[0]
    return total


@triton.jit
def _quantised_few_gate_up(
    x, codes, scales, zeros, chosen, y, N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, TOP: tl.constexpr, T: tl.constexpr,
    BN: tl.constexpr, NIBBLES: tl.constexpr, FP8: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    SCALES: tl.constexpr, ZEROS: tl.constexpr, ACT: tl.constexpr, WHOLE: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (pair, outputs) computes `[BN]` of the pair's N neurons. T threads share a row of WORDS words of codes, in steps.

    An expert has SCALES scales. `WHOLE` is as in `_words`.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    STEPS: tl.constexpr = (WORDS + 2 * T - 1) // (2 * T)
    APART: tl.constexpr = GROUP % 128 != 0 and GROUPS > 1  # the fields of a word have different scales
    pair, n = tl.program_id(0), tl.program_id(1) * BN + tl.arange(0, BN)
    there, row = n < N, tl.minimum(n, N - 1)
    expert = tl.load(chosen + pair).to(tl.int64)
    own, own_scales, own_zeros = codes + expert * (2 * N * WORDS), scales + expert * SCALES, zeros + expert * SCALES
    source = x + (pair // TOP).to(tl.int64) * K
    gates = ()  # all loads are issued before the first is used
    ups = ()
    gate_factors = ()
    up_factors = ()
    for step in tl.static_range(STEPS):
        gates += (_words(own, n, there, step, WORDS, T, WHOLE),)
        ups += (_words(own, n + N, there, step, WORDS, T, WHOLE),)
        if GROUPS > 1 or step == 0:
            gate_factors += (_factor(own_scales, own_zeros, row, step, T, NIBBLES, GROUP, GROUPS, ROWS, ZEROS, APART),)
            up_factors += (_factor(own_scales, own_zeros, row + N, step, T, NIBBLES, GROUP, GROUPS, ROWS, ZEROS, APART),)
    gate = tl.zeros([BN, T], tl.float32)
    up = tl.zeros([BN, T], tl.float32)
    for step in tl.static_range(STEPS):
        inputs = _inputs(source, step, K, T, NIBBLES)
        gate += _sums(gates[step], inputs, gate_factors[step if GROUPS > 1 else 0], T, BN, NIBBLES, FP8, GROUPS, ZEROS, APART, ASM)
        up += _sums(ups[step], inputs, up_factors[step if GROUPS > 1 else 0], T, BN, NIBBLES, FP8, GROUPS, ZEROS, APART, ASM)
    if GROUPS == 1:
        gate *= gate_factors[0][0]
        up *= up_factors[0][0]
    out = activated(tl.sum(gate, 1), tl.sum(up, 1), y.dtype.element_ty, ACT)
    tl.store(y + pair.to(tl.int64) * N + n, out.to(y.dtype.element_ty), mask=there)


@triton.jit
def _quantised_few_down(
    h, codes, scales, zeros, chosen, weights, residual, y, N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, TOP: tl.constexpr,
    T: tl.constexpr, BN: tl.constexpr, NIBBLES: tl.constexpr, FP8: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, RESIDUAL: tl.constexpr, WHOLE: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, outputs) computes `[BN]` of the token's N outputs, summed over its TOP experts."""
    if PDL:
        gdc_launch_dependents()
    STEPS: tl.constexpr = (WORDS + 2 * T - 1) // (2 * T)
    EACH: tl.constexpr = STEPS if GROUPS > 1 else 1
    APART: tl.constexpr = GROUP % 128 != 0 and GROUPS > 1
    token, n = tl.program_id(0), tl.program_id(1) * BN + tl.arange(0, BN)
    there, row = n < N, tl.minimum(n, N - 1)
    experts = ()
    shares = ()
    factors = ()
    for j in tl.static_range(TOP):
        expert = tl.load(chosen + token * TOP + j, cache_modifier=".cg").to(tl.int64)
        experts += (expert,)
        shares += (tl.load(weights + token * TOP + j, cache_modifier=".cg").to(tl.float32),)
        for step in tl.static_range(EACH):
            at, zero = scales + expert * SCALES, zeros + expert * SCALES
            factors += (_factor(at, zero, row, step, T, NIBBLES, GROUP, GROUPS, ROWS, ZEROS, APART),)
    before = tl.load(residual + token.to(tl.int64) * N + n, mask=there, other=0.0, cache_modifier=".cg") if RESIDUAL else 0.0
    if PDL:
        gdc_wait()
    held = ()  # all loads are issued before the first is used
    for j in tl.static_range(TOP):
        for step in tl.static_range(STEPS):
            held += (_words(codes + experts[j] * (N * WORDS), n, there, step, WORDS, T, WHOLE),)
    total = tl.zeros([BN, T], tl.float32)
    for j in tl.static_range(TOP):
        source = h + (token * TOP + j).to(tl.int64) * K
        acc = tl.zeros([BN, T], tl.float32)
        for step in tl.static_range(STEPS):
            inputs = _inputs(source, step, K, T, NIBBLES)
            factor = factors[j * EACH + (step if GROUPS > 1 else 0)]
            acc += _sums(held[j * STEPS + step], inputs, factor, T, BN, NIBBLES, FP8, GROUPS, ZEROS, APART, ASM)
        if GROUPS == 1:
            acc *= factors[j][0]
        total += acc * shares[j]
    out = rounded(tl.sum(total, 1), 0.0, before, y.dtype.element_ty, False, RESIDUAL)
    tl.store(y + token.to(tl.int64) * N + n, out, mask=there)


@triton.jit(do_not_specialize=["blocks"])  # depends on the number of tokens: one kernel serves all
def _quantised_grouped(
    x, codes, scales, zeros, order, table, y, blocks, N: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr,
    BLOCKS: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr, NIBBLES: tl.constexpr,
    FP8: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, SCALES: tl.constexpr,
    ZEROS: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, WHOLE: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block, outputs) computes `[BN, BP]` outputs of one expert's product; programs are ordered in groups of BLOCKS blocks.

    It takes D elements of each output's codes per step. `GATED` and the table are as in `triton_experts`, `FORM` as in `scale_form`, and
    `WHOLE`: no step reaches beyond the codes or the inputs.
    """
    if PDL and GATED:
        gdc_wait()
    if PDL:
        gdc_launch_dependents()
    ACROSS: tl.constexpr = BLOCKS * ((N + BN - 1) // BN)
    before = tl.program_id(0) // ACROSS * BLOCKS
    size = tl.minimum(blocks - before, BLOCKS)
    block, column = before + tl.program_id(0) % ACROSS % size, tl.program_id(0) % ACROSS // size
    first, stop = tl.load(table + blocks + block), tl.load(table + 2 * blocks + block)
    if first >= stop:
        return
    expert = tl.load(table + block).to(tl.int64)
    place, n, d = first + tl.arange(0, BP), column * BN + tl.arange(0, BN), tl.arange(0, D)
    on, there = (place < stop)[None, :], (n < N)[:, None]
    pair = tl.load(order + place, mask=place < stop, other=0)
    if PDL and not GATED:
        gdc_wait()
    source, target = (pair // TOP, place) if GATED else (place, pair)
    row = tl.minimum(n, N - 1)  # what is read for outputs beyond the last is not stored
    rows = x + source.to(tl.int64)[None, :] * K + d[:, None]
    own = codes + (expert * (2 * N if GATED else N) + row)[:, None] * WIDTH + d[None, :]
    up_own = own + N * WIDTH
    scales += expert * SCALES
    zeros += expert * SCALES
    scale_row, up_row = row // ROWS, (row + N) // ROWS
    found = first_scales(scales, scale_row, up_row, 0, K, NIBBLES, FORM, GROUP, GROUPS, GATED, x.dtype.element_ty, ASM)
    acc, other = summed_products(
        rows, on, own, up_own, scales, zeros, scale_row, up_row, found, 0, WIDTH, K, WIDTH, BP, BN, D, STAGES, NIBBLES, FP8, FORM,
        GROUP, GROUPS, ZEROS, GATED, WHOLE, ASM,
    )  # fmt: skip
    if GATED:
        acc = activated(acc, other, y.dtype.element_ty, ACT)
    tl.store(y + target.to(tl.int64)[None, :] * N + n[:, None], acc.to(y.dtype.element_ty), mask=on & there)


def launch(
    x: Float[Tensor, "T M"],
    gate_up: QuantisedMatrix,
    down: QuantisedMatrix,
    chosen: Int64[Tensor, "T k"] | Int32[Tensor, "T k"],
    weights: Float[Tensor, "T k"],
    act: str,
    tiles: QuantisedFewTiles | QuantisedGroupedTiles,
    pdl: bool,
    asm: bool = False,
    residual: Float[Tensor, "T M"] | None = None,
) -> Float[Tensor, "T M"]:
    """Launch the kernels of the op `quantised_experts` in this tile configuration, for at least one token.

    All tensors are contiguous, and the matrices are `in_gpu_layout`.
    `asm`: convert codes by PTX of compute capability 9.0, not by plain operations.
    """
    (tokens, k), (num, width, inner) = chosen.shape, down.shape
    h, y = x.new_empty(tokens * k, inner), torch.empty_like(x)
    with torch.cuda.device_of(x):
        x = _ordered(x, gate_up)
        if isinstance(tiles, QuantisedFewTiles):
            _launch_few(_quantised_few_gate_up, x, gate_up, (chosen, h), inner, k, tiles.gate_up, (act,), pdl, asm)
            others, how = (chosen, weights, y if residual is None else residual, y), (residual is not None,)
            _launch_few(_quantised_few_down, _ordered(h, down), down, others, width, k, tiles.down, how, pdl, asm)
            return y
        parts = x.new_empty(tokens * k, width)
        given = sort(chosen, num, tiles.gate_up.rows, pdl)
        _launch_grouped(x, gate_up, h, *given, k, True, act, tiles.gate_up, pdl, asm)
        _launch_grouped(_ordered(h, down), down, parts, *given, k, False, act, tiles.down, pdl, asm)
        combine(parts, weights, residual, y, pdl)
        return y


def _ordered(x: Tensor, matrix: QuantisedMatrix) -> Tensor:
    """Gather the inputs in the order of the codes' columns, which all experts share."""
    return x if matrix.order is None else x.index_select(1, matrix.order)


def _kind(matrix: QuantisedMatrix) -> tuple[Any, ...]:
    """Return `GROUP`, `GROUPS`, `ROWS`, `SCALES` and `ZEROS` of the kernels."""
    _, rows, groups = matrix.scales.shape
    return matrix.group, groups, matrix.rows, rows * groups, matrix.zeros is not None


def _launch_few(
    kernel: Any, x: Tensor, matrix: QuantisedMatrix, others: tuple[Tensor, ...], outputs: int, k: int, tile: FewTile,
    how: tuple[str | bool, ...], pdl: bool, asm: bool,
) -> None:  # fmt: skip
    programs, words = others[-1].shape[0], matrix.width // 2
    threads = min(32 * tile.warps, triton.next_power_of_2(triton.cdiv(words, 2)))
    whole = outputs % tile.outputs == 0 and words % (2 * threads) == 0
    kernel[(programs, triton.cdiv(outputs, tile.outputs))](
        x, *operands(matrix, words=True), *others, outputs, matrix.columns, words, k, threads, tile.outputs,
        matrix.bits == 4, matrix.kind == "fp8", *_kind(matrix), *how, whole, asm, pdl, **launch_options(tile.warps, pdl),
    )  # fmt: skip


def _launch_grouped(
    x: Tensor, matrix: QuantisedMatrix, y: Tensor, order: Tensor, table: Tensor, blocks: int, k: int, gated: bool, act: str, tile: ManyTile,
    pdl: bool, asm: bool,
) -> None:  # fmt: skip
    outputs, columns, width = y.shape[1], matrix.columns, matrix.width
    whole = width % tile.depth == 0 and columns == matrix.fields * width
    kernel: Any = _quantised_grouped
    kernel[(blocks * triton.cdiv(outputs, tile.outputs),)](
        x, *operands(matrix), order, table, y, blocks, outputs, columns, width, k, GROUP, tile.rows, tile.outputs, tile.depth,
        tile.stages, matrix.bits == 4, matrix.kind == "fp8", scale_form(matrix, tile.depth), *_kind(matrix), gated, act, whole, asm, pdl,
        **launch_options(tile.warps, pdl),
    )  # fmt: skip
