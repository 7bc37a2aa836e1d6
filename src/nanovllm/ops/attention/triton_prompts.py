"""The Triton kernel of attention of prompts over pages: a program takes one tile of queries and one key/value head.

Import this module only if Triton is installed.
"""

# pyright: reportGeneralTypeIssues=false
# (because kernels return tuples)

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.ops.attention.prompt_tiles import FIELDS, TilePlan
from nanovllm.ops.kv_cache.fp8 import head_dim_of
from nanovllm.ops.kv_cache.triton_fp8 import SCALE_BYTES, mixed_with, scales_of, scores_of, slot_of_head
from nanovllm.ops.triton_parts import score_scales, soft_capped
from nanovllm.types import Float, Int32, Tensor


@triton.jit
def _attend(
    highest, total, mixed, queries, kv, table, k, begin, stop, place, scale, window, N: tl.constexpr, K: tl.constexpr, S: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Go on with an online softmax (Milakov & Gimelshein, 2018) over the tokens begin ... stop - 1, where `begin` is a multiple of N.

    Query m is token `place[m]` of its row. Without CAUSAL it sees all these tokens, and their number is a multiple of N.
    """
    FP8: tl.constexpr = kv.dtype.element_ty == tl.float8e4nv
    VALUES: tl.constexpr = K * S * (D + SCALE_BYTES) if FP8 else K * S * D
    PAGE: tl.constexpr = 2 * VALUES
    factor = 1.0 if SOFTCAP > 0 else scale
    n, d = tl.arange(0, N), tl.arange(0, DP)
    inside = (d < D)[None, :]
    # Page ids are loaded one iteration ahead, not by the pipeliner: it would spend a stage on them that keys and values need.
    page = tl.load(table + (begin + n) // S, mask=begin + n < stop, other=0)
    for at in tl.range(begin, stop, N, num_stages=STAGES):
        token = at + n
        base = kv + (page.to(tl.int64) * PAGE + slot_of_head(k, token % S, S, D, FP8))[:, None] + d[None, :]
        key_scales, value_scales = token, token
        if FP8:
            scales = scales_of(kv + page.to(tl.int64) * PAGE, k, token % S, S, D)
            key_scales = tl.load(scales, mask=token < stop, other=0.0)
            value_scales = tl.load(scales + VALUES // 4, mask=token < stop, other=0.0)
        page = tl.load(table + (token + N) // S, mask=token + N < stop, other=0)
        ok = (token < stop)[:, None] & inside if CAUSAL else inside
        if CAUSAL or D < DP:
            keys = tl.load(base, mask=ok, other=0.0)
            values = tl.load(base + VALUES, mask=ok, other=0.0)
        else:
            keys = tl.load(base)
            values = tl.load(base + VALUES)
        scores = scores_of(queries, keys, key_scales, FP8, PRECISION)
        if SOFTCAP > 0:
            scores = soft_capped(scores, scale, SOFTCAP)
        if CAUSAL:
            scores = tl.where(token[None, :] <= place[:, None], scores, float("-inf"))
        if WINDOWED:
            scores = tl.where(token[None, :] > (place - window)[:, None], scores, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 1) * factor)
        safe = tl.where(now == float("-inf"), 0.0, now)
        faded = tl.exp2(highest - safe)
        weights = tl.exp2(scores * factor - safe[:, None])
        total = total * faded + tl.sum(weights, 1)
        mixed = mixed_with(mixed * faded[:, None], weights, values, value_scales, queries.dtype, FP8, PRECISION)
        highest = now
    return highest, total, mixed


@triton.jit(do_not_specialize=["window"])
def _prompts(
    q, kv, tables, tiles, out, q_stride, table_stride, scale, window, M: tl.constexpr, N: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Program (tile, key/value head). A tile without queries is padding."""
    tile, k = tiles + tl.program_id(1) * FIELDS, tl.program_id(0)
    row, first, count, before = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    if count > 0:
        m, d = tl.arange(0, M), tl.arange(0, DP)
        token, head = m // GP, m % GP
        on = ((token < count) & (head < G))[:, None] & (d < D)[None, :]
        at = (first + token).to(tl.int64)[:, None] * q_stride + ((k * G + head) * D)[:, None] + d[None, :]
        queries = tl.load(q + at, mask=on, other=0.0)
        highest = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        mixed = tl.zeros([M, DP], tl.float32)
        begin, whole, stop = 0, (before + 1) // N * N, before + count  # every query sees the tokens before `whole`
        if WINDOWED:
            begin = tl.maximum(0, before - window + 1) // N * N
            whole = tl.maximum(begin, whole)
        place, table = before + token, tables + row * table_stride
        highest, total, mixed = _attend(highest, total, mixed, queries, kv, table, k, begin, whole, place, scale, window, N, K, S, D, DP,
                                        STAGES, PRECISION, WINDOWED, SOFTCAP, False)  # fmt: skip
        highest, total, mixed = _attend(highest, total, mixed, queries, kv, table, k, whole, stop, place, scale, window, N, K, S, D, DP,
                                        STAGES, PRECISION, WINDOWED, SOFTCAP, True)  # fmt: skip
        to = out + (first + token).to(tl.int64)[:, None] * (K * G * D) + ((k * G + head) * D)[:, None] + d[None, :]
        tl.store(to, (mixed / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty), mask=on)


def attend_tiles(
    q: Float[Tensor, "T H D"],
    kv: Float[Tensor, "N 2 K S W"],
    page_tables: Int32[Tensor, "B P"],
    scale: float,
    plan: TilePlan,
    window: int = 0,
    softcap: float = 0.0,
) -> Float[Tensor, "T H D"]:
    """Launch one layer's attention of prompts by a plan. Rows of `q` may be strided; `kv` is one layer of a contiguous pool.

    Queries in no tile get zeros: padding must not put NaN into the dummy page.
    """
    (num_heads, head_dim), (_, _, num_kv_heads, page_size, _) = q.shape[1:], kv.shape
    assert head_dim == head_dim_of(kv)
    if q.stride()[1:] != (head_dim, 1):
        q = q.contiguous()
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    padded, group = max(16, triton.next_power_of_2(head_dim)), num_heads // num_kv_heads
    wide, heads = q.dtype.itemsize > 2 or padded > 128, triton.next_power_of_2(group)
    queries = max(16, triton.next_power_of_2(plan.tokens * heads))
    factor, cap = score_scales(scale, softcap)
    launch: Any = _prompts
    with torch.cuda.device_of(q):
        launch[(num_kv_heads, plan.max_tiles)](
            q, kv, page_tables, plan.table, out, q.stride(0), page_tables.stride(0), factor, window, queries, 32 if wide else 64, group,
            heads, num_kv_heads, page_size, head_dim, padded, 2 if wide else 3, "ieee" if q.dtype == torch.float32 else "tf32", window > 0,
            cap, FIELDS, num_warps=8, num_stages=1,
        )  # fmt: skip
    return out
