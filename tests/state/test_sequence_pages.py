"""The pages of one sequence: reserved, copied, written, given up and found again."""

from dataclasses import replace

import pytest

from nanovllm.sampling.params import SamplingParams
from nanovllm.state import pool as pools
from nanovllm.state.chunk import Provenance
from nanovllm.state.pages import init_pages, retain
from nanovllm.state.pool import Pool, init_pool
from nanovllm.state.prefix_cache import init_prefix
from nanovllm.state.request import Request, Sequence
from nanovllm.state.sequence_pages import TOGETHER, give_up_pages, give_up_together, reserve, worth_taking, written_pages
from nanovllm.state.vector import IntVector


def unfilled(num_tokens):
    request = Request(
        request_id=0,
        num_prompt=num_tokens,
        sampling=SamplingParams(),
        seed=0,
        max_len=num_tokens + 4,
        stop_ids=frozenset(),
        arrival=0.0,
    )
    return Sequence(request=request, tokens=IntVector.of(range(num_tokens)), pages=IntVector.of())


def held(num_tokens, num_filled, num_pages=8, page_size=2):
    """A pool, and a sequence that owns pages for its filled tokens."""
    sequence = unfilled(num_tokens)
    done = pools.allocate(init_pool(num_pages, page_size), -(-num_filled // page_size))
    assert done is not None
    return done[0], sequence.with_pages(IntVector.of(done[1]), num_filled)


@pytest.mark.parametrize(("length", "fresh"), [(3, 0), (4, 0), (5, 1), (8, 2)])
def test_reserve_takes_what_is_missing(length, fresh):
    pool, sequence = held(10, 3)
    done = reserve(pool, sequence, length, 2)
    assert done is not None
    after, grown, copies, taken = done
    assert (len(taken), copies) == (fresh, [])
    assert list(grown.pages) == [*sequence.pages, *taken]
    assert after.pages.num_free == pool.pages.num_free - fresh


def test_reserve_copies_a_shared_partial_page_only():
    pool, sequence = held(10, 3)
    shared = Pool(pages=retain(pool.pages, sequence.pages), prefix=pool.prefix)
    done = reserve(shared, sequence, 4, 2)
    assert done is not None
    _, grown, copies, taken = done
    assert copies == [(sequence.pages[1], taken[0])]
    assert list(grown.pages) == [sequence.pages[0], taken[0]]
    assert list(sequence.pages) != list(grown.pages)
    pool, sequence = held(10, 4)
    done = reserve(Pool(pages=retain(pool.pages, sequence.pages), prefix=pool.prefix), sequence, 5, 2)
    assert done is not None and done[2] == []
    assert reserve(shared, held(10, 3)[1], 3, 2) is not None


def test_reserve_is_none_when_the_pool_cannot():
    pool, sequence = held(10, 3, num_pages=2)
    assert reserve(pool, sequence, 5, 2) is None
    shared = Pool(pages=retain(pool.pages, sequence.pages), prefix=pool.prefix)
    assert reserve(shared, sequence, 4, 2) is None
    assert pool.pages.num_free == 0


def test_written_pages():
    _, sequence = held(10, 3)
    sequence = sequence.with_pages(IntVector.of([5, 6, 7]), 3)
    assert written_pages(sequence, 1, 2).tolist() == [6]
    assert written_pages(sequence, 2, 2).tolist() == [6, 7]
    assert written_pages(sequence, 0, 2).tolist() == []


def test_give_up_indexes_whole_filled_pages():
    pool, sequence = held(10, 5)
    pool = give_up_pages(pool, sequence)
    assert pools.match(pool, sequence.tokens.array()).tolist() == list(sequence.pages)[:2]
    assert pool.num_available == 8 and pool.pages.num_free == 6


def test_give_up_indexes_exact_pages_alone():
    pool, sequence = held(10, 7)
    mixed = replace(sequence, provenance=Provenance(operations=("composed",)), exact_len=4)
    pool = give_up_pages(pool, mixed)
    assert pools.match(pool, sequence.tokens.array()).tolist() == list(sequence.pages)[:2]
    assert pool.num_available == 8 and pool.pages.num_free == 6


def test_indexed_pages_are_taken_only_where_they_serve_better():
    pool, sequence = held(4, 4)
    pool = give_up_pages(pool, sequence)
    matched = pools.match(pool, sequence.tokens.array())
    mine = sequence.with_pages(IntVector.of([6]), 2)
    assert worth_taking(pool, matched, unfilled(4), 2)
    assert not worth_taking(pool, matched, sequence, 2)  # no more than it has
    assert not worth_taking(pool, matched, mine, 2)  # idle ones: they are counted as available
    assert worth_taking(pools.acquire(pool, matched[:1]), matched, mine, 2)
    assert not worth_taking(pools.acquire(pool, matched), matched, sequence, 2)  # no more than it has, although others hold them


def test_an_empty_pool_value():
    assert Pool(pages=init_pages(0), prefix=init_prefix(0, 1)).num_available == 0


@pytest.mark.parametrize("kind", ["apart", "one page shared", "same tokens", "one prefix"])
@pytest.mark.parametrize("count", [1, 2, TOGETHER + 3])
def test_sequences_that_give_up_their_pages_together_leave_the_pool_as_one_by_one(kind, count):
    """Counts of owners, free pages in their order, the index, and the order of eviction are the same."""
    pool, sequences = init_pool(256, 2), []
    for i in range(count):
        num_tokens = 3 + i % 5
        done = pools.allocate(pool, -(-num_tokens // 2))
        assert done is not None
        pool, pages = done
        first = 0 if kind == "same tokens" else 100 * i
        tokens = [first + j for j in range(num_tokens + 1)]
        if kind == "one prefix":
            tokens[:2] = [7, 8]
        if kind == "one page shared" and i:
            pages = (sequences[0].pages[0], *pages[1:])
            tokens[:2] = sequences[0].tokens.array(0, 2).tolist()
            pool = pools.acquire(pools.release(pool, [done[1][0]]), [pages[0]])
        request = replace(unfilled(len(tokens)).request, request_id=i, namespace=i % 2 if kind == "apart" else 0)
        sequence = Sequence(request=request, tokens=IntVector.of(tokens), pages=IntVector.of())
        sequences.append(sequence.with_pages(IntVector.of(pages), num_tokens))
    one = pool
    for sequence in sequences:
        one = give_up_pages(one, sequence)
    together = give_up_together(pool, sequences)
    assert together.pages.counts.copy().tolist() == one.pages.counts.copy().tolist()
    assert together.num_free == one.num_free and together.num_available == one.num_available == 256
    for sequence in sequences:
        tokens, namespace = sequence.tokens.array(), sequence.request.namespace
        assert pools.match(together, tokens, namespace).tolist() == pools.match(one, tokens, namespace).tolist()
    assert evicted(together) == evicted(one)


def evicted(pool):
    """All pages, in the order in which the pool hands them out."""
    order = []
    while pool.num_available:
        pool, pages = pools.allocate(pool, 1)
        order += pages
    return order
