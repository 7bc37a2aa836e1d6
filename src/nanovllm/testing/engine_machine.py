"""`EngineMachine`: every public call of the engine, in any order, against an oracle (all invariants of the architecture)."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, precondition, rule

from ..chunks import fork, prefill, release, truncate
from ..engine import cancel, capacity, enter, step, submit
from ..errors import DonatedStateError, ForeignChunkError, InvalidRequestError, NanoVLLMError, OutOfPagesError, ReleasedChunkError
from ..generate import Generation, generate_many
from ..invariants import check
from ..requests import detach, submit_many
from ..sampling_params import SamplingParams
from ..session import begin, commit
from ..state.chunk import Chunk
from ..state.engine_state import EngineState
from ..state.kv import pages_for
from ..state.request import Request, Sequence, StepOutput
from .shadow import KeptValues, expect, freeze, indexed_runs
from .strategies import Limits, limits, sampling_params, token_ids
from .worlds import FlakyExecutor, PlantedError, SymbolicWorld, World


@dataclass(slots=True)
class Pending:
    """A submitted request as the shadow sees it. `most_filled` is what its KV cost, run or reused, so far."""

    request: Request
    prompt: list[int]
    most_filled: int = 0
    drawn: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Steps:
    """Decode steps between `begin` and `commit`."""

    carry: Any
    requests: list[Request]
    prompts: list[list[int]]
    room: int
    drawn: list[list[int]]
    done: int = 0


class EngineMachine(RuleBasedStateMachine):
    """Chunks, requests, replies and sessions over one engine of a few pages, with planted failures, stale states and released chunks.

    After each rule all of the engine's values, and the KV that any of them refers to, are compared with the shadow's. `world` is what runs:
    a subclass puts another model, or another engine, in its place.
    """

    world: ClassVar[World] = SymbolicWorld()
    max_pages: ClassVar[int] = 8
    chunks = Bundle("chunks")

    def __init__(self) -> None:
        super().__init__()
        self.state: EngineState = self.world.init_state(Limits(num_pages=1, page_size=1, max_model_len=2, max_num_seqs=1, max_num_batched_tokens=1))
        self.chunk_kv: dict[int, bytes] = {}
        self.pending: dict[int, Pending] = {}
        self.ended: list[int] = []  # ids of kept requests that have ended and hold their pages
        self.sessions: list[Steps] = []
        self.stale: list[EngineState] = []
        self.dead: list[Chunk] = []
        self.most_pinned = 0
        self.needed = 0  # tokens whose KV was needed by what is over
        self.kept = KeptValues()

    @initialize(data=st.data(), hoards=st.integers(0, 3))
    def start(self, data: st.DataObject, hoards: int) -> None:
        """A fresh engine. In one run of four, chunks may pin the whole pool; else at most about a half of it."""
        self.state = self.world.init_state(data.draw(limits(max_pages=self.max_pages)))
        self.most_pinned = self.state.config.num_pages if hoards == 3 else self.state.config.num_pages // 2 + 1

    # Chunks

    @rule(target=chunks, ids=token_ids(max_size=6))
    def prefill(self, ids: list[int]):
        """A chunk of token ids."""
        return self._prefill(None, ids)

    @rule(target=chunks, after=chunks, ids=token_ids(min_size=0, max_size=4))
    def prefill_after(self, after: Chunk, ids: list[int]):
        """A chunk that continues another."""
        return self._prefill(after, ids)

    @rule(target=chunks, chunk=chunks, cut=st.integers(0, 5))
    def fork(self, chunk: Chunk, cut: int):
        """A second handle, perhaps a shorter one."""
        length = max(1, len(chunk) - cut)
        call = (lambda: truncate(self.state, chunk, length)) if cut else (lambda: fork(self.state, chunk))
        return self._new_chunk(self._attempt(call), chunk.token_ids.tolist()[:length])

    @rule(given=st.lists(consumes(chunks), min_size=1, max_size=3))
    def release(self, given: list[Chunk]) -> None:
        """Handles end."""
        for chunk in given:
            self._release(chunk)

    # Requests, a step at a time

    @rule(prompts=st.lists(token_ids(max_size=6), min_size=1, max_size=4), data=st.data())
    def submit(self, prompts: list[list[int]], data: st.DataObject) -> None:
        """Requests for prompts."""
        options, keep = data.draw(self._options()), data.draw(st.integers(0, 6))
        for place, ids in enumerate(prompts):
            self._submit(None, ids, options, keep == place)

    @rule(chunk=chunks, more=st.lists(token_ids(min_size=0, max_size=4), min_size=1, max_size=3), data=st.data())
    def submit_context(self, chunk: Chunk, more: list[list[int]], data: st.DataObject) -> None:
        """Requests that go on from a chunk, which may be released at once."""
        options, keep = data.draw(self._options()), data.draw(st.integers(0, 6))
        for place, ids in enumerate(more):
            self._submit(chunk, ids, options, keep == place)

    @precondition(lambda self: self.pending)
    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        """Some steps of all requests."""
        for _ in range(count):
            self._step()

    @precondition(lambda self: self.pending)
    @rule(count=st.integers(0, 3), late=st.booleans())
    def failing_step(self, count: int, late: bool) -> None:
        """A step, of which one device call fails, and one that does not."""
        self._executor.arm(count, late)
        self._step()
        self._executor.disarm()
        self.values_agree()
        self.memory_agrees()
        self._step()

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A request is dropped in whatever state it is."""
        rid = data.draw(st.sampled_from(sorted(self.pending)))
        done = self._attempt(lambda: (cancel(self.state, rid), None))
        if done is not None:
            self.state = done[0]
            self.needed += self.pending.pop(rid).most_filled

    @precondition(lambda self: self.ended or self.pending)
    @rule(target=chunks, data=st.data())
    def detach(self, data: st.DataObject):
        """A request becomes a chunk of what is filled."""
        rid = data.draw(st.sampled_from(self.ended + [i for i, p in sorted(self.pending.items()) if p.request.keep] or [-1]))
        if rid == -1:
            return multiple()
        filled = next((s for s in self._sequences() if s.request.request_id == rid))
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

    # Replies by one call

    @rule(target=chunks, ids=token_ids(max_size=6), data=st.data())
    def generate(self, ids: list[int], data: st.DataObject):
        """One reply to a prompt."""
        return self._generate([(None, ids, data.draw(self._options()))])

    @rule(target=chunks, chunk=chunks, data=st.data(), count=st.integers(1, 3))
    def generate_from(self, chunk: Chunk, data: st.DataObject, count: int):
        """Replies to contexts of which some share a chunk."""
        bases = st.just(chunk) if count == 1 else st.sampled_from([None, chunk])
        rows = []
        for _ in range(count):
            base = data.draw(bases)
            rows.append((base, data.draw(token_ids(min_size=base is None, max_size=4)), data.draw(self._options())))
        return self._generate(rows)

    # Decode steps by hand

    @rule(room=st.integers(1, 4), ids=token_ids(max_size=4), twice=st.booleans(), data=st.data())
    def begin(self, room: int, ids: list[int], twice: bool, data: st.DataObject) -> None:
        """Pages are reserved for steps over one or two prompts."""
        self._begin([(None, ids), (None, ids[:1] + ids)][: 1 + twice], room, data.draw(self._options()))

    @rule(chunk=chunks, room=st.integers(1, 4), more=token_ids(min_size=0, max_size=2), twice=st.booleans(), data=st.data())
    def begin_from(self, chunk: Chunk, room: int, more: list[int], twice: bool, data: st.DataObject) -> None:
        """Pages are reserved for steps that go on from a chunk."""
        self._begin([(chunk, more), (chunk, [])][: 1 + twice], room, data.draw(self._options()))

    @precondition(lambda self: any(s.done < s.room for s in self.sessions))
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        """One step of one session."""
        going = [s for s in self.sessions if s.done < s.room]
        session = going[data.draw(st.integers(0, len(going) - 1))]
        session.carry, out = self.world.decode(self.state, session.carry)
        session.done += 1
        for row, token in zip(session.drawn, out.token_ids.tolist(), strict=True):
            row.append(token)

    @precondition(lambda self: self.sessions)
    @rule(target=chunks, data=st.data())
    def commit(self, data: st.DataObject):
        """A session ends."""
        return self._commit(data.draw(st.integers(0, len(self.sessions) - 1)))

    # Misuse and failure

    @rule(countdown=st.integers(0, 4), late=st.booleans())
    def plant_failure(self, countdown: int, late: bool) -> None:
        """A device call of the near future raises."""
        self._executor.arm(countdown, late)

    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        """Donated states, released and foreign chunks and impossible requests are refused, and change nothing."""
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
        chunk = data.draw(st.sampled_from(self.dead))
        calls: list[Callable[[EngineState], Any]] = [
            lambda state: release(state, chunk),
            lambda state: fork(state, chunk),
            lambda state: prefill(self.world.model, state, [0], after=chunk),
            lambda state: submit(self.world.model, state, chunk, None),
            lambda state: generate_many(self.world.model, state, [[chunk, [0]]], SamplingParams()),
        ]
        call = calls[data.draw(st.integers(0, len(calls) - 1))]
        self._refused(ReleasedChunkError, lambda: call(self.state))
        other = self.world.init_state(Limits(num_pages=2, page_size=1, max_model_len=2, max_num_seqs=1, max_num_batched_tokens=1))
        self._refused(ForeignChunkError, lambda: call(other))

    def _ask_the_impossible(self, data: st.DataObject) -> None:
        bad = data.draw(st.sampled_from([[], [-1], [self.world.model.config.vocab_size], [0] * (capacity(self.state) + 1), [0.5]]))
        self._refused(InvalidRequestError, lambda: submit(self.world.model, self.state, [*bad], SamplingParams()))
        self._refused(InvalidRequestError, lambda: prefill(self.world.model, self.state, [*bad]))
        self._refused(InvalidRequestError, lambda: cancel(self.state, self.state.next_id))

    # What must hold after each rule

    @invariant()
    def values_agree(self) -> None:
        """The engine's own check, the shadow's counts of tokens, and old values."""
        check(enter(self.state))
        self.kept.require_unchanged()
        self._observe()
        stats = self.state.stats
        run = stats.prefill_tokens + stats.decode_tokens + stats.reused_tokens
        sessions = sum(len(prompt) - 1 for s in self.sessions for prompt in s.prompts)
        needed = self.needed + sessions + sum(p.most_filled for p in self.pending.values())
        extra = stats.rerun_tokens + stats.discarded_tokens
        expect(run == needed + extra, f"invariant 9: {run} tokens run or reused; {needed} needed and {extra} extra: {stats}")

    @invariant()
    def memory_agrees(self) -> None:
        """Every slot that a value refers to holds the KV of its tokens, and a live chunk's bytes never change."""
        state = enter(self.state)
        for chunk in state.chunks.values():
            self.world.require_kv(state.kv, list(chunk.pages), chunk.token_ids.tolist())
            expect(self._bytes(chunk) == self.chunk_kv[chunk.liveness], f"invariant 3: the KV of {chunk!r} changed")
        for sequence in self._sequences(state):
            self.world.require_kv(state.kv, list(sequence.pages), sequence.tokens.array(0, sequence.num_filled).tolist())
        pages_of = {run: page for run, page in indexed_runs(state.prefix)}
        size = state.config.page_size
        for run in pages_of:
            if not any(other != run and other[: len(run)] == run for other in pages_of):
                self.world.require_kv(state.kv, [pages_of[run[: end + size]] for end in range(0, len(run), size)], run)

    def teardown(self) -> None:
        """Invariant 6: everything ends, and all pages come back."""
        self._executor.disarm()
        while self.sessions:
            self._commit(0)
        bound = sum((p.request.max_len + 2) * (len(self.pending) + 2) for p in self.pending.values())
        for _ in range(bound):
            if not self.pending:
                break
            self._step()
            self.values_agree()
        expect(not self.pending, f"invariant 6: requests {sorted(self.pending)} did not end within {bound} steps")
        for rid in list(self.ended):
            self.state, _ = detach(self.world.model, self.state, rid)
        for chunk in list(self.state.chunks.values()):
            self.state = release(self.state, chunk)
        check(self.state)
        available = self.state.pool.num_available
        expect(available == self.state.config.num_pages, f"invariant 6: {available} of {self.state.config.num_pages} pages came back")

    # How the rules call the engine

    @property
    def _executor(self) -> FlakyExecutor:
        executor = self.state.runtime.executor
        assert isinstance(executor, FlakyExecutor)
        return executor

    def _options(self) -> st.SearchStrategy[SamplingParams]:
        return sampling_params(greedy_only=self.world.greedy_only)

    def _sequences(self, state: EngineState | None = None) -> list[Sequence]:
        state = self.state if state is None else state
        inside = [s for session in state.sessions.values() for s in session.sequences]
        return [*state.running, *state.waiting, *state.kept.values(), *inside]

    def _attempt(self, call: Callable[[], Any], fails: type[NanoVLLMError] | None = None) -> Any:
        """What a call returns; None where a planted failure, or a legitimate refusal, came in between: the old state then stands."""
        before = self.state
        self.kept.keep(before.pool)
        self.kept.keep(before.running)
        self.kept.keep(before.waiting)
        try:
            done = call()
        except PlantedError:
            done = None
        except NanoVLLMError as error:
            if fails is None or not isinstance(error, fails):
                raise
            return error
        self._executor.disarm()
        if done is None:
            return None
        self.stale = [*self.stale[-3:], before]
        return done

    def _refused(self, error: type[NanoVLLMError], call: Callable[[], Any]) -> None:
        before = freeze(self.state.pool)
        try:
            call()
        except error as raised:
            expect(bool(str(raised)), f"{error.__name__} says nothing")
        else:
            expect(False, f"{error.__name__} was to be raised")
        expect(freeze(self.state.pool) == before, "a refused call changed the pool")

    def _new_chunk(self, done: tuple[EngineState, Chunk] | None, tokens: list[int]):
        if done is None:
            return multiple()
        self.state, chunk = done
        self._adopt(chunk, tokens)
        return self._hold(chunk)

    def _hold(self, *chunks: Chunk):
        """The chunks that stay; where too much is pinned they are released at once."""
        if self._pinned() <= self.most_pinned:
            return multiple(*chunks)
        for chunk in chunks:
            self._release(chunk)
        return multiple()

    def _pinned(self) -> int:
        inside = [s for v in self.state.sessions.values() for s in v.sequences]
        return len({page for holder in (*self.state.chunks.values(), *self.state.kept.values(), *inside) for page in holder.pages})

    def _adopt(self, chunk: Chunk, tokens: list[int]) -> None:
        expect(chunk.token_ids.tolist() == tokens, f"{chunk!r} holds {chunk.token_ids.tolist()}, not {tokens}")
        self.chunk_kv[chunk.liveness] = self._bytes(chunk)
        self.kept.keep(chunk)

    def _bytes(self, chunk: Chunk) -> bytes:
        size, parts = self.state.config.page_size, []
        for pool in self.state.kv.pools:
            for at, page in enumerate(chunk.pages):
                parts.append(pool[:, page, :, :, : min(size, len(chunk) - at * size)].numpy().tobytes())
        return b"".join(parts)

    def _available(self, base: Chunk | None) -> int:
        """Pages that a request over this chunk can count on: those available and the whole ones it shares."""
        return enter(self.state).pool.num_available + (0 if base is None else len(base) // self.state.config.page_size)

    def _prefill(self, after: Chunk | None, ids: list[int]):
        tokens = ids if after is None else after.token_ids.tolist() + ids
        if len(tokens) > capacity(self.state):
            self._refused(InvalidRequestError, lambda: prefill(self.world.model, self.state, ids, after))
            return multiple()
        room = self._available(after)
        done = self._attempt(lambda: prefill(self.world.model, self.state, ids, after), OutOfPagesError)
        if isinstance(done, OutOfPagesError):
            expect(pages_for(len(tokens), self.state.config.page_size) > room, f"{len(tokens)} tokens did not fit into {room} pages: {done}")
            return multiple()
        if done is not None:
            self.needed += len(tokens)
        return self._new_chunk(done, tokens)

    def _release(self, chunk: Chunk) -> None:
        done = self._attempt(lambda: (release(self.state, chunk), None))
        self.state = done[0]
        self.dead = [*self.dead[-3:], chunk]

    def _submit(self, base: Chunk | None, ids: list[int], params: SamplingParams, keep: bool) -> None:
        context, tokens = _context(base, ids), _tokens(base, ids)
        if len(tokens) >= capacity(self.state):
            return self._refused(InvalidRequestError, lambda: submit(self.world.model, self.state, context, params))
        if keep:
            done = self._attempt(lambda: submit_many(self.world.model, self.state, [context], [params], keep=True))
        else:
            done = self._attempt(lambda: submit(self.world.model, self.state, context, params))
        self.state, found = done
        rid = found[0] if isinstance(found, list) else found
        self.pending[rid] = Pending(self.state.waiting.items[rid].request, tokens)

    def _observe(self) -> None:
        for sequence in self._sequences():
            mine = self.pending.get(sequence.request.request_id)
            if mine is not None:
                mine.most_filled = max(mine.most_filled, sequence.most_filled)

    def _step(self) -> None:
        self._observe()
        pinned = self._pinned()
        done = self._attempt(lambda: step(self.world.model, self.state))
        if done is None:
            return
        self.state, outputs = done
        for out in outputs:
            self._see(out, pinned)
        while self.ended and self._pinned() > self.most_pinned:
            rid = self.ended.pop()
            kept = self.state.kept[rid]
            tokens = kept.tokens.array(0, kept.num_filled).tolist()
            self.state, chunk = detach(self.world.model, self.state, rid)
            if chunk is not None:
                self._adopt(chunk, tokens)
                self._release(chunk)

    def _see(self, out: StepOutput, pinned: int) -> None:
        mine = self.pending[out.request_id]
        mine.drawn += out.token_ids
        self.world.require_reply(mine.prompt, mine.drawn, mine.request)
        if out.output is None:
            expect(out.finish_reason is None and not _ends(mine.request, mine.drawn), f"request {out.request_id} goes on after {mine.drawn}")
            return
        expect(out.output.token_ids == mine.drawn, f"request {out.request_id} drew {mine.drawn} and returned {out.output.token_ids}")
        total, config = len(mine.prompt) + len(mine.drawn), self.state.config
        if out.finish_reason != _ends(mine.request, mine.drawn):
            expect(out.finish_reason == "length", f"request {out.request_id} ended with {out.finish_reason} after {mine.drawn}")
            room = config.num_pages - pinned
            expect(pages_for(total, config.page_size) > room, f"request {out.request_id} was given up at {total} tokens; {room} pages are not pinned")
            self.needed += max(mine.most_filled, out.output.num_cached_tokens)
        else:
            self.needed += total - 1
        del self.pending[out.request_id]
        if mine.request.keep:
            self.ended.append(out.request_id)

    def _generate(self, rows: Seq[tuple[Chunk | None, list[int], SamplingParams]]):
        contexts = [_context(base, ids) for base, ids, _ in rows]
        prompts = [_tokens(base, ids) for base, ids, _ in rows]
        params, size = [options for *_, options in rows], self.state.config.page_size
        call = lambda: generate_many(self.world.model, self.state, contexts, params)  # noqa: E731
        if max(map(len, prompts)) >= capacity(self.state):
            self._refused(InvalidRequestError, call)
            return multiple()
        limits = [min(len(p) + o.max_tokens, capacity(self.state)) for p, o in zip(prompts, params, strict=True)]
        room, next_id = self._available(None), enter(self.state).next_id
        shared = sum(len(base) // size for base, *_ in rows if base is not None)
        done = self._attempt(call, OutOfPagesError)
        if isinstance(done, OutOfPagesError):
            wanted = pages_for(len(prompts[0]) + 1, size) if len(rows) == 1 else sum(pages_for(limit, size) for limit in limits)
            expect(wanted > room + shared, f"{wanted} pages were wanted, {room} are available and {shared} shared: {done}")
            return multiple()
        if done is None:
            return multiple()
        self.state, made = done
        if len(rows) == 1:
            limits = [min(limits[0], (room + shared) * size)]
        for i, (generation, prompt, limit) in enumerate(zip(made, prompts, limits, strict=True)):
            request = self._request(next_id + i, len(prompt), params[i], limit)
            self._see_generation(generation, prompt, request)
        return self._hold(*(generation.chunk for generation in made))

    def _see_generation(self, generation: Generation, prompt: list[int], request: Request) -> None:
        self.world.require_reply(prompt, generation.token_ids, request)
        reason = _ends(request, generation.token_ids)
        expect(generation.finish_reason == reason, f"{generation.token_ids} ended with {generation.finish_reason}, not {reason}")
        self._adopt(generation.chunk, prompt + generation.token_ids)
        self.needed += len(prompt) + len(generation.token_ids)

    def _begin(self, rows: Seq[tuple[Chunk | None, list[int]]], room: int, params: SamplingParams) -> None:
        contexts = [_context(base, ids) for base, ids in rows]
        prompts = [_tokens(base, ids) for base, ids in rows]
        if self._pinned() + sum(pages_for(len(p) + room, self.state.config.page_size) for p in prompts) > self.most_pinned:
            return
        call = lambda: begin(self.world.model, self.state, contexts, params, room=room)  # noqa: E731
        if max(map(len, prompts)) + room > capacity(self.state):
            return self._refused(InvalidRequestError, call)
        size, available, next_id = self.state.config.page_size, self._available(None), self.state.next_id
        done = self._attempt(call, OutOfPagesError)
        if isinstance(done, OutOfPagesError):
            wanted = sum(pages_for(len(p) + room, size) - (0 if b is None else len(b) // size) for p, (b, _) in zip(prompts, rows, strict=True))
            return expect(wanted > available, f"{wanted} pages were wanted and {available} are available: {done}")
        if done is None:
            return
        self.state, carry = done
        ends = [min(len(p) + params.max_tokens, capacity(self.state)) for p in prompts]
        requests = [self._request(next_id + i, len(p), params, end) for i, (p, end) in enumerate(zip(prompts, ends, strict=True))]
        self.sessions.append(Steps(carry, requests, prompts, room, [[] for _ in rows]))

    def _commit(self, at: int):
        session = self.sessions[at]
        done = self._attempt(lambda: commit(self.world.model, self.state, session.carry))
        if done is None:
            return multiple()
        self.state, made = done
        del self.sessions[at]
        for generation, prompt, request, drawn in zip(made, session.prompts, session.requests, session.drawn, strict=True):
            self.world.require_reply(prompt, drawn, request)
            count = next((i for i in range(1, len(drawn) + 1) if _ends(request, drawn[:i])), len(drawn))
            expect(generation.token_ids == drawn[:count], f"{drawn} were drawn, {generation.token_ids} returned")
            expect(generation.finish_reason == (_ends(request, drawn[:count]) or "length"), f"{drawn} ended with {generation.finish_reason}")
            self._adopt(generation.chunk, prompt + drawn[:count])
            self.needed += len(prompt) + count
        self._refused(DonatedStateError, lambda: commit(self.world.model, self.state, session.carry))
        return self._hold(*(generation.chunk for generation in made))

    def _request(self, request_id: int, num_prompt: int, params: SamplingParams, max_len: int) -> Request:
        """What the engine makes of a request, but for what the oracle does not look at."""
        from ..engine import _mix

        seed = _mix(self.state.config.seed, request_id) if params.seed is None else params.seed
        ends = () if params.ignore_eos else self.world.model.config.eos_token_ids
        return Request(
            request_id=request_id, num_prompt=num_prompt, sampling=params, seed=seed, max_len=max_len,
            stop_ids=frozenset((*ends, *params.stop_token_ids)), arrival=0.0,
        )  # fmt: skip


def _ends(request: Request, drawn: list[int]) -> str | None:
    """Why a reply ends here; None where it goes on."""
    if drawn and drawn[-1] in request.stop_ids:
        return "stop"
    return "length" if request.num_prompt + len(drawn) >= request.max_len else None


def _context(base: Chunk | None, ids: list[int]) -> Any:
    return ids if base is None else [base, ids] if ids else base


def _tokens(base: Chunk | None, ids: list[int]) -> list[int]:
    return ids if base is None else base.token_ids.tolist() + ids
