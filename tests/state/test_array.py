"""`IntArray` against tuples: every version stays what it was, whichever is written next, and old ones stay small."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.state.array import IntArray

LENGTH = 5


def places(*at: int) -> np.ndarray:
    return np.array(at, np.int32)


@given(data=st.data())
def test_every_version_stays_what_it_was(data):
    versions = [(IntArray.full(LENGTH), (0,) * LENGTH)]
    for value in range(1, data.draw(st.integers(1, 20)) + 1):
        array, shadow = data.draw(st.sampled_from(versions))
        at = data.draw(st.lists(st.integers(0, LENGTH - 1), unique=True))
        changed = tuple(value + place if place in at else old for place, old in enumerate(shadow))
        values = np.array([value + place for place in at], np.int32)
        versions.append((array.put(places(*at), values), changed))
        seen, expected = data.draw(st.sampled_from(versions))
        assert tuple(seen.get(places(*range(LENGTH))).tolist()) == expected
    for array, shadow in versions:
        assert tuple(array.copy().tolist()) == tuple(array[place] for place in range(LENGTH)) == shadow


@pytest.mark.parametrize("place", [-1, LENGTH])
def test_out_of_range(place):
    array = IntArray.full(LENGTH)
    with pytest.raises(IndexError):
        array[place]
    with pytest.raises(IndexError):
        array.get(places(0, place))
    with pytest.raises(IndexError):
        array.put(places(0, place), 1)
    assert array.copy().tolist() == [0] * LENGTH


def test_a_copy_is_the_callers():
    array = IntArray.full(LENGTH)
    array.copy()[0] = 1
    array.get(places(0))[0] = 1
    assert array[0] == 0


def test_the_places_of_a_write_are_the_callers():
    old, at = IntArray.full(LENGTH, 3, np.int64), places(1)
    new = old.put(at, 2**40)
    at[0] = 4
    assert old.copy().tolist() == [3, 3, 3, 3, 3]
    assert new.copy().tolist() == [3, 2**40, 3, 3, 3]


def test_a_write_copies_nothing():
    newest = IntArray.full(1000)
    memory = newest._memory()
    for value in range(1000):
        newest = newest.put(places(value % 7), value)
        assert newest._memory() is memory


def test_an_old_version_holds_a_bounded_past():
    first = newest = IntArray.full(LENGTH)
    for value in range(1000):
        newest = newest.put(places(value % LENGTH), value)
    held, count = first._held, 0
    while not isinstance(held, np.ndarray):
        held, count = held.newer._held, count + 1
    assert count <= LENGTH + 2
    assert first.copy().tolist() == [0] * LENGTH
    assert newest.copy().tolist() == [995, 996, 997, 998, 999]


def test_a_write_that_fails_midway_changes_nothing():
    array = IntArray.full(LENGTH).put(places(1), 7)
    with pytest.raises(ValueError, match="shape"):
        array.put(places(1, 2), np.zeros(3, np.int32))
    assert array.copy().tolist() == [0, 7, 0, 0, 0]
    assert array.put(places(2), 8).copy().tolist() == [0, 7, 8, 0, 0]
