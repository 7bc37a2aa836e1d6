"""Paged attention in plain torch: what the kernels are checked against, and what runs where there are none.

Shapes: n queries of one row · C keys of one row · G query heads of one key/value head · the rest as in `types`.
"""

import torch
from einops import rearrange

from ..types import Float, Int32, Tensor

MAX_SCORES = 1 << 22  # score elements alive at once for one row; bounds memory for long prompts
MAX_GATHERED = 1 << 28  # key/value elements copied at once by `decode_rows`


def row_kv(pages: Float[Tensor, "N 2 K S D"], table: Int32[Tensor, "P"], seq_len: int) -> Float[Tensor, "2 K C D"]:
    """One row's first `seq_len` keys and values out of one layer's pages. Raises `IndexError` if the table holds fewer."""
    page_size = pages.shape[3]
    num_pages = -(-seq_len // page_size)
    if num_pages > table.shape[0]:
        raise IndexError(f"a row of {seq_len} tokens needs {num_pages} pages of {page_size}, its page table has {table.shape[0]}")
    gathered = pages.permute(1, 2, 0, 3, 4).index_select(2, table[:num_pages])
    return gathered.flatten(2, 3)[:, :, :seq_len]


def attend(q: Float[Tensor, "n H D"], kv: Float[Tensor, "2 K C D"], scale: float) -> Float[Tensor, "n H D"]:
    """Attention of a row's last n tokens to all its C, causally; at least float32 inside, in q's dtype outside.

    The arithmetic depends on n and C alone, so a row gives the same bits in any batch.
    """
    if q.shape[0] == 1:
        return attend_one(q[0], kv, scale)[None]
    (n, num_heads, head_dim), (_, num_kv_heads, kv_len, _) = q.shape, kv.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = kv.to(dtype).unbind(0)
    q_kgnd = rearrange(q.to(dtype) * scale, "n (k g) d -> k g n d", k=num_kv_heads)
    block = max(1, MAX_SCORES // (num_heads * kv_len))
    out = q.new_empty(n, num_heads, head_dim)
    for lo in range(0, n, block):
        hi = min(n, lo + block)
        stop = kv_len - n + hi  # the block's last query sees this many keys
        scores = torch.bmm(q_kgnd[:, :, lo:hi].reshape(num_kv_heads, -1, head_dim), k[:, :stop].mT)
        hidden = torch.ones(hi - lo, stop, dtype=torch.bool, device=q.device).triu_(stop - (hi - lo) + 1)
        weights = scores.view(num_kv_heads, -1, hi - lo, stop).masked_fill_(hidden, float("-inf")).softmax(-1)
        mixed = torch.bmm(weights.view(num_kv_heads, -1, stop), v[:, :stop])
        out[lo:hi] = rearrange(mixed, "k (g n) d -> n (k g) d", n=hi - lo)
    return out


def attend_one(q: Float[Tensor, "H D"], kv: Float[Tensor, "2 K C D"], scale: float) -> Float[Tensor, "H D"]:
    """`attend` for one query: the same arithmetic, no mask, few calls."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = kv.to(dtype).unbind(0)
    # The product is fresh memory: how BLAS rounds may depend on alignment, and a row's view into a batch has any.
    q_kgd = (q.to(dtype) * scale).view(kv.shape[1], -1, kv.shape[3])
    return torch.bmm(torch.bmm(q_kgd, k.mT).softmax(-1), v).view_as(q).to(q.dtype)


def prefill_rows(
    q: Float[Tensor, "T H D"],
    pages: Float[Tensor, "N 2 K S D"],
    page_tables: Int32[Tensor, "B P"],
    seq_lens: Int32[Tensor, "B"],
    cu_seqlens: Int32[Tensor, "B+1"],
    scale: float,
) -> Float[Tensor, "T H D"]:
    """`paged_prefill` as a loop over rows. Reads lengths on the host: on a GPU it synchronises and cannot be captured."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    starts = cu_seqlens.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        lo, hi = starts[row], starts[row + 1]
        if hi > lo:
            out[lo:hi] = attend(q[lo:hi], row_kv(pages, page_tables[row], seq_len), scale)
    return out


def decode_rows(
    q: Float[Tensor, "B H D"],
    pages: Float[Tensor, "N 2 K S D"],
    page_tables: Int32[Tensor, "B P"],
    seq_lens: Int32[Tensor, "B"],
    scale: float,
) -> Float[Tensor, "B H D"]:
    """`paged_decode` without the host: whole page tables are gathered and masked, a bounded number of rows at a time."""
    num_rows, num_heads, head_dim = q.shape
    _, _, num_kv_heads, page_size, _ = pages.shape
    kv_len = page_tables.shape[1] * page_size
    dtype = torch.promote_types(q.dtype, torch.float32)
    positions = torch.arange(kv_len, dtype=torch.int32, device=q.device)
    block = max(1, MAX_GATHERED // (2 * num_kv_heads * kv_len * head_dim))
    out = q.new_empty(num_rows, num_heads, head_dim)
    for lo in range(0, num_rows, block):
        rows = slice(lo, min(num_rows, lo + block))
        kv = rearrange(pages[page_tables[rows]], "b p two k s d -> two b k (p s) d").to(dtype)
        q_bkgd = (q[rows].to(dtype) * scale).view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        hidden = (positions >= seq_lens[rows, None])[:, None, None]
        weights = (q_bkgd @ kv[0].transpose(-1, -2)).masked_fill_(hidden, float("-inf")).softmax(-1)
        out[rows] = (weights @ kv[1]).view(-1, num_heads, head_dim)
    return out
