"""Finds which rows of a batch share which pages, so that cascade attention reads shared pages once.

Two rows share their leading pages as far as their page tables are equal. This gives a trie of any number of levels, whose nodes are runs:
pages in a row that the same rows share.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass

import numpy as np

from nanovllm.config import EngineConfig
from nanovllm.executor.batch import EXTENSION, HostBatch
from nanovllm.models.model import Model
from nanovllm.ops.attention.cascade import PromptCascade
from nanovllm.ops.attention.cascade_plan import CascadePlan, CascadeWorkspace, Run
from nanovllm.state.kv_cache import bytes_per_page, stored_dtype
from nanovllm.state.pool_sizes import dummies
from nanovllm.types import Int32

DECODE_BYTES = 1 << 20  # reads per layer that sharing must save in a decode step
PROMPT_BYTES = 1 << 30  # and in a step of prompts
RUN_TOKENS = 256  # token reads that sharing a single run must save
FULL_TILE = 64  # queries per KV head that fill a kernel's tile


def shared_runs(
    page_tables: Int32[np.ndarray, "B P"],
    whole: Int32[np.ndarray, "B"],
    page_counts: Int32[np.ndarray, "B"],
    worth: Callable[[int, int], bool],
) -> list[Run]:
    """Split the pages `0 ... page_counts[b] - 1` of every row b into runs.

    Each run is given once with all rows that share it, shared runs first. Every row ends in a run that only it reads, unless all its pages
    are shared.

    Args:
        page_tables: The pages of each row, `[B, P]`.
        whole: For each row how many leading pages may be shared: the pages that all its queries see entirely.
        page_counts: Pages in use by each row.
        worth: Whether to share a run, given its numbers of rows and pages. If not, its pages become part of the next runs.
    """
    shared, own = _shared(page_tables, whole, worth)
    return shared + _tails(own, page_counts)


def _shared(
    page_tables: Int32[np.ndarray, "B P"], whole: Int32[np.ndarray, "B"], worth: Callable[[int, int], bool]
) -> tuple[list[Run], Int32[np.ndarray, "B"]]:
    """The shared runs, and for each row the first page after them."""
    shared: list[Run] = []
    own = np.zeros(len(page_tables), np.int32)
    todo = [(np.arange(len(page_tables), dtype=np.int32), 0, 0)]  # rows, their first page without a run, their first page not yet compared
    while todo:
        rows, start, at = todo.pop()
        own[rows] = start
        for group in _equal(page_tables, rows[whole[rows] > at], at):
            stop = _common(page_tables, group, at, int(whole[group].min()))
            if worth(len(group), stop - start):
                shared.append(Run(rows=group, start=start, stop=stop))
                todo.append((group, stop, stop))
            else:
                todo.append((group, start, stop))
    return shared, own


def own_runs(page_counts: Int32[np.ndarray, "B"]) -> list[Run]:
    """The runs if nothing is shared: all pages of each row."""
    return _tails(np.zeros(len(page_counts), np.int32), page_counts)


def _tails(starts: np.ndarray, stops: np.ndarray) -> list[Run]:
    """One run per row, of its pages `starts[b] ... stops[b] - 1`; a row without such pages has none."""
    rows = np.arange(len(starts), dtype=np.int32)[:, None]
    each = zip(rows, starts.tolist(), stops.tolist(), strict=True)
    return [Run(row, start, stop) for row, start, stop in each if stop > start]


def num_saved(runs: Seq[Run]) -> int:
    """How many page reads sharing saves attention: for each run its pages, times the rows after the first."""
    return sum((len(run.rows) - 1) * (run.stop - run.start) for run in runs)


def _equal(page_tables: np.ndarray, rows: np.ndarray, at: int) -> list[np.ndarray]:
    """The groups of two or more rows that have the same page at place `at`."""
    if len(rows) < 2:
        return []
    pages = page_tables[rows, at]
    if (pages == pages[0]).all():
        return [rows]
    _, place, count = np.unique(pages, return_inverse=True, return_counts=True)
    return [rows[place == i] for i in np.flatnonzero(count > 1)]


def _common(page_tables: np.ndarray, group: np.ndarray, at: int, limit: int) -> int:
    """The first place from `at` on at which the group's tables differ, at most `limit`."""
    first, last = group.item(0), group.item(-1)
    neighbours = last - first + 1 == len(group)  # then a view of their tables is enough
    tables = page_tables[first : last + 1, at:limit] if neighbours else page_tables[group, at:limit]
    differ = tables[1:] != tables[0]
    return at + int(differ.any(0).argmax()) if differ.any() else limit


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadePolicy:
    """Decides when shared pages are read once for all their rows.

    The bounds were measured on an H200 with `benchmarks/cascade.py`. Below them merging partial results takes longer than the saved reads.

    Attributes:
        always: Share every whole page that can be shared. Otherwise share only if that is faster.
        page_size: Tokens per page.
        page_bytes: Bytes of a page in one layer.
        group: Query heads per KV head.
        alone: Share nothing. Plans then only divide long rows between programs.
        no_frame: If every layer has a sliding window: the number in the page tables for pages whose memory was given up. Nothing is shared
            from the first such page on.
    """

    always: bool
    page_size: int
    page_bytes: int
    group: int
    no_frame: int | None = None
    alone: bool = False

    def decode(self, host: HostBatch) -> list[Run] | None:
        """The runs of a decode batch; None if it is faster that each row reads its own pages."""
        return None if self.alone else self._runs(host, host.seq_lens // self.page_size, DECODE_BYTES)

    def may_share(self, rows: int, most_tokens: int) -> bool:
        """Whether `decode` returns runs for any batch of so many rows, of at most so many tokens each."""
        if self.alone:
            return False
        pages = most_tokens // self.page_size
        spared = (rows - 1) * pages * self.page_bytes
        return rows > 1 and self._worth(rows, pages) and spared >= (1 if self.always else DECODE_BYTES)

    def prompts(self, host: HostBatch) -> list[Run] | None:
        """The runs of a batch of prompts; None if it is faster that each row reads its own pages."""
        assert host.cu_seqlens is not None
        if self.alone:
            return None
        counts = np.diff(host.cu_seqlens)
        if not self.always and host.cu_seqlens[-1] * self.group > FULL_TILE * len(counts):
            return None  # rows fill a kernel's tiles by themselves: arithmetic is the limit, and sharing saves none
        return self._runs(host, (host.seq_lens - counts) // self.page_size, PROMPT_BYTES)

    def _runs(self, host: HostBatch, whole: Int32[np.ndarray, "B"], least: int) -> list[Run] | None:
        if self.no_frame is not None:
            lost = host.page_tables == self.no_frame
            whole = np.where(lost.any(1), np.minimum(whole, lost.argmax(1)), whole).astype(np.int32)
        shared, own = _shared(host.page_tables, whole, self._worth)
        spared = num_saved(shared) * self.page_bytes  # runs of one row save nothing
        return shared + _tails(own, host.page_counts) if spared >= (1 if self.always else least) else None

    def _worth(self, rows: int, pages: int) -> bool:
        return self.always or (rows - 1) * pages * self.page_size >= RUN_TOKENS


def cascade_policy(model: Model, limits: EngineConfig, *, always: bool, alone: bool = False) -> CascadePolicy:
    """The policy of an engine."""
    c, size = model.config, limits.page_size
    return CascadePolicy(
        always=always,
        alone=alone,
        page_size=size,
        page_bytes=bytes_per_page(c, page_size=size, dtype=stored_dtype(limits, model.dtype)) // c.num_layers,
        group=c.num_heads // c.num_kv_heads,
        no_frame=dummies(c, limits)[0] if c.all_windowed else None,
    )


class Cascades:
    """The cascade plans of one engine: `plan` makes plans for captured steps, `prompts` updates the plan of prompts in plain torch."""

    def __init__(self, model: Model, limits: EngineConfig, policy: CascadePolicy):
        c = model.config
        self.policy, self._device = policy, model.device
        self._workspace = CascadeWorkspace(
            max(limits.max_num_seqs, EXTENSION), c.num_heads, c.head_dim, model.device, fp8=limits.kv_dtype is not None
        )
        self._shape = (c.num_heads, c.num_kv_heads, limits.page_size, model.device)
        self._prompts = PromptCascade()

    def within(self, policy: CascadePolicy) -> "Cascades":
        """The same plans and memory under another policy."""
        twin = copy(self)
        twin.policy = policy
        return twin

    def plan(self, size: int) -> CascadePlan:
        """Return a new plan for decode batches of `size` rows."""
        return CascadePlan(self._workspace, size, *self._shape)

    def decode(self, host: HostBatch) -> CascadePlan | None:
        """Return a new plan for the pages that the rows of this batch share; None if sharing is not worth it."""
        runs = self.policy.decode(host)
        if runs is None:
            return None
        plan = self.plan(len(host.seq_lens))
        return plan if plan.update(runs) else None

    def prompts(self, host: HostBatch) -> int:
        """Plan for a batch of prompts in plain torch, and return the handle; 0 if sharing is not worth it."""
        runs = self.policy.prompts(host)
        if runs is None or host.cu_seqlens is None:
            return 0
        self._prompts.update(host.seq_lens, host.cu_seqlens, runs, self._device)
        return self._prompts.handle
