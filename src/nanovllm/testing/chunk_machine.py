"""`ChunkMachine`: the algebra of chunks. Anything may be made of anything, and every slot holds what its making says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from ..chunks import fork, prefill, release, truncate
from ..compose import MODES, compose, drop
from ..engine import capacity, enter
from ..errors import DonatedStateError, InvalidRequestError, OutOfPagesError, ReleasedChunkError
from ..generate import generate
from ..invariants import check
from ..sampling_params import SamplingParams
from ..state.chunk import Chunk
from ..state.engine_state import EngineState
from .engine_driver import SMALLEST
from .shadow import KeptValues, expect, freeze, indexed_runs
from .strategies import limits, token_ids
from .symbolic import START, fold, logits_of, number_of, numbers, read
from .worlds import FlakyExecutor, PlantedError, SymbolicWorld


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A token of a chunk as the shadow sees it: its position, and the number that its slot must hold."""

    token: int
    position: int
    number: int


Cells: TypeAlias = tuple[Cell, ...]


def exact(tokens: Sequence[int]) -> Cells:
    """What a full prefill gives."""
    return tuple(Cell(token=t, position=i, number=n) for i, (t, n) in enumerate(zip(tokens, numbers(tokens), strict=True)))


def grown(cells: Cells, tokens: Sequence[int]) -> Cells:
    """More tokens, run behind what there is."""
    made = list(cells)
    for token in tokens:
        position = made[-1].position + 1 if made else 0
        made.append(Cell(token=token, position=position, number=_number(made, token, position)))
    return tuple(made)


def rerun(cells: Cells, places: Sequence[int]) -> Cells:
    """Tokens run again in place, in order."""
    made = list(cells)
    for at in places:
        made[at] = Cell(token=made[at].token, position=made[at].position, number=_number(made[:at], made[at].token, made[at].position))
    return tuple(made)


def placed(cells: Cells, start: int) -> Cells:
    """The same numbers at positions `start ...`."""
    return tuple(Cell(token=cell.token, position=start + i, number=cell.number) for i, cell in enumerate(cells))


def _number(before: Sequence[Cell], token: int, position: int) -> int:
    folded = START
    for cell in before:
        folded = fold(folded, cell.number)
    return number_of(folded, token, position - len(before))


class ChunkMachine(RuleBasedStateMachine):
    """Chunks made by every call that makes them, over one engine of a few pages, with planted failures.

    A chunk that calls itself exact must hold what a full prefill holds; any other, what follows from the chunks it was made of.
    """

    max_tokens: ClassVar[int] = 40  # that the pool holds
    chunks = Bundle("chunks")

    world: ClassVar[SymbolicWorld] = SymbolicWorld()

    def __init__(self) -> None:
        super().__init__()
        self.state: EngineState = self.world.init_state(SMALLEST)
        self.refusal: Exception | None = None
        self.cells: dict[int, Cells] = {}
        self.needed = 0
        self.stale: list[EngineState] = []
        self.dead: list[Chunk] = []
        self.kept = KeptValues()

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """A fresh engine."""
        self.state = self.world.init_state(data.draw(limits(self.max_tokens)))

    @rule(target=chunks, ids=token_ids(max_size=6))
    def prefill(self, ids: list[int]):
        """A chunk of token ids."""
        return self._made(lambda: prefill(self.world.model, self.state, ids), grown((), ids), needed=len(ids))

    @rule(target=chunks, chunk=chunks, ids=token_ids(min_size=0, max_size=4))
    def extend(self, chunk: Chunk, ids: list[int]):
        """A chunk that continues another."""
        cells = grown(self.cells[chunk.liveness], ids)
        return self._made(lambda: prefill(self.world.model, self.state, ids, after=chunk), cells, needed=len(cells))

    @rule(target=chunks, chunk=chunks, cut=st.integers(0, 5))
    def shorten(self, chunk: Chunk, cut: int):
        """A second handle, perhaps a shorter one."""
        length = max(1, len(chunk) - cut)
        call = (lambda: truncate(self.state, chunk, length)) if cut else (lambda: fork(self.state, chunk))
        return self._made(call, self.cells[chunk.liveness][:length], needed=0)

    @rule(given=st.lists(consumes(chunks), min_size=1, max_size=4))
    def release(self, given: list[Chunk]) -> None:
        """Handles end."""
        for chunk in given:
            self._release(chunk)

    @rule(target=chunks, given=st.lists(chunks, min_size=1, max_size=4), recompute=st.sampled_from([0, 0, 1, 2, 9, "all"]))
    def compose(self, given: list[Chunk], recompute: Any):
        """Chunks one after another, some of their tokens run again."""
        cells, heads = (), []
        for chunk in given:
            heads.append(len(cells))
            cells += self.cells[chunk.liveness]
        alone = len(given) == 1 and not given[0].gaps
        if recompute == "all" and not alone:
            cells = exact([cell.token for cell in cells])
        elif not alone:
            places = [at for head, chunk in zip(heads[1:], given[1:], strict=True) for at in range(head, head + min(recompute, len(chunk)))]
            cells = rerun(placed(cells, 0), places)
        call = lambda: compose(self.world.model, self.state, given, recompute)  # noqa: E731
        return self._made(call, cells, needed=0 if alone else len(cells))

    @rule(target=chunks, chunk=chunks, mode=st.sampled_from(MODES), data=st.data())
    def drop(self, chunk: Chunk, mode: Any, data: st.DataObject):
        """A span taken out."""
        if len(chunk) < 2:
            return multiple()
        start = data.draw(st.integers(0, len(chunk) - 1))
        stop = data.draw(st.integers(start + 1, len(chunk) if start else len(chunk) - 1))
        old = self.cells[chunk.liveness]
        head, tail = old[:start], old[stop:]
        match mode:
            case "recompute":
                cells = grown(head, [cell.token for cell in tail])
            case "shift":
                cells = head + placed(tail, head[-1].position + 1 if head else 0)
            case _:
                cells = head + tail
        call = lambda: drop(self.world.model, self.state, chunk, start, stop, mode)  # noqa: E731
        return self._made(call, cells, needed=len(cells) if tail else 0)

    @rule(target=chunks, chunk=chunks, ids=token_ids(min_size=0, max_size=3), max_tokens=st.integers(1, 6))
    def generate(self, chunk: Chunk, ids: list[int], max_tokens: int):
        """A greedy reply to a chunk and some tokens."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        context = [chunk, ids] if ids else chunk
        done = self._attempt(lambda: generate(self.world.model, self.state, context, params))
        if done is None:
            return multiple()
        self.state, reply = done
        cells = grown(self.cells[chunk.liveness], ids)
        if reply.chunk.provenance.exact:  # pages of the index served better
            cells = exact([cell.token for cell in cells])
        drawn = []
        for token in reply.token_ids:
            drawn.append(token)
            logits = logits_of(cells[-1].number, self.world.model.config.vocab_size)
            expect(logits[token] == max(logits), f"{reply.chunk!r} drew {drawn} where the logits were {logits}")
            cells = grown(cells, [token])
        self.needed += len(cells)
        return self._adopted(reply.chunk, cells)

    @rule(countdown=st.integers(0, 2), late=st.booleans())
    def plant_failure(self, countdown: int, late: bool) -> None:
        """A device call of the near future raises."""
        self._executor.arm(countdown, late)

    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        """Donated states and released chunks are refused, and change nothing."""
        calls: list[Callable[[EngineState, Chunk], Any]] = [
            lambda state, chunk: compose(self.world.model, state, [chunk, chunk]),
            lambda state, chunk: drop(self.world.model, state, chunk, 0, 1, "gap"),
            lambda state, chunk: prefill(self.world.model, state, [0], after=chunk),
            fork,
        ]
        call, before = data.draw(st.sampled_from(calls)), freeze(self.state.pool)
        live = next(iter(self.state.chunks.values()), None)
        for error, state, chunk in (
            (DonatedStateError, self.stale[-1] if self.stale else None, live),
            (ReleasedChunkError, self.state, self.dead[-1] if self.dead else None),
        ):
            if state is None or chunk is None:
                continue
            try:
                call(state, chunk)
            except error:
                continue
            expect(False, f"{error.__name__} was to be raised")
        expect(freeze(self.state.pool) == before, "a refused call changed the pool")

    @property
    def _executor(self) -> FlakyExecutor:
        executor = self.state.runtime.executor
        assert isinstance(executor, FlakyExecutor)
        return executor

    def _attempt(self, call: Callable[[], Any]) -> Any:
        """What a call returns; None where a planted failure or a legitimate refusal came in between: the old state then stands."""
        before, frozen = self.state, freeze(self.state.pool)
        self.kept.keep(before.pool)
        try:
            done = call()
        except (PlantedError, OutOfPagesError, InvalidRequestError) as error:
            expect(freeze(before.pool) == frozen, "a failed call changed the pool")
            self._executor.disarm()
            self.refusal = error
            return None
        self._executor.disarm()
        self.stale = [*self.stale[-3:], before]
        return done

    def _made(self, call: Callable[[], tuple[EngineState, Chunk]], cells: Cells, needed: int):
        offset = max((cell.position - i for i, cell in enumerate(cells)), default=0)
        done = self._attempt(call)
        if done is None:
            self._require_reason(cells, offset)
            return multiple()
        self.state, chunk = done
        self.needed += needed
        if chunk.provenance.exact:  # pages of the index may have served better than those of an approximate chunk
            cells = exact([cell.token for cell in cells])
        return self._adopted(chunk, cells)

    def _require_reason(self, cells: Cells, offset: int) -> None:
        if isinstance(self.refusal, InvalidRequestError):
            expect(len(cells) + offset > capacity(self.state), f"{len(cells)} tokens were refused: {self.refusal}")
        elif isinstance(self.refusal, OutOfPagesError):
            size = self.state.config.page_size
            room = enter(self.state).pool.num_available
            expect(-(-len(cells) // size) + 1 > room, f"{len(cells)} tokens were refused, {room} pages are there: {self.refusal}")

    def _adopted(self, chunk: Chunk, cells: Cells):
        expect(chunk.token_ids.tolist() == [cell.token for cell in cells], f"{chunk!r} holds {chunk.token_ids.tolist()}")
        expect(chunk.positions.tolist() == [cell.position for cell in cells], f"{chunk!r} stands at {chunk.positions.tolist()}")
        true = exact([cell.token for cell in cells])
        expect(cells[: chunk.num_exact] == true[: chunk.num_exact], f"{chunk!r} calls {chunk.num_exact} tokens exact")
        expect(chunk.provenance.exact or cells != true or chunk.num_exact < len(chunk), f"{chunk!r} is exact and does not say so")
        self.cells[chunk.liveness] = cells
        self.kept.keep(chunk)
        if len({page for live in self.state.chunks.values() for page in live.pages}) * 3 <= self.state.config.num_pages * 2:
            return multiple(chunk)
        self.agrees()  # where too much is pinned the new chunk is released at once, or little else could be made
        self._release(chunk)
        return multiple()

    def _release(self, chunk: Chunk) -> None:
        before = self.state
        self.state = release(self.state, chunk)
        self.stale, self.dead = [*self.stale[-3:], before], [*self.dead[-3:], chunk]

    @invariant()
    def agrees(self) -> None:
        """The engine's own check, counted tokens, old values, and every slot that a chunk or the index refers to."""
        state = enter(self.state)
        check(state)
        self.kept.require_unchanged()
        stats = state.stats
        run = stats.prefill_tokens + stats.decode_tokens + stats.reused_tokens - stats.rerun_tokens - stats.discarded_tokens
        expect(run == self.needed, f"invariant 9: {run} tokens run or reused, {self.needed} needed: {stats}")
        memory, size = state.kv.pools[0].numpy(), state.config.page_size
        for chunk in state.chunks.values():
            pages = chunk.pages.array().tolist()
            for at, cell in enumerate(self.cells[chunk.liveness]):
                held = read(memory, pages[at // size], at % size)
                expect(held == cell.number, f"slot {at} of {chunk!r}, in page {pages[at // size]}, holds {held}, not {cell.number}")
        for run_of, page in indexed_runs(state.prefix):
            wanted = numbers(run_of)[-size:]
            held = [read(memory, page, at) for at in range(size)]
            expect(held == wanted, f"invariant 10: page {page} is found by {run_of} and holds {held}, not {wanted}")

    def teardown(self) -> None:
        """With all handles released all pages come back."""
        for chunk in list(self.state.chunks.values()):
            self.state = release(self.state, chunk)
        check(self.state)
        available = self.state.pool.num_available
        expect(available == self.state.config.num_pages, f"invariant 6: {available} of {self.state.config.num_pages} pages came back")
