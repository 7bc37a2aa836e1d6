"""The plan of cascade attention: shared runs of pages, divided into work for the programs of a launch."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.ops.attention.plan_table import register
from nanovllm.ops.backends import LARGEST, processors, shared_memory
from nanovllm.ops.kv_cache.fp8 import FP8
from nanovllm.types import Int32, Tensor

MAX_PARTS = 16  # partial results per row that a workspace has room for, in addition to those from the ends of shares
TILE = 64  # tokens; shared runs are divided at multiples of it
FP8_TILE = 128  # tokens of a tile in FP8, which has half the bytes and the same latency
LEAST_OWN = 512  # so many tokens at the end of a row do not delay the other rows
FP8_OWN = 128  # in FP8, because the launch over the ends of rows then begins when that over shared pages ends: registers hold no more
FIELDS = 5  # fields of an item: row whose table has the pages, first page, end page, first member, number of members
WIDE = 64  # queries of a shared run that one program takes: rows times query heads per key/value head


class Run(NamedTuple):
    """Pages `start ... stop - 1` of the page tables of `rows` (ascending), which are the same in all of them."""

    rows: Int32[np.ndarray, "n"]
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a kernel reads keys and values: tokens per tile, tiles in flight, warps per program."""

    tokens: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """The work of each program of a plan.

    Share i has the items `bounds[i] ... bounds[i + 1] - 1`. The fourth field of an item is the index of its first member in `members` (the
    rows) and `places` (where their partial results go). The partial results of row b are `starts[b] ... starts[b + 1] - 1`. They are
    consecutive, so merging them needs no list. The row's pages from `begins[b]` on are in no item.
    """

    bounds: Int32[np.ndarray, "bounds"]
    items: Int32[np.ndarray, "items 5"]
    begins: Int32[np.ndarray, "B"]
    starts: Int32[np.ndarray, "B+1"]
    members: Int32[np.ndarray, "parts"]
    places: Int32[np.ndarray, "parts"]


def programs(device: torch.device, fp8: bool = False) -> int:
    """Return the number of programs of the launch over shared pages: one per multiprocessor, or two, whose tiles are smaller, in FP8."""
    return (2 if fp8 else 1) * (processors(device) if device.type == "cuda" else 64)


def tiles(head_dim: int, dtype: torch.dtype, memory: int) -> tuple[Tile, Tile]:
    """Return the tiles of the launch over shared pages, and of the launch over the ends of rows.

    Chosen on an H200 (docs/explanation/performance.md); where heads are long or memory is short, tiles are smaller and fewer are in flight.
    """
    token, fp8 = 2 * dtype.itemsize * max(16, 1 << (head_dim - 1).bit_length()), dtype == FP8  # bytes of its key and value
    tokens, queries = TILE if token <= 512 else 16, WIDE * token // 2
    tokens = FP8_TILE if fp8 and token <= 256 else tokens
    shared = Tile(tokens=tokens, stages=max(1, min(3 if fp8 else 4, (memory - queries) // (tokens * token))), warps=4)
    tokens = min(tokens, 64 if fp8 else 32)
    return shared, Tile(tokens=tokens, stages=max(1, min(3, memory // (tokens * token))), warps=2)


class CascadeWorkspace:
    """Memory for partial results, shared by all cascade plans of one stream, for batches of up to `max_rows` rows.

    `fp8` says whether the KV is in FP8, which more programs read.
    """

    def __init__(self, max_rows: int, num_heads: int, head_dim: int, device: torch.device, *, fp8: bool = False) -> None:
        self.programs, self.fp8 = programs(device, fp8), fp8
        # The end of a share may divide an item, of at most WIDE queries of a key/value head, in two.
        self.num_parts = MAX_PARTS * max_rows + self.programs * -(-WIDE // num_heads)
        on_gpu = device.type == "cuda"
        self.out = torch.empty(self.num_parts if on_gpu else 0, num_heads, head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(self.num_parts if on_gpu else 0, num_heads, dtype=torch.float32, device=device)


class CascadePlan:
    """The plan of how decode batches of exactly `batch_size` rows, with one query each, read their pages.

    The device buffers never move. So launches can be captured, and one captured step serves any sharing of pages. The first launch reads
    shared pages, in shares of equal length, as many as a GPU runs at once. The second launch reads the end of each row and merges. Pass
    `handle` to `paged_decode`; it is valid as long as this object lives. On a CPU plain torch follows the plan.
    """

    def __init__(
        self, workspace: CascadeWorkspace, batch_size: int, num_heads: int, num_kv_heads: int, page_size: int, device: torch.device
    ) -> None:
        self.workspace, self.batch_size, self.page_size, self.device = workspace, batch_size, page_size, device
        self.rows_per_item = max(1, WIDE // (num_heads // num_kv_heads))
        self.shares = max(1, workspace.programs // num_kv_heads)
        self.max_items = 4 * (-(-self.shares // 4) + batch_size + 16)
        self.sizes = self._sizes()
        self.ints = torch.zeros(sum(self.sizes), dtype=torch.int32, device=device)
        self.runs: tuple[Run, ...] = ()
        self.ready = False
        self.handle = register(self)

    def _sizes(self) -> tuple[int, ...]:
        """Return the sizes of the fields of `Work`, in multiples of 16 bytes: kernels are compiled again for other alignments."""
        parts, rows = self.workspace.num_parts, self.batch_size
        return tuple(size + -size % 4 for size in (self.shares + 1, self.max_items * FIELDS, rows, rows + 1, parts, parts))

    def views(self) -> tuple[Tensor, ...]:
        """Return the fields of `Work` on the device, each with its largest size."""
        bounds, items, *rest = self.ints.split(self.sizes)
        return bounds, items.view(-1, FIELDS), *rest

    def tiles(self, dtype: torch.dtype) -> tuple[Tile, Tile]:
        """Return the tiles of the plan's two launches."""
        return tiles(self.workspace.out.shape[2], dtype, shared_memory(self.device) if self.device.type == "cuda" else LARGEST)

    def update(self, runs: Seq[Run]) -> bool:
        """Plan these runs, asynchronously on the current stream.

        Args:
            runs: Runs that cover all used and planned pages of each row. A row has at most one run of its own, which is its last. That
                run may be longer than the row, as far as the row will grow until the next update.

        Returns:
            False if the runs do not fit into the buffers; then nothing has changed.
        """
        own = FP8_OWN if self.workspace.fp8 else None
        work = cut_runs(runs, self.batch_size, self.rows_per_item, self.shares, self.page_size, own)
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


def cut_runs(runs: Seq[Run], num_rows: int, rows_per_item: int, shares: int, page_size: int, own: int | None = None) -> Work:
    """Divide pages that several rows read, at most `rows_per_item` rows at once, into shares of equal length within one tile.

    Pages that only one row reads are left to the launch over the ends of rows. But if they are so many that they would delay the other
    rows, all except the end are divided too. With `own` these are all but so many tokens.
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
    most = max(-(-LEAST_OWN // page_size), -(-total // shares) * tile) if own is None else -(-own // page_size)
    blocks += [Run(rows, start, stop - most) for rows, start, stop in single if stop - start > most]
    begins, starts = np.zeros(num_rows, np.int32), np.zeros(num_rows + 1, np.int32)
    if not blocks:
        none = np.zeros(0, np.int32)
        return Work(bounds=np.zeros(shares + 1, np.int32), items=none.reshape(0, FIELDS), begins=begins, starts=starts, members=none,
                    places=none)  # fmt: skip
    for rows, _, stop in blocks:
        begins[rows] = np.maximum(begins[rows], stop)
    row, start, stop, count = np.array([(rows.item(0), start, stop, len(rows)) for rows, start, stop in blocks]).T
    # All blocks one after another are a line of tiles. It is divided at the ends of shares and at the ends of blocks.
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
