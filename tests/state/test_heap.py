"""The persistent heap: the least key, whatever was pushed and popped before."""

from hypothesis import given
from hypothesis import strategies as st

from nanovllm.state.heap import Heap, popped, pushed


def keys(heap: Heap | None) -> list[int]:
    found = []
    while heap is not None:
        found.append(heap.least)
        heap = popped(heap)
    return found


def height(heap: Heap | None) -> int:
    """The length of the right edge, which every call walks down; checks what is noted about it."""
    if heap is None:
        return 0
    assert height(heap.left) >= height(heap.right) == heap.height - 1
    return heap.height


@given(st.lists(st.one_of(st.integers(-9, 9), st.none()), max_size=60))
def test_the_least_first_and_old_values_stay(calls):
    heap, shadow, kept = None, [], []
    for call in calls:
        if call is not None:
            heap, shadow = pushed(heap, call), sorted([*shadow, call])
        elif heap is not None:
            heap, shadow = popped(heap), shadow[1:]
        kept.append((heap, shadow))
        height(heap)
    for old, expected in kept:
        assert keys(old) == expected


def test_the_right_edge_is_short():
    heap = None
    for key in range(4096):
        heap = pushed(heap, key)
    assert height(heap) <= 13
