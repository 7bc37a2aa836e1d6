"""Admission: whether the first waiting request may run, and over which pages.

Preemption costs tokens that run twice, so a request is admitted only if it and those that run can grow to their expected lengths
(`can_grow`, `state/expected_reply.py`). If those that run are expected to need far more than there is, the last of them wait again
(`shed`). An engine whose places were nearly all taken gives them away several at a time, or any number in each `HELD`-th step (`opens`).
"""

from bisect import bisect
from dataclasses import replace

import numpy as np

from nanovllm.engine.draft import Draft, id_of, missing_pages, turn_of
from nanovllm.engine.preemption import make_room, preempt
from nanovllm.engine.prompt_pages import fitting
from nanovllm.engine.prompt_room import PromptRoom
from nanovllm.errors import BrokenInvariantError
from nanovllm.state import pool as pools
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.request import Sequence
from nanovllm.state.sequence_pages import begun, num_busy
from nanovllm.state.window_frames import least_frames

PLACES = 32  # places that become free are given away together: one of so many places of the engine
HELD = 8  # in one of so many steps a free place is given away even if it is the only one
SMALL = 512  # tokens of a pool below which preemption costs so little that requests are admitted whether they can grow or not
ROWS = 32  # of twice as many running sequences, one step of two sees whether they need too many pages, and so on
BEYOND = 8  # the share of the pool that running sequences may be expected to need beyond it


def opens(draft: Draft, num_steps: int) -> bool:
    """Whether a step that runs no prompt so far may begin to admit requests, after so many steps.

    A step with one short prompt takes nearly as long as a step with several. So if nearly all places are taken, those that become free
    wait until there are several, or one for each request that waits, or until the number of steps is a multiple of `HELD`. A request
    that comes before one that runs does not wait for that.
    """
    first, places = draft.waiting.first(), draft.config.max_num_seqs - len(draft.running)
    if first is None or not draft.running or num_steps % HELD == 0:
        return True
    return places >= min(draft.config.max_num_seqs // PLACES, len(draft.waiting)) or turn_of(first) < turn_of(draft.running[-1])


def may_admit(draft: Draft) -> bool:
    """Whether the first waiting request fits now. A step that preempted admits nothing."""
    first = draft.waiting.first()
    if first is None or len(draft.running) >= draft.config.max_num_seqs or draft.num_preempted or draft.stuck:
        return False
    return not draft.running or (fits(draft, first) and can_grow(draft, first))


def fits(draft: Draft, first: Sequence) -> bool:
    """Whether there are pages for all tokens of a waiting request and the next one."""
    # This first estimate counts reusable pages of the index as missing. The lookup below is more expensive.
    wanted = pages_for(first.tokens.length + 1, draft.config.page_size)
    if wanted - len(first.pages) <= draft.pool.num_available:
        return True
    matched, retired = reusable(draft, first)
    if draft.pool.frames is not None and not frames_suffice(draft, first, matched, retired):
        return False
    free = draft.pool.pages.num_free + draft.pool.prefix.num_idle
    missing = wanted - max(len(matched), len(first.pages))
    idle = int(np.count_nonzero(draft.pool.pages.owners(matched) == 1))
    return missing <= free - idle


def can_grow(draft: Draft, first: Sequence) -> bool:
    """Whether the running sequences and this request can all grow to their expected lengths without preemption."""
    size, spare = draft.config.page_size, _spare(draft)
    if _is_small(draft) or _most(draft) + pages_for(first.request.max_len, size) + 1 <= spare:
        return True
    rows = [*draft.running, first]
    columns = _columns(draft, rows)
    columns[2, -1] = max(first.pages.length, num_busy(draft.pool, reusable(draft, first)[0]))
    return _peak(columns, size) <= spare


def shed(draft: Draft, num_steps: int) -> None:
    """Preempt those whose turn is last while the running sequences need too many pages even if their replies end early.

    This happens if replies turn out to be longer than those before. Sooner or later the last would be preempted anyway, and to do so early
    loses fewer tokens. Too many is an eighth of the pool more than there are, because an estimate may be wrong. While requests wait, many
    rows are not looked at in every step.
    """
    if len(draft.running) < 2 or _is_small(draft) or (len(draft.waiting) and num_steps % max(1, len(draft.running) // ROWS)):
        return
    size, beyond = draft.config.page_size, draft.config.num_pages // BEYOND
    most, draft.most = _most(draft), None  # the step takes pages before requests are admitted
    if most <= _spare(draft) + beyond:
        return
    columns = _columns(draft, draft.running, hopeful=True)
    while len(draft.running) > 1 and _peak(columns[:, : len(draft.running)], size) > _spare(draft) + beyond:
        preempt(draft, len(draft.running) - 1)


def _columns(draft: Draft, rows: list[Sequence], *, hopeful: bool = False) -> np.ndarray:
    """For each sequence the tokens that it is expected to get, those that it has, its pages, and how many of these it got from others."""
    size, tokens = draft.config.page_size, draft.config.num_pages * draft.config.page_size
    facts = [(s.request.max_len, s.request.num_prompt, s.tokens.length, s.pages.length, s.num_cached, id_of(s)) for s in rows]
    limit, prompt, length, held, cached, request_id = np.array(facts).T
    growth = np.minimum(limit - length, draft.reply_lengths.growth(length - prompt, request_id, tokens, hopeful=hopeful))
    return np.array([growth, length, held, cached // size])


def _peak(columns: np.ndarray, page_size: int) -> float:
    """The most pages that sequences take beyond those that they hold, if each grows as expected.

    The most pages are held right before a sequence ends. Then it gives back those that it did not get from others.
    """
    left, length, held, cached = columns[:, columns[0].argsort(kind="stable")]
    given_back, count = np.cumsum(held - cached), np.arange(len(left), 0, -1)
    grown = (length[::-1].cumsum()[::-1] + left * count) / page_size + count / 2  # half of a last page is empty
    more = grown - held[::-1].cumsum()[::-1]  # pages that each sequence and those that stay longer than it take
    return float((more[1:] - given_back[:-1]).max(initial=more[0]))


def _is_small(draft: Draft) -> bool:
    """Whether the pool is so small that preemption costs little."""
    return draft.config.num_pages * draft.config.page_size < SMALL


def _spare(draft: Draft) -> int:
    """The pages that sequences can still get. Of frames a sequence seldom needs more: only for its windows."""
    return draft.pool.pages.num_free + draft.pool.prefix.num_idle


def _most(draft: Draft) -> int:
    """The pages that the running sequences could still take if all replies reached their limits."""
    if draft.most is None:
        draft.most = sum([_most_pages(s, draft.config.page_size) for s in draft.running])
    return draft.most


def reusable(draft: Draft, sequence: Sequence) -> tuple[np.ndarray, int]:
    """The pages of the prefix index that a sequence can reuse, and how many of them are outside its windows."""
    if draft.found is None or draft.found[0] is not draft.pool or draft.found[1] is not sequence:
        asked, tokens = sequence.request, sequence.tokens.array()
        draft.found = draft.pool, sequence, pools.reusable(draft.pool, tokens, whole=asked.keep, namespace=asked.namespace)
    return draft.found[2]


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
        unless nothing else runs.
    """
    sequence = draft.waiting.first()
    if sequence is None:
        raise BrokenInvariantError("admit was called with an empty queue")
    before = draft.pool, draft.waiting, draft.num_reused
    draft.waiting = draft.waiting.pop(id_of(sequence))
    matched, retired = reusable(draft, sequence)
    draft.pool, sequence = begun(draft.pool, sequence, matched, retired, draft.config.page_size)
    reused = min(sequence.num_filled, sequence.tokens.length - 1)  # the last token runs for its logits even if it is filled
    draft.num_reused += max(0, reused - sequence.most_filled)
    cached = sequence.num_cached if sequence.most_filled else reused
    sequence = replace(sequence, most_filled=max(sequence.most_filled, reused), num_cached=cached)
    at = bisect(draft.running, turn_of(sequence), key=turn_of)
    draft.running.insert(at, sequence)
    count = fitting(draft, sequence, room)
    length = sequence.num_filled + count
    if len(draft.running) == 1:
        return (draft.running[at], count) if make_room(draft, sequence, length) else None
    if draft.reserve(at, length):
        if draft.most is not None:
            draft.most += _most_pages(draft.running[at], draft.config.page_size)
        return draft.running[at], count
    del draft.running[at]
    draft.pool, draft.waiting, draft.num_reused = before
    return None


def _most_pages(sequence: Sequence, page_size: int) -> int:
    """The pages that a sequence could still take, and one more."""
    return max(0, missing_pages(sequence, sequence.request.max_len, page_size) + 1)
