"""`PrefixMachine`: compare the prefix index of a pool with a dict of whole token prefixes (invariants 1, 2, 4, 5 and eviction order)."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanovllm.state import pool as pools
from nanovllm.state.invariants import check_pool
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.pool import Pool
from nanovllm.testing.shadows.memory import KeptValues, ShadowIndex, expect, freeze, indexed_runs
from nanovllm.testing.strategies import pick, token_ids


@dataclass(slots=True)
class Run:
    """A holder of pages: the tokens whose KV the pages contain, and the pages in order."""

    tokens: list[int]
    pages: list[int]


class PrefixMachine(RuleBasedStateMachine):
    """Test the prefix index: token runs match, allocate, index, share, return and lose pages in any order.

    Pools have 1 to 8 pages of 1 to 3 tokens. Token ids are 0 and 1, so prefixes often agree.

    Checks invariants 1 (counts), 2 (free pages), 4 (whole prefixes) and 5 (old values do not change). Also checks that the longest-idle
    pages are evicted first, and that a look-up changes nothing. The code under test is `nanovllm.state.pool`; patch its functions to test
    a change.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import PrefixMachine
        >>> run_state_machine_as_test(PrefixMachine, settings=settings(max_examples=5, deadline=None))
    """

    def __init__(self) -> None:
        super().__init__()
        self.size, self.num_pages = 1, 0
        self.pool: Pool = pools.init_pool(0, 1)
        self.shadow = ShadowIndex(1)
        self.runs: list[Run] = []
        self.kept = KeptValues()
        self.memory: dict[int, tuple[int, ...]] = {}  # page -> the tokens of the run that filled it, up to its end

    @initialize(num_pages=st.integers(1, 8), page_size=st.integers(1, 3))
    def start(self, num_pages: int, page_size: int) -> None:
        """Start with an empty pool."""
        self.size, self.num_pages = page_size, num_pages
        self.pool, self.shadow = pools.init_pool(num_pages, page_size), ShadowIndex(page_size)

    @rule(tokens=token_ids(max_size=9), index=st.booleans(), most=st.sampled_from([9, 9, 9, 0, 1]))
    def begin(self, tokens: list[int], index: bool, most: int = 9) -> None:
        """Begin a run: it shares `most` indexed pages and allocates the others, which may evict the longest-idle pages."""
        matched = pools.match(self.pool, np.array(tokens, np.int32)).tolist()
        expect(matched == self.shadow.match(tokens), f"{tokens} matched {matched}, not {self.shadow.match(tokens)}", invariant=4)
        for page, key in zip(matched, self.shadow.keys(tokens), strict=False):
            expect(self.memory[page] == key, f"{tokens} got page {page}, which holds {self.memory[page]}", invariant=4)
        matched = matched[:most]
        pool = pools.acquire(self.pool, matched)
        self.shadow.idle = [page for page in self.shadow.idle if page not in matched]
        fresh = self._allocate(pool, pages_for(len(tokens), self.size) - len(matched))
        run = Run(tokens, matched if fresh is None else matched + fresh)
        if fresh is None:
            return self._give_back(run)
        for place, page in enumerate(fresh, len(matched) + 1):
            self.memory[page] = tuple(tokens[: place * self.size])
        self.runs.append(run)
        if index:
            self.index(run, len(tokens))

    @rule(prompts=st.lists(token_ids(max_size=5), min_size=1, max_size=5))
    def serve(self, prompts: list[list[int]]) -> None:
        """Index several runs and end them at once: their pages stay in the index until another run needs them."""
        for tokens in prompts:
            before = len(self.runs)
            self.begin(tokens, True)
            if len(self.runs) > before:
                self._give_back(self.runs.pop())

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def index_later(self, data: st.DataObject) -> None:
        """Index the beginning of a run, some pages of which the index may have by now."""
        run = pick(data, self.runs)
        self.index(run, data.draw(st.integers(0, len(run.tokens))))

    def index(self, run: Run, length: int) -> None:
        """Index the first `length` tokens of a run."""
        tokens = run.tokens[:length]
        self._move(pools.insert(self.pool, np.array(tokens, np.int32), np.array(run.pages, np.int32)))
        self.shadow.insert(tokens, run.pages)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Add a second holder of the beginning of a run."""
        run = pick(data, self.runs)
        length = data.draw(st.integers(1, len(run.tokens)))
        twin = Run(run.tokens[:length], run.pages[: pages_for(length, self.size)])
        self._move(pools.acquire(self.pool, twin.pages))
        self.runs.append(twin)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """End a run: its pages are released."""
        self._give_back(self.runs.pop(data.draw(st.integers(0, len(self.runs) - 1))))

    @rule(count=st.integers(1, 8))
    def press(self, count: int) -> None:
        """Allocate pages and release them without indexing: the longest-idle pages leave the index."""
        fresh = self._allocate(self.pool, count)
        if fresh is not None:
            self._move(pools.release(self.pool, fresh))

    @rule(lost=st.frozensets(st.integers(0, 7), max_size=3))
    def lose(self, lost: frozenset[int]) -> None:
        """Forget idle pages whose KV was overwritten: they and all pages after them leave the index."""
        doomed = self.shadow.with_descendants(lost & frozenset(self.shadow.idle))
        self._move(pools.forget(self.pool, lost & frozenset(self.shadow.idle)))
        for page in doomed:
            self.shadow.drop(page)

    @rule(tokens=token_ids(max_size=9))
    def look_up(self, tokens: list[int]) -> None:
        """Look tokens up: nothing changes."""
        before = freeze(self.pool)
        found = pools.match(self.pool, np.array(tokens, np.int32)).tolist()
        expect(found == self.shadow.match(tokens), f"{tokens} matched {found}, not {self.shadow.match(tokens)}", invariant=4)
        expect(freeze(self.pool) == before, f"looking {tokens} up changed the index")

    @invariant()
    def agrees(self) -> None:
        """Compare keys, pages, idle pages and their order with the shadow, and check the pool's own invariants."""
        check_pool(self.pool, Counter(page for run in self.runs for page in run.pages))
        indexed = dict(indexed_runs(self.pool.prefix))
        expect(indexed == self.shadow.pages, f"the index contains {indexed}, expected {self.shadow.pages}")
        idle = self.pool.prefix.idle_pages()
        expect(idle == self.shadow.idle, f"idle pages {idle}, expected {self.shadow.idle}")
        expect(self.pool.num_available == self.num_pages - len({p for r in self.runs for p in r.pages}), "pages are missing")

    @invariant()
    def old_values_stand(self) -> None:
        """Check invariant 5: old values have not changed."""
        self.kept.require_unchanged()

    def _allocate(self, pool: Pool, count: int) -> list[int] | None:
        short = count - pool.pages.num_free
        taken = pools.allocate(pool, count)
        expect((taken is None) == (count > pool.num_available), f"allocating {count} of {pool.num_available} available pages gave {taken}")
        if taken is None:
            self._move(pool)
            return None
        self._move(taken[0])
        evicted = self.shadow.idle[: max(0, short)]
        for page in evicted:
            expect(page in taken[1], f"page {page} was idle longest, but the evicted pages are {taken[1]}")
        for page in self.shadow.with_descendants(evicted):  # their prefix is not in the index any more, whoever owns them
            self.shadow.drop(page)
        return list(taken[1])

    def _give_back(self, run: Run) -> None:
        self._move(pools.release(self.pool, run.pages))
        held = {page for other in self.runs for page in other.pages}
        self.shadow.idle += [page for page in reversed(run.pages) if page not in held and page in self.shadow.pages.values()]

    def _move(self, pool: Pool) -> None:
        self.kept.keep(self.pool.pages)
        self.kept.keep(self.pool.prefix)
        self.pool = pool
