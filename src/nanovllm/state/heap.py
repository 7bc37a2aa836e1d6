"""A persistent heap: the least of some keys. It is a leftist heap of tuples, so each call makes O(log n) of them and changes none."""

from typing import Any, NamedTuple


class Heap(NamedTuple):
    """A heap that is not empty; None is the empty one.

    Attributes:
        least: The least key.
        height: One more than the height of `right`, which is the lower of the two.
        left: The keys of one half, none of them less than `least`.
        right: Those of the other half.
    """

    least: Any
    height: int
    left: "Heap | None"
    right: "Heap | None"


def merged(one: Heap | None, other: Heap | None) -> Heap | None:
    """The heap of the keys of two heaps."""
    if one is None or other is None:
        return other if one is None else one
    if other.least < one.least:
        one, other = other, one
    left, right = one.left, merged(one.right, other)
    assert right is not None
    if left is None or left.height < right.height:
        left, right = right, left
    return Heap(one.least, 1 + (0 if right is None else right.height), left, right)


def pushed(heap: Heap | None, key: Any) -> Heap:
    """The heap with one more key."""
    grown = merged(heap, Heap(key, 1, None, None))
    assert grown is not None
    return grown


def popped(heap: Heap) -> Heap | None:
    """The heap without its least key."""
    return merged(heap.left, heap.right)
