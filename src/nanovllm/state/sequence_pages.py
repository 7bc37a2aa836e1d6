"""The pages of one sequence: the pages it gets before it writes, the pages it writes, and the pages it gives up when it ends.

A sequence reads pages that have other owners too, and writes only pages of its own. So before tokens run, `reserve` finds the missing
pages. If the first of these tokens belongs into a shared page, the sequence also gets a copy of that page. `give_up_pages` puts filled
pages into the index, where this or another sequence with the same tokens finds them. `offered` does so before the pages are filled, for
sequences that run with this one or after it. `begun` lets a sequence begin with indexed pages if they are better than its own. Pools and
sequences that are passed in do not change.
"""

from collections.abc import Sequence as Seq

import numpy as np

from nanovllm.state import pool as pools
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.pages import require_writable
from nanovllm.state.pool import Pool
from nanovllm.state.request import Sequence
from nanovllm.state.vector import IntVector

TOGETHER = 16  # sequences that give up their pages together; the pages of more would be one long group in the order of eviction
Reserved = tuple[Pool, Sequence, list[tuple[int, int]], tuple[int, ...]]


def reserve(pool: Pool, sequence: Sequence, length: int, page_size: int) -> Reserved | None:
    """Give a sequence its own pages for the tokens `num_filled ... length - 1`.

    A partly filled page that has another owner is replaced by a copy. The caller keeps the reference on the source page until the copy is
    made.

    Returns:
        The pool, the sequence, the (source, destination) pairs of pages to copy, and the pages taken. None if the pool has too few pages.
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
    """Whether the page of the next token is partly filled and has another owner."""
    filled = sequence.num_filled
    return filled % page_size != 0 and pool.pages.refcount(sequence.pages[filled // page_size]) > 1


def frames_of_copies(pool: Pool, copies: Seq[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The frames of (source, destination) pages, while the sources are held; empty if no layer has a sliding window."""
    if pool.frames is None or not copies:
        return ()
    source, target = pool.frames.frame_of.get(np.array(copies, np.int32).ravel()).reshape(-1, 2).T.tolist()
    return tuple(zip(source, target, strict=True))


def give_up_pages(pool: Pool, sequence: Sequence) -> Pool:
    """Index the filled, exact pages, then release the sequence's references. Full pages stay reusable until they are evicted."""
    tokens, held = sequence.tokens.array(0, sequence.num_exact), sequence.pages.array()
    namespace = sequence.request.namespace
    pool = pools.insert(pool, tokens, held, namespace)
    if pool.prefix.contains(held[: len(tokens) // pool.prefix.page_size]).all():
        return pools.release(pool, held, sequence.retired)
    # other pages stand before the sequence's own: none of them is evicted before those after it
    found = pools.match(pool, tokens, namespace)
    pool = pools.release(pools.acquire(pool, found, len(found)), held, sequence.retired)
    return pools.release(pool, found, len(found))


def give_up_together(pool: Pool, sequences: Seq[Sequence]) -> Pool:
    """Do as `give_up_pages` for each of several sequences in order, in two thirds of its time if they share no pages."""
    for at in range(0, len(sequences), TOGETHER):
        some = sequences[at : at + TOGETHER]
        after = _given_up(pool, some) if len(some) > 1 and pool.frames is None else None
        if after is None:
            for sequence in some:
                pool = give_up_pages(pool, sequence)
        else:
            pool = after
    return pool


def _given_up(pool: Pool, sequences: Seq[Sequence]) -> Pool | None:
    """The pool after the end of sequences. None if they share pages, or the index has other pages for the tokens of one."""
    held = [sequence.pages.array() for sequence in sequences]
    every = np.concatenate(held[::-1])  # their last pages are released in the order of the sequences
    ordered = np.sort(every)
    if (ordered[1:] == ordered[:-1]).any():
        return None
    tokens = [sequence.tokens.array(0, sequence.num_exact) for sequence in sequences]
    namespaces = [sequence.request.namespace for sequence in sequences]
    pool = pools.insert_each(pool, zip(tokens, held, namespaces, strict=True))
    full = [pages[: len(run) // pool.prefix.page_size] for pages, run in zip(held, tokens, strict=True)]
    return pools.release(pool, every) if pool.prefix.contains(np.concatenate(full)).all() else None


def offered(pool: Pool, sequence: Sequence, count: int, page_size: int) -> Pool:
    """The pool whose index has the pages that the next `count` tokens of a sequence fill, before these tokens run.

    Sequences that begin with these pages must not run in an earlier pass than the tokens. They may run in the same pass: in each layer the
    KV of all tokens of a pass is written before any is read.

    Raises:
        BrokenInvariantError: A page that the tokens are written to has another owner.
    """
    require_writable(pool.pages, written_pages(sequence, count, page_size))
    grown = sequence.advance(count)
    return pools.insert(pool, grown.tokens.array(0, grown.num_exact), grown.pages.array(), grown.request.namespace)


def begun(pool: Pool, sequence: Sequence, matched: np.ndarray, retired: int, page_size: int) -> tuple[Pool, Sequence]:
    """Let a sequence, which owns its pages, begin with indexed pages of its tokens instead, if they serve it better.

    Args:
        pool: The pool.
        sequence: The sequence.
        matched: The indexed pages.
        retired: How many of them have KV in sliding-window layers that the sequence does not need.
        page_size: Tokens per page.
    """
    if not worth_taking(pool, matched, sequence, page_size):
        return pool, sequence
    pool = pools.release(pools.acquire(pool, matched, retired), sequence.pages, sequence.retired)
    return pool, sequence.restart(IntVector.of(matched), len(matched) * page_size, retired)


def worth_taking(pool: Pool, matched: np.ndarray, sequence: Sequence, page_size: int) -> bool:
    """Whether indexed pages serve a sequence better than its own: they hold more tokens, and leave no fewer pages available.

    This happens if a live chunk holds a second copy of pages whose indexed copy is idle.
    """
    if len(matched) * page_size <= sequence.num_filled:
        return False
    held = sequence.num_filled // page_size
    return not held or num_busy(pool, matched) >= held


def num_busy(pool: Pool, indexed: np.ndarray) -> int:
    """How many of these indexed pages have another owner, with their frames, so that they do not count as available."""
    busy = pool.pages.owners(indexed) > 1
    if pool.frames is not None:
        busy &= pool.frames.needs.get(indexed) > 0
    return int(np.count_nonzero(busy))


def written_pages(sequence: Sequence, count: int, page_size: int) -> np.ndarray:
    """The pages that running the next `count` unfilled tokens writes."""
    start = sequence.num_filled
    return sequence.pages.array(start // page_size, pages_for(start + count, page_size)) if count else sequence.pages.array(0, 0)
