"""Preemption: if the pool is full, the running sequence whose turn is last gives up its pages and returns to the queue.

So the first sequence always advances, and every workload ends whose requests fit one at a time. A request that waits preempts nobody,
whatever its priority.
"""

from collections.abc import Iterable

import numpy as np

from nanovllm.engine.draft import Draft, id_of, missing_pages
from nanovllm.engine.host_pages import keep_last
from nanovllm.errors import BrokenInvariantError
from nanovllm.state.request import Sequence
from nanovllm.state.sequence_pages import give_up_pages
from nanovllm.state.vector import IntVector, joined


def make_room(draft: Draft, sequence: Sequence, length: int) -> bool:
    """Reserve pages, preempting those whose turn is last. False if `sequence` itself was preempted or is stuck."""
    while True:
        at = draft.find(sequence)
        if at is None:
            raise BrokenInvariantError(f"request {id_of(sequence)} is scheduled but not running")
        if draft.reserve(at, length):
            return True
        if at < len(draft.running) - 1:
            preempt(draft, len(draft.running) - 1)
        elif at > 0:
            preempt(draft, at)
            return False
        elif not strip_waiting(draft, missing_pages(sequence, length, draft.config.page_size)):
            draft.stuck.append(draft.running.pop(at))
            return False


def preempt(draft: Draft, at: int) -> None:
    """Take the pages of one running sequence and return it to the queue."""
    sequence = draft.running.pop(at)
    keep_last(draft, sequence, draft.copies.pop(id_of(sequence), ()))
    draft.pool = give_up_pages(draft.pool, sequence)
    draft.waiting = draft.waiting.push(_without_pages(sequence))
    draft.num_preempted += 1


def strip_waiting(draft: Draft, wanted: int) -> bool:
    """Take the pages of waiting requests that own some, from those whose turn is last, until `wanted` pages and one to copy are available.

    They look them up, or run them, again later. False if there are none, or if all of them together would not give enough.
    """
    holders = [s for s in draft.waiting if len(s.pages)]
    if not holders or not _suffice(draft, holders, wanted):
        return False
    while True:
        last = holders.pop()
        keep_last(draft, last, ())
        draft.pool = give_up_pages(draft.pool, last)
        draft.waiting = draft.waiting.push(_without_pages(last))
        if not holders or draft.pool.num_available > wanted:
            return True


def num_freed(draft: Draft, sequences: Iterable[Sequence]) -> int:
    """How many pages become available if these sequences give up theirs. Pages of chunks and sessions do not."""
    held = joined([(s.pages, 0, s.pages.length) for s in sequences if s.pages.length])
    if not len(held):
        return 0
    counts = np.bincount(held)
    pages = np.flatnonzero(counts).astype(np.int32)
    return int(np.count_nonzero(draft.pool.pages.owners(pages) - draft.pool.prefix.contains(pages) == counts[pages]))


def _suffice(draft: Draft, holders: list[Sequence], wanted: int) -> bool:
    """Whether `wanted` pages, and as many frames, are available once these sequences have given up theirs."""
    pool, frames = draft.pool, draft.pool.frames
    if wanted > pool.pages.num_free + pool.prefix.num_idle + num_freed(draft, holders):
        return False
    if frames is None or wanted <= frames.num_available:
        return True
    needed = np.bincount(joined([(s.pages, s.retired, s.pages.length) for s in holders]))
    pages = np.flatnonzero(needed).astype(np.int32)
    return wanted <= frames.num_available + int(np.count_nonzero(frames.needs.get(pages) == needed[pages]))


def _without_pages(sequence: Sequence) -> Sequence:
    """The sequence without pages, as a preempted one."""
    return sequence.restart(IntVector.of(), 0)
