"""`Steady`: the running sequences during steps in which each samples one token into pages that it already has."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nanovllm.state.pool import Pool
from nanovllm.state.request import Queue, Sequence
from nanovllm.types import brief_fields


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steady(Seq):
    """Sequences as they were in `base`, and the tokens that they sampled since. The `Sequence` values are built when they are needed.

    The next `steps` steps need no schedule while pool and queue stay the same values: every sequence decodes into its own pages.

    Attributes:
        base: The sequences when this began.
        ids: Their request ids.
        stop_ids: All token ids that end one of them; a row is checked against its own.
        left: For each row the age at which it reaches its limit.
        first_end: The least value in `left`.
        steps: How many steps still need no schedule.
        pool: The pool for which this holds.
        waiting: The queue for which this holds.
        age: Steps since `base`.
        drawn: The sampled tokens as a linked list, newest first: (older, tokens `[rows]` or `[steps, rows]`).
        made: The sequences as they are now, once they were built.
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
    made: list[tuple[Sequence, ...]] = field(default_factory=list)

    def __repr__(self) -> str:
        return brief_fields(self)

    @staticmethod
    def of(running: tuple[Sequence, ...], steps: int, pool: Pool, waiting: Queue) -> "Steady":
        """Begin with sequences that need no schedule for so many steps."""
        left = np.array([s.request.max_len - s.tokens.length for s in running], np.int32)
        return Steady(
            base=running, ids=tuple([s.request.request_id for s in running]), left=left, first_end=int(left.min()), steps=steps, pool=pool,
            waiting=waiting, stop_ids=frozenset[int]().union(*{s.request.stop_ids for s in running}),
        )  # fmt: skip

    def holds(self, pool: Pool, waiting: Queue) -> bool:
        """Whether the next step needs no schedule in a state with this pool and this queue."""
        return self.steps > 0 and self.pool is pool and self.waiting is waiting

    def after(self, token_ids: np.ndarray) -> "Steady":
        """The sequences after a step that sampled these tokens `[rows]`. Sequences that end are still included."""
        base, left, first_end, age, drawn = self.base, self.left, self.first_end, self.age, self.drawn
        if self.made:
            base, left, first_end, age, drawn = self.made[0], left - age, first_end - age, 0, None
        return Steady(
            base=base, ids=self.ids, stop_ids=self.stop_ids, left=left, first_end=first_end, steps=self.steps - 1, pool=self.pool,
            waiting=self.waiting, age=age + 1, drawn=(drawn, token_ids),
        )  # fmt: skip

    def ending(self, tokens: list[int]) -> list[int]:
        """The rows that end with the newest tokens, which are `tokens`, in order."""
        rows = set(np.flatnonzero(self.left == self.age).tolist()) if self.age == self.first_end else set()
        if not self.stop_ids.isdisjoint(tokens):
            rows.update(row for row, token in enumerate(tokens) if token in self.base[row].request.stop_ids)
        return sorted(rows)

    def part(self, rows: list[int]) -> tuple[list[Sequence], "Steady | tuple[()]"]:
        """Separate the sequences of these rows from the others."""
        table = self._table()
        gone, kept = [self.base[row].drew(table[:, row]) for row in rows], np.delete(np.arange(len(self)), rows)
        if not len(kept):
            return gone, ()
        base, ids = ([values[row] for row in kept.tolist()] for values in (self.base, self.ids))
        left, drawn = self.left[kept], (None, table[:, kept])
        rest = replace(self, base=tuple(base), ids=tuple(ids), left=left, first_end=int(left.min()), drawn=drawn, made=[])
        return gone, rest

    def sequences(self) -> tuple[Sequence, ...]:
        """The sequences in their present state."""
        if not self.age:
            return self.base
        if not self.made:
            columns = self._table().T
            self.made.append(tuple([sequence.drew(tokens) for sequence, tokens in zip(self.base, columns, strict=True)]))
        return self.made[0]

    def _table(self) -> np.ndarray:
        """The sampled tokens, `[age, rows]`."""
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
