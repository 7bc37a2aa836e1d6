"""`ChunkMachine`: make chunks from tokens, files and other chunks in any way, and compare the KV of each with a shadow."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from nanovllm.chunks.compose import MODES, compose, drop
from nanovllm.chunks.generate import generate, generate_many
from nanovllm.chunks.handles import fork, release, truncate
from nanovllm.chunks.prefill import prefill
from nanovllm.chunks.session import begin, commit
from nanovllm.chunks.storage.file import load_chunk, save_chunk
from nanovllm.engine.donation import enter
from nanovllm.engine.requests import capacity, submit
from nanovllm.errors import ChunkFileError, DonatedStateError, ForeignChunkError, InvalidRequestError, OutOfPagesError, ReleasedChunkError
from nanovllm.sampling.params import MAX_LOGPROBS, SamplingParams
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.invariants import check
from nanovllm.testing.machines.chunk_driver import Asked, ChunkDriver, Held, offset_of
from nanovllm.testing.machines.chunk_files import damaged
from nanovllm.testing.machines.engine_holder import room_of
from nanovllm.testing.shadows.memory import expect, freeze
from nanovllm.testing.shadows.worlds import ModelWorld
from nanovllm.testing.strategies import limits, token_ids

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
RECOMPUTE = st.sampled_from([0, 1, 2, 9, 0.5, "all"])


class ChunkMachine(ChunkDriver):
    """Test the functions that make chunks: prefill, fork, truncate, compose, drop, generate, commit, save and load.

    Pools have up to 48 tokens, and token ids are 0 and 1. A second engine with other page sizes loads and saves the same files. Files are
    damaged in many ways and must then be refused. Device calls fail now and then. Donated states, released chunks and chunks of another
    engine must be refused without changing the pool.

    A chunk with the label exact must have the KV of a full prefill and give its logits. The KV of an approximate chunk must follow from
    the chunks that it was made of. The machine checks invariants 1 to 6 and 8 to 10; the KV of a live chunk never changes.

    Attributes:
        world: The engine and model under test, with their oracle: a `ModelWorld` or a `SymbolicWorld` (the default).
        max_tokens: The largest number of tokens that a pool has room for.
        cascade: Values of the option `cascade` that runs may use: True reads shared pages once, None lets the engine decide.
        num_frames: Smallest and largest number of frames (the KV memory of sliding-window pages). Set it if the model has sliding windows.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import ChunkMachine, SymbolicWorld
        >>> class SmallPools(ChunkMachine):
        ...     world, max_tokens = SymbolicWorld(vocab_size=3), 24
        >>> run_state_machine_as_test(SmallPools, settings=settings(max_examples=2, stateful_step_count=5, deadline=None))
    """

    max_tokens: ClassVar[int] = 48
    cascade: ClassVar[tuple[bool | None, ...]] = (None, True)
    num_frames: ClassVar[tuple[int, int] | None] = None

    @initialize(data=st.data(), pinning=st.integers(0, 3))
    def start(self, data: st.DataObject, pinning: int) -> None:
        """Start two fresh engines. In one run of four, chunks may pin the whole pool; else at most about two thirds of it."""
        self._begin_engines(data, pinning)

    def _begin_engines(self, data: st.DataObject, pinning: int) -> None:
        frames = None if self.num_frames is None else st.integers(*self.num_frames)
        mine = limits(self.max_tokens, min_tokens=8, min_model_len=12, cascade=self.cascade, num_frames=frames)
        self.state = self.world.init_state(data.draw(mine))
        other = limits(self.max_tokens, max_page_size=4, min_tokens=8, min_model_len=12, cascade=self.cascade, num_frames=frames)
        self.other = self.world.init_state(data.draw(other))
        room = room_of(self.state)
        self.most_pinned = room if pinning == 3 else max(2, room * 2 // 3)

    # Chunks made from tokens and from other chunks

    @rule(ids=token_ids(max_size=10))
    def prefill(self, ids: list[int]) -> None:
        """Prefill a chunk from token ids."""
        self._make(lambda: prefill(self.world.model, self.state, ids), self.shadow.exact(ids), needed=len(ids))

    @rule(data=st.data(), ids=token_ids(min_size=0, max_size=4))
    def extend(self, data: st.DataObject, ids: list[int]) -> None:
        """Prefill a chunk that continues another."""
        self._extend(self._pick(data), ids)

    def _extend(self, base: Held, ids: list[int]) -> None:
        expected = self.shadow.extended(base.told, ids)
        self._make(lambda: prefill(self.world.model, self.state, ids, after=base.chunk), expected, needed=len(expected.cells), served=True)

    @rule(data=st.data(), ids=token_ids(min_size=0, max_size=4), follows=st.booleans())
    def truncate(self, data: st.DataObject, ids: list[int], follows: bool) -> None:
        """Make a second handle by `truncate` or `fork`: its end may be before, in or after gaps, within a page or at its end.

        The result may then be continued with other tokens and composed with another chunk.
        """
        base = self._pick(data)
        length = data.draw(st.integers(1, len(base.chunk)))
        call = (lambda: truncate(self.state, base.chunk, length)) if length < len(base.chunk) else (lambda: fork(self.state, base.chunk))
        head = self._make(call, self.shadow.cut(base.told, length), needed=0)
        if head is not None and ids:
            more = base.told.token_ids[length : length + 1]
            self._extend(head, [(token + 1) % self.world.model.config.vocab_size for token in more] + ids)
        if head is not None and follows:
            self._compose([head, self._pick(data)], 0)

    @rule(data=st.data(), count=st.integers(1, 4), recompute=RECOMPUTE)
    def compose(self, data: st.DataObject, count: int, recompute: Any) -> None:
        """Compose chunks one after another; some of their tokens may run again."""
        self._compose([self._pick(data) for _ in range(count)], recompute)

    def _compose(self, bases: list[Held], recompute: Any) -> None:
        bases = [base for base in bases if base.chunk.liveness in self.held]  # the other bases were released to make room
        expected = self.shadow.composed([base.told for base in bases], recompute)
        needed = 0 if len(bases) == 1 and not bases[0].chunk.gaps else len(expected.cells)
        chunks = [base.chunk for base in bases]
        self._make(lambda: compose(self.world.model, self.state, chunks, recompute), expected, needed)

    @rule(data=st.data(), mode=st.sampled_from(["shift", "recompute", *MODES]))  # `leave_out` makes more gaps
    def drop(self, data: st.DataObject, mode: Any) -> None:
        """Drop a span anywhere in a chunk."""
        base = self._pick(data)
        length = len(base.chunk)
        if length < 2:
            return
        start = data.draw(st.integers(0, length - 1))
        stop = data.draw(st.integers(start + 1, length if start else length - 1))
        self._drop(base, start, stop, mode)

    @rule(data=st.data(), times=st.integers(1, 3))
    def leave_out(self, data: st.DataObject, times: int) -> None:
        """Drop spans with mode `gap`, one after another."""
        base: Held | None = self._pick(data)
        while times and base is not None:
            base, times = self._leave_out(data, base), times - 1

    @rule(data=st.data(), count=st.integers(1, 4))
    def release(self, data: st.DataObject, count: int) -> None:
        """Release chunks."""
        for _ in range(count):
            self._release(self._pick(data).chunk)

    # Replies

    @rule(data=st.data(), ids=token_ids(min_size=0, max_size=3), max_tokens=st.integers(1, 6))
    def generate(self, data: st.DataObject, ids: list[int], max_tokens: int) -> None:
        """Generate a reply to a chunk and some tokens, and check its log-probabilities."""
        base, count = self._pick(data), min(MAX_LOGPROBS, self.world.model.config.vocab_size)
        params = replace(GREEDY, max_tokens=max_tokens, logprobs=count)
        expected = self.shadow.extended(base.told, ids)
        call = lambda: generate(self.world.model, self.state, _context(base.chunk, ids), params)  # noqa: E731
        done = self._attempt(call, len(expected.cells) + 1, offset_of(expected))
        if done is None:
            return
        self.state, reply = done
        if reply.chunk.provenance.exact:  # exact pages of the index were reused instead of approximate ones
            expected = self.shadow.exact(expected.token_ids)
        for token, entry in zip(reply.token_ids, reply.logprobs, strict=True):
            wanted, logprobs = self.world.logits_after(expected.cells), dict(entry.top)
            error = np.abs(np.array([*logprobs.values()]) - _log_softmax(wanted)[[*logprobs]]).max()
            agrees = len(logprobs) == count and error < 1e-3 and self.world.likeliest(token, wanted)
            expect(agrees, f"{token} was sampled from {logprobs}; the logits are {wanted}")
            expected = self.shadow.extended(expected, [token])
        self.needed += len(expected.cells)
        self._adopt(reply.chunk, expected)

    @rule(data=st.data(), ids=token_ids(min_size=0, max_size=3), room=st.integers(1, 3))
    def decode(self, data: st.DataObject, ids: list[int], room: int) -> None:
        """Run decode steps by hand and check their logits; logits of exact chunks must equal those of a full prefill."""
        base = self._pick(data)
        expected = self.shadow.extended(base.told, ids)
        call = lambda: begin(self.world.model, self.state, [_context(base.chunk, ids)], GREEDY, room=room)  # noqa: E731
        done = self._attempt(call, len(expected.cells) + room, offset_of(expected))
        if done is None:
            return
        self.state, carry = done
        (session,) = self.state.sessions.values()
        if session.sequences[0].provenance.exact:
            expected = self.shadow.exact(expected.token_ids)
        for _ in range(room):
            carry, out = self.world.decode(carry)
            expected = self._drawn(expected, int(out.token_ids[0]), out.logits[0].tolist())
        while (done := self._attempt(lambda: commit(self.world.model, self.state, carry))) is None:
            pass
        self.state, (reply,) = done
        self.needed += len(expected.cells)
        self._adopt(reply.chunk, expected)

    @rule(data=st.data(), count=st.integers(1, 4), max_tokens=st.integers(1, 4))
    def serve(self, data: st.DataObject, count: int, max_tokens: int) -> None:
        """Submit requests, which compete with live chunks for pages, and step until all of them have ended."""
        asked: dict[int, Asked] = {}
        for _ in range(count):
            base = self._pick(data) if data.draw(st.booleans()) else None
            ids = data.draw(token_ids(min_size=base is None, max_size=8))
            expected = self.shadow.exact(ids) if base is None else self.shadow.extended(base.told, ids)
            context = ids if base is None else _context(base.chunk, ids)
            params = replace(GREEDY, max_tokens=max_tokens)
            call = partial(submit, self.world.model, self.state, context, params)
            done = self._attempt(call, len(expected.cells) + 1, offset_of(expected))
            if done is not None:
                self.state, rid = done
                asked[rid] = Asked(tellings=[expected, *([self.shadow.exact(expected.token_ids)] if expected.operations else [])])
        self._run(asked)

    @rule(data=st.data(), ids=token_ids(max_size=6), alone=st.booleans())
    def evict(self, data: st.DataObject, ids: list[int], alone: bool) -> None:
        """Prefill as many tokens as there is room for and release them. This evicts pages that only the index refers to.

        With `alone`, all chunks but one are released first.
        """
        if alone:
            base = self._pick(data)
            for held in [held for held in self.held.values() if held is not base]:
                self._release(held.chunk)
        count = min(capacity(self.state), enter(self.state).pool.num_available * self.state.config.page_size)
        if count:
            run = (ids * count)[:count]
            made = self._make(lambda: prefill(self.world.model, self.state, run), self.shadow.exact(run), needed=count)
            if made is not None:
                self._release(made.chunk)

    # Files

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        """Load a file that either of the two engines saved into the first engine."""
        file = self._pick_file(data)
        self._make(lambda: load_chunk(self.world.model, self.state, file.path), file.told, needed=len(file.told.cells))

    @rule(data=st.data())
    def pass_on(self, data: st.DataObject) -> None:
        """Load a file into the second engine, whose page size may differ, and save the chunk to a file again."""
        file, path = self._pick_file(data), self._new_path()
        try:
            self.other, chunk = load_chunk(self.world.model, self.other, file.path)
        except (InvalidRequestError, OutOfPagesError) as error:
            return self._require_reason(error, self.other, len(file.told.cells), offset_of(file.told))
        check(self.other)
        self._require_told(self.other, chunk, file.told)
        self._require_index(self.other)
        save_chunk(self.other, chunk, path)
        self._keep_file(path, file.told)
        self.other, self.foreign = release(self.other, chunk), chunk

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """Change a file in many ways: each changed file is refused, and nothing else happens."""
        file, path = self._pick_file(data), self._new_path()
        raw, other = file.path.read_bytes(), self._pick_file(data).path.read_bytes()
        before = freeze(enter(self.state).pool)
        for name, changed in damaged(raw, other, data).items():
            if changed in (raw, other):
                continue
            path.write_bytes(changed)
            try:
                self.state, _ = load_chunk(self.world.model, self.state, path)
            except ChunkFileError:
                continue
            except (InvalidRequestError, OutOfPagesError) as error:
                self._require_reason(error, self.state, len(file.told.cells), offset_of(file.told))
            else:
                expect(False, f"a damaged file was loaded: {name}")
        expect(freeze(enter(self.state).pool) == before, "a refused file changed the pool")
        path.unlink(missing_ok=True)

    # Misuse and failure

    @rule(countdown=st.integers(0, 2), late=st.booleans())
    def plant_failure(self, countdown: int, late: bool) -> None:
        """Let one of the next device calls raise."""
        self._executor.arm(countdown, late)

    @rule()
    def misuse(self) -> None:
        """Call every function with a donated state, a released chunk and a chunk of another engine: all are refused."""
        live = next((held.chunk for held in self.held.values()), None)
        before = freeze(enter(self.state).pool)
        for error, state, chunk in (
            (DonatedStateError, self.stale[-1] if self.stale else None, live),
            (ReleasedChunkError, self.state, self.dead[-1] if self.dead else None),
            (ForeignChunkError, self.state, self.foreign),
        ):
            if state is None or chunk is None:
                continue
            for name, call in self._calls().items():
                try:
                    call(state, chunk)
                except error:
                    continue
                expect(False, f"{name} should have raised {error.__name__}")
        expect(freeze(enter(self.state).pool) == before, "a refused call changed the pool")

    def _calls(self) -> dict[str, Callable[[EngineState, Chunk], Any]]:
        """Return every call that takes a chunk, by name."""
        model, path = self.world.model, self._new_path()
        return {
            "fork": fork,
            "truncate": partial(truncate, length=1),
            "release": release,
            "prefill": lambda state, chunk: prefill(model, state, [0], after=chunk),
            "compose": lambda state, chunk: compose(model, state, [chunk, chunk]),
            "compose of one": lambda state, chunk: compose(model, state, [chunk]),
            "drop": lambda state, chunk: drop(model, state, chunk, 0, 1, "gap"),
            "save_chunk": lambda state, chunk: save_chunk(state, chunk, path),
            "generate": lambda state, chunk: generate(model, state, chunk, GREEDY),
            "generate_many": lambda state, chunk: generate_many(model, state, [[0], [chunk, [0]]], GREEDY),
            "submit": lambda state, chunk: submit(model, state, chunk, GREEDY),
            "begin": lambda state, chunk: begin(model, state, [chunk], GREEDY, room=1),
        }

    @invariant()
    def agrees(self) -> None:
        """Run all checks after each rule."""
        self._require_all()

    def teardown(self) -> None:
        """Check that all pages return when all chunks are released."""
        self.folder.cleanup()
        for chunk in list(self.state.chunks.values()):
            self.state = release(self.state, chunk)
        check(self.state)
        available = self.state.pool.num_available
        expect(available == room_of(self.state), f"{available} of {room_of(self.state)} pages came back", invariant=6)


class ModelChunkMachine(ChunkMachine):
    """`ChunkMachine` over a real model with rotary keys, compared with a decoder in numpy and float64.

    Samples and invariants are those of `ChunkMachine`. The symbolic model has no rotation, so only this machine finds keys that are
    rotated wrongly.

    Attributes:
        world: A `ModelWorld` of a model with plain rotary positions (`config.rope.kind == "default"`).

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import ModelChunkMachine, ModelWorld
        >>> from nanovllm.testing.models import random_model, tiny_config
        >>> class Llama(ModelChunkMachine):
        ...     world = ModelWorld(random_model(tiny_config("LlamaForCausalLM", vocab_size=8)))
        >>> run_state_machine_as_test(Llama, settings=settings(max_examples=3, stateful_step_count=3, deadline=None))
    """

    world = ModelWorld()


def _context(chunk: Chunk, ids: list[int]) -> Any:
    return [chunk, ids] if ids else chunk


def _log_softmax(logits: list[float]) -> np.ndarray:
    values = np.array(logits)
    return values - values.max() - np.log(np.exp(values - values.max()).sum())
