"""An executor that runs steps before they are asked for, as the one for GPUs does, over any other: what it runs in vain must not show."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanovllm.executor.decode import DecodeCarry
from nanovllm.executor.executor import Drawn, Executor
from nanovllm.executor.run_ahead import RunAhead, longest_first, placed, retire
from nanovllm.models.model import Model
from nanovllm.state.kv_cache import KVState
from nanovllm.state.request import Sequence
from nanovllm.state.window_frames import Frames
from nanovllm.types import Int64


@dataclass(slots=True)
class AheadExecutor:
    """`ready` is the result of a step that nobody has asked for."""

    inner: Executor
    page_size: int
    ahead: RunAhead
    ready: tuple[DecodeCarry, Drawn] | None = None

    @classmethod
    def over(cls, inner: Executor, page_size: int) -> "AheadExecutor":
        """The executor with nothing run yet."""
        return cls(inner, page_size, RunAhead(page_size))

    def prefill(self, model: Model, kv: KVState, rows: Seq[tuple[Sequence, int]], **options: Any) -> tuple[Drawn | None, KVState]:
        """See `Executor`."""
        return self.inner.prefill(model, kv, rows, **options)

    def load(self, model: Model, kv: KVState, rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """See `Executor`."""
        self.ahead.drop()
        places = longest_first(rows)
        return self._restarted(self.inner.load(model, kv, placed(rows, places), frames=frames), rows, places)

    def refresh(self, model: Model, carry: DecodeCarry, rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """See `Executor`."""
        if len(rows) != len(carry.active):
            return self.load(model, carry.kv, rows, frames=frames)
        self.ahead.drop()
        places = self.ahead.places
        return self._restarted(self.inner.refresh(model, carry, placed(rows, places), frames=frames), rows, places)

    def narrow(self, model: Model, carry: DecodeCarry, keep: Seq[int], rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """See `Executor`."""
        newest = self.ready[0] if self.ready is not None and self.ahead.launched else carry
        if newest.batch.plan or newest.sampling.penalties is not None:
            return self.load(model, carry.kv, rows, frames=frames)
        gone = self.ahead.narrow(keep, rows)
        retire(newest.kv, newest.batch, newest.active, gone)
        return carry

    def decode(self, model: Model, carry: DecodeCarry) -> tuple[DecodeCarry, Drawn]:
        """See `Executor`."""
        after, drawn = self.ready if self.ahead.take() and self.ready is not None else self.inner.decode(model, carry)
        self.ready = self.inner.decode(model, after) if self.ahead.next() else None
        return after, drawn.at(self.ahead.places)

    def take_discarded_count(self) -> int:
        """See `Executor`."""
        return self.ahead.take_discarded_count() + self.inner.take_discarded_count()

    def begin(self, model: Model, kv: KVState, rows: Seq[Sequence], ticket: int, **options: Any) -> DecodeCarry:
        """See `Executor`."""
        return self.inner.begin(model, kv, rows, ticket, **options)

    def end(self, ticket: int) -> None:
        """See `Executor`."""
        self.inner.end(ticket)

    def _restarted(self, carry: DecodeCarry, rows: Seq[Sequence], places: Int64[np.ndarray, "B"]) -> DecodeCarry:
        self.ahead.restart(rows, places, allowed=carry.sampling.penalties is None)  # whose counts are written in place
        return carry
