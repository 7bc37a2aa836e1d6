"""Paged attention in plain torch. Tests compare the kernels with it, and it runs if no kernel supports the device or the model.

Shapes: n queries of one row · C keys of one row · G query heads of one key/value head · the others as in `nanovllm.types`.

`window` is the number of last keys, itself included, that a query attends to; 0 means all. With `softcap`, a scaled score s becomes
`softcap * tanh(s / softcap)` before the mask; 0 means no cap.
"""

import torch
from einops import rearrange

from nanovllm.ops.kv_cache.fp8 import chosen, in_fp8, numbers
from nanovllm.types import Float, Int32, Tensor

MAX_SCORES = 1 << 22  # score elements of one row in memory at once; this bounds the memory for long prompts
MAX_GATHERED = 1 << 28  # key and value elements that `decode_rows` copies at once


def row_kv(pages: Float[Tensor, "N 2 K S W"], table: Int32[Tensor, "P"], seq_len: int, start: int = 0) -> Float[Tensor, "2 K C D"]:
    """Gather one row's keys and values `start ... seq_len - 1` from one layer's pages; those in FP8 become float32.

    Raises `IndexError` if the table is too short.
    """
    page_size = pages.shape[3]
    num_pages, first = -(-seq_len // page_size), start // page_size
    if num_pages > table.shape[0]:
        raise IndexError(f"a row of {seq_len} tokens needs {num_pages} pages of {page_size}, but its page table has {table.shape[0]}")
    if in_fp8(pages):
        gathered = numbers(chosen(pages, table[first:num_pages])).permute(1, 2, 0, 3, 4)
    else:
        gathered = pages.permute(1, 2, 0, 3, 4).index_select(2, table[first:num_pages])
    return gathered.flatten(2, 3)[:, :, start - first * page_size : seq_len - first * page_size]


def first_seen(seq_len: int, num_queries: int, window: int) -> int:
    """Return the index of the first key that any of a row's last `num_queries` tokens attends to."""
    return max(0, seq_len - num_queries - window + 1) if window else 0


def capped(scores: Tensor, softcap: float) -> Tensor:
    """Return soft-capped scores, or the scores if there is no cap; `scores` may be overwritten."""
    return scores.div_(softcap).tanh_().mul_(softcap) if softcap else scores


def attend(
    q: Float[Tensor, "n H D"], kv: Float[Tensor, "2 K C D"], scale: float, window: int = 0, softcap: float = 0.0
) -> Float[Tensor, "n H D"]:
    """Compute causal attention of a row's last n tokens to its last C keys, in float32 or wider; the result has the dtype of `q`.

    The arithmetic depends only on n, C, the window and the cap, so a row gives the same bits in any batch.
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
        stop = kv_len - n + hi  # the block's last query attends to keys before this index
        start = first_seen(stop, hi - lo, window)
        seen = stop - start
        scores = capped(torch.bmm(q_kgnd[:, :, lo:hi].reshape(num_kv_heads, -1, head_dim), k[:, start:stop].mT), softcap)
        masked = torch.ones(hi - lo, seen, dtype=torch.bool, device=q.device).triu_(seen - (hi - lo) + 1)
        if window:
            masked |= torch.ones_like(masked).tril_(seen - (hi - lo) - window)
        weights = scores.view(num_kv_heads, -1, hi - lo, seen).masked_fill_(masked, float("-inf")).softmax(-1)
        mixed = torch.bmm(weights.view(num_kv_heads, -1, seen), v[:, start:stop])
        out[lo:hi] = rearrange(mixed, "k (g n) d -> n (k g) d", n=hi - lo)
    return out


def attend_one(q: Float[Tensor, "H D"], kv: Float[Tensor, "2 K C D"], scale: float, softcap: float = 0.0) -> Float[Tensor, "H D"]:
    """Compute `attend` for one query that attends to all given keys: the same arithmetic without a mask, in few calls."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = kv.to(dtype).unbind(0)
    # The product is in new memory: rounding in BLAS may depend on alignment, and a row's view into a batch may have any alignment.
    q_kgd = (q.to(dtype) * scale).view(kv.shape[1], -1, kv.shape[3])
    return torch.bmm(capped(torch.bmm(q_kgd, k.mT), softcap).softmax(-1), v).view_as(q).to(q.dtype)


def prefill_rows(
    q: Float[Tensor, "T H D"],
    pages: Float[Tensor, "N 2 K S W"],
    page_tables: Int32[Tensor, "B P"],
    seq_lens: Int32[Tensor, "B"],
    cu_seqlens: Int32[Tensor, "B+1"],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Float[Tensor, "T H D"]:
    """Compute `paged_prefill` in a loop over rows. It reads lengths on the host, so on a GPU it synchronises and cannot be captured."""
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
    pages: Float[Tensor, "N 2 K S W"],
    page_tables: Int32[Tensor, "B P"],
    seq_lens: Int32[Tensor, "B"],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Float[Tensor, "B H D"]:
    """Compute `paged_decode` without reading device memory on the host.

    It gathers all pages of the page tables, or as many as a window can touch, and masks them. It does so for some rows at a time.
    """
    num_rows, num_heads, head_dim = q.shape
    _, _, num_kv_heads, page_size, _ = pages.shape
    width = page_tables.shape[1]
    used = min(width, (window + page_size - 2) // page_size + 1) if window else width
    positions = torch.arange(used * page_size, dtype=torch.int32, device=q.device).expand(num_rows, -1)
    if used < width:
        firsts = ((seq_lens - window).clamp(min=0) // page_size).clamp(max=width - used)[:, None]
        page_tables = page_tables.gather(1, firsts.long() + torch.arange(used, device=q.device))
        positions = positions + firsts * page_size
    kv_len = used * page_size
    dtype = torch.promote_types(q.dtype, torch.float32)
    block = max(1, MAX_GATHERED // (2 * num_kv_heads * kv_len * head_dim))
    out = q.new_empty(num_rows, num_heads, head_dim)
    for lo in range(0, num_rows, block):
        rows = slice(lo, min(num_rows, lo + block))
        kv = rearrange(numbers(chosen(pages, page_tables[rows])), "b p two k s d -> two b k (p s) d").to(dtype)
        q_bkgd = (q[rows].to(dtype) * scale).view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        at, lens = positions[rows], seq_lens[rows, None]
        masked = (at >= lens) | (at < lens - window) if window else at >= lens
        scores = capped(q_bkgd @ kv[0].transpose(-1, -2), softcap)
        weights = scores.masked_fill_(masked[:, None, None], float("-inf")).softmax(-1)
        out[rows] = (weights @ kv[1]).view(-1, num_heads, head_dim)
    return out
