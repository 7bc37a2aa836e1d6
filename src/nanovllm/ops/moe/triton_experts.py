"""The Triton kernels of `experts`. Import this module only if Triton is installed.

Few tokens take two launches: each pair of a token and an expert reads its expert's weights by itself. Many tokens take four launches:
pairs are sorted by expert on the device and divided into blocks of one expert each, whose products run on tensor cores. Only the device
knows the number of blocks. So the launch starts as many programs as there could be blocks, and programs without a block end at once.

Kernels start while the kernel before them still runs (programmatic dependent launch). The first of a call waits for the routing, which
decides which weights are read. It lets the second one start only after that, so the second one may read the routing, and so its weights,
before it waits for the first.
"""

# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# (tuples that grow in an unrolled loop, names bound in a compile-time branch, and loop ranges without `__next__`)
from typing import Any, cast

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.ops.moe.tiles import FewTiles, GroupedTiles
from nanovllm.ops.triton_parts import activated, launch_options, rounded
from nanovllm.types import Float, Int32, Int64, Tensor

GROUP = 8  # blocks that run at the same time, so that blocks of one expert read its weights from L2
SORTED, MOST_SORTED = 1024, 4096  # pairs that a program of the sort reads at once
# With more tokens, the product before the router fills the shared memory. Its multiprocessors then have little L1 until they are idle, and
# the first kernel for few tokens needs L1 for its loads. So it starts as an ordinary launch.
DRAINED = 2
COMBINED = 1024  # outputs of one program of `_combine`


@triton.jit
def _few_gate_up(
    x, w, chosen, y, N: tl.constexpr, K: tl.constexpr, TOP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (pair, outputs) computes `[BN]` of the pair's N neurons. Pairs run at the same time, so pairs of one expert share L2."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    STEPS: tl.constexpr = (K + BK - 1) // BK
    pair, n, k = tl.program_id(0), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    row = x + (pair // TOP).to(tl.int64) * K + k
    there = (n < N)[:, None]
    at = w + (tl.load(chosen + pair).to(tl.int64) * (2 * N) + n)[:, None] * K + k[None, :]
    gates = ()  # all loads are issued before the first is used
    ups = ()
    for step in tl.static_range(STEPS):
        on = there & (step * BK + k < K)[None, :]
        gates += (tl.load(at + step * BK, mask=on, other=0.0, eviction_policy="evict_first"),)
        ups += (tl.load(at + N * K + step * BK, mask=on, other=0.0, eviction_policy="evict_first"),)
    gate = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    for step in tl.static_range(STEPS):
        inputs = tl.load(row + step * BK, mask=step * BK + k < K, other=0.0).to(tl.float32)[None, :]
        gate += gates[step].to(tl.float32) * inputs
        up += ups[step].to(tl.float32) * inputs
    h = activated(tl.sum(gate, 1), tl.sum(up, 1), y.dtype.element_ty, ACT)
    tl.store(y + pair.to(tl.int64) * N + n, h.to(y.dtype.element_ty), mask=n < N)


@triton.jit
def _few_down(
    h, w, chosen, weights, residual, y, N: tl.constexpr, K: tl.constexpr, TOP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, outputs) computes `[BN]` of the token's N outputs, summed over its TOP experts."""
    if PDL:
        gdc_launch_dependents()
    STEPS: tl.constexpr = (K + BK - 1) // BK
    token, n, k = tl.program_id(0), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    there = (n < N)[:, None]
    held = ()  # all loads are issued before the first is used
    for j in tl.static_range(TOP):
        at = w + (tl.load(chosen + token * TOP + j).to(tl.int64) * N + n)[:, None] * K + k[None, :]
        for step in tl.static_range(STEPS):
            on = there & (step * BK + k < K)[None, :]
            held += (tl.load(at + step * BK, mask=on, other=0.0, eviction_policy="evict_first"),)
    before = tl.load(residual + token.to(tl.int64) * N + n, mask=n < N, other=0.0) if RESIDUAL else 0.0
    if PDL:
        gdc_wait()
    acc = tl.zeros([BN, BK], tl.float32)
    for j in tl.static_range(TOP):
        weight = tl.load(weights + token * TOP + j).to(tl.float32)
        row = h + (token * TOP + j).to(tl.int64) * K + k
        for step in tl.static_range(STEPS):
            inputs = tl.load(row + step * BK, mask=step * BK + k < K, other=0.0).to(tl.float32) * weight
            acc += held[j * STEPS + step].to(tl.float32) * inputs[None, :]
    out = rounded(tl.sum(acc, 1), 0.0, before, y.dtype.element_ty, False, RESIDUAL)
    tl.store(y + token.to(tl.int64) * N + n, out, mask=n < N)


@triton.jit(do_not_specialize=["P", "blocks"])  # they depend on the number of tokens: one kernel serves all
def _sort(chosen, order, table, P, blocks, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program e writes the pairs of expert e into `order`, ascending, and its blocks into `table`: expert, first and stop in `order`.

    Each program counts the pairs of all experts, which saves a launch. The last program writes the unused blocks, from 0 to 0.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    e, at, bins = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, EP)
    counts = tl.zeros([EP], tl.int32)
    for start in range(0, P, BLOCK):
        counts += tl.histogram(tl.load(chosen + start + at, mask=start + at < P, other=E).to(tl.int32), EP)
    counts = tl.where(bins < E, counts, 0)
    taken = (counts + BM - 1) // BM
    count, total = tl.sum(tl.where(bins == e, counts, 0), 0), tl.sum(taken, 0)
    first, block = tl.sum(tl.where(bins < e, counts, 0), 0), tl.sum(tl.where(bins < e, taken, 0), 0)
    place = first
    for start in range(0, P, BLOCK):
        mine = (tl.load(chosen + start + at, mask=start + at < P, other=E).to(tl.int32) == e).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - 1, start + at, mask=mine != 0)
        place += tl.sum(mine, 0)
    for start in range(0, blocks, BLOCK):
        b = start + at
        mine = (b >= block) & ((b - block) * BM < count)
        none = (b >= total) & (b < blocks) & (e == E - 1)
        tl.store(table + b, e, mask=mine)
        tl.store(table + blocks + b, tl.where(mine, first + (b - block) * BM, 0), mask=mine | none)
        tl.store(table + 2 * blocks + b, tl.where(mine, first + count, 0), mask=mine | none)


@triton.jit(do_not_specialize=["blocks"])  # depends on the number of tokens: one kernel serves all
def _grouped(
    x, w, order, table, y, blocks, N: tl.constexpr, K: tl.constexpr, TOP: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block, outputs) computes `[BM, BN]` outputs of one expert's product; programs are ordered in groups of GROUP blocks.

    With GATED, rows of x are in token order and results are in the order of `order`. Else rows of x are in the order of `order` and
    results are in the order of pairs.
    """
    if PDL and GATED:
        gdc_wait()
    if PDL:
        gdc_launch_dependents()
    ACROSS: tl.constexpr = GROUP * ((N + BN - 1) // BN)
    before = tl.program_id(0) // ACROSS * GROUP
    size = tl.minimum(blocks - before, GROUP)
    block, column = before + tl.program_id(0) % ACROSS % size, tl.program_id(0) % ACROSS // size
    first, stop = tl.load(table + blocks + block), tl.load(table + 2 * blocks + block)
    if first >= stop:
        return
    expert = tl.load(table + block).to(tl.int64)
    place, n, k = first + tl.arange(0, BM), column * BN + tl.arange(0, BN), tl.arange(0, BK)
    on, there = (place < stop)[:, None], (n < N)[None, :]
    pair = tl.load(order + place, mask=place < stop, other=0)
    if PDL and not GATED:
        gdc_wait()
    source, target = (pair // TOP, place) if GATED else (place, pair)
    rows = x + source.to(tl.int64)[:, None] * K + k[None, :]
    columns = w + (expert * (2 * N if GATED else N) + n)[None, :] * K + k[:, None]
    acc = tl.zeros([BM, BN], tl.float32)
    other = tl.zeros([BM, BN], tl.float32)
    for at in tl.range(0, K, BK, num_stages=STAGES):
        if K % BK == 0:
            inputs = tl.load(rows + at, mask=on, other=0.0)
            ahead = there
        else:
            inputs = tl.load(rows + at, mask=on & (at + k < K)[None, :], other=0.0)
            ahead = there & (at + k < K)[:, None]
        acc = tl.dot(inputs, _weights(columns + at, ahead, N, K, BN, BK), acc)
        if GATED:
            other = tl.dot(inputs, _weights(columns + N * K + at, ahead, N, K, BN, BK), other)
    if GATED:
        acc = activated(acc, other, y.dtype.element_ty, ACT)
    tl.store(y + target.to(tl.int64)[:, None] * N + n[None, :], acc.to(y.dtype.element_ty), mask=on & there)


@triton.jit
def _weights(at, mask, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    return tl.load(at) if N % BN == 0 and K % BK == 0 else tl.load(at, mask=mask, other=0.0)


@triton.jit
def _combine(
    parts, weights, residual, y, M: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr
):
    """Program (token, outputs) computes the weighted sum of the token's parts, in the router's order."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, m = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    before = tl.load(residual + token * M + m, mask=m < M, other=0.0) if RESIDUAL else 0.0
    for j in tl.static_range(TOP):
        part = tl.load(parts + (token * TOP + j) * M + m, mask=m < M, other=0.0).to(tl.float32)
        total += part * tl.load(weights + token * TOP + j).to(tl.float32)
    tl.store(y + token * M + m, rounded(total, 0.0, before, y.dtype.element_ty, False, RESIDUAL), mask=m < M)


def launch(
    x: Float[Tensor, "T M"],
    gate_up: Float[Tensor, "E F2 M"],
    down: Float[Tensor, "E M F"],
    chosen: Int64[Tensor, "T k"] | Int32[Tensor, "T k"],
    weights: Float[Tensor, "T k"],
    act: str,
    tiles: FewTiles | GroupedTiles,
    pdl: bool,
    residual: Float[Tensor, "T M"] | None = None,
) -> Float[Tensor, "T M"]:
    """Launch the kernels of the op `experts` in this tile configuration, for at least one token. All tensors are contiguous."""
    with torch.cuda.device_of(x):
        if isinstance(tiles, FewTiles):
            return _launch_few(x, gate_up, down, chosen, weights, act, tiles, pdl, residual)
        return _launch_grouped(x, gate_up, down, chosen, weights, act, tiles, pdl, residual)


def _launch_few(
    x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, act: str, tiles: FewTiles, pdl: bool, residual: Tensor | None
) -> Tensor:
    (tokens, k), (_, width, inner) = chosen.shape, down.shape
    h, y = x.new_empty(tokens * k, inner), torch.empty_like(x)
    first, second = tiles.gate_up, tiles.down
    kernel: Any = _few_gate_up
    kernel[(tokens * k, triton.cdiv(inner, first.outputs))](
        x,
        gate_up,
        chosen,
        h,
        inner,
        width,
        k,
        first.outputs,
        first.depth,
        act,
        pdl,
        **launch_options(first.warps, pdl and tokens <= DRAINED),
    )
    kernel = _few_down
    kernel[(tokens, triton.cdiv(width, second.outputs))](
        h, down, chosen, weights, y if residual is None else residual, y, width, inner, k, second.outputs, second.depth,
        residual is not None, pdl, **launch_options(second.warps, pdl),
    )  # fmt: skip
    return y


def _launch_grouped(
    x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, act: str, tiles: GroupedTiles, pdl: bool,
    residual: Tensor | None,
) -> Tensor:  # fmt: skip
    (tokens, k), (num, width, inner) = chosen.shape, down.shape
    first, second = tiles.gate_up, tiles.down
    h, parts, y = x.new_empty(tokens * k, inner), x.new_empty(tokens * k, width), torch.empty_like(x)
    order, table, blocks = sort(chosen, num, first.rows, pdl)
    grouped: Any = _grouped
    for source, weight, target, tile, gated in ((x, gate_up, h, first, True), (h, down, parts, second, False)):
        outputs, inputs = target.shape[1], source.shape[1]
        grouped[(blocks * triton.cdiv(outputs, tile.outputs),)](
            source, weight, order, table, target, blocks, outputs, inputs, k, GROUP, tile.rows, tile.outputs, tile.depth, tile.stages,
            act, gated, pdl, **launch_options(tile.warps, pdl),
        )  # fmt: skip
    combine(parts, weights, residual, y, pdl)
    return y


def combine(
    parts: Float[Tensor, "pairs M"],
    weights: Float[Tensor, "T k"],
    residual: Float[Tensor, "T M"] | None,
    y: Float[Tensor, "T M"],
    pdl: bool,
) -> None:
    """Donates `y`. Write the weighted sums of each token's parts, plus the residual if given. All tensors are contiguous."""
    (tokens, k), width, kernel = weights.shape, y.shape[1], cast(Any, _combine)
    before = y if residual is None else residual
    grid, options = (tokens, triton.cdiv(width, COMBINED)), launch_options(4, pdl)
    kernel[grid](parts, weights, before, y, width, k, COMBINED, residual is not None, pdl, **options)


def sort(
    chosen: Int64[Tensor, "T k"] | Int32[Tensor, "T k"], num: int, rows: int, pdl: bool
) -> tuple[Int32[Tensor, "pairs"], Int32[Tensor, "table"], int]:
    """Return pairs sorted by expert, the table of their blocks of `rows` pairs, and the number of blocks that the table has room for.

    `_sort` describes the table. All tensors are contiguous.
    """
    pairs = chosen.numel()
    blocks = most_blocks(pairs, num, rows)
    order, table = (torch.empty(size, dtype=torch.int32, device=chosen.device) for size in (pairs, 3 * blocks))
    looked, warps = (SORTED, 4) if pairs <= MOST_SORTED else (MOST_SORTED, 8)
    bins = max(32, triton.next_power_of_2(num + 1))  # one more than there are experts, for places after the last pair
    kernel: Any = _sort
    kernel[(num,)](chosen, order, table, pairs, blocks, num, bins, rows, looked, pdl, **launch_options(warps, pdl))
    return order, table, blocks


def most_blocks(pairs: int, num: int, rows: int) -> int:
    """Return the largest number of blocks of `rows` pairs that any routing of `pairs` pairs to `num` experts can fill."""
    return (pairs + (rows - 1) * min(num, pairs)) // rows
