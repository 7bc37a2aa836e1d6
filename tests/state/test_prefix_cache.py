"""The prefix index over a pool: matching, order of eviction, second copies."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.errors import BrokenInvariantError
from nanovllm.state import pool as pools
from nanovllm.state import prefix_cache as prefix_ops
from nanovllm.state.invariants import check_prefix
from nanovllm.testing.shadows.memory import KeptValues


def ids(*tokens):
    return np.array(tokens, np.int32)


def serve(pool, tokens, size=2):
    """Fill a run in fresh pages, index it and give the pages back."""
    matched = pools.match(pool, tokens).tolist()
    pool = pools.acquire(pool, matched)
    done = pools.allocate(pool, len(tokens) // size - len(matched))
    assert done is not None
    pool, fresh = done
    held = [*matched, *fresh]
    return pools.release(pools.insert(pool, tokens, np.array(held, np.int32)), held), held


def test_only_whole_pages_match():
    pool, held = serve(pools.init_pool(4, 2), ids(1, 2, 3, 4))
    assert pools.match(pool, ids(1, 2, 3)).tolist() == held[:1]
    assert pools.match(pool, ids(1)).tolist() == []
    assert pools.match(pool, ids(1, 2, 3, 4, 5)).tolist() == held


def test_a_key_commits_to_all_earlier_tokens():
    pool, _ = serve(pools.init_pool(4, 2), ids(1, 2, 3, 4))
    assert pools.match(pool, ids(9, 9, 3, 4)).tolist() == []
    assert pools.match(pool, ids(3, 4)).tolist() == []


def test_equal_bytes_at_another_offset_do_not_match():
    pool, _ = serve(pools.init_pool(4, 2), ids(0, 1, 256, 0))
    assert pools.match(pool, ids(1, 256)).tolist() == []


@pytest.mark.parametrize("again", [False, True])
def test_the_longest_idle_run_is_evicted_first(again):
    pool, first = serve(pools.init_pool(4, 2), ids(1, 1, 2, 2))
    pool, second = serve(pool, ids(3, 3, 4, 4))
    if again:
        pool, _ = serve(pool, ids(1, 1, 2, 2))  # used again, so now the younger
    done = pools.allocate(pool, 1)
    assert done is not None
    oldest = second if again else first
    assert done[1] == (oldest[1],)  # its deepest page
    assert pools.match(done[0], ids(1, 1, 2, 2)).tolist() == (first if again else first[:1])
    assert pools.match(done[0], ids(3, 3, 4, 4)).tolist() == (second[:1] if again else second)


def test_looking_up_does_not_count_as_use():
    pool, first = serve(pools.init_pool(4, 2), ids(1, 1))
    pool, _ = serve(pool, ids(2, 2))
    pools.match(pool, ids(1, 1))
    done = pools.allocate(pool, 3)
    assert done is not None and first[0] in done[1]


def test_a_page_in_use_is_never_evicted():
    pool, held = serve(pools.init_pool(2, 2), ids(1, 1, 2, 2))
    pool = pools.acquire(pool, held[:1])
    assert pool.num_available == 1
    assert pools.allocate(pool, 2) is None
    done = pools.allocate(pool, 1)
    assert done is not None and done[1] == (held[1],)
    assert pools.match(done[0], ids(1, 1, 2, 2)).tolist() == held[:1]


def test_a_second_copy_is_not_indexed_but_what_stands_behind_it_is():
    pool, held = serve(pools.init_pool(6, 2), ids(1, 1, 2, 2))
    done = pools.allocate(pool, 3)
    assert done is not None
    own = np.array(done[1], np.int32)
    pool = pools.insert(done[0], ids(1, 1, 2, 2, 3, 3), own)
    assert pools.match(pool, ids(1, 1, 2, 2, 3, 3)).tolist() == [*held, own[2]]
    assert pool.pages.owners(np.array([*held, *own], np.int32)).tolist() == [1, 1, 1, 1, 2]
    assert pools.insert(pool, ids(1, 1, 2, 2, 3, 3), own) is pool
    pool = pools.release(pool, own)
    assert pool.num_available == 6 and pool.pages.num_free == 3
    check_prefix(pool.prefix)


def test_pages_branch_off_in_the_middle_of_a_node():
    index, _ = prefix_ops.insert(prefix_ops.init_prefix(8, 1), ids(1, 2, 3), ids(0, 1, 2))
    index, added = prefix_ops.insert(index, ids(1, 2, 4), ids(5, 6, 7))
    assert added.tolist() == [7] and prefix_ops.match(index, ids(1, 2, 4)).tolist() == [0, 1, 7]
    index, added = prefix_ops.insert(index, ids(1, 2, 5), ids(0, 3, 4))  # the page before its copy is in the node too
    assert added.tolist() == [4] and prefix_ops.match(index, ids(1, 2, 5)).tolist() == [0, 1, 4]
    for page, tokens, found in ((0, ids(2, 3, 9), [1, 2]), (1, ids(4), [7]), (2, ids(3), []), (prefix_ops.ROOT, ids(1, 9), [0])):
        assert prefix_ops.follow(index, page, tokens).tolist() == found
    check_prefix(index)


def test_forgetting_a_page_forgets_all_behind_it():
    pool, held = serve(pools.init_pool(5, 2), ids(1, 1, 2, 2, 3, 3))
    pool, other = serve(pool, ids(1, 1, 4, 4))
    pool = pools.forget(pool, frozenset(held[1:2]))
    assert pools.match(pool, ids(1, 1, 2, 2, 3, 3)).tolist() == held[:1]
    assert pools.match(pool, ids(1, 1, 4, 4)).tolist() == other
    assert pool.num_available == 5
    assert pools.forget(pool, frozenset([4])) is not None


def test_what_stands_behind_an_evicted_page_leaves_the_index_too():
    index = prefix_ops.init_prefix(4, 1)
    index, _ = prefix_ops.insert(index, ids(1, 2, 3), ids(0, 1, 2))
    index, _ = prefix_ops.insert(index, ids(1, 4), ids(0, 3))
    rest, evicted = prefix_ops.evict(prefix_ops.set_idle(index, ids(1, 3)), 1)  # page 2 is held by a chunk with a gap
    assert evicted.tolist() == [1, 2]
    assert prefix_ops.match(rest, ids(1, 2, 3)).tolist() == [0]
    assert prefix_ops.match(rest, ids(1, 4)).tolist() == [0, 3]
    assert rest.num_idle == 1
    rest, evicted = prefix_ops.evict(prefix_ops.set_idle(index, ids(1, 2)), 1)  # both idle: both are free now
    assert (evicted.tolist(), rest.num_idle) == ([1, 2], 0)
    with pytest.raises(BrokenInvariantError, match="page 1 is idle already"):
        prefix_ops.set_idle(prefix_ops.set_idle(index, ids(1)), ids(1))


def test_an_eviction_ends_at_its_count_where_pages_after_an_evicted_one_went_too():
    index, _ = prefix_ops.insert(prefix_ops.init_prefix(4, 1), ids(1, 2), ids(0, 1))
    index, _ = prefix_ops.insert(index, ids(3), ids(2))
    index, _ = prefix_ops.insert(index, ids(4), ids(3))
    index = prefix_ops.set_idle(index, ids(0, 2, 3, 1))  # page 1 is due last and leaves with page 0
    rest, evicted = prefix_ops.evict(index, 2)
    assert evicted.tolist() == [0, 1]
    assert rest.idle_pages() == [2, 3]
    assert prefix_ops.match(rest, ids(3)).tolist() == [2]


def test_what_is_left_of_a_long_run_holds_no_more_memory_than_it_needs():
    index = prefix_ops.init_prefix(1000, 4)
    index, _ = prefix_ops.insert(index, np.arange(4000, dtype=np.int32), np.arange(1000, dtype=np.int32))
    for left in (400, 3):
        pages = np.arange(left, len(index.pages()), dtype=np.int32)[::-1].copy()
        index, evicted = prefix_ops.evict(prefix_ops.set_idle(index, pages), len(pages))
        assert len(evicted) == len(pages)
        run = index.runs[0]
        assert len(run.pages) == left and run.tokens.tolist() == list(range(4 * left))
        for held in (run.pages, run.tokens):
            assert len(held if held.base is None else held.base) <= 2 * len(held)


def test_pages_take_the_places_of_others():
    index, _ = prefix_ops.insert(prefix_ops.init_prefix(8, 1), ids(1, 2, 3), ids(0, 1, 2))
    index, _ = prefix_ops.insert(index, ids(1, 2, 4), ids(0, 1, 3))
    swapped = prefix_ops.swap(prefix_ops.set_idle(index, ids(2, 1)), ids(0, 1), ids(5, 6))
    check_prefix(swapped)
    assert prefix_ops.match(swapped, ids(1, 2, 3)).tolist() == [5, 6, 2]
    assert prefix_ops.match(swapped, ids(1, 2, 4)).tolist() == [5, 6, 3]
    assert swapped.idle_pages() == [2] and prefix_ops.match(index, ids(1, 2, 4)).tolist() == [0, 1, 3]
    for old, new in ((ids(7), ids(4)), (ids(2), ids(3))):
        with pytest.raises(BrokenInvariantError, match="take their places"):
            prefix_ops.swap(swapped, old, new)


def test_runs_are_looked_through_once_an_eviction(monkeypatch):
    """However many idle pages stand before some that are held."""
    calls = []
    found = prefix_ops._children
    monkeypatch.setattr(prefix_ops, "_children", lambda index: calls.append(1) or found(index))
    monkeypatch.setattr(prefix_ops, "NEAR", 3)
    index = prefix_ops.init_prefix(40, 1)
    for chain in range(20):  # the first page of each idle, the second held
        index, _ = prefix_ops.insert(index, ids(chain, 100), ids(2 * chain, 2 * chain + 1))
    index, evicted = prefix_ops.evict(prefix_ops.set_idle(index, np.arange(0, 40, 2, dtype=np.int32)), 20)
    assert sorted(evicted.tolist()) == list(range(40)) and not index.runs and len(calls) == 1
    check_prefix(index)


class Plain:
    """The index page by page: what stands before each, its tokens, and the idle pages in order."""

    def __init__(self):
        self.before, self.tokens, self.idle = {}, {}, []

    def match(self, tokens, size):
        found = []
        for start in range(0, len(tokens) // size * size, size):
            key = (found[-1] if found else prefix_ops.ROOT, tuple(tokens[start : start + size]))
            found += [page for page in self.before if (self.before[page], self.tokens[page]) == key]
            if len(found) * size <= start:
                break
        return found

    def insert(self, tokens, pages, size):
        known, added = self.match(tokens, size), []
        parent = known[-1] if known else prefix_ops.ROOT
        for place in range(len(known), min(len(tokens) // size, len(pages))):
            page = pages[place]
            self.before[page], self.tokens[page] = parent, tuple(tokens[place * size :][:size])
            added.append(page)
            parent = page
        return added

    def drop(self, page):
        gone = [page]
        for other in gone:
            gone += [p for p in self.before if self.before[p] == other]
        for other in gone:
            del self.before[other], self.tokens[other]
        self.idle = [p for p in self.idle if p not in gone]
        return gone

    def swap(self, to):
        self.before = {to.get(page, page): to.get(parent, parent) for page, parent in self.before.items()}
        self.tokens = {to.get(page, page): own for page, own in self.tokens.items()}
        self.idle = [page for page in self.idle if page not in to]

    def evict(self, count):
        gone, wanted = [], max(0, len(self.idle) - count)
        while len(self.idle) > wanted:
            gone += self.drop(self.idle[0])
        return gone


@settings(deadline=None, max_examples=60)
@given(random=st.randoms(use_true_random=True), num_pages=st.integers(2, 12), size=st.integers(1, 2))
def test_runs_do_what_single_pages_would(random, num_pages, size):
    index, plain, kept = prefix_ops.init_prefix(num_pages, size), Plain(), KeptValues()

    def tokens_of():
        return [random.randrange(2) for _ in range(random.randrange(7 * size))]

    def some(pages):
        return random.sample(pages, random.randint(0, len(pages)))

    for _ in range(30):
        kept.keep(index)
        match random.choice(["insert", "insert", "copy", "idle", "busy", "evict", "forget", "swap"]):
            case "insert" | "copy" as how:  # behind what is there, or in pages of its own from the first on
                tokens = tokens_of()
                pages = plain.match(tokens, size)[: random.randint(0, 6)] if how == "insert" else []
                pages += some([page for page in range(num_pages) if page not in plain.before])
                index, added = prefix_ops.insert(index, ids(*tokens), ids(*pages))
                assert added.tolist() == plain.insert(tokens, pages, size)
            case "idle":  # in any order: pages may become evictable before those behind them
                pages = some([page for page in plain.before if page not in plain.idle])
                index = prefix_ops.set_idle(index, ids(*pages))
                plain.idle += pages
            case "busy":
                pages = some(list(range(num_pages)) * 2)
                index = prefix_ops.set_busy(index, ids(*pages))
                plain.idle = [page for page in plain.idle if page not in pages]
            case "evict":
                count = random.randint(0, len(plain.idle) + 1)
                index, gone = prefix_ops.evict(index, count)
                assert sorted(gone.tolist()) == sorted(plain.evict(count))
            case "forget":
                lost = some(list(range(num_pages)))[:2]
                index, gone = prefix_ops.forget(index, frozenset(lost))
                assert sorted(gone.tolist()) == sorted(p for page in lost if page in plain.before for p in plain.drop(page))
            case "swap":  # whatever stands behind them, and with whatever is swapped too
                old, new = some(list(plain.before)), some([page for page in range(num_pages) if page not in plain.before])
                to = dict(zip(old, new, strict=False))
                index = prefix_ops.swap(index, ids(*to), ids(*to.values()))
                plain.swap(to)
        check_prefix(index)
        assert {page: index.before(page) for page in index.pages()} == plain.before
        assert index.idle_pages() == plain.idle and index.num_idle == len(plain.idle)
        tokens = tokens_of()
        assert prefix_ops.match(index, ids(*tokens)).tolist() == plain.match(tokens, size)
        kept.require_unchanged()
