"""The Triton kernels of `rope_attend` and `rope_write`. Import this module only if Triton is installed.

A program waits for the kernel that computes this step's q, k and v (programmatic dependent launch). Before the wait it loads all data that
do not depend on them: old keys and values of the first tile, page ids, lengths, angles and norm weights. All of these were written before
the chain of dependent kernels began.
"""

# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
# (names bound in a compile-time branch, and pairs that kernels return)
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.ops.attention.fused_plan import FusedDecodePlan
from nanovllm.ops.kv_cache.fp8 import head_dim_of, in_fp8
from nanovllm.ops.kv_cache.triton_fp8 import (
    SCALE_BYTES,
    as_pairs,
    mixed_with,
    mixed_with_pairs,
    narrow_queries,
    on_gpu,
    parted,
    quantised_heads,
    scales_of,
    scores_of,
    scores_of_pairs,
    slot_of_head,
    whole,
)
from nanovllm.ops.triton_parts import gained, launch_options, score_scales, soft_capped
from nanovllm.types import Float, Float32, Int32, Tensor

HEADS = 8  # heads per program of `_rope_write`
MERGED = tl.constexpr(8192)  # numbers of partial results that a merge has in registers at once, the most that fit
FEW = tl.constexpr(8)  # partial results whose merge is compiled apart
FEW_HEADS = tl.constexpr(4)  # with so few query heads and few partial results, 8 rows take 2% less head by head (measured on an H200)


@triton.jit
def _turned(own, far, gain, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Normalise and rotate rows of heads `[M, DP]`, rounded where the plain functions round; `far` has each channel's partner."""
    if NORM:
        wide = own.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
        own = gained(wide * scale, gain[0], own.dtype)
        far = gained(far.to(tl.float32) * scale, gain[1], far.dtype)
    return (own.to(tl.float32) * cos[None, :] + far.to(tl.float32) * sin[None, :]).to(own.dtype)


@triton.jit
def _visible(t, seen, old, WINDOWED: tl.constexpr):
    """Return the mask of tokens t that are before `old` and, with WINDOWED, not before `seen`."""
    ok = t < old
    if WINDOWED:
        ok = ok & (t >= seen)
    return ok


@triton.jit
def _tile(
    kv, tables, t, seen, old, k, e, page_stride, K: tl.constexpr, S: tl.constexpr, D: tl.constexpr, EACH: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Load keys and values of tokens t, and in FP8 their scales; tokens outside the mask of `_visible` give 0.

    Elements `e` of a head have EACH channels: with 2 they are pairs of codes.
    """
    FP8: tl.constexpr = kv.dtype.element_ty == tl.float8e4nv
    VALUES: tl.constexpr = K * S * (D + SCALE_BYTES) if FP8 else K * S * D
    NOTHING: tl.constexpr = 0 if EACH == 2 else 0.0  # pyright: ignore[reportAssignmentType]
    ok = _visible(t, seen, old, WINDOWED)
    pages = tl.load(tables + t // S, mask=ok, other=0, cache_modifier=".cg").to(tl.int64)
    elements = as_pairs(kv) if EACH == 2 else kv
    at = elements + (pages[:, None] * page_stride + slot_of_head(k, t % S, S, D, FP8)[:, None]) // EACH + e[None, :]
    both = ok[:, None] & (e < D // EACH)[None, :]
    key_scales, value_scales = t, t
    if FP8:
        scales = scales_of(kv + pages * page_stride, k, t % S, S, D)
        key_scales = tl.load(scales, mask=ok, other=0.0, cache_modifier=".cg")
        value_scales = tl.load(scales + VALUES // 4, mask=ok, other=0.0, cache_modifier=".cg")
    keys = tl.load(at, mask=both, other=NOTHING, cache_modifier=".cg")
    return keys, tl.load(at + VALUES // EACH, mask=both, other=NOTHING, cache_modifier=".cg"), key_scales, value_scales


@triton.jit
def _merge(
    part, stat, out, b, k, active, h, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, J: tl.constexpr,
    GP: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of a row and the query heads of key head k. The first `active` programs have one, J at most."""
    G: tl.constexpr = H // K
    X: tl.constexpr = min(GP, max(1, MERGED // (J * h.shape[0])))  # heads at once  # pyright: ignore[reportAssignmentType]
    j, inside = tl.arange(0, J), h < D
    there = (j < active)[None, :]
    for lead in tl.static_range(0, G, X):
        one = lead + tl.arange(0, X)
        head = b * H + k * G + tl.minimum(one, G - 1)
        place = (head + b * (H * SPLITS - H))[:, None] + (j * H)[None, :]
        tops = tl.load(stat + place * 2, mask=there, other=float("-inf"))
        sums = tl.load(stat + place * 2 + 1, mask=there, other=0.0)
        parts = tl.load(part + place[:, :, None] * D + h[None, None, :], mask=there[:, :, None] & inside[None, None, :], other=0.0)
        shares = tl.exp2(tops - tl.max(tops, 1)[:, None])
        result = tl.sum(parts * shares[:, :, None], 1) / tl.sum(sums * shares, 1)[:, None]
        to = out + head[:, None] * D + h[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=(one < G)[:, None] & inside[None, :])


@triton.jit
def _merge_heads(part, stat, out, b, k, active, h, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr):
    """Do as `_merge`, head by head, which takes fewer registers."""
    G: tl.constexpr = H // K
    NEAR: tl.constexpr = min(G, max(1, MERGED // (SPLITS * h.shape[0])))  # heads at once  # pyright: ignore[reportAssignmentType]
    inside, j = h < D, tl.arange(0, SPLITS)
    on = j < active
    for lead in tl.static_range(0, G, NEAR):
        tops = ()  # all loads are issued before the first is used: a store between them would delay them
        sums = ()
        parts = ()
        for one in tl.static_range(lead, lead + NEAR):
            place = b * H * SPLITS + k * G + one + j * H
            valid = on & (one < G)
            tops += (tl.load(stat + place * 2, mask=valid, other=float("-inf")),)
            sums += (tl.load(stat + place * 2 + 1, mask=valid, other=0.0),)
            parts += (tl.load(part + place[:, None] * D + h[None, :], mask=valid[:, None] & inside[None, :], other=0.0),)
        for near in tl.static_range(NEAR):
            shares = tl.exp2(tops[near] - tl.max(tops[near], 0))
            result = tl.sum(parts[near] * shares[:, None], 0) / tl.sum(sums[near] * shares, 0)
            to = out + (b * H + k * G + lead + near) * D + h
            tl.store(to, result.to(out.dtype.element_ty), mask=inside & (lead + near < G))


@triton.jit
def _finish(
    highest, total, mixed, part, stat, count, out, b, k, split, active, h, m, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    SPLITS: tl.constexpr, GP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store a program's result. If the row is split, store a partial result; the last program of a head and row to finish merges.

    Few partial results are merged as few: of a short row, those of all heads have room in registers at once. Programs with STAGES, which
    are for long rows, are left the registers.
    """
    G: tl.constexpr = H // K
    head, inside, used = k * G + m, h < D, m < G
    there = used[:, None] & inside[None, :]
    if active == 1:
        to = out + (b * H + head)[:, None] * D + h[None, :]
        tl.store(to, (mixed / total[:, None]).to(out.dtype.element_ty), mask=there)
    else:
        first = b * H * SPLITS + head
        tl.store(part + (first + split * H)[:, None] * D + h[None, :], mixed, mask=there)
        tl.store(stat + (first + split * H) * 2, highest, mask=used)
        tl.store(stat + (first + split * H) * 2 + 1, total, mask=used)
        tl.debug_barrier()
        if tl.atomic_add(count + b * K + k, 1, sem="acq_rel") == active - 1:
            if STAGES > 0 or (SPLITS <= FEW and G <= FEW_HEADS):
                _merge_heads(part, stat, out, b, k, active, h, H, K, D, SPLITS)
            elif SPLITS <= FEW:
                _merge(part, stat, out, b, k, active, h, H, K, D, SPLITS, SPLITS, GP)
            elif active <= FEW:
                _merge(part, stat, out, b, k, active, h, H, K, D, SPLITS, FEW, GP)
            elif SPLITS <= 2 * FEW:
                _merge(part, stat, out, b, k, active, h, H, K, D, SPLITS, SPLITS, GP)
            elif active <= SPLITS // 2:
                _merge(part, stat, out, b, k, active, h, H, K, D, SPLITS, SPLITS // 2, GP)
            else:
                _merge(part, stat, out, b, k, active, h, H, K, D, SPLITS, SPLITS, GP)
            tl.store(count + b * K + k, 0)


@triton.jit
def _scaled(scores, scale, SOFTCAP: tl.constexpr):
    """Return scores in base 2, soft-capped if SOFTCAP is positive."""
    return soft_capped(scores, scale, SOFTCAP) if SOFTCAP > 0 else scores * scale


@triton.jit
def _absorb(
    q, narrow, keys, values, key_scales, value_scales, ok, highest, total, mixed, odd, scale, SOFTCAP: tl.constexpr, FP8: tl.constexpr,
    EACH: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add one tile to the online softmax (Milakov & Gimelshein, 2018), in base 2.

    If keys and values are pairs of codes, `narrow` are the queries of `narrow_queries`, and `mixed` and `odd` the channels of the sums.
    """
    if EACH == 2:
        products = scores_of_pairs(narrow[0], narrow[1], narrow[2], keys, key_scales, ASM)
    else:
        products = scores_of(q, keys, key_scales, FP8, "ieee")
    scores = _scaled(products, scale, SOFTCAP)
    scores = tl.where(ok[None, :], scores, float("-inf"))
    now = tl.maximum(highest, tl.max(scores, 1))
    safe = tl.where(now == float("-inf"), 0.0, now)
    faded, weights = tl.exp2(highest - safe), tl.exp2(scores - safe[:, None])
    if EACH == 2:
        mixed, odd = mixed_with_pairs(mixed * faded[:, None], odd * faded[:, None], weights, values, value_scales, ASM)
    else:
        mixed = mixed_with(mixed * faded[:, None], weights, values, value_scales, q.dtype, FP8, "ieee")
    return now, total * faded + tl.sum(weights, 1), mixed, odd


@triton.jit(do_not_specialize=["window"])
def _rope_attend(
    qkv, q_gain, k_gain, cos, sin, kv, tables, seq_lens, slots, part, stat, count, out, table_stride, page_stride, scale, eps, window,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr, T: tl.constexpr, SPLITS: tl.constexpr,
    GP: tl.constexpr, M: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr,
    PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Program (key head, split, row) processes tiles split, split + SPLITS, ... of T tokens for the query heads of the key head.

    The query heads are padded to M, and to GP where partial results are merged. With WINDOWED, tiles before the last `window` tokens are
    skipped. With SOFTCAP, scores are soft-capped.
    With STAGES, tiles go through shared memory, and STAGES of them are in flight. Without, the first tile is loaded into registers before
    the wait. In FP8, codes go to the tensor cores as pairs, unless `qkv` is float32.
    """
    if PDL:
        gdc_launch_dependents()
    k, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // K
    FP8: tl.constexpr = kv.dtype.element_ty == tl.float8e4nv
    VALUES: tl.constexpr = K * S * (D + SCALE_BYTES) if FP8 else K * S * D
    PAIRS: tl.constexpr = FP8 and qkv.dtype.element_ty != tl.float32
    EACH: tl.constexpr = 2 if PAIRS else 1  # pyright: ignore[reportAssignmentType]
    NOTHING: tl.constexpr = 0 if PAIRS else 0.0  # pyright: ignore[reportAssignmentType]
    last = tl.load(seq_lens + b, cache_modifier=".cg") - 1
    seen, skipped = last, 0
    if WINDOWED:
        seen = tl.maximum(last + 1 - window, 0)
        skipped = seen // T
    tiles = last // T + 1 - skipped
    active = tl.minimum(tiles, SPLITS)
    if split < tiles:
        tables += b * table_stride
        h, m, n, e = tl.arange(0, DP), tl.arange(0, M), tl.arange(0, T), tl.arange(0, DP // EACH)
        inside, used = h < D, m < G
        turned = tl.where(h < D // 2, h + D // 2, h - D // 2)
        slot = tl.load(slots + b, cache_modifier=".cg")
        page = tl.load(tables + last // S, cache_modifier=".cg")
        here = page * S + last % S == slot  # false if the row only reads or has outgrown its table: then it attends to the stored KV
        old = tl.where(here, last, last + 1)
        mine = (last // T - skipped) % SPLITS == split
        t = (skipped + split) * T + n
        if STAGES:
            pages = tl.load(tables + t // S, mask=t < old, other=0, cache_modifier=".cg")
        else:
            keys, values, key_scales, value_scales = _tile(kv, tables, t, seen, old, k, e, page_stride, K, S, D, EACH, WINDOWED)
        c, s = tl.load(cos + b * D + h, mask=inside, other=0.0), tl.load(sin + b * D + h, mask=inside, other=0.0)
        gains_q = (c, c)
        gains_k = (c, c)
        if NORM:
            gains_q = (tl.load(q_gain + h, mask=inside, other=0.0), tl.load(q_gain + turned, mask=inside, other=0.0))
            gains_k = (tl.load(k_gain + h, mask=inside, other=0.0), tl.load(k_gain + turned, mask=inside, other=0.0))
        if PDL:
            gdc_wait()
        row = qkv + b * (H + 2 * K) * D
        there = used[:, None] & inside[None, :]
        queries = row + (k * G + m)[:, None] * D
        own, far = tl.load(queries + h[None, :], mask=there, other=0.0), tl.load(queries + turned[None, :], mask=there, other=0.0)
        new, writes = row + (H + k) * D, inside & mine  # loaded before the first is used
        new_key, new_far = tl.load(new + h, mask=writes, other=0.0), tl.load(new + turned, mask=writes, other=0.0)
        new_value = tl.load(new + K * D + h, mask=writes, other=0.0)
        q = _turned(own, far, gains_q, c, s, eps, D, NORM)
        highest = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        mixed = tl.zeros([M, DP], tl.float32)
        if mine:
            new_row = _turned(new_key[None, :], new_far[None, :], gains_k, c, s, eps, D, NORM)
            page_of_slot = kv + (slot // S).to(tl.int64) * page_stride
            written = page_of_slot + slot_of_head(k, slot % S, S, D, FP8) + h
            own_row = new_row
            if FP8:  # the row attends to its own key and value as they are stored
                key_codes, key_scale = quantised_heads(new_row)
                value_codes, value_scale = quantised_heads(new_value[None, :])
                tl.store(written, tl.reshape(key_codes, [DP]), mask=inside)
                tl.store(written + VALUES, tl.reshape(value_codes, [DP]), mask=inside)
                tl.store(scales_of(page_of_slot, k, slot % S, S, D), tl.sum(key_scale, 0))
                tl.store(scales_of(page_of_slot, K + k, slot % S, S, D), tl.sum(value_scale, 0))
                own_row = key_codes.to(tl.float32) * key_scale[:, None]
                own_value = tl.sum(value_codes.to(tl.float32) * value_scale[:, None], 0)
            else:
                tl.store(written, tl.reshape(new_row, [DP]), mask=inside)
                tl.store(written + VALUES, new_value, mask=inside)
                own_value = new_value
            if here:
                highest = _scaled(tl.sum(q.to(tl.float32) * own_row.to(tl.float32), 1), scale, SOFTCAP)
                total += 1.0
                mixed += own_value.to(tl.float32)[None, :]
        narrow = (q, q, q)
        odd = mixed
        if PAIRS:
            narrow = narrow_queries(q, M, DP)
            mixed, odd = parted(mixed, M, DP)
        if STAGES:
            # Page ids are loaded one iteration ahead, not by the pipeliner: it would spend a stage on them that keys and values need. In
            # FP8, the scales of a tile are loaded one iteration ahead, and so page ids two.
            elements = as_pairs(kv) if PAIRS else kv
            key_scales, value_scales, next_pages = t, t, t
            if FP8:
                ok = _visible(t, seen, old, WINDOWED)
                scales = scales_of(kv + pages.to(tl.int64) * page_stride, k, t % S, S, D)
                key_scales = tl.load(scales, mask=ok, other=0.0)
                value_scales = tl.load(scales + VALUES // 4, mask=ok, other=0.0)
                next_pages = tl.load(tables + (t + SPLITS * T) // S, mask=t + SPLITS * T < old, other=0)
            for at in tl.range((skipped + split) * T, old, SPLITS * T, num_stages=STAGES):
                t = at + n
                slots_of = pages.to(tl.int64)[:, None] * page_stride + slot_of_head(k, t % S, S, D, FP8)[:, None]
                where = elements + slots_of // EACH + e[None, :]
                ok = _visible(t, seen, old, WINDOWED)
                both = ok[:, None] & (e < D // EACH)[None, :]
                after = t + SPLITS * T
                if FP8:
                    pages = tl.maximum(next_pages, 0)  # the pipeliner takes no loop that passes a value on as it is
                    more = _visible(after, seen, old, WINDOWED)
                    scales = scales_of(kv + pages.to(tl.int64) * page_stride, k, after % S, S, D)
                    next_ks = tl.load(scales, mask=more, other=0.0)
                    next_vs = tl.load(scales + VALUES // 4, mask=more, other=0.0)
                    next_pages = tl.load(tables + (after + SPLITS * T) // S, mask=after + SPLITS * T < old, other=0)
                else:
                    pages = tl.load(tables + after // S, mask=after < old, other=0)
                keys, values = tl.load(where, mask=both, other=NOTHING), tl.load(where + VALUES // EACH, mask=both, other=NOTHING)
                highest, total, mixed, odd = _absorb(q, narrow, keys, values, key_scales, value_scales, ok, highest, total, mixed, odd,
                                                     scale, SOFTCAP, FP8, EACH, ASM)  # fmt: skip
                if FP8:
                    key_scales, value_scales = next_ks, next_vs
        else:
            for _ in range(split, tiles, SPLITS):
                ok = _visible(t, seen, old, WINDOWED)
                t += SPLITS * T
                # Load the next tile before this tile is used.
                next_keys, next_values, next_ks, next_vs = _tile(kv, tables, t, seen, old, k, e, page_stride, K, S, D, EACH, WINDOWED)
                highest, total, mixed, odd = _absorb(q, narrow, keys, values, key_scales, value_scales, ok, highest, total, mixed, odd,
                                                     scale, SOFTCAP, FP8, EACH, ASM)  # fmt: skip
                keys, values, key_scales, value_scales = next_keys, next_values, next_ks, next_vs
        if PAIRS:
            mixed = whole(mixed, odd, M, DP)
        _finish(highest, total, mixed, part, stat, count, out, b, k, split, active, h, m, H, K, D, SPLITS, GP, STAGES)


@triton.jit
def _rope_write(
    qkv, q_gain, k_gain, cos, sin, kv, slots, out, out_stride, page_stride, eps, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, S: tl.constexpr, X: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, group) processes X heads: first groups of q, written to `out`, then groups of k and v, written to the row's slot.

    With KEEP, `out` is `qkv`, and k is written back to `qkv` too.
    """
    if PDL:
        gdc_launch_dependents()
    b, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    FP8: tl.constexpr = kv.dtype.element_ty == tl.float8e4nv
    QUERIES: tl.constexpr = (H + X - 1) // X
    KEYS: tl.constexpr = (K + X - 1) // X
    h = tl.arange(0, DP)
    inside = h < D
    turned = tl.where(h < D // 2, h + D // 2, h - D // 2)
    c, s = tl.load(cos + b * D + h, mask=inside, other=0.0), tl.load(sin + b * D + h, mask=inside, other=0.0)
    slot = tl.load(slots + b)
    gains = (c, c)
    if NORM:
        gain = tl.where(group < QUERIES, q_gain, k_gain)
        gains = (tl.load(gain + h, mask=inside, other=0.0), tl.load(gain + turned, mask=inside, other=0.0))
    if PDL:
        gdc_wait()
    row = qkv + b * ((H + 2 * K) * D)
    if group < QUERIES:
        x = group * X + tl.arange(0, X)
        there = (x < H)[:, None] & inside[None, :]
        own = tl.load(row + x[:, None] * D + h[None, :], mask=there, other=0.0)
        far = tl.load(row + x[:, None] * D + turned[None, :], mask=there, other=0.0)
        if KEEP:
            tl.debug_barrier()  # no warp may overwrite data that another warp has not read yet
        tl.store(out + b * out_stride + x[:, None] * D + h[None, :], _turned(own, far, gains, c, s, eps, D, NORM), mask=there)
    else:
        values = group - QUERIES >= KEYS
        x = (group - QUERIES) % KEYS * X + tl.arange(0, X)
        there = (x < K)[:, None] & inside[None, :]
        source = row + (H + tl.where(values, K, 0) + x)[:, None] * D
        own = tl.load(source + h[None, :], mask=there, other=0.0)
        if not values:
            far = tl.load(source + turned[None, :], mask=there, other=0.0)
            if KEEP:
                tl.debug_barrier()
            own = _turned(own, far, gains, c, s, eps, D, NORM)
            if KEEP:
                tl.store(source + h[None, :], own, mask=there)
        page, stored = kv + (slot // S).to(tl.int64) * page_stride, tl.where(values, K, 0) + x
        to = page + slot_of_head(stored, slot % S, S, D, FP8)[:, None] + h[None, :]
        if FP8:
            codes, scale = quantised_heads(own)
            tl.store(to, codes, mask=there)
            tl.store(scales_of(page, stored, slot % S, S, D), scale, mask=x < K)
        else:
            tl.store(to, own, mask=there)


def launch(
    qkv: Float[Tensor, "B width"],
    q_norm: Float[Tensor, "D"] | None,
    k_norm: Float[Tensor, "D"] | None,
    cos: Float32[Tensor, "B 1 D"],
    sin: Float32[Tensor, "B 1 D"],
    kv: Float[Tensor, "N 2 K S W"],
    page_tables: Int32[Tensor, "B P"],
    seq_lens: Int32[Tensor, "B"],
    slots: Int32[Tensor, "B"],
    scale: float,
    eps: float,
    plan: FusedDecodePlan,
    pdl: bool,
    window: int = 0,
    softcap: float = 0.0,
) -> Float[Tensor, "B heads"]:
    """Launch the fused kernel of `rope_attend` according to a plan. `kv` is one layer of a contiguous pool."""
    (rows, width), (_, _, num_kv_heads, page_size, _), head_dim = qkv.shape, kv.shape, head_dim_of(kv)
    num_heads = width // head_dim - 2 * num_kv_heads
    out = torch.empty((rows, num_heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    factor, cap = score_scales(scale, softcap)
    padded = triton.next_power_of_2(num_heads // num_kv_heads)
    options = launch_options(plan.warps, pdl)
    kernel: Any = _rope_attend
    with torch.cuda.device_of(qkv):
        kernel[(num_kv_heads, plan.splits, rows)](
            qkv, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, cos, sin, kv, page_tables, seq_lens, slots,
            plan.parts, plan.stats, plan.counts, out, page_tables.stride(0), kv.stride(0), factor, eps, window, num_heads,
            num_kv_heads, head_dim, max(32 if in_fp8(kv) else 16, triton.next_power_of_2(head_dim)), page_size, plan.tile, plan.splits,
            padded, max(16, padded), plan.stages, q_norm is not None, window > 0, cap, pdl,
            on_gpu(qkv), **options,
        )  # fmt: skip
    return out


def write(
    qkv: Float[Tensor, "B width"],
    q_norm: Float[Tensor, "D"] | None,
    k_norm: Float[Tensor, "D"] | None,
    cos: Float32[Tensor, "B 1 D"],
    sin: Float32[Tensor, "B 1 D"],
    kv: Float[Tensor, "N 2 K S W"],
    slots: Int32[Tensor, "B"],
    eps: float,
    keep: bool,
    pdl: bool,
) -> Float[Tensor, "B H D"]:
    """Launch the first half of `rope_attend`: write k and v, and return q. With `keep`, q and k change in place in `qkv`."""
    (rows, width), (_, _, num_kv_heads, page_size, _), head_dim = qkv.shape, kv.shape, head_dim_of(kv)
    num_heads = width // head_dim - 2 * num_kv_heads
    heads = qkv.view(rows, -1, head_dim)
    out = heads[:, :num_heads] if keep else torch.empty((rows, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    options = launch_options(2, pdl)
    kernel: Any = _rope_write
    with torch.cuda.device_of(qkv):
        kernel[(rows, triton.cdiv(num_heads, HEADS) + 2 * triton.cdiv(num_kv_heads, HEADS))](
            qkv, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, cos, sin, kv, slots, out, out.stride(0),
            kv.stride(0), eps, num_heads, num_kv_heads, head_dim, max(16, triton.next_power_of_2(head_dim)), page_size, HEADS,
            q_norm is not None, keep, pdl, **options,
        )  # fmt: skip
    return out
