"""Decode steps that an executor runs before they are asked for: how far they may go, and what of them was in vain.

Such a step reads and writes only what its rows own, behind what they hold, so that it can be thrown away; and a row that has ended is
left out of its results.
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
    """`places` are those of the rows that go on, in the callers' order, among the rows that the carry holds, in its own; `left` counts the
    steps that may still be run before they are asked for, `unused` the tokens that were run in vain."""

    page_size: int
    places: Int64[np.ndarray, "B"] = field(default_factory=lambda: np.arange(0))
    left: int = 0
    launched: bool = False  # whether the next step that is asked for runs already
    unused: int = 0

    def restart(self, rows: Seq[Sequence], places: Int64[np.ndarray, "B"], *, allowed: bool) -> None:
        """These rows were filled in, at `places` of the carry; a step that runs already was one over others, or is one too many."""
        self.drop()
        self.places, self.left = places, steps_ahead(rows, self.page_size) if allowed else 0

    def narrow(self, keep: Seq[int], rows: Seq[Sequence]) -> Int64[np.ndarray, "gone"]:
        """Only `rows`, those at the places `keep` of the rows so far, go on; returns the carry's places of the others."""
        gone = np.delete(self.places, keep)
        self.unused += len(gone) if self.launched else 0
        # What is left holds for a part of the rows too; only where that is nothing may those that ended have been what was in the way.
        self.places, self.left = self.places[keep], self.left or steps_ahead(rows, self.page_size)
        return gone

    def drop(self) -> None:
        """Throw away what runs."""
        self.unused += len(self.places) if self.launched else 0
        self.left, self.launched = 0, False

    def take(self) -> bool:
        """A step is asked for: whether it runs already."""
        launched, self.launched = self.launched, False
        return launched

    def next(self) -> bool:
        """Whether the step behind the one just asked for is to be launched now."""
        if self.left:
            self.left, self.launched = self.left - 1, True
        return self.launched

    def thrown_away(self) -> int:
        """The tokens run in vain since the last call."""
        unused, self.unused = self.unused, 0
        return unused


def longest_first(rows: Seq[Sequence]) -> Int64[np.ndarray, "B"]:
    """Where each row goes in a batch whose longest comes first: a kernel that takes the rows in turn ends with short ones, so that all of a
    GPU's multiprocessors end together (Graham, 1969). The same for rows that have all grown by as much."""
    places = np.empty(len(rows), np.int64)
    places[np.argsort([-s.tokens.length for s in rows], kind="stable")] = np.arange(len(rows))
    return places


def placed(rows: Seq[Sequence], places: Int64[np.ndarray, "B"]) -> list[Sequence]:
    """The rows in the order that their places give."""
    return [rows[row] for row in np.argsort(places).tolist()]


def steps_ahead(rows: Seq[Sequence], page_size: int) -> int:
    """How many steps over these rows may follow the next one before the host has looked at its tokens: until one has no page left that it
    will need, or all have ended.

    A row that has ended may go on for a step: it writes behind what it holds, into a page of its own or the dummy page. None may run where
    a row only reads in the next step, because the page behind its tokens may still be shared.
    """
    rooms = [(s.pages.length * page_size if s.todo else 0, s.tokens.length, s.request.max_len - 1) for s in rows]
    most = max((wanted - tokens for _, tokens, wanted in rooms), default=0)
    return max(0, min([most, *(room - tokens for room, tokens, wanted in rooms if room < wanted)]))


def retire(kv: KVState, batch: Batch, active: Int32[Tensor, "B"], places: Int64[np.ndarray, "gone"]) -> None:
    """Make rows of a decode batch padding, in place: they write into the dummy page from now on, and do not move."""
    at = torch.from_numpy(places).to(active.device, non_blocking=True)
    for tensor, value in ((active, 0), (batch.seq_lens, 1)):
        tensor.index_fill_(0, at, value)
    for pages, tables in zip(kv.pools, (batch, batch.windowed), strict=False):
        if tables is not None:
            dummy, page_size = pages.shape[1] - 1, pages.shape[4]
            tables.slots.index_fill_(0, at, dummy * page_size)
            tables.page_tables.index_fill_(0, at, dummy)
