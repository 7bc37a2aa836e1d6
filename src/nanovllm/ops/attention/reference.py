"""Paged attention in plain torch: what the kernels are checked against, and what runs where there are none.

Shapes: n queries of one row · C keys of one row · G query heads of one key/value head · the rest as in `types`.

`window`: a query sees the last so many keys up to and including itself; 0: all of them. `softcap`: scores s, scaled, become
`softcap * tanh(s / softcap)` before keys are hidden; 0: they stay.
"""

import torch
from einops import rearrange

from nanovllm.types import Float, Int32, Tensor

MAX_SCORES = 1 << 22  # score elements alive at once for one row; bounds memory for long prompts
MAX_GATHERED = 1 << 28  # key/value elements copied at once by `decode_rows`


def row_kv(pages: Float[Tensor, "N 2 K S D"], table: Int32[Tensor, "P"], seq_len: int, start: int = 0) -> Float[Tensor, "2 K C D"]:
    """One row's keys and values `start ... seq_len - 1` out of one layer's pages. Raises `IndexError` if the table holds fewer."""
    page_size = pages.shape[3]
    num_pages, first = -(-seq_len // page_size), start // page_size
    if num_pages > table.shape[0]:
        raise IndexError(f"a row of {seq_len} tokens needs {num_pages} pages of {page_size}, its page table has {table.shape[0]}")
    gathered = pages.permute(1, 2, 0, 3, 4).index_select(2, table[first:num_pages])
    return gathered.flatten(2, 3)[:, :, start - first * page_size : seq_len - first * page_size]


def first_seen(seq_len: int, num_queries: int, window: int) -> int:
    """The first key that any of a row's last `num_queries` tokens sees."""
    return max(0, seq_len - num_queries - window + 1) if window else 0


def capped(scores: Tensor, softcap: float) -> Tensor:
    """`scores`, which may be overwritten, or soft-capped ones."""
    return scores.div_(softcap).tanh_().mul_(softcap) if softcap else scores


def attend(
    q: Float[Tensor, "n H D"], kv: Float[Tensor, "2 K C D"], scale: float, window: int = 0, softcap: float = 0.0
) -> Float[Tensor, "n H D"]:
    """Attention of a row's last n tokens to its last C, causally; at least float32 inside, in q's dtype outside.

    The arithmetic depends on n, C, the window and the cap alone, so a row gives the same bits in any batch.
    """
    if q.shape[0] == 1:
        return attend_one(q[0], kv[:, :, first_seen(kv.shape[2], 1, window) :], scale, softcap)[None]
    (n, num_heads, head_dim), (_, num_kv_heads, kv_len, _) = q.shape, kv.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = kv.to(dtype).unbind(0)
    q_kgnd = rearrange(q.to(dtype) * scale, "n (k g) d -> k g n d", k=num_kv_heads)
    block = max(1, MAX_SCORES // (num_heads * kv_len))
    out = q.new_empty(n, num_heads, head_dim)
    for lo in range(0, n, block):
        hi = min(n, lo + block)
        stop = kv_len - n + hi  # the block's last query sees keys up to this one
        start = first_seen(stop, hi - lo, window)
        seen = stop - start
        scores = capped(torch.bmm(q_kgnd[:, :, lo:hi].reshape(num_kv_heads, -1, head_dim), k[:, start:stop].mT), softcap)
        hidden = torch.ones(hi - lo, seen, dtype=torch.bool, device=q.device).triu_(seen - (hi - lo) + 1)
        if window:
            hidden |= torch.ones_like(hidden).tril_(seen - (hi - lo) - window)
        weights = scores.view(num_kv_heads, -1, hi - lo, seen).masked_fill_(hidden, float("-inf")).softmax(-1)
        mixed = torch.bmm(weights.view(num_kv_heads, -1, seen), v[:, start:stop])
        out[lo:hi] = rearrange(mixed, "k (g n) d -> n (k g) d", n=hi - lo)
    return out


def attend_one(q: Float[Tensor, "H D"], kv: Float[Tensor, "2 K C D"], scale: float, softcap: float = 0.0) -> Float[Tensor, "H D"]:
    """`attend` for one query, which sees all that it is given: the same arithmetic, no mask, few calls."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = kv.to(dtype).unbind(0)
    # The product is fresh memory: how BLAS rounds may depend on alignment, and a row's view into a batch has any.
    q_kgd = (q.to(dtype) * scale).view(kv.shape[1], -1, kv.shape[3])
    return torch.bmm(capped(torch.bmm(q_kgd, k.mT), softcap).softmax(-1), v).view_as(q).to(q.dtype)


def prefill_rows(
    q: Float[Tensor, "T H D"],
    pages: Float[Tensor, "N 2 K S D"],
    page_tables: Int32[Tensor, "B P"],
    seq_lens: Int32[Tensor, "B"],
    cu_seqlens: Int32[Tensor, "B+1"],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Float[Tensor, "T H D"]:
    """`paged_prefill` as a loop over rows. Reads lengths on the host: on a GPU it synchronises and cannot be captured."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    starts = cu_seqlens.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        lo, hi = starts[row], starts[row + 1]
        if hi > lo:
            kv = row_kv(pages, page_tables[row], seq_len, first_seen(seq_len, hi - lo, window))
            out[lo:hi] = attend(q[lo:hi], kv, scale, window, softcap)
    return out


def decode_rows(
    q: Float[Tensor, "B H D"],
    pages: Float[Tensor, "N 2 K S D"],
    page_tables: Int32[Tensor, "B P"],
    seq_lens: Int32[Tensor, "B"],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Float[Tensor, "B H D"]:
    """`paged_decode` without the host: whole page tables, or as many pages as a window touches, are gathered and masked, a bounded number
    of rows at a time."""
    num_rows, num_heads, head_dim = q.shape
    _, _, num_kv_heads, page_size, _ = pages.shape
    width = page_tables.shape[1]
    held = min(width, (window + page_size - 2) // page_size + 1) if window else width
    positions = torch.arange(held * page_size, dtype=torch.int32, device=q.device).expand(num_rows, -1)
    if held < width:
        firsts = ((seq_lens - window).clamp(min=0) // page_size).clamp(max=width - held)[:, None]
        page_tables = page_tables.gather(1, firsts.long() + torch.arange(held, device=q.device))
        positions = positions + firsts * page_size
    kv_len = held * page_size
    dtype = torch.promote_types(q.dtype, torch.float32)
    block = max(1, MAX_GATHERED // (2 * num_kv_heads * kv_len * head_dim))
    out = q.new_empty(num_rows, num_heads, head_dim)
    for lo in range(0, num_rows, block):
        rows = slice(lo, min(num_rows, lo + block))
        kv = rearrange(pages[page_tables[rows]], "b p two k s d -> two b k (p s) d").to(dtype)
        q_bkgd = (q[rows].to(dtype) * scale).view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        at, lens = positions[rows], seq_lens[rows, None]
        hidden = (at >= lens) | (at < lens - window) if window else at >= lens
        scores = capped(q_bkgd @ kv[0].transpose(-1, -2), softcap)
        weights = scores.masked_fill_(hidden[:, None, None], float("-inf")).softmax(-1)
        out[rows] = (weights @ kv[1]).view(-1, num_heads, head_dim)
    return out
