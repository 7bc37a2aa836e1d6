"""Scheduling, pure: (pool, running, waiting, limits) -> plan.

Requests are served in order of arrival. Each step runs one token of every decoding sequence first and fills the rest of its token
budget with prompts in chunks. Where the pool is full the youngest running sequence gives its pages up and waits in front of the queue; so
the oldest one always goes on, and every workload whose requests fit one by one ends.
"""

from bisect import bisect
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from nanovllm.config import EngineConfig
from nanovllm.errors import BrokenInvariantError
from nanovllm.state import pool as pools
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.pages import require_writable
from nanovllm.state.pool import Pool, Taken
from nanovllm.state.pool_sizes import LOOKAHEAD
from nanovllm.state.request import Queue, Sequence
from nanovllm.state.sequence_pages import frames_of_copies, give_up_pages, reserve, shares_tail, worth_taking, written_pages
from nanovllm.state.steady import Steady
from nanovllm.state.vector import IntVector, joined
from nanovllm.state.window_frames import least_frames, num_retired


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What one step runs, and the values that stand once it has. `decode` runs one token a sequence, `prefill` the given number.

    `copies` are (source, destination) pages to be copied before anything is written, `frame_copies` their frames; `allocated` are
    the pages handed out by this plan, and `frames` what they got.
    `stuck` sequences can never get another page while the live chunks stay: they end with what they have. `grew` tells that a decoding
    sequence has other pages than before.
    """

    pool: Pool
    running: tuple[Sequence, ...]
    waiting: Queue
    decode: tuple[Sequence, ...]
    prefill: tuple[tuple[Sequence, int], ...]
    copies: tuple[tuple[int, int], ...]
    frame_copies: tuple[tuple[int, int], ...]
    allocated: tuple[int, ...]
    frames: tuple[int, ...]
    stuck: tuple[Sequence, ...]
    grew: bool
    num_preempted: int
    num_reused: int

    @property
    def only_decodes(self) -> bool:
        """Whether a token of each running sequence is all that runs, and none was given up or preempted, or found tokens of others."""
        return len(self.decode) == len(self.running) and not (self.stuck or self.num_preempted or self.num_reused)


def schedule(pool: Pool, running: Seq[Sequence], waiting: Queue, config: EngineConfig) -> Plan:
    """Choose the tokens of one step and find pages for them. Nothing that is passed in changes."""
    draft = _Draft(pool, list(running), waiting, config)
    draft.retire()
    decoding = [s for s in draft.running if s.todo <= 1]
    budget = config.max_num_batched_tokens - len(decoding)
    if budget < 0:  # each of them ran in the last step, within its budget
        raise BrokenInvariantError(f"{len(decoding)} sequences decode and a step runs {config.max_num_batched_tokens} tokens")
    chosen = draft.place_decode(decoding) if decoding else set[int]()
    prefill: dict[int, int] = {}
    for sequence in [s for s in draft.running if s.todo > 1]:
        if budget and (count := draft.place_prefill(sequence, budget)):
            prefill[sequence.request.request_id] = count
            budget -= count
    while budget and draft.may_admit():
        sequence = draft.admit()
        if sequence.todo <= 1:
            if draft.make_room(sequence, sequence.num_filled + sequence.todo):
                chosen.add(sequence.request.request_id)
                budget -= 1
        elif count := draft.place_prefill(sequence, budget):
            prefill[sequence.request.request_id] = count
            budget -= count
    return draft.finish(chosen, prefill)


def steady(pool: Pool, running: tuple[Sequence, ...], waiting: Queue, config: EngineConfig) -> Steady | None:
    """The sequences, with the number of steps in which `schedule` would choose one token of each and change nothing, where there are any.

    There are none while a request could be admitted, where a page to be written is missing or shared, or where more than a token is to be
    looked at: a prompt, tokens lost to preemption, stop texts, log-probabilities. A sequence with all pages that it can ever fill holds
    none of the others up.
    """
    size, steps = config.page_size, config.max_model_len
    if not running or len(running) > config.max_num_batched_tokens:
        return None
    for s in running:
        filled, request, room = s.num_filled, s.request, s.pages.length * size
        if s.todo != 1 or filled < request.num_prompt or filled < s.most_filled:
            return None
        if s.stops is not None or request.sampling.logprobs is not None:
            return None
        if room - filled < steps and room < request.max_len - 1:  # the last token is never filled
            steps = room - filled
    if steps <= 0 or _Draft(pool, list(running), waiting, config).may_admit():
        return None
    written = joined([(s.pages, s.num_filled // size, pages_for(s.num_filled + steps, size)) for s in running])
    return Steady.of(running, steps, pool, waiting) if (pool.pages.owners(written) == 1).all() else None


def _id(sequence: Sequence) -> int:
    return sequence.request.request_id


class _Draft:
    """The plan under construction: mutable, and never seen outside `schedule`."""

    def __init__(self, pool: Pool, running: list[Sequence], waiting: Queue, config: EngineConfig):
        self.pool, self.running, self.waiting, self.config = pool, running, waiting, config
        self.taken = Taken()
        self.copies: dict[int, list[tuple[int, int]]] = {}
        self.sources: list[int] = []  # read by a copy: released last, so that none is handed out again before
        self.stuck: list[Sequence] = []
        self.num_preempted = self.num_reused = 0
        self.grew = False

    def retire(self) -> None:
        """What no token that still runs sees in layers with windows is needed no more, but by requests that keep all their pages."""
        frames, size = self.pool.frames, self.config.page_size
        if frames is None:
            return
        parts = []
        for at, s in enumerate(self.running):
            retired = num_retired(s.num_filled, s.tokens.length, frames.window, size)
            if retired > s.retired and not s.request.keep:
                parts.append((s.pages, s.retired, retired))
                self.running[at] = replace(s, retired=retired)
        if parts:
            self.pool = pools.retire(self.pool, joined(parts))

    def place_decode(self, decoding: list[Sequence]) -> set[int]:
        """Room for a token of each that decodes; returns the ids of those that are to."""
        needy, size = self.in_need(decoding), self.config.page_size
        nothing_to_copy = all(s.pages.length * size <= s.num_filled for s in needy)
        short = nothing_to_copy and self.give({_id(s): pages_for(s.num_filled + s.todo, size) - s.pages.length for s in needy})
        for sequence in () if short else needy:
            if self.find(sequence) is not None:
                short = self.make_room(sequence, sequence.num_filled + sequence.todo) or short
        if short:
            self.grew = True
            self.look_ahead()
        return {s.request.request_id for s in decoding}

    def in_need(self, decoding: list[Sequence]) -> list[Sequence]:
        """Those without a page for their next token, or with one that is partly filled and shared."""
        size = self.config.page_size
        partly = [s for s in decoding if s.num_filled % size and s.todo]
        tails = np.array([s.pages[s.num_filled // size] for s in partly], np.int32)
        shared = {_id(partly[at]) for at in np.flatnonzero(self.pool.pages.owners(tails) > 1)}
        return [s for s in decoding if s.pages.length * size <= s.num_filled or (shared and _id(s) in shared)]

    def look_ahead(self) -> None:
        """More pages than needed now for all that decode, so that many steps pass before the tables change again.

        Idle pages of the index are taken too, which would go within these steps anyway where it fills the pool; not while a request that
        gave its pages up waits, for it comes back to what it had filled.
        """
        first = self.waiting.first()
        back = first is not None and first.most_filled > 0
        spare = self.pool.spare(only_free=back)
        size, wanted = self.config.page_size, dict[int, int]()
        for sequence in self.running:
            length = min(sequence.request.max_len, sequence.num_filled + 1 + LOOKAHEAD)
            missing = pages_for(length, size) - sequence.pages.length
            if 0 < missing <= spare and sequence.todo == 1:
                wanted[_id(sequence)], spare = missing, spare - missing
        self.give(wanted)

    def give(self, wanted: dict[int, int]) -> bool:
        """So many pages to each of these requests, behind those that it has; False where the pool has too few, or none are wanted."""
        taken = pools.allocate(self.pool, sum(wanted.values())) if wanted else None
        if taken is None:
            return False
        self.pool, fresh = taken
        pages, start = np.array(fresh, np.int32), 0
        for at, sequence in enumerate(self.running):
            if count := wanted.get(_id(sequence), 0):
                held = sequence.pages.extend(pages[start : start + count])
                self.running[at], start = sequence.with_pages(held, sequence.num_filled), start + count
        self.taken.note(self.pool, fresh)
        return True

    def place_prefill(self, sequence: Sequence, budget: int) -> int:
        """The tokens of a prompt that run in this step: what budget and pool allow; the oldest sequence always gets at least one."""
        at = self.find(sequence)
        if at is None:
            return 0
        sequence = self.running[at]
        size, count = self.config.page_size, min(sequence.todo, budget)
        spare = self.pool.num_available - shares_tail(self.pool, sequence, size)
        if self.pool.frames is not None:  # as many as a window holds come back behind the prompt; those that decode go on beside it
            spare -= min(len(self.running) - 1, spare // 2)
        fits = (len(sequence.pages) + spare) * size - sequence.num_filled
        count = min(count, max(1, fits))
        return count if self.make_room(sequence, sequence.num_filled + count) else 0

    def make_room(self, sequence: Sequence, length: int) -> bool:
        """Reserve pages, preempting from the youngest on. False when the sequence itself had to give way."""
        while True:
            at = self.find(sequence)
            if at is None:
                raise BrokenInvariantError(f"request {_id(sequence)} is scheduled and not running")
            if self.reserve(at, length):
                return True
            if at < len(self.running) - 1:
                self.preempt(len(self.running) - 1)
            elif at > 0:
                self.preempt(at)
                return False
            elif not self.strip_waiting():
                self.stuck.append(self.running.pop(at))
                return False

    def reserve(self, at: int, length: int) -> bool:
        sequence = self.running[at]
        done = reserve(self.pool, sequence, length, self.config.page_size)
        if done is None:
            return False
        self.pool, self.running[at], copies, fresh = done
        self.taken.note(self.pool, fresh)
        if copies:
            self.copies[_id(sequence)] = copies
            self.sources.extend(source for source, _ in copies)
        return True

    def preempt(self, at: int) -> None:
        sequence = self.running.pop(at)
        self.copies.pop(_id(sequence), None)
        self.pool = give_up_pages(self.pool, sequence)
        self.waiting = self.waiting.push(_without_pages(sequence))
        self.num_preempted += 1

    def strip_waiting(self) -> bool:
        """Take the pages that waiting requests hold of their contexts; they are looked up, or run, again later."""
        holders = [s for s in self.waiting if len(s.pages)]
        if not holders:
            return False
        last = holders[-1]
        self.pool = give_up_pages(self.pool, last)
        self.waiting = self.waiting.push(_without_pages(last))
        return True

    def may_admit(self) -> bool:
        first = self.waiting.first()
        if first is None or len(self.running) >= self.config.max_num_seqs or self.num_preempted or self.stuck:
            return False
        if not self.running:
            return True
        # Shared pages that the index would give count as missing here: the estimate errs on the side of waiting.
        wanted = pages_for(first.tokens.length + 1, self.config.page_size)
        if wanted - len(first.pages) <= self.pool.num_available:
            return True
        matched, retired = self.reusable(first)
        if self.pool.frames is not None and not self.frames_suffice(first, matched, retired):
            return False
        free = self.pool.pages.num_free + self.pool.prefix.num_idle
        missing = wanted - max(len(matched), len(first.pages))
        idle = int(np.count_nonzero(self.pool.pages.owners(matched) == 1))
        return missing <= free - idle

    def reusable(self, sequence: Sequence) -> tuple[np.ndarray, int]:
        return pools.reusable(self.pool, sequence.tokens.array(), whole=sequence.request.keep)

    def frames_suffice(self, sequence: Sequence, matched: np.ndarray, retired: int) -> bool:
        """Whether frames are there for what a request would need at once: all its pages where it keeps them, else a window and what it runs
        in a step."""
        frames, size = self.pool.frames, self.config.page_size
        assert frames is not None
        wanted = pages_for(sequence.tokens.length + 1, size)
        if not sequence.request.keep:
            wanted = min(wanted, least_frames(frames.window, size) + pages_for(self.config.max_num_batched_tokens, size))
        spare = np.count_nonzero(frames.needs.get(matched[retired:]) == 0)
        have = max(len(matched) - retired, len(sequence.pages) - sequence.retired)
        return wanted - have <= frames.num_available - int(spare)

    def admit(self) -> Sequence:
        sequence = self.waiting.first()
        if sequence is None:
            raise BrokenInvariantError("nothing waits and a request was to be admitted")
        self.waiting = self.waiting.pop(_id(sequence))
        matched, retired = self.reusable(sequence)
        if worth_taking(self.pool, matched, sequence, self.config.page_size):
            self.pool = pools.acquire(self.pool, matched, retired)
            self.pool = pools.release(self.pool, sequence.pages, sequence.retired)
            sequence = sequence.restart(IntVector.of(matched), len(matched) * self.config.page_size, retired)
        there = min(sequence.num_filled, sequence.tokens.length - 1)  # the last token runs for its logits even where it is filled
        self.num_reused += max(0, there - sequence.most_filled)
        cached = sequence.num_cached if sequence.most_filled else there
        sequence = replace(sequence, most_filled=max(sequence.most_filled, there), num_cached=cached)
        self.running.insert(bisect(self.running, _id(sequence), key=_id), sequence)
        return sequence

    def find(self, sequence: Sequence) -> int | None:
        rid = _id(sequence)
        at = bisect(self.running, rid, key=_id) - 1
        return at if at >= 0 and _id(self.running[at]) == rid else None

    def finish(self, chosen: set[int], prefill: dict[int, int]) -> Plan:
        copies = tuple(pair for pairs in self.copies.values() for pair in pairs)
        frame_copies = frames_of_copies(self.pool, copies)
        pool, size = pools.release(self.pool, self.sources), self.config.page_size
        decode = tuple([s for s in self.running if s.request.request_id in chosen])
        held = {_id(s): s for s in self.running} if prefill else {}
        prompts = tuple((held[rid], count) for rid, count in prefill.items() if rid in held)
        require_writable(pool.pages, [s.pages[s.num_filled // size] for s in decode if s.todo])
        for sequence, count in prompts:
            require_writable(pool.pages, written_pages(sequence, count, size))
        return Plan(
            pool=pool,
            running=tuple(self.running),
            waiting=self.waiting,
            decode=decode,
            prefill=prompts,
            copies=copies,
            frame_copies=frame_copies,
            allocated=tuple(self.taken.pages),
            frames=tuple(self.taken.frames),
            stuck=tuple(self.stuck),
            grew=self.grew,
            num_preempted=self.num_preempted,
            num_reused=self.num_reused,
        )


def _without_pages(sequence: Sequence) -> Sequence:
    return sequence.restart(IntVector.of(), 0)
