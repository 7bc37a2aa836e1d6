"""`FrameMachine`: compare a pool with frames (the KV memory of sliding-window pages) with plain Python."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanovllm.state import pool as pools
from nanovllm.state.invariants import check_pool
from nanovllm.state.pool import Pool
from nanovllm.state.window_frames import Frames, init_frames
from nanovllm.testing.shadows.memory import KeptValues, expect
from nanovllm.testing.strategies import pick


@dataclass(slots=True, eq=False)
class Holder:
    """An owner of a run of pages. It needs the frames of its pages from index `retired` on."""

    pages: tuple[int, ...]
    tokens: list[int]
    retired: int = 0


class FrameMachine(RuleBasedStateMachine):
    """Test a pool for sliding-window layers: owners allocate, share, retire, index, reuse and release pages.

    A frame is the KV memory of a sliding-window page. Pools have 2 to 9 pages of one token, 1 to 7 frames and windows of 1 to 3 tokens.
    A frame keeps the KV of its page until another page gets the frame. Free frames are used first. Then pages lose spare frames, in the
    order in which the frames became spare.

    Checks invariants 1 (counts), 2 (free pages) and 5 (old values do not change). Also checks how many owners need each frame, the order
    of spare frames, the content of each frame, and the longest reusable prefix.

    Attributes:
        ops: The module under test. A subclass may set any object with `allocate`, `acquire`, `retire`, `release`, `insert` and
            `reusable` as in `nanovllm.state.pool`.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.state import pool
        >>> from nanovllm.testing import FrameMachine
        >>> class MyPool(FrameMachine):
        ...     ops = pool  # your module here
        >>> run_state_machine_as_test(MyPool, settings=settings(max_examples=3, deadline=None))
    """

    ops: ClassVar[ModuleType] = pools

    def __init__(self) -> None:
        super().__init__()
        self.pool: Pool = pools.init_pool(1, 1, init_frames(1, 1, window=1, alone=False))
        self.holders: list[Holder] = []
        self.written: dict[int, int] = {}  # page -> the token that its owner wrote
        self.memory: dict[int, int] = {}  # frame -> the token that it contains
        self.spare: list[int] = []  # pages with spare frames; the first page loses its frame first
        self.next_token = 0
        self.kept = KeptValues()

    @initialize(num_pages=st.integers(2, 9), num_frames=st.integers(1, 7), window=st.integers(1, 3))
    def start(self, num_pages: int, num_frames: int, window: int) -> None:
        """Start with an empty pool."""
        self.pool = pools.init_pool(num_pages, 1, init_frames(num_frames, num_pages, window=window, alone=False))

    @rule(count=st.integers(1, 5))
    def allocate(self, count: int) -> None:
        """Allocate pages and their frames: the call returns as many as requested, or None."""
        self._take(range(self.next_token + 1, self.next_token + 1 + count))
        self.next_token += count

    @rule(data=st.data())
    def again(self, data: st.DataObject) -> None:
        """Run the beginning of an indexed prefix again in new pages, perhaps with another token after it."""
        indexed = sorted(self._indexed())
        if indexed:
            tokens = data.draw(st.sampled_from(indexed))
            self._take([*tokens[: data.draw(st.integers(1, len(tokens)))], *data.draw(st.lists(st.integers(-2, -1), max_size=1))])

    def _take(self, tokens: Sequence[int]) -> None:
        count, before = len(tokens), self._with_frames()
        free = self._frames.used.num_free
        available = min(self.pool.pages.num_free + self.pool.prefix.num_idle, free + len(self.spare))
        done = self.ops.allocate(self.pool, count)
        expect((done is None) == (count > available), f"allocating {count} of {available} available pages gave {done}")
        if done is None:
            return
        pool, pages = done
        self._move(pool)
        owned = set(pool.pages.refcounts) - set(pages)
        lost = [page for page in before if page in owned and page not in self._with_frames()]
        evicted = [page for page in before if page not in owned]
        wanted = [page for page in self.spare if page in owned][: max(0, count - free - len(evicted))]
        expect(sorted(lost) == sorted(wanted), f"pages {lost} lost their frames; expected {wanted}, the first of {self.spare}")
        self.spare = [page for page in self.spare if page in owned and page not in lost]
        for page, token in zip(pages, tokens, strict=True):
            self.written[page] = self.memory[self._frame(page)] = token
        self.holders.append(Holder(pages, [self.written[page] for page in pages]))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Add a second owner of a beginning. It needs frames from some index on, after which all pages still have them."""
        first = pick(data, self.holders)
        pages = first.pages[: data.draw(st.integers(1, len(first.pages)))]
        least = max((at + 1 for at, page in enumerate(pages) if page not in self._with_frames()), default=0)
        retired = data.draw(st.integers(least, len(pages)))
        self._move(self.ops.acquire(self.pool, pages, retired))
        self.spare = [page for page in self.spare if page not in pages[retired:]]
        self.holders.append(Holder(pages, first.tokens[: len(pages)], retired))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        """Retire pages: an owner no longer needs the frames of its first pages."""
        holder = pick(data, self.holders)
        retired = data.draw(st.integers(holder.retired, len(holder.pages)))
        gone = holder.pages[holder.retired : retired]
        holder.retired = retired
        self._move(self.ops.retire(self.pool, gone))
        self._become_spare(gone)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Remove an owner; the frames of its last pages become spare first."""
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self._move(self.ops.release(self.pool, holder.pages, holder.retired))
        self._become_spare(holder.pages[holder.retired :][::-1])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def index(self, data: st.DataObject) -> None:
        """Index a run. For each prefix the index keeps the pages with more frames, and no indexed prefix is lost."""
        holder, before = pick(data, self.holders), self._indexed()
        tokens, pages = np.array(holder.tokens, np.int32), np.array(holder.pages, np.int32)
        matched = pools.match(self.pool, tokens)
        frames = max(np.count_nonzero(self._frames.have(either)) for either in (matched, pages[: len(matched)]))
        self._move(self.ops.insert(self.pool, tokens, pages))
        self.spare = [page for page in self.spare if page in self.pool.pages.refcounts]
        lost = sorted(before - self._indexed())
        expect(not lost, f"indexing {holder.tokens} removed the prefixes {lost}")
        framed = np.count_nonzero(self._frames.have(pools.match(self.pool, tokens)[: len(matched)]))
        expect(framed >= frames, f"{framed} of the indexed pages for {holder.tokens} have frames, {frames} could have them")

    @rule(data=st.data(), more=st.integers(0, 3), whole=st.booleans())
    def reuse(self, data: st.DataObject, more: int, whole: bool) -> None:
        """Reuse the longest indexed prefix of a run for which all pages in the next token's window have frames."""
        indexed = sorted(self._indexed())
        tokens = list(data.draw(st.sampled_from(indexed))) if indexed else []
        matched = pools.match(self.pool, np.array(tokens, np.int32)).tolist()
        tokens += [0] * more or ([] if tokens else [0])
        reused, retired = self.ops.reusable(self.pool, np.array(tokens, np.int32), whole=whole)
        window, framed, best = self._frames.window, self._with_frames(), 0
        for count in range(1, len(matched) + 1):
            first = 0 if whole else max(0, min(count, len(tokens) - 1) - window + 1)
            if set(matched[first:count]) <= framed:
                best = count
        expect(reused.tolist() == matched[:best], f"pages {reused.tolist()} of {matched} are reusable, but {sorted(framed)} have frames")
        if not best:
            return
        self._move(self.ops.acquire(self.pool, reused, retired))
        self.spare = [page for page in self.spare if page not in reused.tolist()[retired:]]
        self.holders.append(Holder(tuple(reused.tolist()), tokens[:best], retired))

    @invariant()
    def agrees(self) -> None:
        """Compare counts, the order of spare frames and the content of each frame with the shadow."""
        owners = Counter(page for holder in self.holders for page in holder.pages)
        needs = Counter(page for holder in self.holders for page in holder.pages[holder.retired :])
        check_pool(self.pool, owners, needs)
        listed = self._frames.spare.pages()
        expect(listed == self.spare, f"pages {listed} have spare frames in this order, expected {self.spare}")
        for page in self._with_frames():
            content = self.memory[self._frame(page)]
            expect(content == self.written[page], f"the frame of page {page} contains {content}, expected {self.written[page]}")

    @invariant()
    def old_values_stand(self) -> None:
        """Check invariant 5: old values have not changed."""
        self.kept.require_unchanged()

    @property
    def _frames(self) -> Frames:
        assert self.pool.frames is not None
        return self.pool.frames

    def _move(self, pool: Pool) -> None:
        self.kept.keep(self.pool)
        self.pool = pool

    def _frame(self, page: int) -> int:
        return self._frames.frame_of[page]

    def _with_frames(self) -> set[int]:
        return set(np.flatnonzero(self._frames.frame_of.copy() >= 0).tolist())

    def _indexed(self) -> set[tuple[int, ...]]:
        """Return the tokens up to the end of each indexed page."""
        prefixes = set[tuple[int, ...]]()
        for page in self.pool.prefix.pages():
            tokens, before = [self.written[page]], self.pool.prefix.before(page)
            while before >= 0:
                tokens.insert(0, self.written[before])
                before = self.pool.prefix.before(before)
            prefixes.add(tuple(tokens))
        return prefixes

    def _become_spare(self, pages: tuple[int, ...]) -> None:
        needed = {page for holder in self.holders for page in holder.pages[holder.retired :]}
        owned = self.pool.pages.refcounts
        self.spare = [page for page in self.spare if page in owned]
        self.spare += [page for page in pages if page not in needed and page in owned]
