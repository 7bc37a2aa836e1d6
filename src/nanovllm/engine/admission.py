"""Admission: whether the first waiting request may run, and over which pages.

Preemption costs tokens that run twice, so a request is admitted only if it and those that run can grow to their expected lengths
(`can_grow`, `state/expected_reply.py`). A step with prompts delays all replies that go on, so a few requests wait some steps for others
(`opens`).
"""

from bisect import bisect

import numpy as np

from nanovllm.engine.draft import Draft, id_of, missing_pages, owed_pages, turn_of
from nanovllm.engine.plan import Plan
from nanovllm.engine.preemption import make_room, num_freed, strip_waiting
from nanovllm.engine.prompt_pages import fitting
from nanovllm.engine.prompt_room import PromptRoom
from nanovllm.engine.reuse import gone_on, reusable
from nanovllm.errors import BrokenInvariantError
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.request import Sequence
from nanovllm.state.sequence_pages import num_busy
from nanovllm.state.window_frames import least_frames

PLACES = 32  # places that become free are given away together: one of so many places of the engine
HELD = 8  # in one of so many steps a free place is given away even if it is the only one
GATHER = 4  # steps for which a few requests wait for others after a step with prompts
CROWD = 4  # they are few if there are more running requests than waiting ones, multiplied by this
SMALL = 512  # tokens of a pool below which preemption costs so little that requests are admitted whether they can grow or not
SHARE = 16  # no reply is expected to be longer than the tokens of the pool, divided by this
LONGER = 8  # a reply that is as long as expected is expected to grow by this length, divided by this


def opens(draft: Draft, num_steps: int, gather_until: int) -> bool:
    """Whether a step that runs no prompt so far may begin to admit requests, after so many steps.

    A step with one short prompt takes nearly as long as a step with several. So requests wait for others in two cases:

    - Only a few requests wait, and the number of steps is below `gather_until`. This is set by a step with prompts (`gathering`).
    - Nearly all places are taken. Those that become free are given away when there are several, or one for each request that waits, or
      when the number of steps is a multiple of `HELD`.

    A request that comes before one that runs, or that has no prompt to run, does not wait for others.
    """
    first, places = draft.waiting.first(), draft.config.max_num_seqs - len(draft.running)
    if first is None or not draft.running or first.todo <= 1 or turn_of(first) < turn_of(draft.running[-1]):
        return True
    if _gathers(draft, num_steps, gather_until):
        return False
    return num_steps % HELD == 0 or places >= min(draft.config.max_num_seqs // PLACES, len(draft.waiting))


def steps_held(draft: Draft, num_steps: int, gather_until: int) -> int:
    """The number of steps for which `opens` stays false, if it is false now and nothing comes or ends."""
    return gather_until - num_steps if _gathers(draft, num_steps, gather_until) else HELD - num_steps % HELD


def gathering(plan: Plan, num_steps: int, gather_until: int) -> int:
    """The `gather_until` of the steps after one that ran this plan after `num_steps` others.

    If the step with prompts left requests behind, they go on at once.
    """
    if not plan.prefill:
        return gather_until
    return 0 if len(plan.waiting) else num_steps + 1 + GATHER


def _gathers(draft: Draft, num_steps: int, gather_until: int) -> bool:
    """Whether requests wait because they are few."""
    return num_steps < gather_until and len(draft.waiting) * CROWD < len(draft.running)


def may_admit(draft: Draft) -> bool:
    """Whether the first waiting request fits now. A step that preempted admits nothing."""
    first = draft.waiting.first()
    if first is None or len(draft.running) >= draft.config.max_num_seqs or draft.num_preempted or draft.stuck:
        return False
    return not draft.running or (fits(draft, first) and can_grow(draft, first))


def fits(draft: Draft, first: Sequence) -> bool:
    """Whether there are pages for all tokens of a waiting request and the next one."""
    # This first estimate counts reusable pages of the index as missing. The lookup below is more expensive.
    wanted = pages_for(first.tokens.length + 1, draft.config.page_size) + owed_pages(draft)
    if wanted - len(first.pages) <= draft.pool.num_available:
        return True
    matched, retired = reusable(draft, first)
    if draft.pool.frames is not None and not frames_suffice(draft, first, matched, retired):
        return False
    free = draft.pool.pages.num_free + draft.pool.prefix.num_idle
    missing = wanted - max(len(matched), len(first.pages))
    idle = int(np.count_nonzero(draft.pool.pages.owners(matched) == 1))
    return missing <= free - idle


def set_stranded_apart(draft: Draft, num_steps: int) -> None:
    """Take the first waiting requests out of the queue that cannot run while the live chunks exist, so that others need not wait for them.

    While something runs, this looks in each `HELD`-th step only, because it counts the pages of all requests. A sequence that is stuck in
    this step still has its pages.
    """
    if draft.stuck or (draft.running and num_steps % HELD):
        return
    while (first := draft.waiting.first()) is not None and _is_stranded(draft, first):
        draft.stranded.append(first)
        draft.waiting = draft.waiting.pop(id_of(first))


def _is_stranded(draft: Draft, first: Sequence) -> bool:
    """Whether there are too few pages for the tokens of a waiting request even if all other requests give up theirs."""
    missing = pages_for(first.tokens.length, draft.config.page_size) - len(first.pages)
    free = draft.pool.pages.num_free + draft.pool.prefix.num_idle
    if missing <= free:
        return False
    missing = min(missing, missing + len(first.pages) - len(reusable(draft, first)[0]))
    others = [*draft.running, *draft.reading, *draft.stranded, *(s for s in draft.waiting.items.values() if s is not first)]
    return missing > free and missing > free + num_freed(draft, others)


def can_grow(draft: Draft, first: Sequence) -> bool:
    """Whether the running sequences and this request can all grow to their expected lengths without preemption.

    The most pages are held right before a sequence ends. Then it gives back those that it did not get from others.
    """
    size, expected = draft.config.page_size, _expected_length(draft)
    # of frames a sequence seldom needs more: only for its windows
    spare = draft.pool.pages.num_free + draft.pool.prefix.num_idle - owed_pages(draft)
    if not expected or (len(draft.running) + 1) * (expected // size + 1) + pages_for(first.tokens.length, size) <= spare:
        return True
    if draft.most is None:
        draft.most = sum([_most_pages(s, size) for s in draft.running])
    if draft.most + pages_for(first.request.max_len, size) + 1 <= spare:
        return True
    rows = [*draft.running, first]
    facts = np.array([(s.request.max_len, s.request.num_prompt, s.tokens.length, s.pages.length, s.num_cached) for s in rows])
    facts[-1, 3] = max(first.pages.length, num_busy(draft.pool, reusable(draft, first)[0]))
    limit, prompt, length, held, cached = facts.T
    left = np.minimum(limit - length, np.maximum(prompt + expected - length, expected // LONGER))
    order = left.argsort()
    left, length, held, cached = left[order], length[order], held[order], cached[order]
    given_back, count = np.cumsum(held - cached // size), np.arange(len(rows), 0, -1)
    grown = (length[::-1].cumsum()[::-1] + left * count) / size + count / 2  # half of a last page is empty
    more = grown - held[::-1].cumsum()[::-1]  # pages that each sequence and those that stay longer than it take
    return bool((more[1:] - given_back[:-1]).max(initial=more[0]) <= spare)


def _expected_length(draft: Draft) -> int:
    """How long a reply is expected to become, as far as the pool matters: 0 if it is so small that preemption costs little."""
    tokens = draft.config.num_pages * draft.config.page_size
    return min(draft.expected_reply, tokens // SHARE) if tokens >= SMALL else 0


def frames_suffice(draft: Draft, sequence: Sequence, matched: np.ndarray, retired: int) -> bool:
    """Whether enough frames are available for the first step of a request.

    A request that keeps its KV needs a frame for each page; others need their windows and the tokens of one step.
    """
    frames, size = draft.pool.frames, draft.config.page_size
    assert frames is not None
    wanted = pages_for(sequence.tokens.length + 1, size)
    if not sequence.request.keep:
        wanted = min(wanted, least_frames(frames.window, size) + pages_for(draft.config.max_num_batched_tokens, size))
    spare = np.count_nonzero(frames.needs.get(matched[retired:]) == 0)
    have = max(len(matched) - retired, len(sequence.pages) - sequence.retired)
    return wanted - have <= frames.num_available - int(spare)


def admit(draft: Draft, room: PromptRoom) -> tuple[Sequence, int] | None:
    """Move the first waiting request to the running ones, over pages of the index if they save more than its own.

    Returns:
        The sequence, and how many of its tokens run in this step. None if the pool has too few pages after all; then the request waits,
        unless nothing else runs, ends or waits for the disk.
    """
    sequence = draft.waiting.first()
    if sequence is None:
        raise BrokenInvariantError("admit was called with an empty queue")
    before = draft.pool, draft.waiting, draft.num_reused, draft.load_room, draft.num_loaded
    draft.waiting = draft.waiting.pop(id_of(sequence))
    sequence = gone_on(draft, sequence)
    at = bisect(draft.running, turn_of(sequence), key=turn_of)
    draft.running.insert(at, sequence)
    count = 0 if sequence.loading else fitting(draft, sequence, room)
    length = sequence.num_filled + count
    alone, missing = len(draft.running) == 1, missing_pages(sequence, length, draft.config.page_size)
    if alone and not (draft.stranded or draft.reading):  # which soon give up the pages that they share with others
        return (draft.running[at], count) if make_room(draft, sequence, length) else None
    if draft.reserve(at, length) or (alone and strip_waiting(draft, missing) and draft.reserve(at, length)):
        if draft.most is not None:
            draft.most += _most_pages(draft.running[at], draft.config.page_size)
        return draft.running[at], count
    del draft.running[at]
    draft.pool, draft.waiting, draft.num_reused, draft.load_room, draft.num_loaded = before
    return None


def _most_pages(sequence: Sequence, page_size: int) -> int:
    """The pages that a sequence could still take, and one more."""
    return max(0, missing_pages(sequence, sequence.request.max_len, page_size) + 1)
