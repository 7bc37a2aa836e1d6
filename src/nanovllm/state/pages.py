"""`PageState`: which pages are free, and how many owners each other page has. Persistent: a call never changes an older value."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from nanovllm.errors import BrokenInvariantError
from nanovllm.state.array import IntArray
from nanovllm.state.vector import Ints, as_array

FreeList = tuple[int, Any] | None  # (page, rest); an alias that names itself cannot be checked at run time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageState:
    """The free pages of a pool, and the number of owners of each other page.

    A value never changes: each call returns a new one. The cost of a call does not depend on the size of the pool.

    Attributes:
        num_pages: Pages of the pool, without the dummy page.
        num_used: Pages that have an owner.
        counts: The number of owners of each page.
        returned: The pages that were given back, newest first, as a linked list.
        unused: The first page that was never handed out; all later ones are free too.

    Examples:
        >>> state, chunk = nv.prefill(model, state, "Once upon a time")
        >>> state.pages
        PageState(1 of 64 pages used)
    """

    num_pages: int
    num_used: int
    counts: IntArray
    returned: FreeList
    unused: int

    @property
    def num_free(self) -> int:
        """The number of pages without an owner.

        Examples:
            >>> state.pages.num_free
            64
        """
        return self.num_pages - self.num_used

    @property
    def refcounts(self) -> dict[int, int]:
        """Every page that has owners, with their number. The cost grows with the pool: meant for `check` and for tests.

        Examples:
            >>> state, chunk = nv.prefill(model, state, "Once upon a time")
            >>> state, copy = nv.fork(state, chunk)
            >>> state.pages.refcounts
            {0: 2}
        """
        counts = self.counts.copy()
        return {int(page): int(counts[page]) for page in np.flatnonzero(counts)}

    def __repr__(self) -> str:
        return f"PageState({self.num_used} of {self.num_pages} pages used)"

    def refcount(self, page: int) -> int:
        """Return the number of owners of `page`, 0 if it is free.

        Args:
            page: The number of a page.

        Returns:
            The number of chunks, sequences and index entries that own the page.

        Raises:
            IndexError: The pool has no such page.

        Examples:
            >>> state, chunk = nv.prefill(model, state, "Once upon a time")
            >>> state.pages.refcount(chunk.pages[0]), state.pages.refcount(63)
            (1, 0)
        """
        return self.counts[page]

    def owners(self, held: np.ndarray) -> np.ndarray:
        """Return the number of owners of each of several pages.

        Args:
            held: The pages, int32.

        Returns:
            An int32 array of the same shape.

        Raises:
            BrokenInvariantError: A page is not in the pool.

        Examples:
            >>> state, chunk = nv.prefill(model, state, "Once upon a time")
            >>> state.pages.owners(chunk.pages.array()).tolist()
            [1]
        """
        try:
            return self.counts.get(held)
        except IndexError:
            outside = [page for page in held.tolist() if not 0 <= page < self.num_pages]
            raise BrokenInvariantError(f"pages {outside[:8]} are not in a pool of {self.num_pages}") from None


def init_pages(num_pages: int) -> PageState:
    """A pool of free pages `0 ... num_pages - 1`."""
    return PageState(num_pages=num_pages, num_used=0, counts=IntArray.full(num_pages), returned=None, unused=0)


def allocate(pages: PageState, count: int) -> tuple[PageState, tuple[int, ...]] | None:
    """Take `count` free pages, with one owner each. Returns None, and takes nothing, if there are fewer."""
    if count > pages.num_free:
        return None
    if count == 0:
        return pages, ()
    taken, returned, unused = _upcoming(pages, count)
    counts = pages.counts.put(np.array(taken, np.int32), 1)
    used = pages.num_used + count
    return PageState(num_pages=pages.num_pages, num_used=used, counts=counts, returned=returned, unused=unused), taken


def upcoming(pages: PageState, count: int) -> tuple[int, ...] | None:
    """The pages that `allocate` would hand out, in a third of its time; None if there are fewer."""
    return _upcoming(pages, count)[0] if count <= pages.num_free else None


def _upcoming(pages: PageState, count: int) -> tuple[tuple[int, ...], FreeList, int]:
    returned, unused = pages.returned, pages.unused
    taken = []
    while returned is not None and len(taken) < count:
        page, returned = returned
        taken.append(page)
    missing = count - len(taken)
    return (*taken, *range(unused, unused + missing)), returned, unused + missing


def retain(pages: PageState, held: Ints) -> PageState:
    """Add an owner to each page. Raises `BrokenInvariantError` for a free page."""
    unique, times = distinct(as_array(held))
    owners = pages.owners(unique)
    if not owners.all():
        raise BrokenInvariantError(f"page {unique[owners == 0][0]} is free and cannot be retained")
    counts = pages.counts.put(unique, owners + times)
    return PageState(num_pages=pages.num_pages, num_used=pages.num_used, counts=counts, returned=pages.returned, unused=pages.unused)


def release(pages: PageState, held: Ints) -> PageState:
    """Remove an owner from each page; a page without owners is free. Raises `BrokenInvariantError` for a page that is already free."""
    return give_back(pages, held)[0]


def give_back(pages: PageState, held: Ints) -> tuple[PageState, np.ndarray, np.ndarray]:
    """Do as `release`, and return each page once, in the order given, with the number of owners that it has left."""
    held = as_array(held)
    unique, times = distinct(held)
    left = pages.owners(unique) - times
    if (left < 0).any():
        raise BrokenInvariantError(f"page {unique[left < 0][0]} is free already: a double free")
    counts, returned = pages.counts.put(unique, left), pages.returned
    if unique is not held:
        unique = np.array(list(dict.fromkeys(held.tolist())), np.int32)
        left = counts.get(unique)
    freed = [] if left.all() else unique[left == 0].tolist()
    for page in freed:
        returned = (page, returned)
    used = pages.num_used - len(freed)
    return PageState(num_pages=pages.num_pages, num_used=used, counts=counts, returned=returned, unused=pages.unused), unique, left


def distinct(held: np.ndarray) -> tuple[np.ndarray, np.ndarray | int]:
    """Each page once, and how often it was given."""
    if len(held) < 2:
        return held, 1
    ordered = np.sort(held)
    return np.unique(held, return_counts=True) if (ordered[1:] == ordered[:-1]).any() else (held, 1)


def require_writable(pages: PageState, written: Ints) -> None:
    """Raise `BrokenInvariantError` unless each page has exactly one owner (invariant 3)."""
    written = as_array(written)
    if not len(written):
        return
    owners = pages.owners(written)
    if (owners != 1).any():
        page, count = written[owners != 1][0], owners[owners != 1][0]
        raise BrokenInvariantError(f"page {page} has {count} owners and cannot be written; exactly one is needed")


def free_pages(pages: PageState) -> list[int]:
    """Every free page. The cost grows with the pool: meant for `check` and for tests."""
    free, rest = [], pages.returned
    while rest is not None:
        page, rest = rest
        free.append(page)
    return free + list(range(pages.unused, pages.num_pages))
