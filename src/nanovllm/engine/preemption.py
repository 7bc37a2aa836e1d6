"""Preemption: if the pool is full, the running sequence whose turn is last gives up its pages and returns to the queue.

So the first sequence always advances, and every workload ends whose requests fit one at a time. A request that waits preempts nobody,
whatever its priority.
"""

from nanovllm.engine.draft import Draft, id_of
from nanovllm.errors import BrokenInvariantError
from nanovllm.state.request import Sequence
from nanovllm.state.sequence_pages import give_up_pages
from nanovllm.state.vector import IntVector


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
        elif not strip_waiting(draft):
            draft.stuck.append(draft.running.pop(at))
            return False


def preempt(draft: Draft, at: int) -> None:
    """Take the pages of one running sequence and return it to the queue."""
    sequence = draft.running.pop(at)
    draft.copies.pop(id_of(sequence), None)
    draft.pool = give_up_pages(draft.pool, sequence)
    draft.waiting = draft.waiting.push(_without_pages(sequence))
    draft.num_preempted, draft.num_lost = draft.num_preempted + 1, draft.num_lost + sequence.num_filled


def strip_waiting(draft: Draft) -> bool:
    """Take the pages of the waiting request that owns some and whose turn is last; it looks them up, or runs them, again later."""
    holders = [s for s in draft.waiting if len(s.pages)]
    if not holders:
        return False
    last = holders[-1]
    draft.pool = give_up_pages(draft.pool, last)
    draft.waiting = draft.waiting.push(_without_pages(last))
    return True


def _without_pages(sequence: Sequence) -> Sequence:
    """The sequence without pages, as a preempted one."""
    return sequence.restart(IntVector.of(), 0)
