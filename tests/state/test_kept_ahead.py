"""Pages that go to host memory before they are evicted: the first ones to be evicted, each once, and no more than there is need for."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.state import offload
from nanovllm.state import pool as pools
from nanovllm.state import prefix_cache as prefix_ops
from nanovllm.state.kept_ahead import keep_ahead
from nanovllm.state.offload import Rates, init_host
from nanovllm.state.pool import Pool, init_pool
from nanovllm.state.prefix_keys import keys_of

RATES = Rates(tokens_per_second=1.0, bytes_per_second=1e9)


def pool_of(num_pages: int, num_host_pages: int, *requests: int) -> Pool:
    """A pool whose index has the pages of requests that have ended; `requests` are their numbers of pages."""
    pool = init_pool(num_pages, 1, host=init_host(num_host_pages, 1, RATES))
    for number, count in enumerate(requests):
        pool, _ = run(pool, number, count)
    return pool


def run(pool: Pool, number: int, count: int) -> tuple[Pool, int]:
    """Run a request of so many pages to its end. Returns how many pages its plan has copied out."""
    done = pools.allocate(pools.planning(pool), count)
    assert done is not None and done[0].host is not None
    pool, fresh = done
    host, moves = offload.settled(pool.host)
    pool = replace(pool, host=host)
    pool = pools.insert(pool, np.arange(count, dtype=np.int32) + 1000 * number, np.array(fresh, np.int32))
    return pools.release(pool, fresh), len(moves.out)


def kept(pool: Pool) -> list[int]:
    """The pages of the index that host memory has, in the order of their eviction."""
    assert pool.host is not None
    pages = pool.prefix.idle_pages()
    keys = keys_of(pool.prefix, np.array(pages, np.int32))
    return [page for page, key in zip(pages, keys, strict=True) if key in pool.host.by_key]


@settings(deadline=None, max_examples=80)
@given(requests=st.lists(st.integers(1, 9), min_size=1, max_size=8), longest=st.integers(1, 40), data=st.data())
def test_the_pages_to_be_evicted_first_are_kept_in_pieces_of_any_size(requests: list[int], longest: int, data: st.DataObject):
    pool, copied = pool_of(80, 200, *requests), list[int]()
    while (done := keep_ahead(pool, longest, most := data.draw(st.integers(1, 6)))) is not None:
        pool, moves = done
        assert len(moves.out) <= most
        copied.extend(moves.out.values())
        if pool.host is None or not pool.host.behind:
            break
    assert len(copied) == len(set(copied)) and sorted(copied) == sorted(kept(pool))
    wanted = max(longest, 80 // 4) - pool.num_free
    order = pool.prefix.idle_pages()
    assert kept(pool) == order[: len(copied)]
    assert len(copied) >= min(wanted, len(order)) and len(copied) < max(0, wanted) + 9


@settings(deadline=None, max_examples=60)
@given(requests=st.lists(st.integers(1, 12), min_size=4, max_size=12))
def test_requests_evict_nothing_that_was_not_copied(requests: list[int]):
    pool = pool_of(24, 200)
    for number, count in enumerate(requests):
        pool, copied = run(pool, number, count)
        assert not copied
        while (done := keep_ahead(pool, 12, 3)) is not None:
            pool = done[0]
            if pool.host is None or not pool.host.behind:
                break


def test_a_page_that_was_used_again_is_looked_at_again():
    pool = pool_of(8, 32, 4)
    done = keep_ahead(pool, 8, 2)
    assert done is not None and len(done[1].out) == 2
    pool, held = done[0], np.array([0, 1, 2, 3], np.int32)
    pool = pools.release(pools.acquire(pool, held), held)
    done = keep_ahead(pool, 8, 9)
    assert done is not None and len(done[1].out) == 2 and len(kept(done[0])) == 4


def test_the_rest_of_a_group_is_copied_when_it_is_evicted():
    done = keep_ahead(pool_of(8, 64, 2, 4), 8, 3)
    assert done is not None and len(done[1].out) == 3
    _, copied = run(done[0], 7, 8)
    assert copied == 3


def test_nothing_is_kept_while_enough_pages_are_free():
    assert keep_ahead(pool_of(16, 32, 4, 4), 8, 99) is None
    assert keep_ahead(pool_of(16, 32, 4, 4), 9, 99) is not None
    assert keep_ahead(init_pool(16, 1), 16, 99) is None


def test_at_most_half_of_host_memory_is_used():
    done = keep_ahead(pool_of(16, 8, 3, 3, 3, 3, 3), 16, 99)
    assert done is not None and len(kept(done[0])) == 3  # with the free page they are the four that may be kept


def test_at_most_half_of_host_memory_is_used_for_a_group_that_is_larger():
    pool = pool_of(16, 8, 15)  # one page is free, so three of the group are among the first ones
    copied = list[int]()
    for most in (2, 99, 99):
        if (done := keep_ahead(pool, 16, most)) is not None:
            pool, moves = done
            copied.extend(moves.out.values())
    assert copied == pool.prefix.idle_pages()[:4] == kept(pool)
    assert pool.host is not None and not pool.host.behind


def test_lost_host_pages_are_looked_for_again():
    done = keep_ahead(pool_of(4, 32, 3), 4, 99)
    assert done is not None
    pool = pools.forget_host(done[0], frozenset(done[1].out))
    pool, copied = run(pool, 7, 4)
    assert copied == 3


def test_the_order_begins_anew_where_the_last_page_has_gone():
    index = pool_of(8, 8, 4).prefix
    pages, place, more = prefix_ops.idle_from(index, (0, -1), 4, 2, 9)
    assert pages.tolist() == index.idle_pages()[:2] and more
    rest, _, more = prefix_ops.idle_from(index, place, 4, 9, 9)
    assert rest.tolist() == index.idle_pages()[2:] and not more
    index, _ = prefix_ops.evict(index, 2)
    again, _, _ = prefix_ops.idle_from(index, place, 4, 9, 9)
    assert again.tolist() == index.idle_pages()
