"""Cascade attention: pages that several queries share are read once for all of them (Juravsky et al., 2024, "Hydragen"; Ye et al., 2024).

The pages of a batch are cut into *runs*, each with the rows that attend to it (`sharing.py` finds them). Attention to each run gives a
partial result and its log-sum-exp; a row's partial results, over any number of levels, are merged by these weights. In exact arithmetic
that is plain attention; in floating point it differs in the last bits.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from ..types import Float, Float32, Int32, Tensor
from .backends import LARGEST, installed, processors, shared_memory
from .plans import PlanMismatchError, register
from .reference import capped, row_kv

LOG2E = 1 / math.log(2)
MAX_PARTS = 16  # partial results a row that workspaces have room for, beside those that cuts into shares make
TILE = 64  # tokens: what is shared is cut at its multiples
LEAST_OWN = 512  # tokens at the end of a row that do not hold the others up
FIELDS = 5  # of an item: the row whose table names the pages, first page, end page, first member, number of members
WIDE = 64  # queries that one program takes of a shared run: rows times query heads of one key/value head


class Run(NamedTuple):
    """Pages `start ... stop - 1` of the page tables of `rows` (ascending), which are the same in all of them."""

    rows: Int32[np.ndarray, "n"]
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a kernel reads: tokens of a tile, tiles in flight, warps."""

    tokens: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """What each program of a plan reads.

    Share i is the items `bounds[i] ... bounds[i + 1] - 1`. The members of an item and their places among the parts are listed from its
    fourth field on; row b's parts are `starts[b] ... starts[b + 1] - 1`, one after another, so that merging them needs no list. Its
    pages from `begins[b]` on are in no item.
    """

    bounds: Int32[np.ndarray, "bounds"]
    items: Int32[np.ndarray, "items 5"]
    begins: Int32[np.ndarray, "B"]
    starts: Int32[np.ndarray, "B+1"]
    members: Int32[np.ndarray, "parts"]
    places: Int32[np.ndarray, "parts"]


def programs(device: torch.device) -> int:
    """Programs of the launch over what is shared: one a multiprocessor."""
    return processors(device) if device.type == "cuda" else 64


def tiles(head_dim: int, dtype: torch.dtype, memory: int) -> tuple[Tile, Tile]:
    """Of the launch over what is shared, and of the one over the rows' ends, where a program may use `memory` bytes.

    Chosen on an H200 (docs/explanation/performance.md); where heads are long or memory is short, tiles are smaller and fewer are in flight.
    """
    token = 2 * dtype.itemsize * max(16, 1 << (head_dim - 1).bit_length())  # bytes of its key and value
    tokens, queries = TILE if token <= 512 else 16, WIDE * token // 2
    shared = Tile(tokens=tokens, stages=max(1, min(4, (memory - queries) // (tokens * token))), warps=4)
    tokens = min(tokens, 32)
    return shared, Tile(tokens=tokens, stages=max(1, min(3, memory // (tokens * token))), warps=2)


class CascadeWorkspace:
    """Memory for partial results, shared by all cascade plans of one stream. Sizes: the most rows of a batch, and the model's heads."""

    def __init__(self, max_rows: int, num_heads: int, head_dim: int, device: torch.device) -> None:
        # Each end of a share cuts an item, of at most WIDE queries of a key/value head, in two.
        self.num_parts = MAX_PARTS * max_rows + programs(device) * -(-WIDE // num_heads)
        on_gpu = device.type == "cuda"
        self.out = torch.empty(self.num_parts if on_gpu else 0, num_heads, head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(self.num_parts if on_gpu else 0, num_heads, dtype=torch.float32, device=device)


class CascadePlan:
    """How decode batches of exactly `batch_size` rows, one query each, read their pages; its device buffers never move.

    So launches can be captured, and a captured step serves any sharing. One launch reads what rows share, in shares of equal length, as
    many as a GPU runs at once; one reads the end of each row and merges. `handle` is what `paged_decode` takes; it lives as long as this
    object. On a CPU the plan is followed by plain torch.
    """

    def __init__(
        self, workspace: CascadeWorkspace, batch_size: int, num_heads: int, num_kv_heads: int, page_size: int, device: torch.device
    ) -> None:
        self.workspace, self.batch_size, self.page_size, self.device = workspace, batch_size, page_size, device
        self.rows_per_item = max(1, WIDE // (num_heads // num_kv_heads))
        self.shares = max(1, programs(device) // num_kv_heads)
        self.max_items = 4 * (-(-self.shares // 4) + batch_size + 16)
        self.sizes = self._sizes()
        self.ints = torch.zeros(sum(self.sizes), dtype=torch.int32, device=device)
        self.runs: tuple[Run, ...] = ()
        self.ready = False
        self.handle = register(self)

    def _sizes(self) -> tuple[int, ...]:
        """Room for the fields of `Work`: whole 16 bytes each, for kernels are compiled anew for addresses that are not."""
        parts, rows = self.workspace.num_parts, self.batch_size
        return tuple(size + -size % 4 for size in (self.shares + 1, self.max_items * FIELDS, rows, rows + 1, parts, parts))

    def views(self) -> tuple[Tensor, ...]:
        """The fields of `Work` on the device, each with room for the longest."""
        bounds, items, *rest = self.ints.split(self.sizes)
        return bounds, items.view(-1, FIELDS), *rest

    def tiles(self, dtype: torch.dtype) -> tuple[Tile, Tile]:
        """How the plan's two launches read."""
        return tiles(self.workspace.out.shape[2], dtype, shared_memory(self.device) if self.device.type == "cuda" else LARGEST)

    def update(self, runs: Seq[Run]) -> bool:
        """Follow these runs, which cover every row's pages in use, planned ones too; False, and nothing changed, where they do not fit.

        A row has at most one run of its own, its last, which may reach beyond the row's length, as far as it will grow until the next
        update. Asynchronous on the current stream.
        """
        work = cut_runs(runs, self.batch_size, self.rows_per_item, self.shares, self.page_size)
        if len(work.items) > self.max_items or len(work.members) > self.workspace.num_parts:
            return False
        flat = torch.empty(self.ints.numel(), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        host, at = flat.numpy(), 0
        for part, size in zip((work.bounds, work.items, work.begins, work.starts, work.members, work.places), self.sizes, strict=True):
            host[at : at + part.size] = part.ravel()
            at += size
        self.ints.copy_(flat, non_blocking=True)
        self.runs, self.ready = tuple(runs), True
        return True

    def run(
        self,
        q: Float[Tensor, "B H D"],
        pages: Float[Tensor, "L N 2 K S D"],
        layer: int,
        page_tables: Int32[Tensor, "B P"],
        seq_lens: Int32[Tensor, "B"],
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Float[Tensor, "B H D"]:
        """`paged_decode` of one layer. Of a run a row sees what lies in its window."""
        if q.shape[0] != self.batch_size or not self.ready:
            raise PlanMismatchError(f"{q.shape[0]} rows were given to a plan {'' if self.ready else 'never updated '}for {self.batch_size}")
        if q.device.type == "cuda" and installed("triton"):
            from .triton_attention import cascade_decode

            return cascade_decode(q, pages[layer], page_tables, seq_lens, scale, self, window, softcap)
        return cascade_rows(q, pages[layer], page_tables, seq_lens, scale, self.runs, window, softcap)


class PromptCascade:
    """How the prompts of one step read their pages, followed by plain torch; `handle` is what `paged_prefill` takes."""

    def __init__(self) -> None:
        self.runs: tuple[Run, ...] = ()
        self.row_of = self.visible = torch.empty(0, dtype=torch.int32)
        self.handle = register(self)

    def update(self, seq_lens: Int32[np.ndarray, "B"], cu_seqlens: Int32[np.ndarray, "B+1"], runs: Seq[Run], device: torch.device) -> None:
        """Plan for one step: the host's copies of what `paged_prefill` is given, and runs that cover every row's pages in use."""
        counts, tokens = np.diff(cu_seqlens), run_tokens(runs, cu_seqlens)
        self.runs = tuple(Run(rows=rows, start=run.start, stop=run.stop) for rows, run in zip(tokens, runs, strict=True) if len(rows))
        row_of = np.repeat(np.arange(len(counts)), counts)
        visible = np.arange(cu_seqlens[-1]) + np.repeat(seq_lens - cu_seqlens[1:], counts) + 1
        self.row_of, self.visible = (torch.from_numpy(part.astype(np.int32)).to(device) for part in (row_of, visible))

    def run(
        self,
        q: Float[Tensor, "T H D"],
        pages: Float[Tensor, "L N 2 K S D"],
        layer: int,
        page_tables: Int32[Tensor, "B P"],
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Float[Tensor, "T H D"]:
        """`paged_prefill` of one layer."""
        if q.shape[0] != self.row_of.shape[0]:
            raise PlanMismatchError(f"{q.shape[0]} tokens were given to a plan last updated for {self.row_of.shape[0]}")
        return cascade_rows(q, pages[layer], page_tables[self.row_of], self.visible, scale, self.runs, window, softcap)


def run_tokens(runs: Seq[Run], cu_seqlens: Int32[np.ndarray, "bounds"]) -> list[Int32[np.ndarray, "n"]]:
    """The tokens of each run's rows, in the order of the rows."""
    bounds = cu_seqlens.tolist()
    return [np.concatenate([np.arange(bounds[row], bounds[row + 1], dtype=np.int32) for row in run.rows.tolist()]) for run in runs]


def cut_runs(runs: Seq[Run], num_rows: int, rows_per_item: int, shares: int, page_size: int) -> Work:
    """Cut what several rows read, no more than `rows_per_item` at once, into shares of equal length, give or take a tile.

    What only one row reads is left to that row, unless that is so long that it would hold the others up: then all but its end is cut,
    too.
    """
    tile = -(-TILE // page_size)  # pages
    blocks = [
        Run(rows[lo : lo + rows_per_item], start, stop)
        for rows, start, stop in runs
        if len(rows) > 1
        for lo in range(0, len(rows), rows_per_item)
    ]
    single = [run for run in runs if len(run.rows) == 1]
    total = sum([-(-(stop - start) // tile) for _, start, stop in (*blocks, *single)])
    most = max(-(-LEAST_OWN // page_size), -(-total // shares) * tile)
    blocks += [Run(rows, start, stop - most) for rows, start, stop in single if stop - start > most]
    begins, starts = np.zeros(num_rows, np.int32), np.zeros(num_rows + 1, np.int32)
    if not blocks:
        none = np.zeros(0, np.int32)
        return Work(bounds=np.zeros(shares + 1, np.int32), items=none.reshape(0, FIELDS), begins=begins, starts=starts, members=none,
                    places=none)  # fmt: skip
    for rows, _, stop in blocks:
        begins[rows] = np.maximum(begins[rows], stop)
    row, start, stop, count = np.array([(rows.item(0), start, stop, len(rows)) for rows, start, stop in blocks]).T
    # All blocks one after another are a line of tiles, which is cut where shares end and where blocks do.
    edges = list(accumulate([-(-(stop - start) // tile) for _, start, stop in blocks], initial=0))
    ends = [share * edges[-1] // shares for share in range(shares + 1)]
    cuts = np.array(sorted({*edges, *ends}))
    lefts, rights, edge = cuts[:-1], cuts[1:], np.array(edges)
    block = edge.searchsorted(lefts, "right") - 1
    first_page = start[block] + (lefts - edge[block]) * tile
    counts = count[block]
    past = counts.cumsum()
    items = np.empty((len(block), FIELDS), np.int32)
    items[:, 0], items[:, 1], items[:, 3], items[:, 4] = row[block], first_page, past - counts, counts
    items[:, 2] = np.minimum(first_page + (rights - lefts) * tile, stop[block])
    members = np.concatenate([blocks[at].rows for at in block.tolist()])
    starts[1:] = np.bincount(members, minlength=num_rows).cumsum()
    places = np.empty(len(members), np.int32)
    places[members.argsort(kind="stable")] = np.arange(len(members), dtype=np.int32)
    bounds = cuts.searchsorted(ends).astype(np.int32)
    return Work(bounds=bounds, items=items, begins=begins, starts=starts, members=members, places=places)


def cascade_rows(
    q: Float[Tensor, "T H D"],
    pages: Float[Tensor, "N 2 K S D"],
    page_tables: Int32[Tensor, "T P"],
    seq_lens: Int32[Tensor, "T"],
    scale: float,
    runs: Seq[Run],
    window: int = 0,
    softcap: float = 0.0,
) -> Float[Tensor, "T H D"]:
    """The reference: query t attends to its row's first `seq_lens[t]` tokens, of which it sees the last `window` (0: all), run by run, and
    the parts are merged. A run of which it sees nothing weighs nothing."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    page_size, lens = pages.shape[3], seq_lens.tolist()
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in lens]
    for run in runs:
        rows = run.rows.tolist()
        stop = min(run.stop * page_size, max(lens[row] for row in rows))
        if stop <= run.start * page_size:
            continue  # planned ahead, not reached yet
        if window and min(lens[row] for row in rows) - window >= stop:
            continue  # out of every row's sight
        kv = row_kv(pages, page_tables[rows[0], run.start :], stop - run.start * page_size)
        out, lse = attend_part(q[rows].to(dtype), kv.to(dtype), seq_lens[rows] - run.start * page_size, scale, window, softcap)
        for i, row in enumerate(rows):
            parts[row].append((out[i], lse[i]))
    merged = [merge(torch.stack([out for out, _ in row]), torch.stack([lse for _, lse in row])) for row in parts]
    return torch.stack(merged).to(q.dtype)


def attend_part(
    q: Float[Tensor, "n H D"],
    kv: Float[Tensor, "2 K C D"],
    visible: Int32[Tensor, "n"],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Float[Tensor, "n H D"], Float[Tensor, "n H"]]:
    """Attention of each query to those of C tokens that stand before `visible[i]`, at most `window` before it (0: all of them), and its
    log-sum-exp in base 2 (-inf where it sees none)."""
    k, v = kv.unbind(0)
    scores = capped(torch.einsum("nkgd,kcd->nkgc", q.unflatten(1, (k.shape[0], -1)), k) * scale, softcap)
    at = torch.arange(k.shape[1], device=q.device)
    hidden = at >= visible[:, None]
    if window:
        hidden |= at < visible[:, None] - window
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    weights = scores.softmax(-1).nan_to_num()  # no token seen: 0, which -inf leaves out of the merge
    out = torch.einsum("nkgc,kcd->nkgd", weights, v)
    return out.flatten(1, 2), scores.logsumexp(-1).flatten(1, 2) * LOG2E


def merge(outs: Float[Tensor, "parts H D"], lses: Float[Tensor, "parts H"]) -> Float[Tensor, "H D"]:
    """One row's parts, weighted by their log-sum-exp in base 2."""
    weights = (lses * math.log(2)).softmax(0)
    return (weights[..., None] * outs).sum(0)


def merge_parts(
    outs: Float[Tensor, "parts H D"], lses: Float32[Tensor, "parts H"], starts: Int32[Tensor, "bounds"], places: Int32[Tensor, "listed"]
) -> Float[Tensor, "T H D"]:
    """Token t's result from its parts, `places[starts[t] : starts[t + 1]]`, in the dtype of `outs`."""
    if outs.device.type == "cuda" and installed("triton"):
        from .triton_attention import merge_into

        out = torch.empty(starts.shape[0] - 1, *outs.shape[1:], dtype=outs.dtype, device=outs.device)
        merge_into(outs, lses, starts, places, out)
        return out
    bounds = starts.tolist()
    rows = [places[lo:hi] for lo, hi in pairwise(bounds)]
    return torch.stack([merge(outs[row].to(lses.dtype), lses[row]) for row in rows]).to(outs.dtype)
