"""A plan under construction, and the pages that its sequences have, get and lack."""

from bisect import bisect
from dataclasses import replace

import numpy as np

from nanovllm.config import EngineConfig
from nanovllm.engine.plan import Plan
from nanovllm.state import offload
from nanovllm.state import pool as pools
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.pages import require_writable
from nanovllm.state.pool import Pool, Taken
from nanovllm.state.request import Queue, Sequence
from nanovllm.state.sequence_pages import frames_of_copies, reserve
from nanovllm.state.vector import joined
from nanovllm.state.window_frames import num_retired


def id_of(sequence: Sequence) -> int:
    """The id of a sequence's request."""
    return sequence.request.request_id


def turn_of(sequence: Sequence) -> tuple[int, int]:
    """What sequences are ordered by."""
    return sequence.request.turn


def owed_pages(draft: "Draft") -> int:
    """The pages that running sequences still lack whose pages are being copied in."""
    return sum([max(0, missing_pages(s, s.loading, draft.config.page_size)) for s in draft.running if s.loading])


def room_of(sequence: Sequence, page_size: int) -> int:
    """The number of tokens that a sequence can fill in the pages that it has."""
    return sequence.pages.length * page_size - sequence.num_filled


def missing_pages(sequence: Sequence, length: int, page_size: int) -> int:
    """The pages that a sequence lacks for its first `length` tokens; negative if it has more than these need."""
    return pages_for(length, page_size) - sequence.pages.length


class Draft:
    """A plan under construction: mutable, and used only inside `schedule` and `steady`."""

    def __init__(self, pool: Pool, running: list[Sequence], waiting: Queue, config: EngineConfig, expected_reply: int):
        self.pool = pools.planning(pool)
        self.running, self.waiting = running, waiting
        self.config, self.expected_reply = config, expected_reply
        self.taken = Taken()
        self.copies: dict[int, list[tuple[int, int]]] = {}
        self.sources: list[int] = []  # released last, so that no page is reallocated before it was copied
        self.stuck: list[Sequence] = []
        self.stranded: list[Sequence] = []  # waiting requests that cannot run while the live chunks exist
        self.reading: list[Sequence] = []  # waiting requests whose pages are being read from the disk
        self.num_preempted = self.num_reused = 0
        self.grew = False
        self.load_room: int | None = None  # pages that may still be copied in while replies go on; None: as many as there are
        self.num_loaded = 0  # pages that were, within this room
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

    def find(self, sequence: Sequence) -> int | None:
        """The index of a sequence in `running`, or None."""
        at = bisect(self.running, turn_of(sequence), key=turn_of) - 1
        return at if at >= 0 and id_of(self.running[at]) == id_of(sequence) else None

    def give(self, wanted: dict[int, int]) -> bool:
        """Append `wanted` pages to each of these requests. False if the pool has too few, or none are wanted."""
        taken = pools.allocate(self.pool, sum(wanted.values())) if wanted else None
        if taken is None:
            return False
        self.pool, fresh = taken
        pages, start = np.array(fresh, np.int32), 0
        for at, sequence in enumerate(self.running):
            if count := wanted.get(id_of(sequence), 0):
                longer = sequence.pages.extend(pages[start : start + count])
                self.running[at], start = sequence.with_pages(longer, sequence.num_filled), start + count
        self.taken.note(self.pool, fresh)
        return True

    def reserve(self, at: int, length: int) -> bool:
        """Reserve pages for the first `length` tokens of one running sequence. False if the pool has too few."""
        sequence = self.running[at]
        done = reserve(self.pool, sequence, length, self.config.page_size)
        if done is None:
            return False
        self.pool, self.running[at], copies, fresh = done
        self.taken.note(self.pool, fresh)
        if copies:
            self.copies[id_of(sequence)] = copies
            self.sources.extend(source for source, _ in copies)
        return True

    def finish(self, chosen: set[int], prefill: dict[int, int]) -> Plan:
        """The finished plan."""
        for sequence in self.reading:
            self.waiting = self.waiting.push(sequence)
        copies = tuple(pair for pairs in self.copies.values() for pair in pairs)
        frame_copies = frames_of_copies(self.pool, copies)
        pool, size = pools.release(self.pool, self.sources), self.config.page_size
        host, moves = (None, None) if pool.host is None else offload.settled(pool.host)
        pool = pool if host is None else replace(pool, host=host)
        decode = tuple([s for s in self.running if id_of(s) in chosen])
        by_id = {id_of(s): s for s in self.running} if prefill else {}
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
            stuck=(*self.stuck, *self.stranded),
            grew=self.grew,
            num_preempted=self.num_preempted,
            num_reused=self.num_reused,
            moves=moves,
        )
