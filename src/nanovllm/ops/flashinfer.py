"""FlashInfer's batch attention over our pages: the schedules that its kernels follow, and the calls that launch them.

Written against flashinfer-python 0.6.14 and imported only here. The functions below are the two that its
`BatchPrefillWithPagedKVCacheWrapper` ends in: the wrapper's own `plan` walks the batch in Python, and its buffers cannot be alternated.

**Page counts ahead of lengths.** A decode schedule splits a row by its number of pages, planned; the kernel takes the row's length from
`(pages - 1) * page_size + last_page_len`, in unsigned arithmetic, when it runs. So one schedule serves every step until a row outgrows
its planned pages: `last_page_len` is set on the device from the lengths, negative where a row is still pages short, and a split that
starts at or after the row's length covers nothing and weighs nothing in the merge.

**Windows.** A schedule that splits rows knows how many parts a row has, which depends on the window. The kernel counts them anew when it
runs, and puts the parts of a row's second query behind so many: of another window it would put them elsewhere. So layers of each window
follow a schedule of their own, over the same index arrays. A window that no row outgrows is none, where lengths are known; Hopper's kernels
split no row, and one schedule serves them all.

**Order.** All work of plans that share a workspace goes to one stream. An update writes pinned memory that asynchronous copies read, so
each plan alternates between two sets of it, and waits only when the host is two updates ahead of the device.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from ..types import Float, Float32, Int32, Tensor
from .backends import attention_backend
from .plans import PlanMismatchError, register

__all__ = ["AttentionWorkspace", "DecodePlan", "PrefillPlan", "attention_backend"]

NON_CAUSAL, CAUSAL = 0, 1  # flashinfer.utils.MaskMode
NHD, HND = 0, 1  # flashinfer.utils.TensorLayout
FA3_TILE = 128  # queries of a head that one of Hopper's thread blocks takes, over all of a row's keys: it does not split them
FA3_MIN_TILES = 64
EVERYTHING = 1 << 30  # keys before a query's own; kernels of Hopper that are built for windows take -1 for a number


def _num_tiles(num_tokens: int, num_rows: int, num_heads: int, num_kv_heads: int, tile: int, device: torch.device) -> int:
    """Thread-block rows that FlashInfer reserves for a captured schedule: two blocks a multiprocessor, or a tile for every query tile."""
    blocks = 2 * torch.cuda.get_device_properties(device).multi_processor_count // num_kv_heads
    return max(blocks, -(-num_tokens * (num_heads // num_kv_heads) // tile) + num_rows - 1)


def prefill_kernel(num_tokens: int, num_rows: int, num_heads: int) -> str:
    """`fa3` for steps that fill its tiles and the chip (measured on an H200: 1.2 to 2.4 times as fast), else `fa2` (up to 4 times)."""
    many = num_tokens >= FA3_TILE * num_rows and num_tokens * num_heads >= FA3_TILE * FA3_MIN_TILES
    return "fa3" if many else "fa2"


class AttentionWorkspace:
    """Scratch memory for partial results, shared by all plans of one stream. Sizes: the largest batch, and the model's heads."""

    def __init__(self, max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> None:
        tile_bytes = num_heads * (head_dim + 1) * 4
        tile = 16 if num_heads <= 16 * num_kv_heads else 64  # FA2DetermineCtaTileQ
        decode = _num_tiles(max_rows, max_rows, num_heads, num_kv_heads, tile, device) * tile * tile_bytes
        prefill = _num_tiles(0, 1, num_heads, num_kv_heads, 128, device) * 128 * tile_bytes
        self.buffer = torch.empty(max(decode, prefill) + (1 << 20), dtype=torch.uint8, device=device)


class _Staging:
    """Pinned memory of one update, with room for several schedules. `copied` has passed when the copies out of it have run."""

    def __init__(self, num_ints: int, schedules: int, schedule_bytes: int) -> None:
        self.ints = torch.empty(num_ints, dtype=torch.int32, pin_memory=True)
        self.schedules = torch.empty(schedules, schedule_bytes, dtype=torch.uint8, pin_memory=True).unbind()
        self.copied = torch.cuda.Event()


class _Schedule(NamedTuple):
    """What layers of one window follow: the schedule, where its parts lie, and how many keys before its own a query sees (-1: all)."""

    memory: Tensor
    info: Any
    window_left: int


class _Plan:
    """What both kinds share: FlashInfer's schedules, the index arrays, and their pinned sources."""

    def __init__(
        self,
        workspace: AttentionWorkspace,
        num_ints: int,
        schedule_bytes: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        windows: tuple[int, ...],
        softcap: float,
    ) -> None:
        if attention_backend(device, dtype, head_dim, page_size) != "flashinfer":
            raise PlanMismatchError(f"no FlashInfer attention for {dtype}, head_dim={head_dim}, page_size={page_size} on {device}")
        self.workspace, self.dtype, self.head_dim, self.page_size = workspace, dtype, head_dim, page_size
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.windows, self.softcap = tuple(dict.fromkeys(windows)), softcap
        if not windows or min(windows) < 0 or softcap < 0:
            raise PlanMismatchError(f"windows {windows} must be some, each at least 0, and the soft cap {softcap} at least 0")
        self.ints = torch.zeros(num_ints, dtype=torch.int32, device=device)
        self.memory = torch.empty(len(self.windows), schedule_bytes, dtype=torch.uint8, device=device).unbind()
        sizes = num_ints, len(self.windows), schedule_bytes
        self.staging = (_Staging(*sizes), _Staging(*sizes))
        self.schedules: dict[int, _Schedule] = {}  # by window; none before the first update
        self.pdl = torch.cuda.get_device_capability(device) >= (9, 0)
        self.modules: dict[str, Any] = {}
        self.load("fa2")
        self.handle = register(self)

    def load(self, backend: str) -> None:
        """Load kernels, those for windows and soft caps where the plan has such. The first time for a dtype, a head_dim and the two
        builds them: fa2 30 to 45 s, fa3 90 to 110; they stay on disk."""
        from flashinfer.prefill import get_batch_prefill_module

        dtypes, limits = (self.dtype, self.dtype, self.dtype, torch.int32), (any(self.windows), self.softcap > 0)
        self.modules[backend] = get_batch_prefill_module(backend, *dtypes, self.head_dim, self.head_dim, 0, *limits, False)

    def next_staging(self) -> _Staging:
        self.staging = self.staging[::-1]
        self.staging[0].copied.synchronize()
        return self.staging[0]

    def commit(
        self, staging: _Staging, backend: str, used: int, qo_indptr, kv_indptr, kv_lens, num_tokens: int, captured: bool, causal: bool,
        page_size: int | None = None, longest: int | None = None,
    ) -> None:  # fmt: skip
        """Send the staged arrays, then the schedules; where their parts lie is the same for any captured batch. `longest`: no row is
        longer; None: rows grow."""
        self.ints[:used].copy_(staging.ints[:used], non_blocking=True)
        made: dict[int, tuple[Tensor, Any]] = {}
        for window in self.windows:
            window_left = window - 1 if window and (longest is None or window < longest) else -1
            split = window_left if backend == "fa2" else -1  # what the schedule depends on
            if split not in made:
                memory = self.memory[len(made)]
                info = self.modules[backend].plan(
                    self.workspace.buffer,
                    memory,
                    staging.schedules[len(made)],
                    torch.from_numpy(qo_indptr),
                    torch.from_numpy(kv_indptr),
                    torch.from_numpy(kv_lens),
                    num_tokens,
                    len(qo_indptr) - 1,
                    self.num_heads,
                    self.num_kv_heads,
                    self.page_size if page_size is None else page_size,
                    captured,
                    self.head_dim,
                    self.head_dim,
                    causal,
                    split,
                    *((-1, False, 0) if backend == "fa2" else ()),  # fixed_split_size, disable_split_kv, num_colocated_ctas
                )
                made[split] = memory, info
            if window_left < 0 and backend == "fa3" and any(self.windows):
                window_left = EVERYTHING
            self.schedules[window] = _Schedule(*made[split], window_left)
        staging.copied.record()

    def follow(self, window: int, softcap: float) -> _Schedule:
        """The schedule of layers with this window. Raises `PlanMismatchError` for a window or a soft cap that the plan was not made for."""
        if window not in self.schedules or softcap != self.softcap:
            raise PlanMismatchError(
                f"a layer of window {window} and soft cap {softcap} was given to a plan for {self.windows} and {self.softcap}"
            )
        return self.schedules[window]

    def launch(self, backend, schedule: _Schedule, q, kv, arrays, out, mask, scale, pdl, lse=None, layout=HND) -> None:
        """`kv` are pages, `[N, K, S, D]` each, with the arrays that find them; or in layout NHD rows `[T, K, D]` with their bounds."""
        module, paged = self.modules[backend], layout == HND
        (module.paged_run if paged else module.ragged_run)(
            self.workspace.buffer,
            schedule.memory,
            schedule.info,
            q,
            *kv,
            *arrays,
            out,
            lse,  # in base 2
            mask,
            layout,
            schedule.window_left,
            pdl,
            *(None,) * 6,  # masks, slopes, multi-item scoring
            self.softcap,
            scale,
            *(None,) * (3 if paged else 0),  # scales of 8-bit inputs
            1.0,  # rope_scale
            1e4,  # rope_theta
            0,  # token_pos_in_items_len
            *((self.workspace.buffer.numel(),) if paged else ()),
        )


class DecodePlan(_Plan):
    """The schedule of decode batches of exactly `batch_size` rows; its device buffers never move, so its launches can be captured.

    `max_pages` is the most pages of one row, `windows` are those of the layers (0: none), `softcap` is that of all of them.
    `handle` is what `paged_decode` takes; it lives as long as this object.
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
        schedule_bytes = 4096 + 32 * (_num_tiles(batch_size, batch_size, num_heads, num_kv_heads, 16, device) + batch_size)
        num_ints, shape = batch_size + 1 + batch_size * max_pages, (num_heads, num_kv_heads, head_dim, page_size)
        super().__init__(workspace, num_ints, schedule_bytes, *shape, dtype, device, windows, softcap)
        self.batch_size, self.max_pages = batch_size, max_pages
        self.qo_indptr_host = np.arange(batch_size + 1, dtype=np.int32)
        self.qo_indptr = torch.arange(batch_size + 1, dtype=torch.int32, device=device)
        self.kv_indptr, self.indices = self.ints[: batch_size + 1], self.ints[batch_size + 1 :]
        self.last_page_lens = torch.ones(batch_size, dtype=torch.int32, device=device)

    def update(self, page_counts: Int32[np.ndarray, "B"], page_tables: Int32[np.ndarray, "B P"]) -> None:
        """Plan for rows that hold the first `page_counts[b]` ids of `page_tables[b]`, or any part of them, until the next update.

        Both arrays are the host's. Count pages ahead of need: the plan serves every step in which `seq_lens[b]` is between 1 and
        `page_counts[b] * page_size`; beyond that tokens are silently left out. A padding row counts one page, the dummy page.
        Asynchronous on the current stream. Raises `PlanMismatchError` for another number of rows, or counts outside 1 ... max_pages.
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
        """`paged_decode` of one layer. Layer 0 comes first in every step: it takes the step's lengths for all.

        Raises `PlanMismatchError` for another number of rows, and for a window or a soft cap that the plan was not made for.
        """
        from .triton_kv import last_page_lens

        if q.shape[0] != self.batch_size or not self.schedules:
            raise PlanMismatchError(
                f"{q.shape[0]} rows were given to a plan {'updated' if self.schedules else 'never updated'} for {self.batch_size}"
            )
        schedule = self.follow(window, softcap)
        if layer == 0:
            last_page_lens(self.last_page_lens, seq_lens, self.kv_indptr, self.page_size)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        arrays = (self.qo_indptr, self.kv_indptr, self.indices, self.last_page_lens)
        # A dependent launch reads last_page_lens before it waits for the kernel in front, which at layer 0 is the one that writes them.
        self.launch("fa2", schedule, q, pages[layer].unbind(1), arrays, out, NON_CAUSAL, scale, self.pdl and layer != 0)
        return out


class PrefillPlan(_Plan):
    """The schedule of batches of any number of new tokens a row, updated for every step.

    At most `max_rows` rows of `max_pages` pages. `backend` is `fa2`, `fa3` (Hopper only) or `auto`: `prefill_kernel` chooses for each
    step on Hopper with head_dim 128, elsewhere it is fa2. With `max_tokens` (at most about 2,000) the plan is for capture: fa2, q always
    of `max_tokens` tokens, the unused ones giving 0. Without `causal` every query sees all of its row. `windows` and `softcap` as in
    `DecodePlan`. `handle` is what `paged_prefill` takes; it lives as long as this object.
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
            raise PlanMismatchError(f"windows {windows} end at a query's own position, which a plan that is not causal does not know")
        num_ints, shape = 3 * max_rows + 2 + max_rows * max_pages, (num_heads, num_kv_heads, head_dim, page_size)
        schedule_bytes = 1 << 20 if max_tokens else 1 << 23
        super().__init__(workspace, num_ints, schedule_bytes, *shape, dtype, device, windows, softcap)
        self.max_rows, self.max_pages, self.max_tokens, self.causal = max_rows, max_pages, max_tokens, causal
        hopper = torch.cuda.get_device_capability(device)[0] == 9
        self.backend = "fa2" if max_tokens or not hopper or (backend == "auto" and head_dim != 128) else backend
        if self.backend != "fa2":
            self.load("fa3")  # here, so that the first long prompt does not wait for a build
        self.chosen, self.arrays, self.num_tokens, self.together = "fa2", (), 0, False

    def update(
        self,
        cu_seqlens: Int32[np.ndarray, "bounds"],
        seq_lens: Int32[np.ndarray, "B"],
        page_tables: Int32[np.ndarray, "B P"],
        *,
        together: bool = False,
    ) -> None:
        """Plan for one step: the host's copies of what `paged_prefill` is given (more pages in a table than its row needs do no harm).

        `together`: the keys and values of the new tokens will be given too. Where no row has others, fa3 reads them there, a fifth faster.
        Asynchronous on the current stream. Raises `PlanMismatchError` for more rows, pages or tokens than the plan was made for.
        """
        given, width = page_tables.shape
        num_tokens = int(cu_seqlens[-1])
        if given > self.max_rows or cu_seqlens.shape != (given + 1,) or num_tokens > (self.max_tokens or num_tokens):
            raise PlanMismatchError(
                f"{given} rows, {num_tokens} tokens: the plan takes {self.max_rows} rows, {self.max_tokens or 'any'} tokens"
            )
        counts = -(-seq_lens // self.page_size)
        if counts.min() < 1 or counts.max() > min(width, self.max_pages):
            raise PlanMismatchError(f"rows of {counts.min()} ... {counts.max()} pages must be in 1 ... {min(width, self.max_pages)}")
        rows = self.max_rows if self.max_tokens else given  # a captured launch has all rows; those not given have no tokens and no pages
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
        self.together = together and self.chosen == "fa3" and bool((lens == np.diff(qo)).all())
        captured, (bounds, size) = self.max_tokens is not None, (qo, 1) if self.together else (kv, self.page_size)
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
        """`paged_prefill` of one layer, for the batch of the last update; into `out` and, in base 2, `lse` where they are given. `new` are
        the keys and values that were written, which a plan `together` reads. Raises `PlanMismatchError` for another number of tokens, and
        for a window or a soft cap that the plan was not made for."""
        if q.shape[0] != self.num_tokens or not self.schedules:
            raise PlanMismatchError(f"{q.shape[0]} tokens were given to a plan last updated for {self.num_tokens}")
        schedule = self.follow(window, softcap)
        if out is None:
            make = torch.zeros if self.max_tokens else torch.empty  # padding must not put NaN into the dummy page
            out = make(q.shape, dtype=q.dtype, device=q.device)
        mask = CAUSAL if self.causal else NON_CAUSAL
        if not self.together:
            self.launch(self.chosen, schedule, q, pages[layer].unbind(1), self.arrays, out, mask, scale, self.pdl, lse)
        elif new is None:
            raise PlanMismatchError("the plan reads the new tokens' keys and values where they lie together, and was not given them")
        else:
            self.launch(self.chosen, schedule, q, new, self.arrays[:1] * 2, out, mask, scale, self.pdl, lse, NHD)
        return out
