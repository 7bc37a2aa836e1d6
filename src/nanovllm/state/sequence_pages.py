"""The pages of one sequence: what it is given before it writes, which of them it writes, and what it leaves when it gives way.

A sequence reads pages that others hold too and writes only those that are its own. So before tokens run `reserve` finds it the pages that
are missing, and where the first of these tokens falls into a page that somebody else also holds, a copy of that page. `give_up_pages` puts
what is filled into the index, where this sequence, or another with the same tokens, finds it again; `worth_taking` says whether what is
found there is better than what it has. Pools and sequences that are passed in stay as they are.
"""

from collections.abc import Sequence as Seq

import numpy as np

from nanovllm.state import pool as pools
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.pool import Pool
from nanovllm.state.request import Sequence

Reserved = tuple[Pool, Sequence, list[tuple[int, int]], tuple[int, ...]]


def reserve(pool: Pool, sequence: Sequence, length: int, page_size: int) -> Reserved | None:
    """Give a sequence pages of its own for tokens `num_filled ... length - 1`; None when the pool cannot.

    A partly filled page that somebody else also holds is replaced by a copy (the returned (source, destination) pairs). The reference on
    the source stays with the caller until the copy is made. Last come the pages taken.
    """
    held, filled = sequence.pages, sequence.num_filled
    shared = length > filled and shares_tail(pool, sequence, page_size)
    missing = max(0, pages_for(length, page_size) - len(held))
    if not shared and not missing:
        return pool, sequence, [], ()
    taken = pools.allocate(pool, missing + shared)
    if taken is None:
        return None
    pool, fresh = taken
    copies = []
    if shared:
        at = filled // page_size
        copies.append((held[at], fresh[0]))
        held = held.replace(at, fresh[0])
    if missing:
        held = held.extend(fresh[shared:])
    return pool, sequence.with_pages(held, filled), copies, fresh


def shares_tail(pool: Pool, sequence: Sequence, page_size: int) -> bool:
    """Whether the page of the next token is partly filled and somebody else holds it too."""
    filled = sequence.num_filled
    return filled % page_size != 0 and pool.pages.refcount(sequence.pages[filled // page_size]) > 1


def frames_of_copies(pool: Pool, copies: Seq[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The frames of (source, destination) pages, while the sources are held; empty where no layer has a window."""
    if pool.frames is None or not copies:
        return ()
    source, target = pool.frames.frame_of.get(np.array(copies, np.int32).ravel()).reshape(-1, 2).T.tolist()
    return tuple(zip(source, target, strict=True))


def give_up_pages(pool: Pool, sequence: Sequence) -> Pool:
    """Index what is filled and exact, then take the sequence's references back: full pages stay reusable until they are evicted."""
    tokens = sequence.tokens.array(0, sequence.num_exact)
    pool = pools.insert(pool, tokens, sequence.pages.array(), 0)
    return pools.release(pool, sequence.pages, sequence.retired)


def worth_taking(pool: Pool, matched: np.ndarray, sequence: Sequence, page_size: int) -> bool:
    """Whether indexed pages serve a sequence better than those it has: they hold more, and take no more out of what is available.

    They can, where a live chunk holds a second copy of a run whose indexed pages are idle.
    """
    if len(matched) * page_size <= sequence.num_filled:
        return False
    held = sequence.num_filled // page_size
    return not held or num_busy(pool, matched) >= held


def num_busy(pool: Pool, indexed: np.ndarray) -> int:
    """How many of these indexed pages somebody else holds too, with their frames, so that they are not counted as available."""
    busy = pool.pages.owners(indexed) > 1
    if pool.frames is not None:
        busy &= pool.frames.needs.get(indexed) > 0
    return int(np.count_nonzero(busy))


def written_pages(sequence: Sequence, count: int, page_size: int) -> np.ndarray:
    """The pages that running the next `count` unfilled tokens writes."""
    start = sequence.num_filled
    return sequence.pages.array(start // page_size, pages_for(start + count, page_size)) if count else sequence.pages.array(0, 0)
