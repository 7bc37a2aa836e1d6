"""The Triton kernels of `least_kept`, for a GPU or Triton's interpreter. They neither sort nor wait for the host.

Six launches find each row's least kept logit; rows without a filter leave each of them at once:

1. `_survey` reads the row and stores the largest logit of every 64.
2. `_bound` finds the largest logit of the row, min-p's limit, and for top-k a limit from below: the k-th largest of the stored logits.
3. `_weigh`, twice, for top-p without top-k: the masses above 16 limits. They say between which two the least kept logit is.
4. `_gather` copies the logits that may be the least kept one.
5. `_solve` searches these by bisection. If there are more than `ROOM`, such as in a row of equal logits, it searches the row itself.

Logits are compared as integers of the same order. For 16-bit logits only the upper bits differ, so a search over them is short. No kernel
may contract a product and a sum into one operation, because masses must have the same bits as those of the reference.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.ops.sampling.fixed_weights import COLDEST, LOG2E, POWERS

CHUNK, SUB = 4096, 64  # logits per program; per stored largest logit
LIMITS = 16  # masses per launch of `_weigh`
ROOM = 8192  # candidates per row
SUMS = 1 + 2 * LIMITS  # of a row: candidates, masses of the first launch, masses of the second
FACTS = 8  # floats of a row: largest, inverse temperature, min-p's limit, lower limit, way
_NONE, _BY_COUNT, _BY_MASS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_LIMITS, _SUMS, _FACTS = tl.constexpr(LIMITS), tl.constexpr(SUMS), tl.constexpr(FACTS)
_LOG2E, _COLDEST = tl.constexpr(LOG2E), tl.constexpr(COLDEST)
_P1, _P2, _P3, _P4, _P5, _P6 = (tl.constexpr(power) for power in POWERS[1:])
_HALVING = tl.constexpr(0.0625)


@triton.jit
def _options(row, temperature, top_k, top_p, log_min_p, num):
    """The temperature, top-k (0: none), top-p (1: none) and min-p's logarithm (-inf: none) of a row, and whether it has a filter."""
    t, k = tl.load(temperature + row), tl.minimum(tl.maximum(tl.load(top_k + row), 0), num)
    p, low = tl.load(top_p + row), tl.load(log_min_p + row)
    return t, k, p, low, (t > 0) & ((k > 0) | (p < 1) | (low > -float("inf")))


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """An integer for each float32 in the same order, equal for 0 and -0, without its lowest bits."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The float32 of a key. The lowest bits of a 16-bit logit are zeros, which are ones in the key of a negative one."""
    whole = (key << SHIFT) | ((key >> 31) & ((1 << SHIFT) - 1))  # pyright: ignore[reportOperatorIssue]
    return (whole ^ ((whole >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(x, largest, inverse):
    """`fixed_weights` of the differences from the largest logit."""
    exponents = tl.maximum((x - largest) * inverse * _LOG2E, -64.0)
    whole = tl.floor(exponents + 0.5)
    f = exponents - whole
    power = (((((_P6 * f + _P5) * f + _P4) * f + _P3) * f + _P2) * f + _P1) * f + 1.0
    shift = whole.to(tl.int64) + 16
    return ((power * 16777216.0).to(tl.int64) << tl.maximum(shift, 0)) >> tl.maximum(-shift, 0)


@triton.jit
def _survey(
    logits, stride, temperature, top_k, top_p, log_min_p, tops, bottoms, num, CHUNK: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Program (chunk, row) stores the largest of every `SUB` logits, +inf for NaN, and the smallest of the chunk that is not -inf."""
    chunk, row, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    _, _, _, _, on = _options(row, temperature, top_k, top_p, log_min_p, num)  # pyright: ignore[reportGeneralTypeIssues]
    if on:
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row * stride + index, mask=index < num, other=-float("inf")).to(tl.float32)
        x = tl.where(x != x, float("inf"), x)  # noqa: PLR0124 - NaN
        each = tl.arange(0, CHUNK // SUB)
        tl.store(tops + (row * chunks + chunk) * (CHUNK // SUB) + each, tl.max(tl.reshape(x, (CHUNK // SUB, SUB)), 1))
        tl.store(bottoms + row * chunks + chunk, tl.min(tl.where(x == -float("inf"), float("inf"), x), 0))


@triton.jit
def _bound(
    temperature, top_k, top_p, log_min_p, tops, bottoms, facts, out, num, num_tops, chunks, TOPS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program (row) writes the facts of its row, and its result if neither top-k nor top-p is needed."""
    row = tl.program_id(0).to(tl.int64)
    t, k, p, low, on = _options(row, temperature, top_k, top_p, log_min_p, num)  # pyright: ignore[reportGeneralTypeIssues]
    way, result = tl.full((), _NONE, tl.int32), tl.full((), -float("inf"), tl.float32)
    if on:
        index = tl.arange(0, TOPS)
        x = tl.load(tops + row * num_tops + index, mask=index < num_tops, other=-float("inf"))
        largest = tl.max(x, 0)
        if (largest < float("inf")) & (largest > -float("inf")):
            chunk = tl.arange(0, CHUNKS)
            smallest = tl.min(tl.load(bottoms + row * chunks + chunk, mask=chunk < chunks, other=float("inf")), 0)
            floor = largest + t * low
            result = floor
            lower = tl.maximum(largest - 28.0 * t, smallest)
            if k > 0:
                way = tl.full((), _BY_COUNT, tl.int32)
                keys = _key(x, 16)
                first, last = tl.full((), -32768, tl.int32), tl.full((), 32767, tl.int32)
                if k <= num_tops:
                    while first < last:  # at least k of the stored logits have a key of `first` or more
                        middle = first + (last - first + 1) // 2
                        enough = tl.sum(((keys >= middle) & (index < num_tops)).to(tl.int32), 0) >= k
                        first = tl.where(enough, middle, first)
                        last = tl.where(enough, last, middle - 1)
                # The smallest float32 of this key. Keys of no float32 are below that of -inf or above that of +inf.
                whole = first << 16
                lower = (whole ^ ((whole >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
                lower = tl.where((k > num_tops) | (first <= -32641), -float("inf"), lower)  # the key of -inf and those of NaN
            elif p < 1:
                way = tl.full((), _BY_MASS, tl.int32)
            at = facts + row * _FACTS
            tl.store(at, largest)
            tl.store(at + 1, tl.div_rn(1.0, tl.maximum(t, _COLDEST)))
            tl.store(at + 2, floor)
            tl.store(at + 3, lower)
    tl.store(facts + row * _FACTS + 4, way.to(tl.float32))
    if way == _NONE:
        tl.store(out + row, result)


@triton.jit
def _narrowed(row, facts, sums, p, ROUNDS: tl.constexpr):
    """The limits after `ROUNDS` launches of `_weigh`, the mass that is wanted, and the mass above the upper limit.

    The last two results say whether the interval begins at -inf, and whether it ends at the largest logit.
    """
    upper, lower = tl.load(facts + row * _FACTS), tl.load(facts + row * _FACTS + 3)
    each, at = tl.arange(0, _LIMITS), sums + row * _SUMS + 1
    wanted, above = tl.full((), 1, tl.int64), tl.full((), 0, tl.int64)
    bottom, top = tl.full((), 1, tl.int1), tl.full((), 1, tl.int1)
    for turn in tl.static_range(ROUNDS):  # pyright: ignore[reportGeneralTypeIssues]
        masses = tl.load(at + turn * _LIMITS + each)
        if turn == 0:
            wanted = tl.maximum((p.to(tl.float64) * tl.max(masses, 0).to(tl.float64)).to(tl.int64), 1)
        found = tl.sum((masses >= wanted).to(tl.int32), 0) - 1
        is_last = found == _LIMITS - 1
        above = tl.where(is_last, above, tl.sum(tl.where(each == found + 1, masses, 0), 0))
        new = lower + (upper - lower) * (found.to(tl.float32) * _HALVING)
        upper = tl.where(is_last, upper, lower + (upper - lower) * ((found + 1).to(tl.float32) * _HALVING))
        lower = tl.where(found == 0, lower, new)
        bottom, top = bottom & (found == 0), top & is_last
    return lower, upper, wanted, above, bottom, top


@triton.jit
def _weigh(logits, stride, top_p, facts, sums, num, CHUNK: tl.constexpr, TURN: tl.constexpr):
    """Program (chunk, row) adds the masses of its logits from each of 16 limits on; the first limit is the lower end of the interval."""
    row = tl.program_id(1).to(tl.int64)
    if tl.load(facts + row * _FACTS + 4) == _BY_MASS:
        lower, upper, _, _, bottom, _ = _narrowed(row, facts, sums, tl.load(top_p + row), TURN)  # pyright: ignore[reportGeneralTypeIssues]
        largest, inverse = tl.load(facts + row * _FACTS), tl.load(facts + row * _FACTS + 1)
        index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row * stride + index, mask=index < num, other=-float("inf")).to(tl.float32)
        weights = tl.where((index < num) & (x >= tl.load(facts + row * _FACTS + 2)), _weights(x, largest, inverse), 0)
        each = tl.arange(0, _LIMITS)
        masses = tl.zeros((_LIMITS,), tl.int64)
        for i in tl.static_range(_LIMITS):  # pyright: ignore[reportGeneralTypeIssues]
            inside = x >= lower + (upper - lower) * (i * _HALVING)
            if i == 0:
                inside = inside | bottom
            masses = tl.where(each == i, tl.sum(tl.where(inside, weights, 0), 0), masses)
        tl.atomic_add(sums + row * _SUMS + 1 + TURN * _LIMITS + each, masses)


@triton.jit
def _gather(logits, stride, top_p, facts, sums, candidates, num, CHUNK: tl.constexpr, ROOM: tl.constexpr):
    """Program (chunk, row) copies the logits of its chunk that may be the least kept one, or count for it, in any order."""
    row = tl.program_id(1).to(tl.int64)
    way = tl.load(facts + row * _FACTS + 4)
    if way != _NONE:
        index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row * stride + index, mask=index < num, other=-float("inf")).to(tl.float32)
        take = (index < num) & (x >= tl.load(facts + row * _FACTS + 3))
        if way == _BY_MASS:
            lower, upper, _, _, bottom, top = _narrowed(row, facts, sums, tl.load(top_p + row), 2)  # pyright: ignore[reportGeneralTypeIssues]
            take = (index < num) & ((x >= lower) | bottom) & ((x < upper) | top)
        count = tl.sum(take.to(tl.int32), 0)
        if count > 0:
            first = tl.atomic_add(sums + row * _SUMS, count.to(tl.int64))
            place = first + tl.cumsum(take.to(tl.int32), 0) - 1
            tl.store(candidates + row * ROOM + place, x, mask=take & (place < ROOM))


@triton.jit
def _count(values, num, key, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """How many values have at least this key."""
    counts = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(values + index, mask=index < num, other=-float("inf")).to(tl.float32)
        counts += ((index < num) & (_key(x, SHIFT) >= key)).to(tl.int32)
    return tl.sum(counts, 0)


@triton.jit
def _mass(values, num, key, largest, inverse, floor, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The mass of the values that have at least this key, and are not below min-p's limit."""
    masses = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, num, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(values + index, mask=index < num, other=-float("inf")).to(tl.float32)
        on = (index < num) & (_key(x, SHIFT) >= key) & (x >= floor)
        masses += tl.where(on, _weights(x, largest, inverse), 0)
    return tl.sum(masses, 0)


@triton.jit
def _search(
    values, num, k, p, wanted, above, largest, inverse, floor, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The key of the least kept value: the k-th largest, or if the mass `wanted` is not 0, the first at which this mass is reached."""
    first = _key(tl.full((), -float("inf"), tl.float32), SHIFT)
    if k > 0:
        last = _key(largest, SHIFT)
        while first < last:
            middle = (first.to(tl.int64) + (last.to(tl.int64) - first.to(tl.int64) + 1) // 2).to(tl.int32)
            enough = _count(values, num, middle, SHIFT, BLOCK) >= k
            first = tl.where(enough, middle, first)
            last = tl.where(enough, last, middle - 1)
        if p < 1:
            kth = _value(first, SHIFT)
            total = _mass(values, num, first, largest, inverse, floor, SHIFT, BLOCK)
            more = _count(values, num, first, SHIFT, BLOCK) - k  # tied with the k-th, and not counted
            total -= tl.where(kth >= floor, more.to(tl.int64) * _weights(kth, largest, inverse), 0)
            wanted = tl.maximum((p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
    if p < 1:
        last = _key(largest, SHIFT)
        while first < last:
            middle = (first.to(tl.int64) + (last.to(tl.int64) - first.to(tl.int64) + 1) // 2).to(tl.int32)
            enough = above + _mass(values, num, middle, largest, inverse, floor, SHIFT, BLOCK) >= wanted
            first = tl.where(enough, middle, first)
            last = tl.where(enough, last, middle - 1)
    return first


@triton.jit
def _solve(
    logits, stride, temperature, top_k, top_p, log_min_p, facts, sums, candidates, out, num, SHIFT: tl.constexpr, ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row) finds the least kept logit among the candidates, or in the whole row if they are too many."""
    row = tl.program_id(0).to(tl.int64)
    way = tl.load(facts + row * _FACTS + 4)
    if way != _NONE:
        _, k, p, _, _ = _options(row, temperature, top_k, top_p, log_min_p, num)  # pyright: ignore[reportGeneralTypeIssues]
        largest, inverse = tl.load(facts + row * _FACTS), tl.load(facts + row * _FACTS + 1)
        floor, count = tl.load(facts + row * _FACTS + 2), tl.load(sums + row * _SUMS).to(tl.int32)
        wanted, above = tl.full((), 1, tl.int64), tl.full((), 0, tl.int64)
        if way == _BY_MASS:
            _, _, wanted, above, _, _ = _narrowed(row, facts, sums, p, 2)  # pyright: ignore[reportGeneralTypeIssues]
        if count <= ROOM:
            key = _search(candidates + row * ROOM, count, k, p, wanted, above, largest, inverse, floor, SHIFT, BLOCK)
        else:
            key = _search(logits + row * stride, num, k, p, wanted, above * 0, largest, inverse, floor, SHIFT, BLOCK)
        tl.store(out + row, tl.maximum(_value(key, SHIFT), floor))


def launch(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None, min_p: torch.Tensor | None
) -> torch.Tensor:
    """Launch the kernels of the op `least_kept`, for at most 65,535 rows.

    An absent filter is one that keeps all in every row, so that nothing is compiled when filters first meet.
    """
    (rows, num), device = logits.shape, logits.device
    out = torch.empty(rows, dtype=torch.float32, device=device)
    if rows == 0:
        return out
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    options = (
        temperature.contiguous(),
        torch.zeros(rows, dtype=torch.int32, device=device) if top_k is None else top_k.contiguous(),
        torch.ones(rows, dtype=torch.float32, device=device) if top_p is None else top_p.contiguous(),
        torch.full((rows,), -torch.inf, device=device) if min_p is None else min_p.contiguous().log(),
    )
    chunks = -(-num // CHUNK)
    num_tops, grid, plain = chunks * (CHUNK // SUB), (chunks, rows), {"enable_fp_fusion": False}
    tops = torch.empty((rows, num_tops + chunks), dtype=torch.float32, device=device)
    tops, bottoms = tops.view(-1)[: rows * num_tops], tops.view(-1)[rows * num_tops :]
    facts, sums = torch.empty((rows, FACTS), dtype=torch.float32, device=device), torch.zeros(rows, SUMS, dtype=torch.int64, device=device)
    kernels: Any = (_survey, _bound, _weigh, _gather, _solve)
    survey, bound, weigh, gather, solve = kernels
    shift = {torch.bfloat16: 16, torch.float16: 13}.get(logits.dtype, 0)
    with torch.cuda.device_of(logits):
        survey[grid](logits, logits.stride(0), *options, tops, bottoms, num, CHUNK=CHUNK, SUB=SUB, num_warps=8, **plain)
        widths = {"TOPS": triton.next_power_of_2(num_tops), "CHUNKS": triton.next_power_of_2(chunks)}
        bound[(rows,)](*options, tops, bottoms, facts, out, num, num_tops, chunks, **widths, num_warps=4, **plain)
        if top_k is None and top_p is None:
            return out
        if top_p is not None:
            for turn in range(2):
                weigh[grid](logits, logits.stride(0), options[2], facts, sums, num, CHUNK=CHUNK, TURN=turn, num_warps=8, **plain)
        candidates = torch.empty((rows, ROOM), dtype=torch.float32, device=device)
        near = (logits, logits.stride(0))
        gather[grid](*near, options[2], facts, sums, candidates, num, CHUNK=CHUNK, ROOM=ROOM, num_warps=8, **plain)
        solve[(rows,)](*near, *options, facts, sums, candidates, out, num, SHIFT=shift, ROOM=ROOM, BLOCK=4096, num_warps=16, **plain)
    return out
