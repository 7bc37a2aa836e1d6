"""The scheduler, a pure function: (pool, running, waiting, limits, expected reply) -> plan.

Requests are served in order of their turns: by rank, which is the priority with ageing (`rank_of`), and among equals in order of arrival.
Each step first runs one token of every decoding sequence, then fills the rest of its token budget with prompts, in pieces. While replies go
on, prompts have a smaller budget, of which a long prompt leaves a part to a short one (`prompt_room.py`).

If the pool is full, the running sequence whose turn is last gives up its pages and returns to the queue. So the first sequence always
advances, and every workload ends whose requests fit one at a time. Preemption costs tokens that run twice, so a request is admitted only
if it and those that run can grow to their expected lengths (`can_grow`, `state/expected_reply.py`). A request that waits preempts nobody,
whatever its priority. An engine whose places were nearly all taken gives them away several at a time, or any number in each
`HELD`-th step (`opens`).

Pages that a prompt fills in this step are in the index of the plan's pool already, so a request that is admitted behind it shares them and
does not run their tokens again. A prompt that runs in part takes the rest of the budget, or of the pages. So a request that shares more
with it than it has filled is admitted later, by the step that ends it.
"""

from bisect import bisect
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from nanovllm.config import EngineConfig
from nanovllm.engine.prompt_room import PromptRoom
from nanovllm.errors import BrokenInvariantError
from nanovllm.state import pool as pools
from nanovllm.state.expected_reply import EXPECTED_REPLY
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.pages import require_writable
from nanovllm.state.pool import Pool, Taken
from nanovllm.state.pool_sizes import LOOKAHEAD
from nanovllm.state.request import Queue, Sequence
from nanovllm.state.sequence_pages import frames_of_copies, give_up_pages, num_busy, reserve, shares_tail, worth_taking, written_pages
from nanovllm.state.steady import Steady
from nanovllm.state.vector import IntVector, joined
from nanovllm.state.window_frames import least_frames, num_retired

PLACES = 32  # places that become free are given away together: one of so many places of the engine
EARLY = 2  # steps for which a sequence has pages when it gets more
HELD = 8  # in one of so many steps a free place is given away even if it is the only one
SMALL = 512  # tokens of a pool below which preemption costs so little that requests are admitted whether they can grow or not
SHARE = 16  # no reply is expected to be longer than the tokens of the pool, divided by this
LONGER = 8  # a reply that is as long as expected is expected to grow by this length, divided by this


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """The work of one step, and the values after it.

    Attributes:
        pool: The pool after the step. Its index has the pages that `prefill` fills, so the step must run all of it or drop this pool.
        running: The running sequences.
        waiting: The queue.
        decode: Sequences that run one token each.
        prefill: Sequences with the number of tokens that they run.
        copies: (source, destination) pages to copy before anything is written.
        frame_copies: The same for frames.
        allocated: Pages that this plan allocates.
        frames: Frames that this plan allocates.
        stuck: Sequences that cannot get another page while the live chunks exist; they end with the tokens that they have.
        grew: Whether a decoding sequence has new pages.
        num_preempted: Sequences that this plan preempts.
        num_reused: Tokens of admitted sequences whose KV is already filled.
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
        """Whether each running sequence runs one token and nothing else happens: no preemption, no stuck sequence, no reuse."""
        return len(self.decode) == len(self.running) and not (self.stuck or self.num_preempted or self.num_reused)


def schedule(
    pool: Pool, running: Seq[Sequence], waiting: Queue, config: EngineConfig, expected_reply: int = EXPECTED_REPLY, num_steps: int = 0
) -> Plan:
    """Choose the tokens of one step and find pages for them. The arguments do not change.

    Args:
        pool: The pool.
        running: The running sequences, in order of their turns.
        waiting: The queue.
        config: The engine's limits.
        expected_reply: How long a reply is expected to become, in tokens, if its limit is not nearer.
        num_steps: How many steps the engine has run.
    """
    draft = _Draft(pool, list(running), waiting, config, expected_reply)
    draft.retire()
    decoding = draft.decoding()
    room = PromptRoom.of(config, len(decoding))
    chosen = draft.place_decode(decoding) if decoding else set[int]()
    prefill: dict[int, int] = {}
    prompts = [s for s in draft.running if s.todo > 1]
    for place, sequence in enumerate(prompts):
        if not room:
            break
        part = room.without_share() if draft.must_share(sequence, prompts[place + 1 :], room) else room
        if part and (count := draft.place_prefill(sequence, part)):
            prefill[_id(sequence)] = count
            room = room.after(sequence, count)
    draft.offer([(s, prefill[_id(s)]) for s in draft.running if _id(s) in prefill] if prefill else ())
    opens = bool(prefill) or draft.opens(num_steps)
    while opens and room and draft.may_admit():
        part = room.without_share() if draft.must_leave_share(room) else room
        admitted = draft.admit(part) if part else None
        if admitted is None:
            break
        sequence, count = admitted
        if sequence.todo <= 1:
            chosen.add(_id(sequence))
        else:
            prefill[_id(sequence)] = count
            draft.offer([admitted])
        room = room.after(sequence, max(1, count))
    return draft.finish(chosen, prefill)


def steady(
    pool: Pool,
    running: tuple[Sequence, ...],
    waiting: Queue,
    config: EngineConfig,
    expected_reply: int = EXPECTED_REPLY,
    num_steps: int = 0,
) -> Steady | None:
    """The sequences as a `Steady`, with the number of steps in which `schedule` would only choose one token of each.

    Returns:
        None if there are no such steps: a request could be admitted, or a page to write is missing or shared. The same holds if a
        sequence has a prompt, tokens lost to preemption, or tensors of `process_logits`. A sequence that has all its pages does not limit
        the others.
    """
    size, steps = config.page_size, config.max_model_len
    if not running or len(running) > config.max_num_batched_tokens:
        return None
    draft = _Draft(pool, list(running), waiting, config, expected_reply)
    early = EARLY if draft.may_grow_early() else 0
    for s in running:
        filled, request, room = s.num_filled, s.request, s.pages.length * size
        if s.todo != 1 or filled < request.num_prompt or filled < s.most_filled:
            return None
        if request.process_logits is not None and request.process_logits.init is not None:
            return None
        if room - filled - early < steps and room < request.max_len - 1:  # the last token's KV is never needed
            steps = room - filled - early
    if draft.may_admit():
        steps = 0 if draft.opens(num_steps) else min(steps, HELD - num_steps % HELD)
    if steps <= 0:
        return None
    written = joined([(s.pages, s.num_filled // size, pages_for(s.num_filled + steps, size)) for s in running])
    return Steady.of(running, steps, pool, waiting) if (pool.pages.owners(written) == 1).all() else None


def _id(sequence: Sequence) -> int:
    return sequence.request.request_id


def _most_pages(sequence: Sequence, page_size: int) -> int:
    """The pages that a sequence could still take, and one more."""
    return max(0, pages_for(sequence.request.max_len, page_size) + 1 - sequence.pages.length)


def _room(sequence: Sequence, page_size: int) -> int:
    """The number of tokens for which a sequence has pages."""
    return sequence.pages.length * page_size


def _lacks_pages(sequence: Sequence, page_size: int) -> bool:
    """Whether a sequence needs more pages to reach its limit. The KV of the last token is never needed."""
    return _room(sequence, page_size) < sequence.request.max_len - 1


def _turn(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.turn


class _Draft:
    """A plan under construction: mutable, and used only inside `schedule` and `steady`."""

    def __init__(self, pool: Pool, running: list[Sequence], waiting: Queue, config: EngineConfig, expected_reply: int):
        self.pool, self.running, self.waiting, self.config = pool, running, waiting, config
        tokens = config.num_pages * config.page_size
        self.expected_reply = min(expected_reply, tokens // SHARE) if tokens >= SMALL else 0
        self.taken = Taken()
        self.copies: dict[int, list[tuple[int, int]]] = {}
        self.sources: list[int] = []  # released last, so that no page is reallocated before it was copied
        self.stuck: list[Sequence] = []
        self.num_preempted = self.num_reused = 0
        self.grew = False
        self.most: int | None = None  # pages that the running sequences could still take if all replies reached their limits
        self.found: tuple[Pool, Sequence, tuple[np.ndarray, int]] | None = None  # the last look-up of the prefix index

    def retire(self) -> None:
        """Release the KV of sliding-window layers that no later token sees, unless the request keeps all its pages."""
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

    def decoding(self) -> list[Sequence]:
        """The sequences that run one token each. More than the budget can decode only after it was lowered; the last then wait.

        If the first sequence has a prompt to run, a token is left for it, so that it always advances.
        """
        most = self.config.max_num_batched_tokens
        if self.running and self.running[0].todo > 1:
            most -= 1
        return [s for s in self.running if s.todo <= 1][:most]

    def must_share(self, sequence: Sequence, behind: Seq[Sequence], room: PromptRoom) -> bool:
        """Whether a prompt leaves a part of the room to a short one: it is long itself, and the next in order that can run is short."""
        if room.bound is None or room.is_short(sequence.todo):
            return False
        if any(room.is_short(s.todo) for s in behind):
            return True
        first = self.waiting.first()
        return first is not None and room.is_short(first.todo) and self.may_admit()

    def must_leave_share(self, room: PromptRoom) -> bool:
        """Whether the first waiting request leaves a part of the room to the second: it is long, and the second is short."""
        first = self.waiting.first()
        if room.bound is None or first is None or room.is_short(first.todo) or len(self.running) + 1 >= self.config.max_num_seqs:
            return False
        second = self.waiting.pop(_id(first)).first()
        return second is not None and room.is_short(second.todo)

    def place_decode(self, decoding: list[Sequence]) -> set[int]:
        """Find room for one token of each decoding sequence; returns the ids of the sequences."""
        needy, size = self.in_need(decoding), self.config.page_size
        nothing_to_copy = all(s.pages.length * size <= s.num_filled for s in needy)
        short = nothing_to_copy and self.give({_id(s): pages_for(s.num_filled + s.todo, size) - s.pages.length for s in needy})
        for sequence in () if short else needy:
            if self.find(sequence) is not None:
                short = self.make_room(sequence, sequence.num_filled + sequence.todo) or short
        if short or (self.may_grow_early() and self.grows_early(decoding)):
            self.grew = self.look_ahead() or short
        return {s.request.request_id for s in decoding}

    def may_grow_early(self) -> bool:
        """Whether sequences may get more pages before they need them: there are some, and no request could begin with them instead.

        An executor discards the step that it already runs if frames change, so they change as late as possible.
        """
        taken = self.waiting.first() is None or len(self.running) >= self.config.max_num_seqs
        return taken and self.pool.frames is None and self.spare() > 0

    def grows_early(self, decoding: list[Sequence]) -> bool:
        """Whether sequences get more pages although none of them needs one in this step.

        They do in the last step after which they have pages for another one: an executor may run that one already, and it finds the places
        of the step after it in the pages that were there. They also do if one decodes for the first time, so that the batch is new anyway.
        """
        left = [_room(s, self.config.page_size) - s.num_filled for s in decoding if _lacks_pages(s, self.config.page_size)]
        return min(left, default=0) == EARLY or (bool(left) and any(s.num_generated <= 1 for s in decoding))

    def spare(self) -> int:
        """Pages that `look_ahead` may give away."""
        first = self.waiting.first()
        return self.pool.spare(only_free=first is not None and first.most_filled > 0)

    def in_need(self, decoding: list[Sequence]) -> list[Sequence]:
        """The sequences that need a page: they have none for their next token, or share a partly filled one."""
        size = self.config.page_size
        partly = [s for s in decoding if s.num_filled % size and s.todo]
        tails = np.array([s.pages[s.num_filled // size] for s in partly], np.int32)
        shared = {_id(partly[at]) for at in np.flatnonzero(self.pool.pages.owners(tails) > 1)}
        return [s for s in decoding if s.pages.length * size <= s.num_filled or (shared and _id(s) in shared)]

    def look_ahead(self) -> bool:
        """Give decoding sequences more pages than they need now, so that many steps pass before the page tables change again.

        Returns whether one of them got some.

        Idle pages of the index are taken too, because these steps would evict them anyway. They are spared while a preempted request waits,
        because it can reuse its own pages.
        """
        spare = self.spare()
        size, wanted = self.config.page_size, dict[int, int]()
        for sequence in self.running:
            length = min(sequence.request.max_len, sequence.num_filled + 1 + LOOKAHEAD)
            missing = pages_for(length, size) - sequence.pages.length
            if 0 < missing <= spare and sequence.todo == 1:
                wanted[_id(sequence)], spare = missing, spare - missing
        return self.give(wanted)

    def give(self, wanted: dict[int, int]) -> bool:
        """Append `wanted` pages to each of these requests. False if the pool has too few, or none are wanted."""
        taken = pools.allocate(self.pool, sum(wanted.values())) if wanted else None
        if taken is None:
            return False
        self.pool, fresh = taken
        pages, start = np.array(fresh, np.int32), 0
        for at, sequence in enumerate(self.running):
            if count := wanted.get(_id(sequence), 0):
                longer = sequence.pages.extend(pages[start : start + count])
                self.running[at], start = sequence.with_pages(longer, sequence.num_filled), start + count
        self.taken.note(self.pool, fresh)
        return True

    def place_prefill(self, sequence: Sequence, room: PromptRoom) -> int:
        """The number of prompt tokens that run in this step, within room and pool; the first sequence gets at least one."""
        if self.find(sequence) is None:
            return 0
        count = self.fitting(sequence, room)
        return count if self.make_room(sequence, sequence.num_filled + count) else 0

    def fitting(self, sequence: Sequence, room: PromptRoom) -> int:
        """The number of tokens that room and pool allow a sequence to run now: at least one, if it has any left."""
        size, count = self.config.page_size, room.most(sequence)
        spare = self.pool.num_available - shares_tail(self.pool, sequence, size)
        if self.pool.frames is not None:  # a prompt soon gives back frames outside its window; leave some to decoding sequences
            spare -= min(len(self.running) - 1, spare // 2)
        fits = (len(sequence.pages) + spare) * size - sequence.num_filled
        return min(count, max(1, fits))

    def offer(self, prefill: Seq[tuple[Sequence, int]]) -> None:
        """Index the pages that these prompts fill in this step.

        Requests that are admitted later in the step begin with them. Three rules make that safe. The prompts of a step run in one pass, and
        in each layer the KV of all of them is written before any is read. Sequences that decode run after this pass. No sequence is
        preempted after its pages were offered: a step that preempted admits nothing, and an admission preempts nobody.
        """
        for sequence, count in prefill:
            require_writable(self.pool.pages, written_pages(sequence, count, self.config.page_size))
            grown = sequence.advance(count)
            self.pool = pools.insert(self.pool, grown.tokens.array(0, grown.num_exact), grown.pages.array(), grown.request.namespace)

    def make_room(self, sequence: Sequence, length: int) -> bool:
        """Reserve pages, preempting those whose turn is last. False if `sequence` itself was preempted or is stuck."""
        while True:
            at = self.find(sequence)
            if at is None:
                raise BrokenInvariantError(f"request {_id(sequence)} is scheduled but not running")
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
        """Reserve pages for the first `length` tokens of one running sequence. False if the pool has too few."""
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
        """Take the pages of one running sequence and return it to the queue."""
        sequence = self.running.pop(at)
        self.copies.pop(_id(sequence), None)
        self.pool = give_up_pages(self.pool, sequence)
        self.waiting = self.waiting.push(_without_pages(sequence))
        self.num_preempted += 1

    def strip_waiting(self) -> bool:
        """Take the pages of the waiting request that owns some and whose turn is last; it looks them up, or runs them, again later."""
        holders = [s for s in self.waiting if len(s.pages)]
        if not holders:
            return False
        last = holders[-1]
        self.pool = give_up_pages(self.pool, last)
        self.waiting = self.waiting.push(_without_pages(last))
        return True

    def opens(self, num_steps: int) -> bool:
        """Whether a step that runs no prompt so far may begin to admit requests, after so many steps.

        A step with one short prompt takes nearly as long as a step with several. So if nearly all places are taken, those that become free
        wait until there are several, or one for each request that waits, or until the number of steps is a multiple of `HELD`. A request
        that comes before one that runs does not wait for that.
        """
        first, places = self.waiting.first(), self.config.max_num_seqs - len(self.running)
        if first is None or not self.running or num_steps % HELD == 0:
            return True
        return places >= min(self.config.max_num_seqs // PLACES, len(self.waiting)) or _turn(first) < _turn(self.running[-1])

    def may_admit(self) -> bool:
        """Whether the first waiting request fits now. A step that preempted admits nothing."""
        first = self.waiting.first()
        if first is None or len(self.running) >= self.config.max_num_seqs or self.num_preempted or self.stuck:
            return False
        return not self.running or (self.fits(first) and self.can_grow(first))

    def fits(self, first: Sequence) -> bool:
        """Whether there are pages for all tokens of a waiting request and the next one."""
        # This first estimate counts reusable pages of the index as missing. The lookup below is more expensive.
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

    def can_grow(self, first: Sequence) -> bool:
        """Whether the running sequences and this request can all grow to their expected lengths without preemption.

        The most pages are held right before a sequence ends. Then it gives back those that it did not get from others.
        """
        size, expected = self.config.page_size, self.expected_reply
        spare = self.pool.pages.num_free + self.pool.prefix.num_idle  # of frames a sequence seldom needs more: only for its windows
        if not expected or (len(self.running) + 1) * (expected // size + 1) + pages_for(first.tokens.length, size) <= spare:
            return True
        if self.most is None:
            self.most = sum([_most_pages(s, size) for s in self.running])
        if self.most + pages_for(first.request.max_len, size) + 1 <= spare:
            return True
        rows = [*self.running, first]
        facts = np.array([(s.request.max_len, s.request.num_prompt, s.tokens.length, s.pages.length, s.num_cached) for s in rows])
        facts[-1, 3] = max(first.pages.length, num_busy(self.pool, self.reusable(first)[0]))
        limit, prompt, length, held, cached = facts.T
        left = np.minimum(limit - length, np.maximum(prompt + expected - length, expected // LONGER))
        order = left.argsort()
        left, length, held, cached = left[order], length[order], held[order], cached[order]
        given_back, count = np.cumsum(held - cached // size), np.arange(len(rows), 0, -1)
        grown = (length[::-1].cumsum()[::-1] + left * count) / size + count / 2  # half of a last page is empty
        more = grown - held[::-1].cumsum()[::-1]  # pages that each sequence and those that stay longer than it take
        return bool((more[1:] - given_back[:-1]).max(initial=more[0]) <= spare)

    def reusable(self, sequence: Sequence) -> tuple[np.ndarray, int]:
        """The pages of the prefix index that a sequence can reuse, and how many of them are outside its windows."""
        if self.found is None or self.found[0] is not self.pool or self.found[1] is not sequence:
            asked, tokens = sequence.request, sequence.tokens.array()
            self.found = self.pool, sequence, pools.reusable(self.pool, tokens, whole=asked.keep, namespace=asked.namespace)
        return self.found[2]

    def frames_suffice(self, sequence: Sequence, matched: np.ndarray, retired: int) -> bool:
        """Whether enough frames are available for the first step of a request.

        A request that keeps its KV needs a frame for each page; others need their windows and the tokens of one step.
        """
        frames, size = self.pool.frames, self.config.page_size
        assert frames is not None
        wanted = pages_for(sequence.tokens.length + 1, size)
        if not sequence.request.keep:
            wanted = min(wanted, least_frames(frames.window, size) + pages_for(self.config.max_num_batched_tokens, size))
        spare = np.count_nonzero(frames.needs.get(matched[retired:]) == 0)
        have = max(len(matched) - retired, len(sequence.pages) - sequence.retired)
        return wanted - have <= frames.num_available - int(spare)

    def admit(self, room: PromptRoom) -> tuple[Sequence, int] | None:
        """Move the first waiting request to the running ones, over pages of the index if they save more than its own.

        Returns:
            The sequence, and how many of its tokens run in this step. None if the pool has too few pages after all; then the request waits,
            unless nothing else runs.
        """
        sequence = self.waiting.first()
        if sequence is None:
            raise BrokenInvariantError("admit was called with an empty queue")
        before = self.pool, self.waiting, self.num_reused
        self.waiting = self.waiting.pop(_id(sequence))
        matched, retired = self.reusable(sequence)
        if worth_taking(self.pool, matched, sequence, self.config.page_size):
            self.pool = pools.acquire(self.pool, matched, retired)
            self.pool = pools.release(self.pool, sequence.pages, sequence.retired)
            sequence = sequence.restart(IntVector.of(matched), len(matched) * self.config.page_size, retired)
        reused = min(sequence.num_filled, sequence.tokens.length - 1)  # the last token runs for its logits even if it is filled
        self.num_reused += max(0, reused - sequence.most_filled)
        cached = sequence.num_cached if sequence.most_filled else reused
        sequence = replace(sequence, most_filled=max(sequence.most_filled, reused), num_cached=cached)
        at = bisect(self.running, _turn(sequence), key=_turn)
        self.running.insert(at, sequence)
        count = self.fitting(sequence, room)
        length = sequence.num_filled + count
        if len(self.running) == 1:
            return (self.running[at], count) if self.make_room(sequence, length) else None
        if self.reserve(at, length):
            if self.most is not None:
                self.most += _most_pages(self.running[at], self.config.page_size)
            return self.running[at], count
        del self.running[at]
        self.pool, self.waiting, self.num_reused = before
        return None

    def find(self, sequence: Sequence) -> int | None:
        """The index of a sequence in `running`, or None."""
        at = bisect(self.running, _turn(sequence), key=_turn) - 1
        return at if at >= 0 and _id(self.running[at]) == _id(sequence) else None

    def finish(self, chosen: set[int], prefill: dict[int, int]) -> Plan:
        """The finished plan."""
        copies = tuple(pair for pairs in self.copies.values() for pair in pairs)
        frame_copies = frames_of_copies(self.pool, copies)
        pool, size = pools.release(self.pool, self.sources), self.config.page_size
        decode = tuple([s for s in self.running if s.request.request_id in chosen])
        by_id = {_id(s): s for s in self.running} if prefill else {}
        prompts = tuple((by_id[rid], count) for rid, count in prefill.items() if rid in by_id)
        require_writable(pool.pages, [s.pages[s.num_filled // size] for s in decode if s.todo])
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
    """The sequence without pages, as a preempted one."""
    return sequence.restart(IntVector.of(), 0)
