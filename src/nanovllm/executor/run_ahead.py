"""Decode steps that an executor runs before they are asked for: how many may run, and how many of their tokens were discarded.

Such a step can be discarded, because it reads and writes only pages that its rows own, after the tokens that they hold. A row that has
ended is left out of the results.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from nanovllm.models.common.batch import Batch
from nanovllm.state.kv_cache import KVState
from nanovllm.state.request import Sequence
from nanovllm.types import Int32, Int64, Tensor


@dataclass(slots=True)
class RunAhead:
    """The book-keeping of steps that run ahead.

    Attributes:
        page_size: Tokens per page.
        places: For each remaining row, in the caller's order, its place among the rows of the carry.
        left: How many more steps may run before they are asked for.
        allowed: Whether steps may run ahead at all.
        launched: Whether the step that will be asked for next already runs.
        unused: Tokens that ran ahead and were discarded.
    """

    page_size: int
    places: Int64[np.ndarray, "B"] = field(default_factory=lambda: np.arange(0))
    left: int = 0
    allowed: bool = True
    launched: bool = False
    unused: int = 0

    def restart(self, rows: Seq[Sequence], places: Int64[np.ndarray, "B"], *, allowed: bool) -> None:
        """Note that these rows were filled in at `places` of the carry, and discard a step that already runs."""
        self.drop()
        self.places, self.allowed, self.left = places, allowed, steps_ahead(rows, self.page_size) if allowed else 0

    def outlives_growth(self) -> bool:
        """Whether a step runs that stays valid if rows get more pages now: it finds the places of the step after it in the old pages."""
        return self.launched and self.left > 0

    def grow(self, rows: Seq[Sequence]) -> None:
        """Note that some of the rows have more pages. The step that already runs stays valid."""
        self.left = steps_ahead(rows, self.page_size)

    def narrow(self, keep: Seq[int], rows: Seq[Sequence]) -> Int64[np.ndarray, "gone"]:
        """Keep only `rows`, at the places `keep` of the rows so far. Returns the carry's places of the other rows."""
        gone = np.delete(self.places, keep)
        self.unused += len(gone) if self.launched else 0
        # A limit for all rows also holds for some of them. Only a limit of 0 may have come from a row that has ended.
        self.places = self.places[keep]
        self.left = self.left or (steps_ahead(rows, self.page_size) if self.allowed else 0)
        return gone

    def drop(self) -> None:
        """Discard the step that runs ahead, if there is one."""
        self.unused += len(self.places) if self.launched else 0
        self.left, self.launched = 0, False

    def take(self) -> bool:
        """Ask for a step. Returns whether it already runs."""
        launched, self.launched = self.launched, False
        return launched

    def next(self) -> bool:
        """Return whether to launch the step after the one just asked for."""
        if self.left:
            self.left, self.launched = self.left - 1, True
        return self.launched

    def take_discarded_count(self) -> int:
        """Return how many tokens were discarded since the last call, and reset the count to 0."""
        unused, self.unused = self.unused, 0
        return unused


def longest_first(rows: Seq[Sequence]) -> Int64[np.ndarray, "B"]:
    """The place of each row in a batch whose longest row comes first.

    A kernel that takes rows one after another then ends with short rows, so that all multiprocessors of a GPU end together (Graham, 1969).
    The order stays the same while all rows grow equally.
    """
    places = np.empty(len(rows), np.int64)
    places[np.argsort([-s.tokens.length for s in rows], kind="stable")] = np.arange(len(rows))
    return places


def placed(rows: Seq[Sequence], places: Int64[np.ndarray, "B"]) -> list[Sequence]:
    """The rows in the order of their places."""
    return [rows[row] for row in np.argsort(places).tolist()]


def steps_ahead(rows: Seq[Sequence], page_size: int) -> int:
    """How many steps over these rows may follow the next one before the host has seen its tokens.

    The limit is reached when a row has no page left that it will need, or when all rows have ended. A row that has ended may run for one
    more step: it writes after its tokens, into its own page or the dummy page. No step may run ahead if a row only reads in the next step,
    because the page after its tokens may still be shared.
    """
    rooms = [(s.pages.length * page_size if s.todo else 0, s.tokens.length, s.request.max_len - 1) for s in rows]
    most = max((wanted - tokens for _, tokens, wanted in rooms), default=0)
    return max(0, min([most, *(room - tokens for room, tokens, wanted in rooms if room < wanted)]))


def retire(kv: KVState, batch: Batch, active: Int32[Tensor, "B"], places: Int64[np.ndarray, "gone"]) -> None:
    """Turn rows of a decode batch into padding, in place: they write into the dummy page from now on, and do not move."""
    host = torch.empty(len(places), dtype=torch.int64, pin_memory=active.is_cuda)
    host.numpy()[:] = places
    at = host.to(active.device, non_blocking=True)
    for tensor, value in ((active, 0), (batch.seq_lens, 1)):
        tensor.index_fill_(0, at, value)
    for pages, tables in zip(kv.pools, (batch, batch.windowed), strict=False):
        if tables is not None:
            dummy, page_size = pages.shape[1] - 1, pages.shape[4]
            tables.slots.index_fill_(0, at, dummy * page_size)
            tables.page_tables.index_fill_(0, at, dummy)
