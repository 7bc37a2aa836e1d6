"""`IntVector` against a list: whatever is appended, an older value and its siblings stay what they were."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.state.vector import IntVector, joined


@given(st.data())
def test_every_version_stays_what_it_was(data):
    versions = [(IntVector.of([1, 2, 3]), [1, 2, 3])]
    for _ in range(data.draw(st.integers(1, 25))):
        vector, shadow = versions[data.draw(st.integers(0, len(versions) - 1))]
        kind = data.draw(st.sampled_from(["append", "extend", "truncate", "replace"]))
        if kind == "append":
            made = (vector.append(7), [*shadow, 7])
        elif kind == "extend":
            more = data.draw(st.lists(st.integers(0, 9), max_size=20))
            made = (vector.extend(more), shadow + more)
        elif kind == "truncate":
            length = data.draw(st.integers(0, len(shadow)))
            made = (vector.truncate(length), shadow[:length])
        elif shadow:
            at = data.draw(st.integers(0, len(shadow) - 1))
            made = (vector.replace(at, 5), [*shadow[:at], 5, *shadow[at + 1 :]])
        else:
            continue
        versions.append(made)
    for vector, shadow in versions:
        assert vector.array().tolist() == list(vector) == shadow
        assert len(vector) == len(shadow)


def test_parts_of_vectors():
    vectors = [IntVector.of([1, 2, 3]), IntVector.of(), IntVector.of([4]).extend([5, 6])]
    got = joined([(vectors[0], 1, 9), (vectors[1], 0, 2), (vectors[2], 0, 2), (vectors[2].truncate(1), 0, 3)])
    assert got.tolist() == [2, 3, 4, 5, 4] and got.dtype == joined([]).dtype == np.int32
    target = np.full(4, 9, np.int32)
    vectors[0].copy_to(target)
    assert target.tolist() == [1, 2, 3, 9] and len(joined([])) == 0


def test_a_view_cannot_be_written():
    view = IntVector.of([1, 2]).array()
    assert view.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 3


def test_the_source_is_copied():
    source = np.array([1, 2], np.int32)
    vector = IntVector.of(source)
    source[0] = 9
    assert list(vector) == [1, 2]


@pytest.mark.parametrize("index", [3, -4])
def test_out_of_range(index):
    vector = IntVector.of([1, 2, 3])
    assert vector[-1] == 3
    with pytest.raises(IndexError, match=str(index)):
        vector[index]
    with pytest.raises(IndexError):
        vector.truncate(4)
    with pytest.raises(IndexError):
        vector.replace(3, 0)


def test_appending_is_amortised():
    vector, buffers = IntVector.of(), set()
    for value in range(10_000):
        vector = vector.append(value)
        buffers.add(id(vector.buffer))
    assert len(buffers) < 20
    assert list(vector) == list(range(10_000))
