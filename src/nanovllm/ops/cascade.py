"""Cascade attention: pages that several queries share are read once for all of them (Juravsky et al., 2024, "Hydragen"; Ye et al., 2024).

The pages of a batch are cut into *runs*, each with the rows that attend to it (`sharing.py` finds them). Attention to each run gives a
partial result and its log-sum-exp; a row's partial results, over any number of levels, are merged by these weights. In exact arithmetic
that is plain attention; in floating point it differs in the last bits.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from ..types import Float, Float32, Int32, Tensor
from .backends import dependent_launch, installed
from .plans import PlanMismatchError, register
from .reference import row_kv

LOG2E = 1 / math.log(2)
MAX_PARTS = 16  # partial results a row that workspaces have room for, over the whole batch
MIN_PARTS = 2048
MIN_SPLIT = 64  # tokens of a run that one program takes at least
FIELDS = 5  # of an item: the row whose table names the pages, first page, end page, first member, number of members
WIDE = 64  # queries that one program takes of a shared run: rows times query heads of one key/value head


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """Pages `start ... stop - 1` of the page tables of `rows` (ascending), which are the same in all of them."""

    rows: Int32[np.ndarray, "n"]
    start: int
    stop: int


class CascadeWorkspace:
    """Memory for partial results, shared by all cascade plans of one stream. Sizes: the most rows of a batch, and the model's heads."""

    def __init__(self, max_rows: int, num_heads: int, head_dim: int, device: torch.device) -> None:
        self.num_parts = max(MIN_PARTS, MAX_PARTS * max_rows)
        on_gpu = device.type == "cuda"
        self.out = torch.empty(self.num_parts if on_gpu else 0, num_heads, head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(self.num_parts if on_gpu else 0, num_heads, dtype=torch.float32, device=device)


class CascadePlan:
    """How decode batches of exactly `batch_size` rows, one query each, read their pages; its device buffers never move.

    So launches can be captured, and a captured step serves any sharing. `handle` is what `paged_decode` takes; it lives as long as this
    object. On a CPU the plan is followed by plain torch.
    """

    def __init__(
        self, workspace: CascadeWorkspace, batch_size: int, num_heads: int, num_kv_heads: int, page_size: int, device: torch.device
    ) -> None:
        self.workspace, self.batch_size, self.page_size, self.device = workspace, batch_size, page_size, device
        self.rows_per_item = max(1, WIDE // (num_heads // num_kv_heads))
        self.num_programs = 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 64
        self.target = max(1, self.num_programs // (2 * num_kv_heads))
        self.max_items = self.target + 4 * batch_size + 64
        max_parts = self.workspace.num_parts
        self.ints = torch.zeros(1 + self.max_items * FIELDS + batch_size + 1 + 2 * max_parts, dtype=torch.int32, device=device)
        self.runs: tuple[Run, ...] = ()
        self.ready = False
        self.handle = register(self)

    def views(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The number of items `[1]`, items `[I, 5]`, rows' first parts `[B+1]`, members `[parts]` and their places `[parts]`."""
        parts, items = self.workspace.num_parts, self.max_items * FIELDS
        count, table, starts, members, places = self.ints.split((1, items, self.batch_size + 1, parts, parts))
        return count, table.view(-1, FIELDS), starts, members, places

    def update(self, runs: Seq[Run]) -> bool:
        """Follow these runs, which cover every row's pages in use, planned ones too; False, and nothing changed, where they do not fit.

        A run of one row may reach beyond the row's length, as far as it will grow until the next update. Asynchronous on the current
        stream.
        """
        plan = split_runs(runs, self.batch_size, self.rows_per_item, self.target, -(-MIN_SPLIT // self.page_size), self.workspace.num_parts)
        if plan is None or len(plan[0]) > self.max_items:
            return False
        items, starts, members, places = plan
        parts, first = self.workspace.num_parts, 1 + self.max_items * FIELDS
        flat = torch.empty(self.ints.numel(), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        host = flat.numpy()
        host[0] = len(items)
        host[1 : 1 + items.size] = items.ravel()
        host[first : first + self.batch_size + 1] = starts
        first += self.batch_size + 1
        host[first : first + len(members)] = members
        host[first + parts : first + parts + len(places)] = places
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
    ) -> Float[Tensor, "B H D"]:
        """`paged_decode` of one layer."""
        if q.shape[0] != self.batch_size or not self.ready:
            raise PlanMismatchError(f"{q.shape[0]} rows were given to a plan {'' if self.ready else 'never updated '}for {self.batch_size}")
        if q.device.type == "cuda" and installed("triton"):
            from .triton_attention import cascade_decode

            views, pdl = self.views(), dependent_launch(q.device)
            return cascade_decode(q, pages[layer], page_tables, seq_lens, scale, views, self.workspace, self.num_programs, pdl)
        return cascade_rows(q, pages[layer], page_tables, seq_lens, scale, self.runs)


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
    ) -> Float[Tensor, "T H D"]:
        """`paged_prefill` of one layer."""
        if q.shape[0] != self.row_of.shape[0]:
            raise PlanMismatchError(f"{q.shape[0]} tokens were given to a plan last updated for {self.row_of.shape[0]}")
        return cascade_rows(q, pages[layer], page_tables[self.row_of], self.visible, scale, self.runs)


def run_tokens(runs: Seq[Run], cu_seqlens: Int32[np.ndarray, "bounds"]) -> list[Int32[np.ndarray, "n"]]:
    """The tokens of each run's rows, in the order of the rows."""
    bounds = cu_seqlens.tolist()
    return [np.concatenate([np.arange(bounds[row], bounds[row + 1], dtype=np.int32) for row in run.rows.tolist()]) for run in runs]


def split_runs(
    runs: Seq[Run], num_rows: int, rows_per_item: int, target: int, min_pages: int, max_parts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Cut runs into about `target` items of equal length, none of more than `rows_per_item` rows: items `[I, 5]`, rows' first parts
    `[B+1]`, and the items' members and their places among the parts, `[parts]`; None where there are more than `max_parts`.

    A row's parts lie one after another, so that merging them needs no list.
    """
    blocks = [-(-len(run.rows) // rows_per_item) for run in runs]
    total = sum((run.stop - run.start) * count for run, count in zip(runs, blocks, strict=True))
    split = max(min_pages, -(-total // target))
    while sum(len(run.rows) * -(-(run.stop - run.start) // split) for run in runs) > max_parts:
        if split > total:
            return None
        split *= 2
    pieces = [
        (run.rows[lo : lo + rows_per_item], start, min(start + split, run.stop))
        for run in runs
        for start in range(run.start, run.stop, split)
        for lo in range(0, len(run.rows), rows_per_item)
    ]
    members = np.concatenate([rows for rows, _, _ in pieces])
    sizes = np.array([len(rows) for rows, _, _ in pieces])
    first = np.cumsum(sizes) - sizes
    items = np.array([(rows[0], start, stop, 0, len(rows)) for rows, start, stop in pieces], np.int32)
    items[:, 3] = first
    order = np.argsort(members, kind="stable")
    starts = np.zeros(num_rows + 1, np.int32)
    np.cumsum(np.bincount(members, minlength=num_rows), out=starts[1:])
    places = np.empty(len(members), np.int32)
    places[order] = np.arange(len(members), dtype=np.int32)
    return items, starts, members.astype(np.int32), places


def cascade_rows(
    q: Float[Tensor, "T H D"],
    pages: Float[Tensor, "N 2 K S D"],
    page_tables: Int32[Tensor, "T P"],
    seq_lens: Int32[Tensor, "T"],
    scale: float,
    runs: Seq[Run],
) -> Float[Tensor, "T H D"]:
    """The reference: query t attends to its row's first `seq_lens[t]` tokens, run by run, and the parts are merged."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    page_size, lens = pages.shape[3], seq_lens.tolist()
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in lens]
    for run in runs:
        rows = run.rows.tolist()
        stop = min(run.stop * page_size, max(lens[row] for row in rows))
        if stop <= run.start * page_size:
            continue  # planned ahead, not reached yet
        kv = row_kv(pages, page_tables[rows[0], run.start :], stop - run.start * page_size)
        out, lse = attend_part(q[rows].to(dtype), kv.to(dtype), seq_lens[rows] - run.start * page_size, scale)
        for i, row in enumerate(rows):
            parts[row].append((out[i], lse[i]))
    merged = [merge(torch.stack([out for out, _ in row]), torch.stack([lse for _, lse in row])) for row in parts]
    return torch.stack(merged).to(q.dtype)


def attend_part(
    q: Float[Tensor, "n H D"], kv: Float[Tensor, "2 K C D"], visible: Int32[Tensor, "n"], scale: float
) -> tuple[Float[Tensor, "n H D"], Float[Tensor, "n H"]]:
    """Attention of each query to the first `visible[i]` of C tokens, and its log-sum-exp in base 2 (-inf where it sees none)."""
    k, v = kv.unbind(0)
    scores = torch.einsum("nkgd,kcd->nkgc", q.unflatten(1, (k.shape[0], -1)), k) * scale
    hidden = torch.arange(k.shape[1], device=q.device) >= visible[:, None]
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
