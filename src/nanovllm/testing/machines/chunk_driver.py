"""Calls of `ChunkMachine` into the engine: each call updates the shadow and compares the result with it."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from hypothesis import strategies as st

from nanovllm.chunks.compose import drop
from nanovllm.chunks.handles import release
from nanovllm.chunks.prefill import prefill
from nanovllm.chunks.storage.file import save_chunk
from nanovllm.engine.donation import enter
from nanovllm.engine.requests import cancel, capacity
from nanovllm.engine.step import step
from nanovllm.errors import InvalidRequestError, OutOfPagesError
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.invariants import check
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.request import StepOutput
from nanovllm.testing.machines.engine_holder import SMALLEST, EngineHolder, in_memory, kv_bytes
from nanovllm.testing.shadows.chunks import ChunkShadow, ShadowChunk
from nanovllm.testing.shadows.memory import expect, freeze, indexed_runs
from nanovllm.testing.shadows.worlds import ChunkWorld, PlantedError, SymbolicWorld
from nanovllm.testing.strategies import token_ids

MOST_STEPS = 1000  # for a few requests; if they need more steps, they never end


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """A live chunk, the expected chunk of the shadow (`told`), and its content and KV at the time when it was made."""

    chunk: Chunk
    told: ShadowChunk
    seen: Any
    kv: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saved:
    """A chunk file, and the expected chunk of the shadow (`told`)."""

    path: Path
    told: ShadowChunk


@dataclass(slots=True, kw_only=True, eq=False)
class Asked:
    """A running or waiting request. After a preemption its KV becomes exact, so there may be two expected chunks (`tellings`)."""

    tellings: list[ShadowChunk]
    most_filled: int = 0


class ChunkDriver(EngineHolder):
    """One engine of `world`, a second engine that shares files with it, and the shadow of the chunks."""

    world: ClassVar[ChunkWorld] = SymbolicWorld()

    def __init__(self) -> None:
        super().__init__()
        self.other: EngineState = self.world.init_state(SMALLEST)
        self.shadow = ChunkShadow(self.world)
        self.held: dict[int, Held] = {}  # live chunks by handle, the oldest first
        self.files: list[Saved] = []
        self.folder = TemporaryDirectory(prefix="nanovllm-", dir=in_memory())
        self.num_files = 0
        self.foreign: Chunk | None = None

    def _pick(self, data: st.DataObject) -> Held:
        """Return a live chunk, in half of the calls one with gaps. A new chunk is made if needed, and now and then."""
        while not self.held:
            ids = data.draw(token_ids(max_size=8))[: min(capacity(self.state), self.most_pinned * self.state.config.page_size)]
            self._make(lambda ids=ids: prefill(self.world.model, self.state, ids), self.shadow.exact(ids), needed=len(ids))
        wanted, gapped = data.draw(st.booleans()), [i for i, held in self.held.items() if held.chunk.gaps]
        if wanted and (not gapped or data.draw(st.integers(0, 3)) == 3):
            base = max((self.held[i] for i in gapped or self.held), key=lambda held: len(held.chunk))
            return self._leave_out(data, base) or next(reversed(self.held.values()))
        return self.held[data.draw(st.sampled_from(gapped if wanted else list(self.held)))]

    def _pick_file(self, data: st.DataObject) -> Saved:
        """Return a chunk file, in half of the calls a new one."""
        if not self.files or data.draw(st.booleans()):
            held, path = self._pick(data), self._new_path()
            save_chunk(self.state, held.chunk, path)
            self._keep_file(path, held.told)
        return self.files[data.draw(st.integers(0, len(self.files) - 1))]

    def _leave_out(self, data: st.DataObject, base: Held) -> Held | None:
        """Make a chunk with a gap. In half of the calls the gap is whole pages, so that the pages after it are shared."""
        length, size = len(base.chunk), self.state.config.page_size if data.draw(st.booleans()) else 1
        if length <= size:
            return None
        start = data.draw(st.integers(0, length - size - 1))
        count = data.draw(st.integers(1, min(3, (length - start - 1) // size)))
        return self._drop(base, start, start + count * size, "gap")

    def _drop(self, base: Held, start: int, stop: int, mode: Any) -> Held | None:
        told = self.shadow.dropped(base.told, start, stop, mode)
        needed = 0 if stop == len(base.chunk) else len(told.cells)
        call = lambda: drop(self.world.model, self.state, base.chunk, start, stop, mode)  # noqa: E731
        return self._make(call, told, needed, served=mode == "recompute")

    # Calls

    def _attempt(self, call: Callable[[], Any], most: int | None = None, offset: int = 0) -> Any:
        """Return a call's result, or None after a planted failure or a legitimate refusal, after which the old state stays valid.

        The call needs room for `most` tokens, whose last position is `offset` larger than their number.
        """
        before, frozen = self.state, freeze(self.state.pool)
        self.kept.keep(before.pool)
        try:
            done = call()
        except (PlantedError, OutOfPagesError, InvalidRequestError) as error:
            expect(freeze(before.pool) == frozen, "a failed call changed the pool")
            self._executor.disarm()
            if not isinstance(error, PlantedError):
                self._require_reason(error, self.state, most, offset)
            return None
        self._executor.disarm()
        self._replaced(before)
        return done

    def _require_reason(self, error: Exception, state: EngineState, most: int | None, offset: int = 0) -> None:
        if most is None:
            raise error
        if isinstance(error, InvalidRequestError):
            return expect(most + offset > capacity(state), f"{most} tokens were refused without reason: {error}")
        moved = () if state.pool.host is None else state.pool.host.moved.values()  # chunks that the call may bring back
        wanted, room = pages_for(most, state.config.page_size) + 1 + sum(len(one.pages) for one in moved), enter(state).pool.num_available
        expect(wanted > room, f"{most} tokens were refused, but {room} pages are available: {error}")

    def _make(self, call: Callable[[], tuple[EngineState, Chunk]], told: ShadowChunk, needed: int, *, served: bool = False) -> Held | None:
        """Make one chunk by a call; return None if the call failed or the chunk was released at once.

        `needed` is the number of tokens that ran or were reused. With `served`, exact pages of the index may have been reused instead of
        approximate pages.
        """
        done = self._attempt(call, len(told.cells), offset_of(told))
        if done is None:
            return None
        self.state, chunk = done
        self.needed += needed
        self._adopt(chunk, told, served=served)
        return self.held.get(chunk.liveness)

    def _adopt(self, chunk: Chunk, told: ShadowChunk, *, served: bool = False) -> None:
        """Check a new chunk and keep it. If too many pages are pinned, the oldest chunks are released to leave room."""
        if served and chunk.provenance.exact:
            told = self.shadow.exact(told.token_ids)
        self._require_told(self.state, chunk, told)
        self.held[chunk.liveness] = Held(chunk=chunk, told=told, seen=freeze(chunk), kv=kv_bytes(self.state, chunk))
        self.kept.keep(chunk)
        if len(chunk.pages) > self.most_pinned:
            self._release(chunk)
        while self._pinned() > self.most_pinned:
            self._release(next(iter(self.held.values())).chunk)

    def _pinned(self) -> int:
        return len({page for chunk in self.state.chunks.values() for page in chunk.pages})

    def _release(self, chunk: Chunk) -> None:
        before = self.state
        self.state = release(self.state, chunk)
        del self.held[chunk.liveness]
        self._replaced(before)
        self._released(chunk)

    def _require_told(self, state: EngineState, chunk: Chunk, told: ShadowChunk) -> None:
        expect(chunk.token_ids.tolist() == told.token_ids, f"{chunk!r} contains {chunk.token_ids.tolist()}, not {told.token_ids}")
        positions = [cell.position for cell in told.cells]
        expect(chunk.positions.tolist() == positions, f"{chunk!r} has positions {chunk.positions.tolist()}, not {positions}")
        made = chunk.provenance.operations
        expect(made == told.operations, f"{chunk!r} has operations {made}, not {told.operations}")
        expect(chunk.num_exact == told.num_exact, f"{chunk!r} labels {chunk.num_exact} tokens exact, not {told.num_exact}")
        if len(chunk.pages):  # not a second handle on a chunk in host memory
            self.world.require_cells(state.kv, list(chunk.pages), told.cells, state.pool.frames)

    def _keep_file(self, path: Path, told: ShadowChunk) -> None:
        self.files.append(Saved(path=path, told=told))
        if len(self.files) > 4:
            self.files.pop(0).path.unlink()

    def _new_path(self) -> Path:
        self.num_files += 1
        return Path(self.folder.name) / f"{self.num_files}.safetensors"

    def _drawn(self, told: ShadowChunk, token: int, logits: Seq[float]) -> ShadowChunk:
        """Return the expected chunk after a token that was sampled greedily from these logits."""
        self.world.require_logits(logits, told.cells, exact=not told.operations)
        expect(self.world.likeliest(token, logits), f"{token} was sampled from {list(logits)}")
        return self.shadow.extended(told, [token])

    # Requests

    def _run(self, asked: dict[int, Asked]) -> None:
        """Step until all requests have ended."""
        for _ in range(MOST_STEPS):
            if not asked:
                return
            for sequence in (*self.state.running, *self.state.waiting):
                mine = asked[sequence.request.request_id]
                mine.most_filled = max(mine.most_filled, sequence.most_filled)
            try:
                after, outputs = step(self.world.model, self.state)
            except PlantedError:
                continue
            except OutOfPagesError:  # live chunks leave no room for a prompt, so its request must be canceled
                rid = min(asked)
                self.state = cancel(self.state, rid)
                self.needed += asked.pop(rid).most_filled
                continue
            self.state = after
            for out in outputs:
                self._see(out, asked)
            check(self.state)
        expect(not asked, f"requests {sorted(asked)} did not end within {MOST_STEPS} steps", invariant=6)

    def _see(self, out: StepOutput, asked: dict[int, Asked]) -> None:
        mine = asked[out.request_id]
        for token in out.token_ids:
            wanted = [self.world.logits_after(told.cells) for told in mine.tellings]
            drawn = any(self.world.likeliest(token, logits) for logits in wanted)
            expect(drawn, f"request {out.request_id} sampled {token} after {mine.tellings[0].token_ids}; the logits are {wanted}")
            mine.tellings = [self.shadow.extended(told, [token]) for told in mine.tellings]
        if out.output is not None:
            total = len(mine.tellings[0].cells)
            self.needed += total - 1 if out.token_ids else max(mine.most_filled, out.output.num_cached_tokens)
            del asked[out.request_id]

    # Checks after each rule

    def _require_all(self) -> None:
        """Run the engine's own check, and check token counts, old values, and that values and KV of live chunks have not changed."""
        state = enter(self.state)
        check(state)
        self.kept.require_unchanged()
        stats = state.stats
        run = stats.prefill_tokens + stats.decode_tokens + stats.reused_tokens - stats.rerun_tokens - stats.discarded_tokens
        expect(run == self.needed, f"{run} tokens run or reused, {self.needed} needed: {stats}", invariant=9)
        expect(sorted(state.chunks) == sorted(self.held), f"chunks {sorted(state.chunks)} are live, not {sorted(self.held)}")
        for held in self.held.values():
            if freeze(held.chunk) != held.seen:
                expect(False, f"{held.chunk!r} was {held.seen}", invariant=5)
            if kv_bytes(state, held.chunk) != held.kv:
                expect(False, f"the KV of {held.chunk!r} changed", invariant=3)
        self._require_index(state)

    def _require_index(self, state: EngineState) -> None:
        """Check that each indexed page contains the exact KV of its tokens (invariants 4 and 10)."""
        size = state.config.page_size
        for run, page in indexed_runs(state.prefix):
            self.world.require_cells(state.kv, [page], self.shadow.exact(run).cells[-size:], state.pool.frames, 1)


def offset_of(told: ShadowChunk) -> int:
    """Return the number of positions in the gaps of a chunk."""
    return told.cells[-1].position + 1 - len(told.cells)
