"""An executor that runs decode steps before the engine asks for them, like the executor for GPUs, on top of any other executor.

Results of steps that ran in vain must not be visible.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nanovllm.executor.decode_carry import DecodeCarry
from nanovllm.executor.executor import Drawn, Executor, Masks
from nanovllm.executor.row_processing import carries, processors_of
from nanovllm.executor.run_ahead import RunAhead, longest_first, placed, retire
from nanovllm.executor.scoring import Scored
from nanovllm.models.model import Model
from nanovllm.sampling.row_options import is_masked
from nanovllm.state.kv_cache import KVState
from nanovllm.state.request import Sequence
from nanovllm.state.window_frames import Frames
from nanovllm.types import Int32, Int64


@dataclass(frozen=True, slots=True)
class _Placed:
    """Masks of rows that are at other places."""

    masks: Masks
    places: Int64[np.ndarray, "B"]

    def fill(self, words: Int32[np.ndarray, "L W"], lines: Seq[int]) -> None:
        """Write the mask of each row."""
        self.masks.fill(words, [lines[place] for place in self.places])


@dataclass(slots=True)
class AheadExecutor:
    """Runs one decode step ahead. `ready` is the result of a step that the engine has not asked for yet."""

    inner: Executor
    page_size: int
    ahead: RunAhead
    ready: tuple[DecodeCarry, Drawn] | None = None

    @classmethod
    def over(cls, inner: Executor, page_size: int) -> "AheadExecutor":
        """Wrap an executor; no step has run ahead yet."""
        return cls(inner, page_size, RunAhead(page_size))

    def prefill(self, model: Model, kv: KVState, rows: Seq[tuple[Sequence, int]], **options: Any) -> tuple[Drawn | None, KVState]:
        """Donates `kv`: run prompt tokens, and sample for sequences that are complete afterwards."""
        return self.inner.prefill(model, kv, rows, **options)

    def score(self, model: Model, kv: KVState, rows: Seq[tuple[Sequence, int]], asked: Any, **options: Any) -> tuple[Scored, KVState]:
        """Donates `kv`: run prompt tokens, and return the log-probabilities of tokens that the caller names."""
        return self.inner.score(model, kv, rows, asked, **options)

    def load(self, model: Model, kv: KVState, rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """Drop the step ahead, and make a carry for a new batch in which the longest rows come first."""
        self.ahead.drop()
        places = longest_first(rows)
        return self._restarted(self.inner.load(model, kv, placed(rows, places), frames=frames), rows, places)

    def refresh(self, model: Model, carry: DecodeCarry, rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """Donates `carry`: drop the step ahead, and update the carry after some rows got other pages."""
        if self._grown(rows, frames):
            return carry
        if len(rows) != len(carry.active):
            return self.load(model, carry.kv, rows, frames=frames)
        self.ahead.drop()
        places = self.ahead.places
        return self._restarted(self.inner.refresh(model, carry, placed(rows, places), frames=frames), rows, places)

    def narrow(
        self, model: Model, carry: DecodeCarry, keep: Seq[int], rows: Seq[Sequence], *, grew: bool = False, frames: Frames | None = None
    ) -> DecodeCarry:
        """Donates `carry`: go on with the rows at the indices `keep`, ascending; the other rows have ended and must not write any more."""
        newest = self.ready[0] if self.ready is not None and self.ahead.launched else carry
        if newest.batch.plan or newest.sampling.penalties is not None or (grew and not self.ahead.outlives_growth()):
            return self.load(model, carry.kv, rows, frames=frames)
        gone = self.ahead.narrow(keep, rows)
        retire(newest.kv, newest.batch, newest.active, gone)
        if grew and not self._grown(rows, frames):
            return self.load(model, carry.kv, rows, frames=frames)
        return carry

    def decode(self, model: Model, carry: DecodeCarry, masks: Masks | None = None) -> tuple[DecodeCarry, Drawn]:
        """Donates `carry`: return the result of the step ahead, or run a step; then run the next step ahead if that is allowed."""
        inner = None if masks is None else _Placed(masks, self.ahead.places)
        after, drawn = self.ready if self.ahead.take() and self.ready is not None else self.inner.decode(model, carry, inner)
        self.ready = self.inner.decode(model, after) if self.ahead.next() else None
        return after, drawn.at(self.ahead.places)

    def take_discarded_count(self) -> int:
        """The number of tokens that steps ahead ran in vain since the last call; counting starts again."""
        return self.ahead.take_discarded_count() + self.inner.take_discarded_count()

    def begin(self, model: Model, kv: KVState, rows: Seq[Sequence], ticket: int, **options: Any) -> DecodeCarry:
        """Make a carry with tensors of its own for a decode session; its resources live until `end(ticket)`."""
        return self.inner.begin(model, kv, rows, ticket, **options)

    def end(self, ticket: int) -> None:
        """Let go of the resources of a decode session."""
        self.inner.end(ticket)

    def captured(self, function: Callable[..., Any], carry: DecodeCarry, *inputs: Any) -> Callable[..., Any]:
        """The function as the inner executor captures it."""
        return self.inner.captured(function, carry, *inputs)

    def _grown(self, rows: Seq[Sequence], frames: Frames | None) -> bool:
        """Give the rows their new pages, if a step that runs ahead stays valid."""
        if self.ready is None or not self.ahead.outlives_growth() or frames is not None or self.ready[0].batch.plan:
            return False
        after, drawn = self.ready
        width, old = max(len(s.pages) for s in rows), after.batch.page_tables
        tables = torch.full((len(old), width), after.kv.pools[0].shape[1] - 1, dtype=old.dtype, device=old.device)
        for place, sequence in zip(self.ahead.places.tolist(), rows, strict=True):
            tables[place, : len(sequence.pages)] = torch.tensor(sequence.pages.array().tolist(), dtype=old.dtype)
        self.ready = replace(after, batch=replace(after.batch, page_tables=tables)), drawn
        self.ahead.grow(rows)
        return True

    def _restarted(self, carry: DecodeCarry, rows: Seq[Sequence], places: Int64[np.ndarray, "B"]) -> DecodeCarry:
        # Counts for penalties, and what processors carry, are written in place: a step ahead could not be undone. A mask needs the token.
        waits = carries(processors_of(rows)) or any(is_masked(s.request.sampling) for s in rows)
        allowed = carry.sampling.penalties is None and not waits
        self.ahead.restart(rows, places, allowed=allowed)
        return carry
