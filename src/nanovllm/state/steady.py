"""`Steady`: the running sequences during steps in which each samples one token into pages that it already has."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nanovllm.sampling.row_options import is_masked
from nanovllm.state.logprobs import TokenLogprobs, last_entries, scores_of
from nanovllm.state.pool import Pool
from nanovllm.state.request import Queue, Sequence
from nanovllm.state.step_log import StepLog
from nanovllm.state.stop_scan import StopScan
from nanovllm.types import Int32, Int64, brief_fields


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
        num_top: For each row how many of the most probable tokens it asked for, None if it asked for no log-probabilities. () if no row
            asked for some.
        ends: For each row the bytes with which its stop strings end, `[rows, 4]`; None if no row has stop strings.
        absent: The bytes that each token lacks (`TokenTexts`), of the rows with stop strings: a table for each way to read special tokens.
        tables: For each row the index of its table in `absent`; None if there is at most one.
        masked: The rows whose steps may not sample every token.
        age: Steps since `base`.
        log: The tokens that were sampled since, and their log-probabilities if `scored`: the first `age` steps.
        columns: For each row its column in the log. None: the row itself.
        scans: The searches for stop strings of rows that read tokens since.
        made: The sequences as they are now, once they were built.
        kept: What the engine keeps for the rows in `masked` while they stay the same: at most one value.
    """

    base: tuple[Sequence, ...]
    ids: tuple[int, ...]
    stop_ids: frozenset[int]
    left: np.ndarray
    first_end: int
    steps: int
    pool: Pool
    waiting: Queue
    num_top: tuple[int | None, ...] = ()
    ends: np.ndarray | None = None
    absent: tuple[np.ndarray, ...] = ()
    tables: np.ndarray | None = None
    masked: tuple[int, ...] = ()
    age: int = 0
    log: StepLog | None = None
    columns: np.ndarray | None = None
    scans: Mapping[int, StopScan] = field(default_factory=dict)
    made: list[tuple[Sequence, ...]] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        return brief_fields(self)

    @staticmethod
    def of(running: tuple[Sequence, ...], steps: int, pool: Pool, waiting: Queue) -> "Steady":
        """Begin with sequences that need no schedule for so many steps."""
        left = np.array([s.request.max_len - s.tokens.length for s in running], np.int32)
        stops = [s.stops for s in running]
        absent = {id(one.absent): one.absent for one in stops if one is not None}
        place = {key: at for at, key in enumerate(absent)}
        tables = None if len(absent) < 2 else np.array([0 if one is None else place[id(one.absent)] for one in stops])
        none, num_top = np.zeros(4, np.uint64), tuple([s.request.sampling.logprobs for s in running])
        return Steady(
            base=running, ids=tuple([s.request.request_id for s in running]), left=left, first_end=int(left.min()), steps=steps, pool=pool,
            waiting=waiting, stop_ids=frozenset[int]().union(*{s.request.stop_ids for s in running}),
            num_top=() if all(asked is None for asked in num_top) else num_top,
            ends=np.array([none if one is None else one.ends for one in stops]) if absent else None, absent=tuple(absent.values()),
            tables=tables,
            masked=tuple([row for row, s in enumerate(running) if is_masked(s.request.sampling)]),
        )  # fmt: skip

    @property
    def scored(self) -> bool:
        """Whether a row asked for log-probabilities."""
        return bool(self.num_top)

    def holds(self, pool: Pool, waiting: Queue) -> bool:
        """Whether the next step needs no schedule in a state with this pool and this queue."""
        return self.steps > 0 and self.pool is pool and self.waiting is waiting

    def after(self, token_ids: np.ndarray, *scores: np.ndarray | None) -> "Steady":
        """The sequences after a step that sampled these int32 tokens `[rows]`. Sequences that end are still included.

        Args:
            token_ids: The tokens.
            scores: Their log-probabilities `[rows]`, the most probable tokens `[rows, k]` and their log-probabilities.
        """
        results = (token_ids, *scores) if self.scored else (token_ids,)
        base, left, first_end, age, log, columns = self.base, self.left, self.first_end, self.age, self.log, self.columns
        scans = self.scans
        if self.made or (self.scored and log is not None and not log.fits(results)):
            base, left, first_end, age, log, columns, scans = self.sequences(), left - age, first_end - age, 0, None, None, {}
        return Steady(
            base=base, ids=self.ids, stop_ids=self.stop_ids, left=left, first_end=first_end, steps=self.steps - 1, pool=self.pool,
            waiting=self.waiting, num_top=self.num_top, ends=self.ends, absent=self.absent, tables=self.tables,
            masked=self.masked, kept=self.kept, age=age + 1, scans=scans, columns=columns,
            log=StepLog.of(results) if log is None else log.append(age, columns, results),
        )  # fmt: skip

    def suspects(self, token_ids: np.ndarray) -> list[int]:
        """The rows in which the newest tokens, which are `token_ids`, may complete a stop string.

        The text of such a token has the last byte of a stop string, or is not known yet.
        """
        if self.ends is None:
            return []
        places = np.minimum(token_ids, len(self.absent[0]) - 1)
        known = self.absent[0][places]
        for table, absent in enumerate(self.absent[1:], 1):
            rows = self.tables == table
            known[rows] = absent[places[rows]]
        return np.flatnonzero((self.ends & ~known).any(1)).tolist()

    def stops(self, row: int) -> StopScan:
        """The search for stop strings of a row that has some."""
        found = self.scans.get(row) or self.base[row].stops
        assert found is not None
        return found

    def reply(self, row: int, start: int) -> list[int]:
        """The tokens of a row's reply after its first `start`. The time does not depend on the length of the reply, nor on other rows."""
        sequence = self.base[row]
        older = start - sequence.num_generated
        before = sequence.tokens.array(sequence.request.num_prompt + start).tolist() if older < 0 else []
        return before if self.log is None else before + self.log.tokens(max(0, older), self.age, int(self._columns(row)))

    def newest(self, rows: Int64[np.ndarray, "n"]) -> Int32[np.ndarray, "n"]:
        """The newest tokens of some rows."""
        if self.log is None or not self.age:
            return np.array([self.base[row].tokens[-1] for row in rows.tolist()], np.int32)
        return self.log.newest(self.age, self._columns(rows))

    def entries(self, row: int, token_ids: list[int]) -> list[TokenLogprobs]:
        """The log-probabilities of the last tokens of a row that asked for them, `token_ids`. The time depends on their number alone."""
        sequence, num_top = self.base[row], self.num_top[row]
        assert num_top is not None
        scores, new = sequence.logprobs, min(len(token_ids), self.age)
        if new and self.log is not None:
            _, *arrays = self.log.part(self.age - new, self.age, int(self._columns(row)))
            scores = scores, scores_of(new, num_top, *arrays)
        return last_entries(scores, token_ids)

    def ending(self, tokens: list[int], scans: Mapping[int, StopScan]) -> list[int]:
        """The rows that end with the newest tokens, which are `tokens`, in order. `scans` are the searches that have read them."""
        rows = set(np.flatnonzero(self.left == self.age).tolist()) if self.age == self.first_end else set()
        if not self.stop_ids.isdisjoint(tokens):
            rows.update(row for row, token in enumerate(tokens) if token in self.base[row].request.stop_ids)
        if scans:
            rows.update(row for row, scan in scans.items() if scan.found is not None)
        return sorted(rows)

    def part(self, rows: list[int]) -> tuple[list[Sequence], "Steady | tuple[()]"]:
        """Separate the sequences of these rows from the others."""
        gone, kept = self._drew(np.array(rows, np.intp)), np.delete(np.arange(len(self)), rows)
        if not len(kept):
            return gone, ()
        base, ids = ([values[row] for row in kept.tolist()] for values in (self.base, self.ids))
        left = self.left[kept]
        scans = {new: self.scans[row] for new, row in enumerate(kept.tolist()) if row in self.scans}
        rest = replace(
            self, base=tuple(base), ids=tuple(ids), left=left, first_end=int(left.min()), columns=self._columns(kept), scans=scans,
            made=[], kept=[],
            ends=None if self.ends is None else self.ends[kept], tables=None if self.tables is None else self.tables[kept],
            num_top=tuple([self.num_top[row] for row in kept.tolist()]) if self.num_top else (),
            masked=tuple([new for new, row in enumerate(kept.tolist()) if row in self.masked]) if self.masked else (),
        )  # fmt: skip
        return gone, rest

    def sequences(self) -> tuple[Sequence, ...]:
        """The sequences in their present state."""
        if not self.age:
            return self.base
        if not self.made:
            self.made.append(tuple(self._drew(np.arange(len(self)))))
        return self.made[0]

    def _drew(self, rows: np.ndarray) -> list[Sequence]:
        """The sequences of these rows in their present state."""
        if self.log is None:
            return [self.base[row] for row in rows.tolist()]
        (tokens, *scores), drew = self.log.results(self.age, self._columns(rows)), list[Sequence]()
        for at, row in enumerate(rows.tolist()):
            sequence, asked = self.base[row], None
            if (num_top := sequence.request.sampling.logprobs) is not None:
                asked = scores_of(len(tokens), num_top, *[None if each is None else each[:, at] for each in scores])
            drew.append(sequence.drew(tokens[:, at], asked, self.scans.get(row)))
        return drew

    def _columns(self, rows: Any) -> Any:
        return rows if self.columns is None else self.columns[rows]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> Any:
        return self.sequences()[index]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences())
