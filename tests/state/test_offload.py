"""Which host pages are kept, found, replaced and lost; and when a copy is worth it."""

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.errors import BrokenInvariantError
from nanovllm.state import offload
from nanovllm.state.invariants import check_host
from nanovllm.state.offload import HostPages, Rates, init_host, worth_loading
from nanovllm.state.prefix_keys import keys_from
from nanovllm.testing.shadows.memory import freeze

RATES = Rates(tokens_per_second=1000.0, bytes_per_second=1e6)


def ints(values) -> np.ndarray:
    return np.array(values, np.int32)


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def kept(host: HostPages, pages, names) -> tuple[HostPages, offload.Moves]:
    return offload.settled(offload.keep(offload.planning(host), ints(pages), keys(*names)))


def names_in(host: HostPages) -> set[str]:
    return {key.decode() for key in host.by_key}


def test_a_copy_is_worth_it_if_it_takes_less_time_than_the_tokens():
    assert worth_loading(1000, 100_000, RATES)  # a second against a tenth
    assert not worth_loading(100, 100_000, RATES)
    assert not worth_loading(0, 0, RATES)


def test_tokens_with_context_take_longer_and_are_sooner_worth_a_copy():
    rates = replace(RATES, context_doubling=500.0)
    assert RATES.seconds_to_run(0, 1000) == RATES.seconds_to_run(1000, 2000) == 1.0
    assert rates.seconds_to_run(0, 1000) == pytest.approx(2.0)  # on average a token has a context of 500 tokens
    assert rates.seconds_to_run(0, 400) + rates.seconds_to_run(400, 1000) == pytest.approx(2.0)
    assert worth_loading(100, 100_000, rates, start=50) and not worth_loading(100, 100_000, RATES, start=50)
    assert not worth_loading(100, 150_000, rates) and worth_loading(100, 150_000, rates, start=1000)


@given(st.integers(0, 99), st.integers(0, 99), st.sampled_from([1.0, 7.0, 40.0]), st.sampled_from([0.5, 30.0]))
def test_the_widest_window_bounds_the_context_of_a_token(start, count, window, doubling):
    """The time is that of its tokens one by one; a token in the middle of its second has half a token of context more than at its start."""
    rates = replace(RATES, context_doubling=doubling, most_context=window)
    each = [(1 + min(at + 0.5, window) / doubling) / 1000 for at in range(start, start + count)]
    assert rates.seconds_to_run(start, start + count) == pytest.approx(sum(each))


@given(st.integers(0, 10**6), st.integers(0, 10**9), st.floats(1, 1e7), st.floats(1, 1e12), st.floats(1, 1e9), st.integers(0, 10**6))
def test_fewer_bytes_or_more_tokens_or_more_context_never_make_a_copy_less_worth(num_tokens, num_bytes, tokens, size, doubling, start):
    rates = Rates(tokens_per_second=tokens, bytes_per_second=size, context_doubling=doubling)
    if worth_loading(num_tokens, num_bytes, rates, start):
        assert worth_loading(num_tokens + 1, num_bytes, rates, start)
        assert worth_loading(num_tokens, num_bytes // 2, rates, start)
        assert worth_loading(num_tokens, num_bytes, rates, start + 1)


def test_without_a_plan_nothing_is_kept():
    host = init_host(4, 10, RATES)
    assert offload.keep(host, ints([1]), keys("a")) is host


def test_the_host_page_used_least_recently_is_replaced_first():
    host, _ = kept(init_host(2, 10, RATES), [5, 6], ["a", "b"])
    host, moves = kept(host, [7], ["a"])  # there already: not copied again, but used
    assert not moves.out
    host, moves = kept(host, [8], ["c"])
    assert names_in(host) == {"a", "c"} and list(moves.out.values()) == [8]
    check_host(host)


def test_of_too_many_pages_those_that_come_first_in_their_prompt_are_kept():
    host, moves = kept(init_host(2, 10, RATES), [3, 2, 1], ["c", "b", "a"])  # pages are evicted from the last one on
    assert names_in(host) == {"a", "b"} and sorted(moves.out.values()) == [1, 2]
    check_host(host)


def test_a_page_kept_and_replaced_in_one_plan_is_not_copied():
    host = offload.keep(offload.planning(init_host(1, 10, RATES)), ints([4]), keys("a"))
    host, moves = offload.settled(offload.keep(host, ints([5]), keys("b")))
    assert names_in(host) == {"b"} and list(moves.out.items()) == [(0, 5)]


def test_a_host_page_that_is_read_is_not_replaced_in_the_same_plan():
    host, _ = kept(init_host(2, 10, RATES), [5, 6], ["a", "b"])
    read = [host.by_key[b"a"]]
    host = offload.load(offload.read(offload.planning(host), read), read, [(read[0], 9)])
    host, moves = offload.settled(offload.keep(host, ints([7, 8]), keys("c", "d")))
    assert names_in(host) == {"a", "d"} and moves.into == ((read[0], 9),) and list(moves.out.values()) == [8]
    check_host(host)
    host, _ = kept(host, [4], ["e"])
    assert names_in(host) == {"a", "e"}  # what was read is replaced last


def test_lost_host_pages_are_not_found_and_are_free():
    host, _ = kept(init_host(2, 10, RATES), [5, 6], ["a", "b"])
    before, lost = freeze(host), host.by_key[b"a"]
    after = offload.forget(host, [lost])
    assert names_in(after) == {"b"} and after.used.num_free == 1 and freeze(host) == before
    assert freeze(offload.forget(after, [lost])) == freeze(after)
    check_host(after)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=9), st.integers(1, 3), st.data())
def test_find_returns_the_host_pages_in_a_row(tokens, size, data):
    made = list(keys_from(ints(tokens), 0, size))
    there = data.draw(st.lists(st.booleans(), min_size=len(made), max_size=len(made)))
    host = offload.planning(init_host(len(made) + 1, 10, RATES))
    held = [key for key, one in zip(made, there, strict=True) if one]
    host, _ = offload.settled(offload.keep(host, np.arange(len(held), dtype=np.int32), held))
    start = data.draw(st.integers(0, len(made)))
    found = offload.find(host, ints(tokens), start, size)
    count = next((i for i, one in enumerate(there[start:]) if not one), len(made) - start)
    assert found == [host.by_key[key] for key in made[start : start + count]]


def test_check_names_what_is_wrong():
    host, _ = kept(init_host(2, 10, RATES), [5, 6], ["a", "b"])
    with pytest.raises(BrokenInvariantError, match="invariant 16, 'host pages'"):
        check_host(offload.replace(host, by_key=host.by_key.set(b"a", 1)))
    with pytest.raises(BrokenInvariantError, match="invariant 16, 'host pages'"):
        check_host(offload.planning(host))
    with pytest.raises(BrokenInvariantError, match="invariant 16, 'host order'"):
        check_host(offload.replace(host, ages=offload.lru.remove(host.ages, ints([0]))))


@given(st.integers(1, 4), st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=True), max_size=12))
def test_it_agrees_with_an_ordered_dict(num_pages, plans):
    """Each plan evicts pages with these keys; those used least recently are replaced."""
    host, shadow = init_host(num_pages, 10, RATES), OrderedDict()
    for plan in plans:
        before, content = host, freeze(host)
        host, moves = kept(host, plan, [str(key) for key in plan])
        known = [key for key in plan if key in shadow]
        fresh = [key for key in plan if key not in shadow]
        rest = [key for key in shadow if key not in known]
        while rest and len(shadow) + len(fresh) > num_pages:
            del shadow[rest.pop(0)]
        fresh = fresh[max(0, len(shadow) + len(fresh) - num_pages) :]
        for key in plan:
            if key in known or key in fresh:
                shadow[key] = None
                shadow.move_to_end(key)
        assert names_in(host) == {str(key) for key in shadow}
        assert [host.key_of[at].decode() for at in host.ages.pages()] == [str(key) for key in shadow]
        assert {host.key_of[at].decode(): page for at, page in moves.out.items()} == {str(key): key for key in fresh}
        assert freeze(before) == content
        check_host(host)
