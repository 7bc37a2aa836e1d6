"""An executor that runs steps before they are asked for, as the one for GPUs does, over any other: what it runs in vain must not show."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ..compile import Drawn, Executor, steps_ahead
from ..decode import DecodeCarry
from ..model import Model
from ..state.kv import KVState
from ..state.request import Sequence


@dataclass(slots=True)
class AheadExecutor:
    """`ready` is the result of a step that nobody has asked for, `left` how many more may be run so."""

    inner: Executor
    page_size: int
    left: int = 0
    ready: tuple[DecodeCarry, Drawn] | None = None
    unused: int = 0

    def prefill(self, model: Model, kv: KVState, rows: Seq[tuple[Sequence, int]], *, draw: bool = True) -> tuple[Drawn | None, KVState]:
        """See `Executor`."""
        return self.inner.prefill(model, kv, rows, draw=draw)

    def load(self, model: Model, kv: KVState, rows: Seq[Sequence]) -> DecodeCarry:
        """See `Executor`."""
        self._drop(rows)
        return self.inner.load(model, kv, rows)

    def refresh(self, carry: DecodeCarry, rows: Seq[Sequence]) -> DecodeCarry:
        """See `Executor`."""
        self._drop(rows)
        return self.inner.refresh(carry, rows)

    def decode(self, model: Model, carry: DecodeCarry) -> tuple[DecodeCarry, Drawn]:
        """See `Executor`."""
        after, drawn = self.inner.decode(model, carry) if self.ready is None else self.ready
        self.ready = None
        if self.left and after.sampling.penalties is None:  # whose counts are written in place
            self.left -= 1
            self.ready = self.inner.decode(model, after)
        return after, drawn

    def thrown_away(self) -> int:
        """See `Executor`."""
        unused, self.unused = self.unused, 0
        return unused + self.inner.thrown_away()

    def begin(self, model: Model, kv: KVState, rows: Seq[Sequence], ticket: int) -> DecodeCarry:
        """See `Executor`."""
        return self.inner.begin(model, kv, rows, ticket)

    def end(self, ticket: int) -> None:
        """See `Executor`."""
        self.inner.end(ticket)

    def _drop(self, rows: Seq[Sequence]) -> None:
        """Forget what was run ahead, for these rows stand in its place."""
        if self.ready is not None:
            self.unused += len(self.ready[1].token_ids)
        self.left, self.ready = steps_ahead(rows, self.page_size), None
