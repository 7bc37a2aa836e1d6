"""The page pool: `PageState` and `PrefixIndex` together, since a page held by the index alone counts as available."""

from dataclasses import dataclass

import numpy as np

from ..errors import BrokenInvariantError, OutOfPagesError
from . import pages as page_ops
from . import prefix as prefix_ops
from .pages import PageState, init_pages
from .prefix import PrefixIndex, init_prefix
from .vector import Ints, as_array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """Owners of the pages, and the index of reusable ones."""

    pages: PageState
    prefix: PrefixIndex

    @property
    def num_available(self) -> int:
        """Pages that an allocation could get: free ones, and those only the index holds."""
        return self.pages.num_free + self.prefix.num_idle


def too_few(pool: Pool, what: str) -> OutOfPagesError:
    """What is raised where the pool cannot give the pages that `what` needs."""
    there = f"{pool.num_available} of {pool.pages.num_pages} pages are available"
    return OutOfPagesError(f"{what}; {there}: release chunks, cancel requests, or make the pool larger")


def init_pool(num_pages: int, page_size: int) -> Pool:
    """A pool of free pages and an empty index."""
    return Pool(pages=init_pages(num_pages), prefix=init_prefix(num_pages, page_size))


def allocate(pool: Pool, count: int) -> tuple[Pool, tuple[int, ...]] | None:
    """Take `count` pages, evicting idle ones where needed; None, and nothing changed, when there are too few."""
    if count > pool.num_available:
        return None
    pages, prefix = pool.pages, pool.prefix
    if count > pages.num_free:
        prefix, evicted = prefix_ops.evict(prefix, count - pages.num_free)
        pages = page_ops.release(pages, evicted)
    taken = page_ops.allocate(pages, count)
    if taken is None:
        raise BrokenInvariantError(f"{count} pages were promised, {pages.num_free} are free")
    return Pool(pages=taken[0], prefix=prefix), taken[1]


def acquire(pool: Pool, held: Ints) -> Pool:
    """Add an owner to pages that are in use or indexed."""
    held = as_array(held)
    if not len(held):
        return pool
    return Pool(pages=page_ops.retain(pool.pages, held), prefix=prefix_ops.set_busy(pool.prefix, held))


def release(pool: Pool, held: Ints) -> Pool:
    """Take an owner from each page of a run, given in order; the deepest page is the first to become evictable.

    A page that stands there twice loses two.
    """
    backwards = as_array(held)[::-1]
    if not len(backwards):
        return pool
    pages, given, left = page_ops.give_back(pool.pages, backwards)
    idle = given[(left == 1) & pool.prefix.contains(given)]
    return Pool(pages=pages, prefix=prefix_ops.set_idle(pool.prefix, idle))


def match(pool: Pool, tokens: np.ndarray) -> np.ndarray:
    """The pages (int32) of the longest indexed prefix of `tokens`."""
    return prefix_ops.match(pool.prefix, tokens)


def insert(pool: Pool, tokens: np.ndarray, held: np.ndarray, start: int) -> Pool:
    """Index the full pages `start ...` of a run of exact KV; the index becomes an owner of the new ones."""
    prefix, added = prefix_ops.insert(pool.prefix, tokens, held, start)
    return Pool(pages=page_ops.retain(pool.pages, added), prefix=prefix) if len(added) else pool


def forget(pool: Pool, lost: frozenset[int]) -> Pool:
    """Take pages whose KV was lost, and all indexed behind them, out of the index."""
    prefix, dropped = prefix_ops.forget(pool.prefix, lost)
    return Pool(pages=page_ops.release(pool.pages, dropped), prefix=prefix) if len(dropped) else pool
