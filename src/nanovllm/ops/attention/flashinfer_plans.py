"""The plans of FlashInfer's attention: `DecodePlan` for decode batches, `PrefillPlan` for prompts.

**Page counts ahead of lengths.** A decode schedule splits a row by its planned number of pages. When the kernel runs, it computes the
row's length as `(pages - 1) * page_size + last_page_len`, in unsigned arithmetic. So one schedule serves every step until a row outgrows
its planned pages. `last_page_len` is set on the device from the lengths; it is negative if a row is still some pages short. A split that
starts at or after the row's length covers no token and has weight 0 in the merge.
"""

import numpy as np
import torch

from nanovllm.ops.attention.flashinfer import CAUSAL, NHD, NON_CAUSAL, AttentionWorkspace, FlashInferPlan, num_tiles
from nanovllm.ops.attention.plan_table import PlanMismatchError
from nanovllm.types import Float, Float32, Int32, Int64, Tensor

FA3_TILE = 128  # queries of a head that one thread block on Hopper takes, over all keys of a row, which it does not split
FA3_MIN_TILES = 64


COPIED_FROM = 2048  # new tokens of a row from which on it is faster to copy older ones out of the pages


def kv_lines(
    lens: Int32[np.ndarray, "B"], page_tables: Int32[np.ndarray, "B P"], num_kv_heads: int, page_size: int, device: torch.device
) -> Int64[Tensor, "2 tokens K"]:
    """Where a layer's pages, as lines of one head of one token, have the keys and the values of the first `lens` tokens of each row."""
    row_of = np.repeat(np.arange(len(lens)), lens)
    at = np.arange(len(row_of)) - np.repeat(lens.cumsum() - lens, lens)
    pinned = torch.empty(2, len(at), 1, dtype=torch.int64, pin_memory=device.type == "cuda")
    pinned.numpy()[..., 0] = page_tables[row_of, at // page_size], at % page_size
    page, offset = pinned.to(device, non_blocking=True)
    in_page = torch.arange(2 * num_kv_heads, device=device).view(2, 1, num_kv_heads) * page_size
    return page * (2 * num_kv_heads * page_size) + in_page + offset


def copied_kv(pages: Float[Tensor, "N 2 K S D"], lines: Int64[Tensor, "2 tokens K"]) -> tuple[Tensor, Tensor]:
    """The keys and values `[tokens, K, D]` in the lines of `kv_lines`."""
    k, v = torch.embedding(pages.view(-1, pages.shape[-1]), lines)
    return k, v


def prefill_kernel(num_tokens: int, num_rows: int, num_heads: int) -> str:
    """Choose `fa3` for steps that fill its tiles and the GPU, else `fa2`.

    Measured on an H200: `fa3` is 1.2 to 2.4 times as fast for such steps, and `fa2` up to 4 times as fast for others.
    """
    many = num_tokens >= FA3_TILE * num_rows and num_tokens * num_heads >= FA3_TILE * FA3_MIN_TILES
    return "fa3" if many else "fa2"


class DecodePlan(FlashInferPlan):
    """The schedule of decode batches of exactly `batch_size` rows. The device buffers never move, so launches can be captured.

    A row has at most `max_pages` pages. `windows` are the windows of all layers (0: none); `softcap` is the same for all layers. Pass
    `handle` to `paged_decode`; it is valid as long as this object lives.
    """

    def __init__(
        self,
        workspace: AttentionWorkspace,
        batch_size: int,
        max_pages: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        windows: tuple[int, ...] = (0,),
        softcap: float = 0.0,
    ) -> None:
        schedule_bytes = 4096 + 32 * (num_tiles(batch_size, batch_size, num_heads, num_kv_heads, 16, device) + batch_size)
        num_ints, shape = batch_size + 1 + batch_size * max_pages, (num_heads, num_kv_heads, head_dim, page_size)
        super().__init__(workspace, num_ints, schedule_bytes, *shape, dtype, device, windows, softcap)
        self.batch_size, self.max_pages = batch_size, max_pages
        self.qo_indptr_host = np.arange(batch_size + 1, dtype=np.int32)
        self.qo_indptr = torch.arange(batch_size + 1, dtype=torch.int32, device=device)
        self.kv_indptr, self.indices = self.ints[: batch_size + 1], self.ints[batch_size + 1 :]
        self.last_page_lens = torch.ones(batch_size, dtype=torch.int32, device=device)

    def update(self, page_counts: Int32[np.ndarray, "B"], page_tables: Int32[np.ndarray, "B P"]) -> None:
        """Plan the rows until the next update, asynchronously on the current stream.

        The plan serves every step in which `seq_lens[b]` is between 1 and `page_counts[b] * page_size`. So count pages ahead of need:
        tokens after that are left out without an error.

        Args:
            page_counts: Number of pages of each row, used or planned, on the host. A padding row has one page, the dummy page.
            page_tables: Page numbers of each row, on the host. Row b uses the first `page_counts[b]`.

        Raises:
            PlanMismatchError: The number of rows is another, or a count is outside 1 ... max_pages.
        """
        rows, width = page_tables.shape
        if rows != self.batch_size or page_counts.shape != (rows,):
            raise PlanMismatchError(f"a plan for {self.batch_size} rows was given {page_counts.shape[0]} counts and {rows} page tables")
        if page_counts.min() < 1 or page_counts.max() > min(width, self.max_pages):
            raise PlanMismatchError(
                f"page counts {page_counts.min()} ... {page_counts.max()} must be in 1 ... {min(width, self.max_pages)}"
            )
        indptr = np.zeros(rows + 1, np.int32)
        np.cumsum(page_counts, out=indptr[1:])
        used = rows + 1 + int(indptr[-1])
        staging = self.next_staging()
        host = staging.ints.numpy()
        host[: rows + 1] = indptr
        host[rows + 1 : used] = page_tables[np.arange(width, dtype=np.int32) < page_counts[:, None]]
        self.commit(staging, "fa2", used, self.qo_indptr_host, indptr, page_counts * self.page_size, rows, True, False)

    def run(
        self,
        q: Float[Tensor, "B H D"],
        pages: Float[Tensor, "L N 2 K S D"],
        layer: int,
        seq_lens: Int32[Tensor, "B"],
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Float[Tensor, "B H D"]:
        """Compute `paged_decode` of one layer. Layer 0 must come first in every step: it reads the step's lengths for all layers.

        Raises `PlanMismatchError` for another number of rows, and for a window or a soft cap that the plan was not made for.
        """
        from nanovllm.ops.kv_cache.triton_kv import last_page_lens

        if q.shape[0] != self.batch_size or not self.schedules:
            raise PlanMismatchError(
                f"{q.shape[0]} rows were given to a plan {'' if self.schedules else 'that was never updated, '}for {self.batch_size} rows"
            )
        schedule = self.follow(window, softcap)
        if layer == 0:
            last_page_lens(self.last_page_lens, seq_lens, self.kv_indptr, self.page_size)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        arrays = (self.qo_indptr, self.kv_indptr, self.indices, self.last_page_lens)
        # A dependent launch reads last_page_lens before it waits for the previous kernel. At layer 0 that kernel writes last_page_lens.
        self.launch("fa2", schedule, q, pages[layer].unbind(1), arrays, out, NON_CAUSAL, scale, self.pdl and layer != 0)
        return out


class PrefillPlan(FlashInferPlan):
    """The schedule of batches with any number of new tokens per row, updated for every step.

    Pass `handle` to `paged_prefill`; it is valid as long as this object lives. A batch has at most `max_rows` rows of `max_pages` pages.
    `windows` and `softcap` are as in `DecodePlan`. Without `causal` every query attends to all keys of its row.

    `backend` is `fa2`, `fa3` (Hopper only) or `auto`. With `auto`, `prefill_kernel` chooses for each step on Hopper with head_dim 128; else
    fa2 is used. With `max_tokens` (at most about 2,000) the plan is for capture: it uses fa2 and takes exactly `max_tokens` queries. The
    results of unused queries are 0.
    """

    def __init__(
        self,
        workspace: AttentionWorkspace,
        max_rows: int,
        max_pages: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: str = "auto",
        max_tokens: int | None = None,
        causal: bool = True,
        windows: tuple[int, ...] = (0,),
        softcap: float = 0.0,
    ) -> None:
        if backend not in ("auto", "fa2", "fa3"):
            raise PlanMismatchError(f"attention backend {backend!r} is not one of auto, fa2, fa3")
        if any(windows) and not causal:
            raise PlanMismatchError(f"windows {windows} need a causal plan: they end at a query's own position; use causal=True")
        num_ints, shape = 3 * max_rows + 2 + max_rows * max_pages, (num_heads, num_kv_heads, head_dim, page_size)
        schedule_bytes = 1 << 20 if max_tokens else 1 << 23
        super().__init__(workspace, num_ints, schedule_bytes, *shape, dtype, device, windows, softcap)
        self.max_rows, self.max_pages, self.max_tokens, self.causal = max_rows, max_pages, max_tokens, causal
        hopper = torch.cuda.get_device_capability(device)[0] == 9
        self.backend = "fa2" if max_tokens or not hopper or (backend == "auto" and head_dim != 128) else backend
        if self.backend != "fa2":
            self.load("fa3")  # now, so that the first long prompt does not wait for a build
        self.chosen, self.arrays, self.num_tokens, self.together = "fa2", (), 0, False
        self.copied: Int64[Tensor, "2 tokens K"] | None = None  # where the keys and values are that are copied out of the pages

    def update(
        self,
        cu_seqlens: Int32[np.ndarray, "bounds"],
        seq_lens: Int32[np.ndarray, "B"],
        page_tables: Int32[np.ndarray, "B P"],
        *,
        together: bool = False,
    ) -> None:
        """Plan one step, asynchronously on the current stream.

        Args:
            cu_seqlens: Copy of the argument of `paged_prefill` on the host.
            seq_lens: Copy of the argument of `paged_prefill` on the host.
            page_tables: Copy of the argument of `paged_prefill` on the host. A table may have more pages than its row needs.
            together: Whether `run` will get the new tokens' keys and values as `new`. If no row has older tokens, fa3 reads them there
                instead of in the pages, which is a fifth faster. If rows have at most as many older tokens as new ones, and many new
                ones, their keys and values are copied out of the pages first.

        Raises:
            PlanMismatchError: There are more rows, pages or tokens than the plan was made for.
        """
        given, width = page_tables.shape
        num_tokens = int(cu_seqlens[-1])
        if given > self.max_rows or cu_seqlens.shape != (given + 1,) or num_tokens > (self.max_tokens or num_tokens):
            raise PlanMismatchError(
                f"got {given} rows, {num_tokens} tokens; the plan takes up to {self.max_rows} rows and {self.max_tokens or 'any'} tokens"
            )
        counts = -(-seq_lens // self.page_size)
        if counts.min() < 1 or counts.max() > min(width, self.max_pages):
            raise PlanMismatchError(f"rows of {counts.min()} ... {counts.max()} pages must be in 1 ... {min(width, self.max_pages)}")
        rows = self.max_rows if self.max_tokens else given  # a captured launch has all rows; unused rows have no tokens and no pages
        qo, kv, lens = np.full(rows + 1, num_tokens, np.int32), np.zeros(rows + 1, np.int32), np.zeros(rows, np.int32)
        qo[: given + 1], lens[:given] = cu_seqlens, seq_lens
        np.cumsum(counts, out=kv[1 : given + 1])
        kv[given + 1 :] = kv[given]
        used = 3 * rows + 2 + int(kv[-1])
        staging = self.next_staging()
        host = staging.ints.numpy()
        host[: 3 * rows + 2] = np.concatenate((qo, kv, lens - (np.diff(kv) - 1) * self.page_size))
        host[3 * rows + 2 : used] = page_tables[np.arange(width, dtype=np.int32) < counts[:, None]]
        self.chosen = prefill_kernel(num_tokens, given, self.num_heads) if self.backend == "auto" else self.backend
        bound = self.max_tokens or num_tokens
        total, fresh = int(lens.sum()), bool((lens == np.diff(qo)).all())
        copied = num_tokens >= COPIED_FROM * given and total <= 2 * num_tokens
        self.together = together and self.chosen == "fa3" and (fresh or copied)
        self.copied = (
            None if not self.together or fresh else kv_lines(lens, page_tables, self.num_kv_heads, self.page_size, self.ints.device)
        )
        captured, (bounds, size) = self.max_tokens is not None, (kv, self.page_size)
        if self.together:  # then no index of a page is read, and the bounds are those of tokens
            bounds, size = np.zeros_like(kv), 1
            np.cumsum(lens, out=bounds[1:])
            host[rows + 1 : 2 * rows + 2] = bounds
        longest = None if captured else int(seq_lens.max())
        self.commit(staging, self.chosen, used, qo, bounds, lens, bound, captured, self.causal, size, longest)
        indptrs, rest = self.ints[: 2 * rows + 2].view(2, rows + 1), self.ints[2 * rows + 2 :]
        self.arrays, self.num_tokens = (*indptrs, rest[rows:], rest[:rows]), bound

    def run(
        self,
        q: Float[Tensor, "T H D"],
        pages: Float[Tensor, "L N 2 K S D"],
        layer: int,
        scale: float,
        out: Float[Tensor, "T H D"] | None = None,
        lse: Float32[Tensor, "T H"] | None = None,
        new: tuple[Float[Tensor, "T K D"], Float[Tensor, "T K D"]] | None = None,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Float[Tensor, "T H D"]:
        """Compute `paged_prefill` of one layer for the batch of the last update.

        Args:
            q: Queries, `[T, H, D]`.
            pages: One KV pool.
            layer: The layer's index in this pool.
            scale: Factor of the scores.
            out: Where the result is written, if given.
            lse: Where the log-sum-exps are written, in base 2, if given.
            new: Keys and values of the new tokens. A plan updated with `together` reads them.
            window: Window of the layer; 0 means none.
            softcap: Soft cap of the layer; 0 means none.

        Raises:
            PlanMismatchError: The number of tokens is another, `new` is missing, or the plan is for other windows or soft caps.
        """
        if q.shape[0] != self.num_tokens or not self.schedules:
            raise PlanMismatchError(f"{q.shape[0]} tokens were given to a plan that was last updated for {self.num_tokens} tokens")
        schedule = self.follow(window, softcap)
        if out is None:
            make = torch.zeros if self.max_tokens else torch.empty  # padding must not put NaN into the dummy page
            out = make(q.shape, dtype=q.dtype, device=q.device)
        mask = CAUSAL if self.causal else NON_CAUSAL
        if not self.together:
            self.launch(self.chosen, schedule, q, pages[layer].unbind(1), self.arrays, out, mask, scale, self.pdl, lse)
        elif new is None:
            raise PlanMismatchError("the plan was updated with together=True but got no keys and values; pass new=(k, v)")
        else:
            kv = new if self.copied is None else copied_kv(pages[layer], self.copied)
            self.launch(self.chosen, schedule, q, kv, self.arrays[:2], out, mask, scale, self.pdl, lse, NHD)
        return out
