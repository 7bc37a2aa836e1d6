"""The Triton kernels of cascade attention: one over items of work, whatever rows share them, and one that merges partial results.

Imported only where Triton is.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..types import Float, Float32, Int32, Tensor

if TYPE_CHECKING:
    from .cascade import CascadeWorkspace

NARROW = 16  # the fewest queries that a tensor core takes
LONG, SHORT = 64, 16  # keys of one turn of the loop: the second where a head's keys are long, for three turns must fit into shared memory
LONGEST = 256  # bytes of one key up to which the first holds: 90 KB in all
PARTS = 32  # partial results of one turn of the merge


@triton.jit
def _attend(
    q, kv, tables, members, places, part, lse, k, row, begin, stop, first, count, q_stride, table_stride, page_stride, scale,
    M: tl.constexpr, N: tl.constexpr, G: tl.constexpr, K: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """At most M queries, G heads of each member, which all see tokens begin ... stop - 1 of the row's table; `scale` is in base 2."""
    m, d, n = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, N)
    member, head = m // G, k * G + m % G
    on = member < count
    query = tl.load(members + first + member, mask=on, other=0)
    place = tl.load(places + first + member, mask=on, other=0).to(tl.int64)
    inside = d < D
    qq = tl.load(q + query[:, None].to(tl.int64) * q_stride + head[:, None] * D + d[None, :], mask=on[:, None] & inside[None, :], other=0.0)
    highest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, DP], tl.float32)
    tables += row * table_stride
    # Page ids are loaded a turn ahead, and not by the pipeliner: it would spend a stage on them that keys and values need.
    page = tl.load(tables + (begin + n) // S, mask=begin + n < stop, other=0)
    for at in range(begin, stop, N):
        t = at + n
        ok = t < stop
        base = kv + page.to(tl.int64)[:, None] * page_stride + ((k * S + t % S) * D)[:, None] + d[None, :]
        page = tl.load(tables + (t + N) // S, mask=t + N < stop, other=0)
        keys = tl.load(base, mask=ok[:, None] & inside[None, :], other=0.0)
        values = tl.load(base + K * S * D, mask=ok[:, None] & inside[None, :], other=0.0)
        scores = tl.dot(qq, tl.trans(keys), input_precision=PRECISION) * scale
        scores = tl.where(ok[None, :], scores, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        safe = tl.where(now == float("-inf"), 0.0, now)
        faded = tl.exp2(highest - safe)
        weights = tl.exp2(scores - safe[:, None])
        total = total * faded + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * faded[:, None], input_precision=PRECISION)
        highest = now
    seen = total > 0
    mixed = mixed / tl.where(seen, total, 1.0)[:, None]
    to = place * (K * G) + head
    tl.store(part + to[:, None] * D + d[None, :], mixed, mask=on[:, None] & inside[None, :])
    tl.store(lse + to, tl.where(seen, highest + tl.log2(tl.where(seen, total, 1.0)), float("-inf")), mask=on)


@triton.jit
def _cascade_decode(
    q, kv, tables, seq_lens, num_items, items, members, places, part, lse, q_stride, table_stride, page_stride, scale, programs,
    WIDE: tl.constexpr, NARROW: tl.constexpr, N: tl.constexpr, G: tl.constexpr, K: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, PRECISION: tl.constexpr, FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i takes the (item, key/value head) pairs i, i + programs, ...; items of shared runs come first."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for work in range(tl.program_id(0), tl.load(num_items) * K, programs):
        item, k = items + work // K * FIELDS, work % K  # pyright: ignore[reportOperatorIssue]
        row, count, first = tl.load(item), tl.load(item + 4), tl.load(item + 3)
        # What rows share they see entirely; a run of one row's own may reach beyond its tokens.
        begin, stop = tl.load(item + 1) * S, tl.minimum(tl.load(item + 2) * S, tl.load(seq_lens + row))
        if count * G <= NARROW:
            _attend(q, kv, tables, members, places, part, lse, k, row, begin, stop, first, count, q_stride, table_stride,
                    page_stride, scale, NARROW, N, G, K, S, D, DP, PRECISION)  # fmt: skip
        else:
            _attend(q, kv, tables, members, places, part, lse, k, row, begin, stop, first, count, q_stride, table_stride,
                    page_stride, scale, WIDE, N, G, K, S, D, DP, PRECISION)  # fmt: skip


@triton.jit
def _merge(
    part, lse, starts, places, out, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, J: tl.constexpr, LISTED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, head): its parts, weighted by their log-sum-exp in base 2."""
    if PDL:
        gdc_launch_dependents()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j, d = tl.arange(0, J), tl.arange(0, DP)
    first, stop = tl.load(starts + token), tl.load(starts + token + 1)
    if PDL:
        gdc_wait()
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([DP], tl.float32)
    for at in range(first, stop, J):
        ok = at + j < stop
        place = (tl.load(places + at + j, mask=ok, other=0) if LISTED else at + j).to(tl.int64) * H + head
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
    kv: Float[Tensor, "N 2 K S D"],
    page_tables: Int32[Tensor, "B P"],
    seq_lens: Int32[Tensor, "B"],
    scale: float,
    plan: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    workspace: "CascadeWorkspace",
    programs: int,
    pdl: bool,
) -> Float[Tensor, "B H D"]:
    """One layer's decode attention along a plan's views: `q` rows may be strided, `kv` is one layer of a contiguous pool."""
    from .cascade import FIELDS, LOG2E, WIDE

    num_items, items, starts, members, places = plan
    (_, num_heads, head_dim), (_, _, num_kv_heads, page_size, _) = q.shape, kv.shape
    if q.stride()[1:] != (head_dim, 1):
        q = q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    padded = max(16, triton.next_power_of_2(head_dim))
    group = num_heads // num_kv_heads
    tokens = LONG if padded * kv.element_size() <= LONGEST else SHORT
    wide = max(NARROW, WIDE, triton.next_power_of_2(group))
    launch: Any = _cascade_decode
    with torch.cuda.device_of(q):
        launch[(programs,)](
            q, kv, page_tables, seq_lens, num_items, items, members, places, workspace.out, workspace.lse, q.stride(0),
            page_tables.stride(0), kv.stride(0), scale * LOG2E, programs, wide, NARROW, tokens, group, num_kv_heads, page_size, head_dim,
            padded, "ieee" if q.dtype == torch.float32 else "tf32", FIELDS, pdl, num_warps=4, num_stages=3,
            **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    merge_into(workspace.out, workspace.lse, starts, None, out, pdl)
    return out


def merge_into(
    parts: Float[Tensor, "parts H D"],
    lses: Float32[Tensor, "parts H"],
    starts: Int32[Tensor, "T+1"],
    places: Int32[Tensor, "parts"] | None,
    out: Float[Tensor, "T H D"],
    pdl: bool = False,
) -> None:
    """Write each token's merged result into `out`; without `places` a token's parts are `starts[t] ... starts[t + 1] - 1`."""
    num_tokens, num_heads, head_dim = out.shape
    launch: Any = _merge
    padded = max(16, triton.next_power_of_2(head_dim))
    listed = places is not None
    with torch.cuda.device_of(parts):
        launch[(num_tokens, num_heads)](
            parts, lses, starts, places if listed else starts, out, num_heads, head_dim, padded, PARTS, listed, pdl, num_warps=1,
            **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
