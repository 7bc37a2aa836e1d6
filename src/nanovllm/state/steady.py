"""`Steady`: the running sequences over steps in which each draws a token and needs nothing for it."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nanovllm.state.pool import Pool
from nanovllm.state.request import Queue, Sequence


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steady(Seq):
    """Sequences as they stood in `base`, and the tokens that they drew in `age` steps since; they are made when somebody looks.

    The next `steps` steps need no schedule for as long as pool and queue are these very values: every sequence decodes, in pages that it
    has. One ends with a token of `stop_ids` that is its own, or at the age in `left`, the least of which is `first_end`. `drawn` is a
    linked list, newest first: (older, tokens `[rows]` or `[steps, rows]`).
    """

    base: tuple[Sequence, ...]
    ids: tuple[int, ...]
    stop_ids: frozenset[int]
    left: np.ndarray
    first_end: int
    steps: int
    pool: Pool
    waiting: Queue
    age: int = 0
    drawn: Any = None
    made: list[tuple[Sequence, ...]] = field(default_factory=list)  # once somebody has looked

    @staticmethod
    def of(running: tuple[Sequence, ...], steps: int, pool: Pool, waiting: Queue) -> "Steady":
        """Sequences that need no schedule for so many steps."""
        left = np.array([s.request.max_len - s.tokens.length for s in running], np.int32)
        return Steady(
            base=running, ids=tuple([s.request.request_id for s in running]), left=left, first_end=int(left.min()), steps=steps, pool=pool,
            waiting=waiting, stop_ids=frozenset[int]().union(*{s.request.stop_ids for s in running}),
        )  # fmt: skip

    def holds(self, pool: Pool, waiting: Queue) -> bool:
        """Whether the next step needs no schedule in a state with this pool and this queue."""
        return self.steps > 0 and self.pool is pool and self.waiting is waiting

    def after(self, token_ids: np.ndarray) -> "Steady":
        """The sequences after a step in which they drew these tokens `[rows]`; those that end are still among them."""
        base, left, first_end, age, drawn = self.base, self.left, self.first_end, self.age, self.drawn
        if self.made:
            base, left, first_end, age, drawn = self.made[0], left - age, first_end - age, 0, None
        return Steady(
            base=base, ids=self.ids, stop_ids=self.stop_ids, left=left, first_end=first_end, steps=self.steps - 1, pool=self.pool,
            waiting=self.waiting, age=age + 1, drawn=(drawn, token_ids),
        )  # fmt: skip

    def ending(self, tokens: list[int]) -> list[int]:
        """The rows that end with the newest tokens, which are these, in order."""
        rows = set(np.flatnonzero(self.left == self.age).tolist()) if self.age == self.first_end else set()
        if not self.stop_ids.isdisjoint(tokens):
            rows.update(row for row, token in enumerate(tokens) if token in self.base[row].request.stop_ids)
        return sorted(rows)

    def part(self, rows: list[int]) -> tuple[list[Sequence], "Steady | tuple[()]"]:
        """The sequences of these rows, and the others."""
        table = self._table()
        gone, kept = [self.base[row].drew(table[:, row]) for row in rows], np.delete(np.arange(len(self)), rows)
        if not len(kept):
            return gone, ()
        base, ids = ([values[row] for row in kept.tolist()] for values in (self.base, self.ids))
        left, drawn = self.left[kept], (None, table[:, kept])
        rest = replace(self, base=tuple(base), ids=tuple(ids), left=left, first_end=int(left.min()), drawn=drawn, made=[])
        return gone, rest

    def sequences(self) -> tuple[Sequence, ...]:
        """The sequences as they stand."""
        if not self.age:
            return self.base
        if not self.made:
            columns = self._table().T
            self.made.append(tuple([sequence.drew(tokens) for sequence, tokens in zip(self.base, columns, strict=True)]))
        return self.made[0]

    def _table(self) -> np.ndarray:
        """What was drawn, `[age, rows]`."""
        steps, older = [], self.drawn
        while older is not None:
            older, token_ids = older
            steps.append(token_ids)
        return np.vstack(steps[::-1])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> Any:
        return self.sequences()[index]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences())
