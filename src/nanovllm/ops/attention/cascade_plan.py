"""The plan of cascade attention: shared runs of pages cut into work for the programs of a launch."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.ops.attention.plan_table import register
from nanovllm.ops.backends import LARGEST, processors, shared_memory
from nanovllm.types import Int32, Tensor

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
