"""`PageState`: which pages are free and how many owners each other page has. Persistent: no call changes an older value."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from immutables import Map

from ..errors import BrokenInvariantError

FreeList = tuple[int, Any] | None  # (page, rest); an alias that names itself cannot be checked at run time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageState:
    """Owners of `num_pages` pages. `refcounts` has every page with an owner; `returned` lists pages given back, newest first;
    pages from `unused` on were never handed out. Size and cost of a call do not depend on the size of the pool."""

    num_pages: int
    refcounts: Map[int, int]
    returned: FreeList
    unused: int

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return self.num_pages - len(self.refcounts)

    def __repr__(self) -> str:
        return f"PageState({len(self.refcounts)} of {self.num_pages} pages used)"

    def refcount(self, page: int) -> int:
        """Owners of `page`; 0 when it is free."""
        return self.refcounts.get(page, 0)


def init_pages(num_pages: int) -> PageState:
    """A pool of free pages `0 ... num_pages - 1`."""
    return PageState(num_pages=num_pages, refcounts=Map(), returned=None, unused=0)


def allocate(pages: PageState, count: int) -> tuple[PageState, tuple[int, ...]] | None:
    """Take `count` free pages, one owner each; None, and nothing taken, when there are fewer."""
    if count > pages.num_free:
        return None
    if count == 0:
        return pages, ()
    taken, returned, unused = _upcoming(pages, count)
    refcounts = pages.refcounts.update(dict.fromkeys(taken, 1))
    return PageState(num_pages=pages.num_pages, refcounts=refcounts, returned=returned, unused=unused), taken


def upcoming(pages: PageState, count: int) -> tuple[int, ...] | None:
    """The pages that `allocate` would hand out, in a third of its time; None when there are fewer."""
    return _upcoming(pages, count)[0] if count <= pages.num_free else None


def _upcoming(pages: PageState, count: int) -> tuple[tuple[int, ...], FreeList, int]:
    returned, unused = pages.returned, pages.unused
    taken = []
    while returned is not None and len(taken) < count:
        page, returned = returned
        taken.append(page)
    missing = count - len(taken)
    return (*taken, *range(unused, unused + missing)), returned, unused + missing


def retain(pages: PageState, held: Iterable[int]) -> PageState:
    """Add an owner to each page. Raises `BrokenInvariantError` for a free page."""
    counts = pages.refcounts.mutate()
    for page in held:
        if page not in counts:
            raise BrokenInvariantError(f"page {page} is free and cannot be retained")
        counts[page] = counts[page] + 1
    refcounts = counts.finish()
    return PageState(num_pages=pages.num_pages, refcounts=refcounts, returned=pages.returned, unused=pages.unused)


def release(pages: PageState, held: Iterable[int]) -> PageState:
    """Take an owner from each page; a page without owners is free. Raises `BrokenInvariantError` for a page that is already free."""
    returned = pages.returned
    counts = pages.refcounts.mutate()
    for page in held:
        owners = counts.get(page, 0)
        if owners == 0:
            raise BrokenInvariantError(f"page {page} is free already: a double free")
        if owners == 1:
            del counts[page]
            returned = (page, returned)
        else:
            counts[page] = owners - 1
    refcounts = counts.finish()
    return PageState(num_pages=pages.num_pages, refcounts=refcounts, returned=returned, unused=pages.unused)


def require_writable(pages: PageState, written: Iterable[int]) -> None:
    """Raise `BrokenInvariantError` unless each page has exactly one owner (invariant 3)."""
    for page in written:
        owners = pages.refcount(page)
        if owners != 1:
            raise BrokenInvariantError(f"page {page} has {owners} owners and cannot be written; exactly one is needed")


def free_pages(pages: PageState) -> list[int]:
    """Every free page; linear in the pool, for `check` and tests."""
    found, rest = [], pages.returned
    while rest is not None:
        page, rest = rest
        found.append(page)
    return found + list(range(pages.unused, pages.num_pages))
