"""The Triton kernels of cascade attention: one over pages that several rows share, and one over the end of each row, which merges.

Import this module only if Triton is installed.
"""

# pyright: reportGeneralTypeIssues=false
# (because kernels return tuples)

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.ops.attention.cascade_plan import CascadePlan
from nanovllm.ops.backends import dependent_launch
from nanovllm.ops.kv_cache.fp8 import in_fp8
from nanovllm.ops.kv_cache.triton_fp8 import (
    SCALE_BYTES,
    as_pairs,
    mixed_with,
    mixed_with_pairs,
    narrow_queries,
    on_gpu,
    scales_of,
    scores_of,
    scores_of_pairs,
    slot_of_head,
    whole,
)
from nanovllm.ops.triton_parts import score_scales, soft_capped
from nanovllm.types import Float, Float32, Int32, Tensor

NARROW = 16  # the smallest number of queries for a tensor core
PARTS = 32  # partial results times heads in one iteration of the merge


@triton.jit
def _read(
    q, kv, table, k, begin, stop, seen, scale, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Attend with queries `[M, DP]` to tokens begin ... stop - 1 of a page table; return maximum scores, sums of weights, weighted sums.

    This is an online softmax (Milakov & Gimelshein, 2018). `begin` is the first token of a page, and `scale` gives scores in base 2. If
    tiles are whole pages, only page ids change between iterations, so few instructions compute addresses. That matters because there are
    few warps to hide them. Loads bypass L1 (".cg"), so they see writes of earlier kernels even before this kernel has waited (see `_own`).
    With WINDOWED, query m sees no token before `seen[m]`. With SOFTCAP, `scale` is the argument of `soft_capped`.

    In FP8, the scales of a tile are loaded an iteration ahead, and so page ids two. Codes go to the tensor cores as pairs, unless the
    queries are float32.
    """
    FP8: tl.constexpr = kv.dtype.element_ty == tl.float8e4nv
    PAIRS: tl.constexpr = FP8 and q.dtype != tl.float32
    EACH: tl.constexpr = 2 if PAIRS else 1  # channels of an element  # pyright: ignore[reportAssignmentType]
    NOTHING: tl.constexpr = 0 if PAIRS else 0.0  # pyright: ignore[reportAssignmentType]
    VALUES: tl.constexpr = K * S * (D + SCALE_BYTES) if FP8 else K * S * D
    PAGE: tl.constexpr = 2 * VALUES
    WHOLE: tl.constexpr = N % S == 0
    factor = 1.0 if SOFTCAP > 0 else scale
    d, n = tl.arange(0, DP // EACH), tl.arange(0, N)
    inside = d < D // EACH
    highest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, DP // EACH], tl.float32)
    odd = mixed
    if PAIRS:
        q_even, q_odd, q_factor = narrow_queries(q, M, DP)
        elements = as_pairs(kv)
    else:
        elements = kv
    last = (stop + S - 1) // S
    here = elements + (slot_of_head(k, n % S, S, D, FP8) // EACH)[:, None] + d[None, :]
    # Page ids are loaded one iteration ahead, not by the pipeliner: it would spend a stage on them that keys and values need.
    place = begin // S + n // S
    page = tl.load(table + place, mask=place < last, other=0)
    key_scales, value_scales, next_page = n, n, n
    if FP8:
        scales = scales_of(kv + page.to(tl.int64) * PAGE, k, (begin + n) % S, S, D)
        key_scales = tl.load(scales, mask=begin + n < stop, other=0.0, cache_modifier=".cg")
        value_scales = tl.load(scales + VALUES // 4, mask=begin + n < stop, other=0.0, cache_modifier=".cg")
        place = (begin + N + n) // S
        next_page = tl.load(table + place, mask=place < last, other=0)
    for at in tl.range(begin, stop, N, num_stages=STAGES):
        ok = at + n < stop
        if WHOLE:
            base = here + (page.to(tl.int64) * (PAGE // EACH))[:, None]
            place = (at + N) // S + n // S
        else:
            slot = slot_of_head(k, (at + n) % S, S, D, FP8)
            base = elements + ((page.to(tl.int64) * PAGE + slot) // EACH)[:, None] + d[None, :]
            place = (at + N + n) // S
        if FP8:
            page = tl.maximum(next_page, 0)  # the pipeliner takes no loop that passes a value on as it is
            more = at + N + n < stop
            scales = scales_of(kv + page.to(tl.int64) * PAGE, k, (at + N + n) % S, S, D)
            next_key_scales = tl.load(scales, mask=more, other=0.0, cache_modifier=".cg")
            next_value_scales = tl.load(scales + VALUES // 4, mask=more, other=0.0, cache_modifier=".cg")
            place = (at + 2 * N + n) // S
            next_page = tl.load(table + place, mask=place < last, other=0)
        else:
            page = tl.load(table + place, mask=place < last, other=0)
        keys = tl.load(base, mask=ok[:, None] & inside[None, :], other=NOTHING, cache_modifier=".cg")
        values = tl.load(base + VALUES // EACH, mask=ok[:, None] & inside[None, :], other=NOTHING, cache_modifier=".cg")
        if PAIRS:
            scores = scores_of_pairs(q_even, q_odd, q_factor, keys, key_scales, ASM)
        else:
            scores = scores_of(q, keys, key_scales, FP8, PRECISION)
        if SOFTCAP > 0:
            scores = soft_capped(scores, scale, SOFTCAP)
        scores = tl.where(ok[None, :], scores, float("-inf"))
        if WINDOWED:
            scores = tl.where((at + n)[None, :] >= seen[:, None], scores, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 1) * factor)
        safe = tl.where(now == float("-inf"), 0.0, now)
        faded = tl.exp2(highest - safe)
        weights = tl.exp2(scores * factor - safe[:, None])
        total = total * faded + tl.sum(weights, 1)
        if PAIRS:
            mixed, odd = mixed_with_pairs(mixed * faded[:, None], odd * faded[:, None], weights, values, value_scales, ASM)
        else:
            mixed = mixed_with(mixed * faded[:, None], weights, values, value_scales, q.dtype, FP8, PRECISION)
        if FP8:
            key_scales, value_scales = next_key_scales, next_value_scales
        highest = now
    if PAIRS:
        mixed = whole(mixed, odd, M, DP)
    return highest, total, mixed


@triton.jit
def _part(
    q, kv, tables, seq_lens, members, places, part, lse, k, row, begin, stop, first, count, q_stride, table_stride, scale, window,
    M: tl.constexpr, N: tl.constexpr, G: tl.constexpr, K: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Compute the partial results of at most M queries, G heads per member, which see the same tokens of the row's page table.

    Tokens before a member's window are masked. If a member sees no token, its log-sum-exp is -inf.
    """
    m, d = tl.arange(0, M), tl.arange(0, DP)
    member, head = m // G, k * G + m % G
    on = member < count
    both = on[:, None] & (d < D)[None, :]
    query = tl.load(members + first + member, mask=on, other=0)
    to = tl.load(places + first + member, mask=on, other=0).to(tl.int64) * (K * G) + head
    queries = tl.load(q + query[:, None].to(tl.int64) * q_stride + head[:, None] * D + d[None, :], mask=both, other=0.0)
    seen = member
    if WINDOWED:
        seen = tl.where(on, tl.load(seq_lens + query, mask=on, other=0) - window, stop)
        begin = tl.maximum(begin, tl.min(seen, 0) // S * S)
    highest, total, mixed = _read(queries, kv, tables + row * table_stride, k, begin, stop, seen, scale, M, N, K, S, D, DP, STAGES,
                                  PRECISION, WINDOWED, SOFTCAP, ASM)  # fmt: skip
    some = total > 0
    mixed = mixed / tl.where(some, total, 1.0)[:, None]
    tl.store(part + to[:, None] * D + d[None, :], mixed, mask=both)
    tl.store(lse + to, tl.where(some, highest + tl.log2(tl.where(some, total, 1.0)), float("-inf")), mask=on)


@triton.jit(do_not_specialize=["window"])
def _shared(
    q, kv, tables, seq_lens, bounds, items, members, places, part, lse, q_stride, table_stride, scale, window, WIDE: tl.constexpr,
    NARROW: tl.constexpr, N: tl.constexpr, G: tl.constexpr, K: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, FIELDS: tl.constexpr,
    PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Program (share, key/value head) processes the items of its share one after another.

    Many queries and many tokens of a tile in FP8 would not fit into registers together.
    """
    FEWER: tl.constexpr = N // 2 if kv.dtype.element_ty == tl.float8e4nv and N > WIDE else N
    share, k = tl.program_id(0) // K, tl.program_id(0) % K  # pyright: ignore[reportOperatorIssue]
    first_item, end = tl.load(bounds + share), tl.load(bounds + share + 1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # after the wait, so that the next kernel can read the writes of earlier kernels without waiting
    for index in range(first_item, end):
        item = items + index * FIELDS
        row, count, first = tl.load(item), tl.load(item + 4), tl.load(item + 3)
        # Rows see shared runs completely, or from a window's beginning on. A run of a single row may be longer than the row.
        begin, stop = tl.load(item + 1) * S, tl.minimum(tl.load(item + 2) * S, tl.load(seq_lens + row))
        if count * G <= NARROW:
            _part(q, kv, tables, seq_lens, members, places, part, lse, k, row, begin, stop, first, count, q_stride, table_stride,
                  scale, window, NARROW, N, G, K, S, D, DP, STAGES, PRECISION, WINDOWED, SOFTCAP, ASM)  # fmt: skip
        else:
            _part(q, kv, tables, seq_lens, members, places, part, lse, k, row, begin, stop, first, count, q_stride, table_stride,
                  scale, window, WIDE, FEWER, G, K, S, D, DP, STAGES, PRECISION, WINDOWED, SOFTCAP, ASM)  # fmt: skip


@triton.jit(do_not_specialize=["window"])
def _own(
    q, kv, tables, seq_lens, begins, starts, part, lse, out, q_stride, table_stride, scale, window, M: tl.constexpr, N: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, J: tl.constexpr, K: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Program (key/value head, row) attends to the row's tokens from page `begins[row]` on, then merges the row's partial results.

    It starts after all programs of `_shared` have waited. So q, keys and values, for which `_shared` waited, can be read at once. Partial
    results can be read after this kernel has waited. So `_shared` must come directly before this kernel, and each of its programs must wait
    before it lets this kernel start.
    """
    if PDL:
        gdc_launch_dependents()
    k, row = tl.program_id(0), tl.program_id(1)
    m, d, g, j = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, GP), tl.arange(0, J)
    begin, stop = tl.load(begins + row) * S, tl.load(seq_lens + row)
    first, end = tl.load(starts + row), tl.load(starts + row + 1)
    at = q + row.to(tl.int64) * q_stride + (k * G + m)[:, None] * D + d[None, :]
    queries = tl.load(at, mask=(m < G)[:, None] & (d < D)[None, :], other=0.0, cache_modifier=".cg")
    seen = m
    if WINDOWED:
        seen = tl.zeros([M], tl.int32) + (stop - window)
        begin = tl.maximum(begin, (stop - window) // S * S)
    highest, total, mixed = _read(queries, kv, tables + row * table_stride, k, begin, stop, seen, scale, M, N, K, S, D, DP, STAGES,
                                  PRECISION, WINDOWED, SOFTCAP, ASM)  # fmt: skip
    # Only the first G of the M queries are real.
    real = tl.arange(0, M // GP)[:, None] == 0
    highest = tl.sum(tl.where(real, tl.reshape(highest, [M // GP, GP]), 0.0), 0)
    total = tl.sum(tl.where(real, tl.reshape(total, [M // GP, GP]), 0.0), 0)
    mixed = tl.sum(tl.where(real[:, :, None], tl.reshape(mixed, [M // GP, GP, DP]), 0.0), 0)
    if PDL:
        gdc_wait()
    on = (g < G)[None, :]
    for at in range(first, end, J):
        ok = (at + j < end)[:, None] & on
        place = (at + j).to(tl.int64)[:, None] * (K * G) + (k * G + g)[None, :]
        weight = tl.load(lse + place, mask=ok, other=float("-inf"))
        parts = tl.load(part + place[:, :, None] * D + d[None, None, :], mask=ok[:, :, None] & (d < D)[None, None, :], other=0.0)
        now = tl.maximum(highest, tl.max(weight, 0))
        safe = tl.where(now == float("-inf"), 0.0, now)
        faded, weight = tl.exp2(highest - safe), tl.exp2(weight - safe[None, :])
        total = total * faded + tl.sum(weight, 0)
        mixed = mixed * faded[:, None] + tl.sum(parts * weight[:, :, None], 0)
        highest = now
    to = out + row.to(tl.int64) * (K * G * D) + (k * G + g)[:, None] * D + d[None, :]
    result = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(to, result.to(out.dtype.element_ty), mask=(g < G)[:, None] & (d < D)[None, :])


@triton.jit
def _merge(part, lse, starts, places, out, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, J: tl.constexpr):
    """Program (token, head) merges the token's listed partial results, weighted by their log-sum-exps in base 2."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j, d = tl.arange(0, J), tl.arange(0, DP)
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([DP], tl.float32)
    stop = tl.load(starts + token + 1)
    for at in range(tl.load(starts + token), stop, J):
        ok = at + j < stop
        place = tl.load(places + at + j, mask=ok, other=0).to(tl.int64) * H + head
        weight = tl.load(lse + place, mask=ok, other=float("-inf"))
        parts = tl.load(part + place[:, None] * D + d[None, :], mask=ok[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        now = tl.maximum(highest, tl.max(weight, 0))
        safe = tl.where(now == float("-inf"), 0.0, now)
        faded, weight = tl.exp2(highest - safe), tl.exp2(weight - safe)
        total = total * faded + tl.sum(weight, 0)
        mixed = mixed * faded + tl.sum(parts * weight[:, None], 0)
        highest = now
    tl.store(out + (token * H + head) * D + d, (mixed / total).to(out.dtype.element_ty), mask=d < D)


def cascade_decode(
    q: Float[Tensor, "B H D"],
    kv: Float[Tensor, "N 2 K S W"],
    page_tables: Int32[Tensor, "B P"],
    seq_lens: Int32[Tensor, "B"],
    scale: float,
    plan: CascadePlan,
    window: int = 0,
    softcap: float = 0.0,
) -> Float[Tensor, "B H D"]:
    """Launch one layer's decode attention according to a plan. Rows of `q` may be strided; `kv` is one layer of a contiguous pool."""
    from nanovllm.ops.attention.cascade_plan import FIELDS, WIDE

    bounds, items, begins, starts, members, places = plan.views()
    (num_rows, num_heads, head_dim), (_, _, num_kv_heads, page_size, _) = q.shape, kv.shape
    if q.stride()[1:] != (head_dim, 1):
        q = q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    padded = max(32 if in_fp8(kv) else 16, triton.next_power_of_2(head_dim))
    group = num_heads // num_kv_heads
    heads = triton.next_power_of_2(group)
    shared, own = plan.tiles(kv.dtype)
    part, lse = plan.workspace.out, plan.workspace.lse
    factor, cap = score_scales(scale, softcap)
    strides = q.stride(0), page_tables.stride(0), factor, window
    precision, pdl = "ieee" if q.dtype == torch.float32 else "tf32", q.device.type == "cuda" and dependent_launch(q.device)
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    first: Any = _shared
    last: Any = _own
    with torch.cuda.device_of(q):
        first[(plan.shares * num_kv_heads,)](
            q, kv, page_tables, seq_lens, bounds, items, members, places, part, lse, *strides, max(NARROW, WIDE, heads), NARROW,
            shared.tokens, group, num_kv_heads, page_size, head_dim, padded, shared.stages, precision, window > 0, cap, FIELDS,
            pdl, on_gpu(q), num_warps=shared.warps, num_stages=1, **options,
        )  # fmt: skip
        last[(num_kv_heads, num_rows)](
            q, kv, page_tables, seq_lens, begins, starts, part, lse, out, *strides, max(NARROW, heads), own.tokens, group, heads,
            max(1, PARTS // heads), num_kv_heads, page_size, head_dim, padded, own.stages, precision, window > 0, cap, pdl, on_gpu(q),
            num_warps=own.warps, num_stages=1, **options,
        )  # fmt: skip
    return out


def merge_into(
    parts: Float[Tensor, "parts H D"],
    lses: Float32[Tensor, "parts H"],
    starts: Int32[Tensor, "ends"],  # T + 1
    places: Int32[Tensor, "listed"],
    out: Float[Tensor, "T H D"],
) -> None:
    """Merge the partial results `places[starts[t]] ... places[starts[t + 1] - 1]` of each token t into `out`."""
    num_tokens, num_heads, head_dim = out.shape
    launch: Any = _merge
    padded = max(16, triton.next_power_of_2(head_dim))
    with torch.cuda.device_of(parts):
        launch[(num_tokens, num_heads)](parts, lses, starts, places, out, num_heads, head_dim, padded, PARTS, num_warps=1)
