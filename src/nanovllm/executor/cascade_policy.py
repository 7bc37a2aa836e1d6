"""Which rows of a batch share which pages, read off their page tables: the runs that cascade attention reads once.

Two rows share their leading pages as far as their tables are equal: a trie whose nodes are runs of pages, with any number of levels.
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
from nanovllm.state.kv_cache import bytes_per_page
from nanovllm.state.pool_sizes import dummies
from nanovllm.types import Int32

DECODE_BYTES = 1 << 20  # of one layer: what sharing has to spare a decode step
PROMPT_BYTES = 1 << 30  # and a step of prompts
RUN_TOKENS = 256  # and a single run, in tokens
FULL_TILE = 64  # queries of a key/value head


def shared_runs(
    page_tables: Int32[np.ndarray, "B P"],
    whole: Int32[np.ndarray, "B"],
    page_counts: Int32[np.ndarray, "B"],
    worth: Callable[[int, int], bool],
) -> list[Run]:
    """Split every row's pages `0 ... page_counts[b] - 1` into runs, each given once with all rows that share it, shared ones first.

    Of row b only the first `whole[b]` pages may be shared: those that all of its queries see entirely. `worth(rows, pages)` says whether
    a run is to be shared; where not, its pages stand at the head of the runs behind it. Every row ends in a run of its own, unless all
    its pages are shared.
    """
    shared, own = _shared(page_tables, whole, worth)
    return shared + _tails(own, page_counts)


def _shared(
    page_tables: Int32[np.ndarray, "B P"], whole: Int32[np.ndarray, "B"], worth: Callable[[int, int], bool]
) -> tuple[list[Run], Int32[np.ndarray, "B"]]:
    """The runs that are shared, and of each row the first page behind them."""
    shared: list[Run] = []
    own = np.zeros(len(page_tables), np.int32)
    todo = [(np.arange(len(page_tables), dtype=np.int32), 0, 0)]  # rows, their first page without a run, the first not compared yet
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
    """The runs where nothing is shared: each row's pages."""
    return _tails(np.zeros(len(page_counts), np.int32), page_counts)


def _tails(starts: np.ndarray, stops: np.ndarray) -> list[Run]:
    """A run of each row by itself, of those that have pages there."""
    rows = np.arange(len(starts), dtype=np.int32)[:, None]
    each = zip(rows, starts.tolist(), stops.tolist(), strict=True)
    return [Run(row, start, stop) for row, start, stop in each if stop > start]


def num_saved(runs: Seq[Run]) -> int:
    """Pages that sharing spares attention: those that it would read again for each further row."""
    return sum((len(run.rows) - 1) * (run.stop - run.start) for run in runs)


def _equal(page_tables: np.ndarray, rows: np.ndarray, at: int) -> list[np.ndarray]:
    """The groups of two and more rows with the same page at place `at`."""
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
    neighbours = last - first + 1 == len(group)  # no copy of their tables is needed then
    tables = page_tables[first : last + 1, at:limit] if neighbours else page_tables[group, at:limit]
    differ = tables[1:] != tables[0]
    return at + int(differ.any(0).argmax()) if differ.any() else limit


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadePolicy:
    """When the pages that rows share are read once for all of them: `always` for any whole page, else where it is faster.

    `page_bytes` is the size of a page in one layer, `group` the query heads of a key/value head. `no_frame` is what the first KV pool's
    tables say of pages that have no memory there any more, where every layer has a window: from the first of them on nothing is shared.
    The bounds were measured on an H200 (`benchmarks/cascade.py`): below them the merge of partial results costs more than the
    spared reads.
    """

    always: bool
    page_size: int
    page_bytes: int
    group: int
    no_frame: int | None = None

    def decode(self, host: HostBatch) -> list[Run] | None:
        """The runs of a decode batch; None where each row had better read its own pages."""
        return self._runs(host, host.seq_lens // self.page_size, DECODE_BYTES)

    def prompts(self, host: HostBatch) -> list[Run] | None:
        """The runs of a batch of prompts; None where each row had better read its own pages."""
        assert host.cu_seqlens is not None
        counts = np.diff(host.cu_seqlens)
        if not self.always and host.cu_seqlens[-1] * self.group > FULL_TILE * len(counts):
            return None  # rows fill the tiles of a kernel by themselves: bound by arithmetic, which sharing does not spare
        return self._runs(host, (host.seq_lens - counts) // self.page_size, PROMPT_BYTES)

    def _runs(self, host: HostBatch, whole: Int32[np.ndarray, "B"], least: int) -> list[Run] | None:
        if self.no_frame is not None:
            lost = host.page_tables == self.no_frame
            whole = np.where(lost.any(1), np.minimum(whole, lost.argmax(1)), whole).astype(np.int32)
        shared, own = _shared(host.page_tables, whole, self._worth)
        spared = num_saved(shared) * self.page_bytes  # what a row reads by itself spares nothing
        return shared + _tails(own, host.page_counts) if spared >= (1 if self.always else least) else None

    def _worth(self, rows: int, pages: int) -> bool:
        return self.always or (rows - 1) * pages * self.page_size >= RUN_TOKENS


def cascade_policy(model: Model, limits: EngineConfig, *, always: bool) -> CascadePolicy:
    """How an engine decides what is read once."""
    c, size = model.config, limits.page_size
    return CascadePolicy(
        always=always,
        page_size=size,
        page_bytes=bytes_per_page(c, page_size=size, dtype=model.dtype) // c.num_layers,
        group=c.num_heads // c.num_kv_heads,
        no_frame=dummies(c, limits)[0] if c.all_windowed else None,
    )


class Cascades:
    """The cascade plans of one engine: captured steps follow those of `plan`, prompts on the reference the one of `prompts`."""

    def __init__(self, model: Model, limits: EngineConfig, policy: CascadePolicy):
        c = model.config
        self.policy, self._device = policy, model.device
        self._workspace = CascadeWorkspace(max(limits.max_num_seqs, EXTENSION), c.num_heads, c.head_dim, model.device)
        self._shape = (c.num_heads, c.num_kv_heads, limits.page_size, model.device)
        self._prompts = PromptCascade()

    def within(self, policy: CascadePolicy) -> "Cascades":
        """Another that decides otherwise, over the same memory."""
        twin = copy(self)
        twin.policy = policy
        return twin

    def plan(self, size: int) -> CascadePlan:
        """A plan of its own for decode batches of `size` rows."""
        return CascadePlan(self._workspace, size, *self._shape)

    def decode(self, host: HostBatch) -> CascadePlan | None:
        """A plan of its own that follows what the rows of this batch share; None where nothing is worth sharing."""
        runs = self.policy.decode(host)
        if runs is None:
            return None
        plan = self.plan(len(host.seq_lens))
        return plan if plan.update(runs) else None

    def prompts(self, host: HostBatch) -> int:
        """The handle for a batch of prompts, followed by plain torch; 0 where nothing is worth sharing."""
        runs = self.policy.prompts(host)
        if runs is None or host.cu_seqlens is None:
            return 0
        self._prompts.update(host.seq_lens, host.cu_seqlens, runs, self._device)
        return self._prompts.handle
