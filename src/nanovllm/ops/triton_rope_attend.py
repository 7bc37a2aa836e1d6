"""The Triton kernel of `rope_attend`. Imported only where Triton is.

What does not depend on this step's q, k and v is asked for before the wait for the kernel that makes them (programmatic dependent
launch): old keys and values of the first tile, page ids, lengths, angles, gains. All of it was written before the chain of kernels began.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..types import Float, Float32, Int32, Tensor

if TYPE_CHECKING:
    from .rope_attend import FusedDecodePlan

LOG2E = 1.4426950408889634


@triton.jit
def _turned(row, gain, h, turned, cos, sin, inside, eps, D: tl.constexpr, NORM: tl.constexpr):
    """One head's norm and rotation, rounded where the plain functions round; the gains are a pair (at h, at its partner)."""
    own, far = tl.load(row + h, mask=inside, other=0.0), tl.load(row + turned, mask=inside, other=0.0)
    if NORM:
        wide = own.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
        own = (wide * scale).to(own.dtype) * gain[0]
        far = (far.to(tl.float32) * scale).to(far.dtype) * gain[1]
    return (own.to(tl.float32) * cos + far.to(tl.float32) * sin).to(own.dtype)


@triton.jit
def _rope_attend(
    qkv, q_gain, k_gain, cos, sin, kv, tables, seq_lens, slots, part, stat, count, out, table_stride, page_stride, scale, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr, T: tl.constexpr, SPLITS: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (query head, split, row): tiles of T tokens split, split + SPLITS, ...; the last program of a head to arrive merges."""
    if PDL:
        gdc_launch_dependents()
    head, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // K
    k = head // G
    last = tl.load(seq_lens + b, cache_modifier=".cg") - 1
    tiles = last // T + 1
    active = tl.minimum(tiles, SPLITS)
    if split < tiles:
        tables += b * table_stride
        h = tl.arange(0, DP)
        inside = h < D
        turned = tl.where(h < D // 2, h + D // 2, h - D // 2)
        slot = tl.load(slots + b, cache_modifier=".cg")
        page = tl.load(tables + last // S, cache_modifier=".cg")
        here = page * S + last % S == slot  # a row that only reads, or has outgrown its table, writes elsewhere and reads what is there
        old = tl.where(here, last, last + 1)
        own = here & (last // T % SPLITS == split)
        t = split * T + tl.arange(0, T)
        ok = t < old
        pages = tl.load(tables + t // S, mask=ok, other=0, cache_modifier=".cg").to(tl.int64)
        at = kv + pages[:, None] * page_stride + ((k * S + t % S) * D)[:, None] + h[None, :]
        both = ok[:, None] & inside[None, :]
        keys = tl.load(at, mask=both, other=0.0, cache_modifier=".cg")
        values = tl.load(at + K * S * D, mask=both, other=0.0, cache_modifier=".cg")
        c, s = tl.load(cos + b * D + h, mask=inside, other=0.0), tl.load(sin + b * D + h, mask=inside, other=0.0)
        gains_q = (c, c)
        gains_k = (c, c)
        if NORM:
            gains_q = (tl.load(q_gain + h, mask=inside, other=0.0), tl.load(q_gain + turned, mask=inside, other=0.0))
            gains_k = (tl.load(k_gain + h, mask=inside, other=0.0), tl.load(k_gain + turned, mask=inside, other=0.0))
        if PDL:
            gdc_wait()
        row = qkv + b * (H + 2 * K) * D
        q = _turned(row + head * D, gains_q, h, turned, c, s, inside, eps, D, NORM).to(tl.float32) * scale
        highest = tl.full([], float("-inf"), tl.float32)
        total = tl.zeros([], tl.float32)
        mixed = tl.zeros([DP], tl.float32)
        write = (head % G == 0) & (last // T % SPLITS == split)
        if own | write:
            new_key = _turned(row + (H + k) * D, gains_k, h, turned, c, s, inside, eps, D, NORM)
            new_value = tl.load(row + (H + K + k) * D + h, mask=inside, other=0.0)
            if write:
                to = kv + (slot // S).to(tl.int64) * page_stride + (k * S + slot % S) * D + h
                tl.store(to, new_key, mask=inside)
                tl.store(to + K * S * D, new_value, mask=inside)
            if own:
                highest = tl.sum(q * new_key.to(tl.float32), 0)
                total += 1.0
                mixed = new_value.to(tl.float32)
        scores = tl.where(ok, tl.sum(keys.to(tl.float32) * q[None, :], 1), float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 0))
        safe = tl.where(now == float("-inf"), 0.0, now)
        faded, weights = tl.exp2(highest - safe), tl.exp2(scores - safe)
        total = total * faded + tl.sum(weights, 0)
        mixed = mixed * faded + tl.sum(values.to(tl.float32) * weights[:, None], 0)
        highest = now
        for tile in range(split + SPLITS, tiles, SPLITS):
            t = tile * T + tl.arange(0, T)
            ok = t < old
            pages = tl.load(tables + t // S, mask=ok, other=0, cache_modifier=".cg").to(tl.int64)
            at = kv + pages[:, None] * page_stride + ((k * S + t % S) * D)[:, None] + h[None, :]
            both = ok[:, None] & inside[None, :]
            keys = tl.load(at, mask=both, other=0.0, cache_modifier=".cg")
            values = tl.load(at + K * S * D, mask=both, other=0.0, cache_modifier=".cg")
            scores = tl.where(ok, tl.sum(keys.to(tl.float32) * q[None, :], 1), float("-inf"))
            now = tl.maximum(highest, tl.max(scores, 0))
            safe = tl.where(now == float("-inf"), 0.0, now)
            faded, weights = tl.exp2(highest - safe), tl.exp2(scores - safe)
            total = total * faded + tl.sum(weights, 0)
            mixed = mixed * faded + tl.sum(values.to(tl.float32) * weights[:, None], 0)
            highest = now
        to = out + (b * H + head) * D + h
        if active == 1:
            tl.store(to, (mixed / total).to(out.dtype.element_ty), mask=inside)
        else:
            first = (b * H + head) * SPLITS
            tl.store(part + (first + split) * D + h, mixed, mask=inside)
            tl.store(stat + (first + split) * 2, highest)
            tl.store(stat + (first + split) * 2 + 1, total)
            tl.debug_barrier()
            if tl.atomic_add(count + b * H + head, 1, sem="acq_rel") == active - 1:
                j = first + tl.arange(0, SPLITS)
                on = tl.arange(0, SPLITS) < active
                tops = tl.load(stat + j * 2, mask=on, other=float("-inf"))
                shares = tl.exp2(tops - tl.max(tops, 0))
                sums = tl.sum(tl.load(stat + j * 2 + 1, mask=on, other=0.0) * shares, 0)
                parts = tl.load(part + j[:, None] * D + h[None, :], mask=on[:, None] & inside[None, :], other=0.0)
                tl.store(to, (tl.sum(parts * shares[:, None], 0) / sums).to(out.dtype.element_ty), mask=inside)
                tl.store(count + b * H + head, 0)


def launch(
    qkv: Float[Tensor, "B width"],
    q_norm: Float[Tensor, "D"] | None,
    k_norm: Float[Tensor, "D"] | None,
    cos: Float32[Tensor, "B 1 D"],
    sin: Float32[Tensor, "B 1 D"],
    kv: Float[Tensor, "N 2 K S D"],
    page_tables: Int32[Tensor, "B P"],
    seq_lens: Int32[Tensor, "B"],
    slots: Int32[Tensor, "B"],
    scale: float,
    eps: float,
    plan: "FusedDecodePlan",
    pdl: bool,
) -> Float[Tensor, "B heads"]:
    """See `ops.rope_attend.rope_attend`; `kv` is one layer of a contiguous pool."""
    (rows, width), (_, _, num_kv_heads, page_size, head_dim) = qkv.shape, kv.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    out = torch.empty((rows, num_heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    options = {"num_warps": plan.warps} | ({"launch_pdl": True} if pdl else {})
    kernel: Any = _rope_attend
    with torch.cuda.device_of(qkv):
        kernel[(num_heads, plan.splits, rows)](
            qkv, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, cos, sin, kv, page_tables, seq_lens, slots,
            plan.parts, plan.stats, plan.counts, out, page_tables.stride(0), kv.stride(0), scale * LOG2E, eps, num_heads, num_kv_heads,
            head_dim, triton.next_power_of_2(head_dim), page_size, plan.tile, plan.splits, q_norm is not None, pdl, **options,
        )  # fmt: skip
    return out
