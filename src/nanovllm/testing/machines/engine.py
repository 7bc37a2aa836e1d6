"""`EngineMachine`: call every public function of the engine in any order and compare the results with an oracle (all invariants)."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, initialize, invariant, multiple, precondition, rule

from nanovllm.chunks.generate import generate_many
from nanovllm.chunks.handles import detach, fork, release, truncate
from nanovllm.chunks.prefill import prefill
from nanovllm.chunks.session import begin
from nanovllm.engine.donation import enter
from nanovllm.engine.requests import cancel, capacity, submit
from nanovllm.engine.step import step
from nanovllm.errors import DonatedStateError, ForeignChunkError, InvalidRequestError, ReleasedChunkError
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.invariants import check
from nanovllm.testing.machines.engine_holder import SMALLEST, kv_bytes, room_of
from nanovllm.testing.machines.session_driver import SessionDriver
from nanovllm.testing.shadows.memory import expect, indexed_runs
from nanovllm.testing.strategies import limits, pick, token_ids


class EngineMachine(SessionDriver):
    """Test an engine: chunks, requests, replies and decode sessions in any order, with failures and misuse.

    Pools have up to 18 tokens in pages of 1 to 3, and token ids are 0 and 1. So sharing, eviction and preemption are common. Now and then
    a device call fails, before or after it did its work. Donated states, released chunks, chunks of another engine and impossible requests
    must be refused without changing the pool. A step in which the device has too little memory, or live chunks leave too few pages, may end
    a request with an error. No other request may lose a token by it.

    After each rule the machine compares all values of the engine, and the KV that they refer to, with its shadow. It checks invariants 1
    to 7, 9 and 10. Replies must equal those of the request alone in a fresh engine (invariant 8).

    Attributes:
        world: The engine and model under test, with their oracle: a `World`. The default is `SymbolicWorld()`.
        max_tokens: The largest number of tokens that a pool has room for.
        num_frames: Smallest and largest number of frames (the KV memory of sliding-window pages). Set it if the model has sliding windows.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import EngineMachine, SymbolicWorld
        >>> class WideVocabulary(EngineMachine):
        ...     world = SymbolicWorld(vocab_size=16)
        >>> run_state_machine_as_test(WideVocabulary, settings=settings(max_examples=2, stateful_step_count=5, deadline=None))
    """

    max_tokens: ClassVar[int] = 18
    num_frames: ClassVar[tuple[int, int] | None] = None
    chunks = Bundle("chunks")

    @initialize(data=st.data(), pinning=st.integers(0, 3))
    def start(self, data: st.DataObject, pinning: int) -> None:
        """Start a fresh engine. In one run of four, chunks may pin the whole pool; else at most about two thirds of it."""
        frames = None if self.num_frames is None else st.integers(*self.num_frames)
        self.state = self.world.init_state(data.draw(limits(self.max_tokens, num_frames=frames)))
        room = room_of(self.state)
        self.most_pinned = room if pinning == 3 else max(2, room * 2 // 3)

    # Chunks

    @rule(target=chunks, ids=token_ids(max_size=6))
    def prefill(self, ids: list[int]):
        """Prefill a chunk from token ids."""
        return self._prefill(None, ids)

    @rule(target=chunks, after=chunks, ids=token_ids(min_size=0, max_size=4))
    def prefill_after(self, after: Chunk, ids: list[int]):
        """Prefill a chunk that continues another."""
        return self._prefill(after, ids)

    @rule(target=chunks, chunk=chunks, cut=st.integers(0, 5))
    def fork(self, chunk: Chunk, cut: int):
        """Make a second handle by `fork`, or a shorter one by `truncate`."""
        length = max(1, len(chunk) - cut)
        call = (lambda: truncate(self.state, chunk, length)) if cut else (lambda: fork(self.state, chunk))
        return self._new_chunk(self._attempt(call), chunk.token_ids.tolist()[:length])

    @rule(chunk=consumes(chunks))
    def release(self, chunk: Chunk) -> None:
        """Release a chunk."""
        self._release(chunk)

    # Requests, step by step

    @rule(prompts=st.lists(token_ids(max_size=6), min_size=1, max_size=4), steps=st.integers(0, 4), data=st.data())
    def submit(self, prompts: list[list[int]], steps: int, data: st.DataObject) -> None:
        """Submit requests for prompts, then run some steps."""
        options, keep = self._options(data), data.draw(st.integers(0, 6))
        for place, ids in enumerate(prompts):
            self._submit(None, ids, options, keep == place)
        self.step(steps)

    @rule(chunk=chunks, more=st.lists(token_ids(min_size=0, max_size=4), min_size=1, max_size=3), steps=st.integers(0, 4), data=st.data())
    def submit_context(self, chunk: Chunk, more: list[list[int]], steps: int, data: st.DataObject) -> None:
        """Submit requests that continue a chunk, then run some steps."""
        options, keep = self._options(data), data.draw(st.integers(0, 6))
        for place, ids in enumerate(more):
            self._submit(chunk, ids, options, keep == place)
        self.step(steps)

    @precondition(lambda self: self.pending)
    @rule(count=st.integers(1, 5))
    def run(self, count: int) -> None:
        """Run steps."""
        self.step(count)

    def step(self, count: int) -> None:
        """Run some steps and check the KV memory after each."""
        for at in range(count):
            if at:
                self.memory_agrees()
            self._step()

    @precondition(lambda self: self.pending)
    @rule(count=st.integers(0, 3), late=st.booleans())
    def failing_step(self, count: int, late: bool) -> None:
        """Run a step in which a device call fails, then a step without failure."""
        self._executor.arm(count, late)
        self._step()
        self._executor.disarm()
        self.values_agree()
        self.memory_agrees()
        self._step()

    @precondition(lambda self: self.pending)
    @rule(count=st.integers(0, 3), late=st.booleans(), times=st.integers(1, 3))
    def step_without_memory(self, count: int, late: bool, times: int) -> None:
        """Run a step in which the device has no memory for some calls. A request may end with an error; the others go on."""
        self._executor.arm(count, late, torch.OutOfMemoryError("planted"), times)
        self._step()
        self._executor.disarm()

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Cancel a running or waiting request."""
        rid = data.draw(st.sampled_from(sorted(self.pending)))
        done = self._attempt(lambda: (cancel(self.state, rid), None))
        if done is not None:
            self.state = done[0]
            self.needed += self.pending.pop(rid).most_filled

    @precondition(lambda self: self.ended or self.pending)
    @rule(target=chunks, data=st.data())
    def detach(self, data: st.DataObject):
        """Turn a kept request into a chunk of its filled tokens."""
        rid = data.draw(st.sampled_from(self.ended + [i for i, p in sorted(self.pending.items()) if p.request.keep] or [-1]))
        if rid == -1:
            return multiple()
        filled = next(s for s in self._sequences() if s.request.request_id == rid)
        tokens = filled.tokens.array(0, filled.num_filled).tolist()
        done = self._attempt(lambda: detach(self.world.model, self.state, rid))
        if done is None:
            return multiple()
        if rid in self.ended:
            self.ended.remove(rid)
        else:
            self.needed += self.pending.pop(rid).most_filled
        if done[1] is None:
            self.state = done[0]
            return multiple()
        return self._new_chunk(done, tokens)

    # Replies in one call

    @rule(target=chunks, ids=token_ids(max_size=6), data=st.data())
    def generate(self, ids: list[int], data: st.DataObject):
        """Generate one reply to a prompt."""
        return self._generate([(None, ids, self._options(data))])

    @rule(target=chunks, chunk=chunks, data=st.data(), count=st.integers(1, 3))
    def generate_from(self, chunk: Chunk, data: st.DataObject, count: int):
        """Generate replies to contexts, some of which share a chunk."""
        bases = [chunk] if count == 1 else [None, chunk]
        rows = []
        for _ in range(count):
            base = pick(data, bases)
            rows.append((base, data.draw(token_ids(min_size=base is None, max_size=4)), self._options(data)))
        return self._generate(rows)

    # Decode steps by hand

    @rule(room=st.integers(1, 4), ids=token_ids(max_size=4), twice=st.booleans(), steps=st.integers(0, 4), data=st.data())
    def begin(self, room: int, ids: list[int], twice: bool, steps: int, data: st.DataObject) -> None:
        """Begin a decode session over one or two prompts and run some steps."""
        if self._begin([(None, ids), (None, ids[:1] + ids)][: 1 + twice], room, self._options(data)):
            self._decode(self.sessions[-1], steps)

    @rule(chunk=chunks, room=st.integers(1, 4), more=token_ids(min_size=0, max_size=2), twice=st.booleans(), data=st.data())
    def begin_from(self, chunk: Chunk, room: int, more: list[int], twice: bool, data: st.DataObject) -> None:
        """Begin a decode session that continues a chunk."""
        self._begin([(chunk, more), (chunk, [])][: 1 + twice], room, self._options(data))

    @precondition(lambda self: any(s.done < s.room for s in self.sessions))
    @rule(count=st.integers(1, 4), data=st.data())
    def decode(self, count: int, data: st.DataObject) -> None:
        """Run steps of one session, as far as its room allows."""
        going = [s for s in self.sessions if s.done < s.room]
        self._decode(going[data.draw(st.integers(0, len(going) - 1))], count)

    @precondition(lambda self: self.sessions)
    @rule(target=chunks, data=st.data())
    def commit(self, data: st.DataObject):
        """Commit a session."""
        return self._commit(data.draw(st.integers(0, len(self.sessions) - 1)))

    @precondition(lambda self: self.sessions)
    @rule(newest=st.booleans(), data=st.data())
    def abandon(self, newest: bool, data: st.DataObject) -> None:
        """Abandon a session, by its newest carry or by its number."""
        self._abandon(data.draw(st.integers(0, len(self.sessions) - 1)), newest)

    # Misuse and failure

    @precondition(lambda self: self.quiet >= 5)
    @rule(countdown=st.integers(0, 4), late=st.booleans())
    def plant_failure(self, countdown: int, late: bool) -> None:
        """Let one of the next device calls raise."""
        self._executor.arm(countdown, late)
        self.quiet = 0

    @precondition(lambda self: self.quiet >= 5)
    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        """Call with a donated state, a released chunk, a chunk of another engine or an impossible request: all are refused."""
        self.quiet = 0
        kind = data.draw(st.integers(0, 2))
        if kind == 0:
            self._ask_the_impossible(data)
        elif kind == 1 and self.stale:
            self._use_stale_state(data)
        elif self.dead:
            self._use_released_chunk(data)

    def _use_stale_state(self, data: st.DataObject) -> None:
        old = self.stale[data.draw(st.integers(0, len(self.stale) - 1))]
        calls = [
            lambda: submit(self.world.model, old, [0], None),
            lambda: step(self.world.model, old),
            lambda: prefill(self.world.model, old, [0]),
            lambda: generate_many(self.world.model, old, [[0]], SamplingParams()),
            lambda: begin(self.world.model, old, [[0]], SamplingParams(), room=1),
        ]
        self._refused(DonatedStateError, calls[data.draw(st.integers(0, len(calls) - 1))])

    def _use_released_chunk(self, data: st.DataObject) -> None:
        chunk = pick(data, self.dead)
        calls: list[Callable[[EngineState], Any]] = [
            lambda state: release(state, chunk),
            lambda state: fork(state, chunk),
            lambda state: prefill(self.world.model, state, [0], after=chunk),
            lambda state: submit(self.world.model, state, chunk, None),
            lambda state: generate_many(self.world.model, state, [[chunk, [0]]], SamplingParams()),
        ]
        call = calls[data.draw(st.integers(0, len(calls) - 1))]
        self._refused(ReleasedChunkError, lambda: call(self.state))
        other = self.world.init_state(SMALLEST)
        self._refused(ForeignChunkError, lambda: call(other))

    def _ask_the_impossible(self, data: st.DataObject) -> None:
        long = [0] * (capacity(self.state, whole=False) + 1)
        bad = data.draw(st.sampled_from([[], [-1], [self.world.model.config.vocab_size], long, [0.5]]))
        self._refused(InvalidRequestError, lambda: submit(self.world.model, self.state, [*bad], SamplingParams()))
        self._refused(InvalidRequestError, lambda: prefill(self.world.model, self.state, [*bad]))
        self._refused(InvalidRequestError, lambda: cancel(self.state, self.state.next_id))

    # What must hold after each rule

    @invariant()
    def values_agree(self) -> None:
        """Run the engine's own check; check that old values have not changed, and the token counts (invariant 9)."""
        self.quiet += 1
        check(enter(self.state))
        self.kept.require_unchanged()
        self._observe()
        stats = self.state.stats
        run = stats.prefill_tokens + stats.decode_tokens + stats.reused_tokens
        sessions = sum(len(prompt) - 1 for s in self.sessions for prompt in s.prompts)
        needed = self.needed + sessions + sum(p.most_filled for p in self.pending.values())
        extra = stats.rerun_tokens + stats.discarded_tokens
        expect(run == needed + extra, f"{run} tokens run or reused; {needed} needed and {extra} extra: {stats}", invariant=9)

    @invariant()
    def memory_agrees(self) -> None:
        """Check that each slot that a value refers to contains its token's KV, and that the bytes of live chunks have not changed."""
        state = enter(self.state)
        frames = state.pool.frames
        for chunk in state.chunks.values():
            if len(chunk.pages):  # not in host memory
                self.world.require_kv(state.kv, list(chunk.pages), chunk.token_ids.tolist(), frames)
            expect(kv_bytes(self.state, chunk) == self.chunk_kv[chunk.liveness], f"the KV of {chunk!r} changed", invariant=3)
        for sequence in self._sequences(state):
            filled = sequence.tokens.array(0, sequence.num_filled).tolist()
            self.world.require_kv(state.kv, list(sequence.pages), filled, frames, sequence.retired)
        pages_of, size = dict(indexed_runs(state.prefix)), state.config.page_size
        for run in pages_of:
            if not any(other != run and other[: len(run)] == run for other in pages_of):  # the longest prefixes cover the shorter ones
                pages = [pages_of[run[: end + size]] for end in range(0, len(run), size)]
                self.world.require_kv(state.kv, pages, run, frames, len(pages))

    def teardown(self) -> None:
        """Check invariant 6: all requests and sessions end, and all pages return."""
        self._executor.disarm()
        while self.sessions:
            self._commit(0)
        bound = sum((p.request.max_len + 2) * (len(self.pending) + 2) for p in self.pending.values())
        for _ in range(bound):
            if not self.pending:
                break
            self._step()
            self.values_agree()
        expect(not self.pending, f"requests {sorted(self.pending)} did not end within {bound} steps", invariant=6)
        for rid in list(self.ended):
            self.state, _ = detach(self.world.model, self.state, rid)
        for chunk in list(self.state.chunks.values()):
            self.state = release(self.state, chunk)
        check(self.state)
        available = self.state.pool.num_available
        expect(available == room_of(self.state), f"{available} of {room_of(self.state)} pages came back", invariant=6)
