"""Programs over decode sessions: captured, compiled and eager steps, loops, splits and other calls of the engine, in any order.

Whatever a program does, its tokens are those of `generate`, its chunks hold the KV of their tokens, a carry that was used is refused, the
engine's invariants hold after each call, and at the end no page is held.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nanovllm as nv
from nanovllm.executor import decode
from nanovllm.testing.models import random_model, tiny_config

pytestmark = pytest.mark.compile

ROOM, ROWS, PRIME = 6, 2, 5
# The longest context of a session has five tokens, so that the sessions of a program have few shapes and are traced seldom.
CONTEXTS = [((1, 2, 3, 4, 5), (9, 8, 7)), ((1, 2, 3, 4, 6), (1, 2, 3, 4, 5)), ((7,), (5, 5, 5, 5, 5)), ((1, 2, 3, 4, 5), (1, 2, 3, 4, 5))]
SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
MODELS = {
    "plain": random_model(tiny_config(**SIZES), 0),
    "windowed": random_model(tiny_config(**SIZES, windows=(4, 0)), 0),
    "all windowed": random_model(tiny_config(**SIZES, windows=(4, 4)), 0),
}
CASES = [("plain", 1), ("plain", 3), ("windowed", 2), ("all windowed", 4)]
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2}
WAYS = ("eager", "captured", "traced", "loop", "loop of a capture", "until")
IN_PLACE = ("eager", "until")
GREEDY = nv.SamplingParams(temperature=0, ignore_eos=True, logprobs=0, max_tokens=3)


@pytest.fixture(autouse=True)
def traced_anew() -> Iterator[None]:
    """Each test traces by itself, for as many shapes as it needs."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def fresh(kind: str) -> nv.EngineState:
    return nv.init_state(MODELS[kind], num_pages=64, page_size=4, max_num_seqs=4)


def options(seed: int | None, penalties: bool, count: int = ROOM) -> nv.SamplingParams:
    """Greedy without a seed."""
    more = PENALTIES if penalties else {}
    if seed is None:
        return nv.SamplingParams(temperature=0, ignore_eos=True, max_tokens=count, **more)
    return nv.SamplingParams(temperature=1.5, top_p=0.9, seed=seed, ignore_eos=True, max_tokens=count, **more)


@cache
def reply(kind: str, text: tuple[int, ...], seed: int | None, penalties: bool, count: int) -> list[int]:
    """What `generate` gives in an engine of its own."""
    return nv.generate(MODELS[kind], fresh(kind), list(text), options(seed, penalties, count))[1].token_ids


@cache
def continued(kind: str, text: tuple[int, ...]) -> tuple[list[int], list[float]]:
    _, made = nv.generate(MODELS[kind], fresh(kind), list(text), GREEDY)
    assert made.logprobs is not None
    return made.token_ids, [each.logprob for each in made.logprobs]


def step_of(kind: str) -> Callable[[nv.DecodeCarry], tuple[nv.DecodeCarry, torch.Tensor]]:
    model = MODELS[kind]

    def step(carry: nv.DecodeCarry) -> tuple[nv.DecodeCarry, torch.Tensor]:
        carry, out = nv.decode_step(model.params, carry, model.config)
        return carry, out.token_ids

    return step


@cache
def compiled(kind: str, backend: str) -> Callable[[Any, nv.DecodeCarry], tuple[nv.DecodeCarry, torch.Tensor]]:
    config = MODELS[kind].config

    def step(params: Any, carry: nv.DecodeCarry) -> tuple[nv.DecodeCarry, torch.Tensor]:
        carry, out = nv.decode_step(params, carry, config)
        return carry, out.token_ids

    return torch.compile(step, fullgraph=True, backend=backend)


@cache
def compiled_split() -> Callable[..., nv.DecodeCarry]:
    return torch.compile(nv.split_rows, fullgraph=True, backend="eager")


@contextmanager
def in_place() -> Iterator[None]:
    """Write the tensors of a carry in place, in program order, as traced code on a GPU does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "written_in_place", lambda tensor: True)
        yield


@dataclass(slots=True, eq=False)
class Running:
    """A session that is not committed, and the text that each row should have."""

    carry: nv.DecodeCarry
    origins: list[tuple[int, ...]]
    texts: list[list[int]]
    seeds: list[int | None]
    penalties: bool
    branching: bool
    in_place: bool
    stopped: list[bool] = field(default_factory=lambda: [False] * ROWS)
    done: int = 0
    used: list[nv.DecodeCarry] = field(default_factory=list)  # carries that later ones replaced
    captured: Any = None


class Program:
    """An engine, its sessions and its chunks."""

    def __init__(self, kind: str, page_size: int) -> None:
        self.kind, self.model = kind, MODELS[kind]
        self.state = nv.init_state(self.model, num_pages=60 // page_size, page_size=page_size, max_num_seqs=4)
        self.sessions: list[Running] = []
        self.chunks: list[nv.Chunk] = []

    def begin(
        self, contexts: tuple[tuple[int, ...], ...], seeds: list[int | None], penalties: bool, branching: bool, fill: bool, own: bool
    ) -> None:
        prompts = [self.prompt(context) for context in contexts]
        params = [options(seed, penalties and not branching) for seed in seeds]
        try:
            self.state, carry = nv.begin(self.model, self.state, prompts, params, room=ROOM, branching=branching, fill=fill)
        except nv.OutOfPagesError:
            return
        texts = [list(context) for context in contexts]
        penalised = penalties and not branching
        self.sessions.append(Running(carry, list(contexts), texts, seeds, penalised, branching, own))

    def prompt(self, context: tuple[int, ...]) -> Any:
        """The context, from a chunk if there is one of its first tokens."""
        for chunk in self.chunks:
            if tuple(chunk.token_ids.tolist()) == context[: len(chunk)]:
                return [chunk, list(context[len(chunk) :])]
        return list(context)

    def move(self, session: Running, way: str, count: int) -> None:
        """Run steps, and compare their tokens."""
        count = min(count, ROOM - session.done)
        if not count:
            with pytest.raises(nv.InvalidRequestError, match=f"room={ROOM}|room of the session: {ROOM} of {ROOM}"):
                self.run(session, "eager" if way == "traced" else way, 1)
            return
        before = session.carry
        tokens = self.run(session, way, count)
        if session.carry.log is not before.log and not session.in_place:
            session.used.append(before)
        session.done += len(tokens)
        for step in tokens:
            self.see(session, step)
            if way == "until":
                session.stopped = [was or token % 5 == 0 for was, token in zip(session.stopped, step, strict=True)]

    def run(self, session: Running, way: str, count: int) -> list[list[int]]:
        carry, step, rows = session.carry, step_of(self.kind), []
        if carry.prompt is not None and way in ("captured", "loop of a capture"):
            with pytest.raises(nv.InvalidRequestError, match="run the first step as it is"):
                nv.capture(step, carry)
            way = "eager"
        if session.in_place and way != "until":
            with in_place():
                for _ in range(count):
                    carry, row = step(carry)
                    rows.append(row.tolist())
        elif way == "until":
            before = int(carry.log.num_steps)
            carry, made = nv.decode_loop(self.model, self.state, carry, count, until=lambda tokens: tokens % 5 == 0)
            ran = int(carry.log.num_steps) - before
            assert not made[ran:].any()
            rows = made[:ran].tolist()
        elif way in ("loop", "loop of a capture"):
            body = nv.capture(step, carry) if way != "loop" else None
            carry, made = nv.decode_loop(self.model, self.state, carry, count, body)
            rows = made.tolist()
        elif way == "captured":
            if session.captured is None:
                session.captured = nv.capture(step, carry)
            for _ in range(count):
                carry, row = session.captured(carry)
                rows.append(row.tolist())
        else:
            for _ in range(count):
                carry, row = step(carry) if way == "eager" else compiled(self.kind, "eager")(self.model.params, carry)
                rows.append(row.tolist())
        session.carry = carry
        return rows

    def see(self, session: Running, tokens: list[int]) -> None:
        for row, token in enumerate(tokens):
            if session.stopped[row]:
                continue
            text, origin, seed = session.texts[row], session.origins[row], session.seeds[row]
            if session.branching:  # after a split the row has the seed of its own, and the text of another row
                want = reply(self.kind, tuple(text), seed, False, 1)[0]
            else:
                want = reply(self.kind, origin, seed, session.penalties, ROOM)[len(text) - len(origin)]
            assert token == want, f"row {row} of {text} sampled {token}, not {want}"
            text.append(token)

    def split(self, session: Running, parents: list[int], given: list[int] | None, traced: bool) -> None:
        if not session.branching:
            with pytest.raises(nv.InvalidRequestError, match="branching=True"):
                nv.split_rows(session.carry, torch.tensor(parents))
            return
        if session.carry.prompt is not None:
            with pytest.raises(nv.InvalidRequestError, match="run the first step before split_rows"):
                nv.split_rows(session.carry, torch.tensor(parents))
            return
        given = given if session.done else None  # the newest token must be a sampled one
        before, ids = session.carry, None if given is None else torch.tensor(given, dtype=torch.int32)
        if session.in_place:
            with in_place():
                session.carry = nv.split_rows(before, torch.tensor(parents), ids)
        else:
            split = compiled_split() if traced else nv.split_rows
            session.carry = split(before, torch.tensor(parents), ids)
            session.used.append(before)
        session.texts = [list(session.texts[parent]) for parent in parents]
        session.stopped = [session.stopped[parent] for parent in parents]
        session.origins = [session.origins[parent] for parent in parents]
        for row, token in enumerate(given or ()):
            if not session.stopped[row] and len(session.texts[row]) > len(session.origins[row]):
                session.texts[row][-1] = token

    def misuse(self, session: Running) -> None:
        """A carry that was used is refused at once by all that is not traced."""
        step = step_of(self.kind)
        for used in session.used[-2:]:
            uses: list[Callable[[], Any]] = [
                lambda used=used: step(used),
                lambda used=used: nv.decode_loop(self.model, self.state, used, 1),
                lambda used=used: nv.capture(step, used),
                lambda used=used: nv.commit(self.model, self.state, used),
            ]
            uses += [lambda used=used: session.captured(used)] if session.captured is not None else []
            uses += [lambda used=used: nv.split_rows(used, torch.arange(ROWS))] if session.branching else []
            for use in uses:
                with pytest.raises(nv.DonatedStateError):
                    use()

    def commit(self, session: Running) -> None:
        self.sessions.remove(session)
        self.state, made = nv.commit(self.model, self.state, session.carry)
        nv.check(self.state)
        for one, text, origin, stopped in zip(made, session.texts, session.origins, session.stopped, strict=True):
            assert one.chunk.token_ids.tolist() == text and one.token_ids == text[len(origin) :]
            assert one.finish_reason == ("stop" if stopped and len(one.token_ids) < ROOM else "length")
            self.require_kv(one.chunk)
        for one in made:
            self.state = nv.release(self.state, one.chunk)
        with pytest.raises(nv.DonatedStateError):
            nv.commit(self.model, self.state, session.carry)
        with pytest.raises(nv.DonatedStateError):
            step_of(self.kind)(session.carry)

    def require_kv(self, chunk: nv.Chunk) -> None:
        """Require that what follows a chunk is what follows its text in a fresh engine."""
        try:
            self.state, more = nv.generate(self.model, self.state, chunk, GREEDY)
        except nv.OutOfPagesError:
            return
        token_ids, logprobs = continued(self.kind, tuple(chunk.token_ids.tolist()))
        count = len(more.token_ids)
        assert more.token_ids == token_ids[:count] and more.logprobs is not None
        assert [each.logprob for each in more.logprobs] == pytest.approx(logprobs[:count], abs=1e-4)
        self.state = nv.release(self.state, more.chunk)

    def call(self, name: str, number: int) -> None:
        """Another call of the engine."""
        if name in ("prefill", "generate"):
            ids, context = CONTEXTS[number % len(CONTEXTS)][0][: 1 + number % PRIME], None
            try:
                if name == "prefill":
                    self.state, context = nv.prefill(self.model, self.state, list(ids))
                else:
                    self.state, made = nv.generate(self.model, self.state, list(ids), options(number % 3, True))
                    assert made.token_ids == reply(self.kind, ids, number % 3, True, ROOM)[: len(made.token_ids)]
                    context = made.chunk
            except nv.OutOfPagesError:
                return
            self.chunks.append(context)
        elif self.chunks:
            chunk = self.chunks[number % len(self.chunks)]
            if name == "fork":
                self.state, copy = nv.fork(self.state, chunk)
                self.chunks.append(copy)
            elif name == "truncate":
                self.state, shorter = nv.truncate(self.state, chunk, 1 + number % len(chunk))
                self.chunks.append(shorter)
            else:
                self.chunks.remove(chunk)
                self.state = nv.release(self.state, chunk)

    def end(self) -> None:
        for session in [*self.sessions]:
            self.commit(session)
        for chunk in self.chunks:
            self.require_kv(chunk)
            self.state = nv.release(self.state, chunk)
        nv.check(self.state)
        assert nv.memory(self.state).num_held == 0


def perform(program: Program, data: st.DataObject) -> None:
    """One call that Hypothesis chooses."""
    kinds = ["begin", "move", "move", "move", "split", "split", "misuse", "commit", "call"]
    name = data.draw(st.sampled_from(kinds if program.sessions else ["begin", "begin", "call"]))
    if name == "begin":
        if len(program.sessions) < 3:
            seeds = data.draw(st.lists(st.none() | st.integers(0, 2), min_size=ROWS, max_size=ROWS))
            contexts = data.draw(st.sampled_from(CONTEXTS))
            penalties, branching, fill, own = (data.draw(st.integers(0, most)) == 0 for most in (1, 1, 3, 3))
            program.begin(contexts, seeds, penalties, branching, not fill, own)
        return
    if name == "call":
        calls = st.sampled_from(["prefill", "prefill", "generate", "fork", "truncate", "release", "release"])
        return program.call(data.draw(calls), data.draw(st.integers(0, 19)))
    session = program.sessions[data.draw(st.integers(0, len(program.sessions) - 1))]
    if name == "move":
        ways = IN_PLACE if session.in_place else WAYS
        return program.move(session, data.draw(st.sampled_from(ways)), data.draw(st.integers(1, 3)))
    if name == "split":
        row, token = st.integers(0, ROWS - 1), st.integers(0, 49)
        parents = data.draw(st.lists(row, min_size=ROWS, max_size=ROWS))
        return program.split(
            session, parents, data.draw(st.none() | st.lists(token, min_size=ROWS, max_size=ROWS)), data.draw(st.booleans())
        )
    if name == "misuse":
        return program.misuse(session)
    return program.commit(session)


@pytest.mark.parametrize(("kind", "page_size"), CASES)
@settings(max_examples=25)
@given(data=st.data())
def test_any_program_gives_the_tokens_of_generate(kind: str, page_size: int, data: st.DataObject):
    program = Program(kind, page_size)
    for _ in range(data.draw(st.integers(5, 25))):
        perform(program, data)
        nv.check(program.state)
    program.end()


def begun(kind: str, *, branching: bool = False, room: int = ROOM) -> tuple[nv.EngineState, nv.DecodeCarry]:
    params = [options(seed, not branching) for seed in (None, 1)]
    return nv.begin(MODELS[kind], fresh(kind), [list(each) for each in CONTEXTS[0]], params, room=room, branching=branching)


@pytest.mark.parametrize("use", ["step", "split"])
def test_a_used_carry_in_traced_code_is_found_at_the_latest_by_commit(use: str):
    model, step = MODELS["plain"], step_of("plain")
    state, first = begun("plain", branching=True)
    second, _ = step(first)
    if use == "step":
        astray, _ = compiled("plain", "eager")(model.params, first)  # traced code does not check
    else:
        astray = compiled_split()(first, torch.arange(ROWS), None)
    for carry in (first, second, astray):
        for again in (lambda carry=carry: step(carry), lambda carry=carry: nv.commit(model, state, carry)):
            with pytest.raises(nv.DonatedStateError):
                again()
    nv.check(state)


def test_the_host_sees_a_traced_step_that_took_its_newest_carry():
    """The host knows the newest carry of a session by what steps returned to it. Traced steps return nothing to it."""
    model, step = MODELS["plain"], step_of("plain")
    state, first = begun("plain")
    second, _ = step(first)
    third, _ = compiled("plain", "eager")(model.params, second)
    with pytest.raises(nv.DonatedStateError, match="has seen 1 steps of session"):
        step(second)
    fourth, _ = step(third)
    with pytest.raises(nv.DonatedStateError, match="has seen 2 steps of session"):
        step(third)
    state, made = nv.commit(model, state, fourth)
    assert [one.token_ids for one in made] == [
        reply("plain", text, seed, True, ROOM)[:3] for text, seed in zip(CONTEXTS[0], (None, 1), strict=True)
    ]
    nv.check(state)


@pytest.mark.parametrize("kind", list(MODELS))
def test_code_of_inductor_takes_its_turn(kind: str):
    model, step = MODELS[kind], step_of(kind)
    state, carry = begun(kind)
    captured, rows = nv.capture(step, carry), []
    for run in (compiled(kind, "inductor"), step, compiled(kind, "inductor"), captured, step, captured):
        used, (carry, row) = carry, run(model.params, carry) if run is compiled(kind, "inductor") else run(carry)
        rows.append(row.tolist())
        with pytest.raises(nv.DonatedStateError):
            step(used)
    state, made = nv.commit(model, state, carry)
    nv.check(state)
    want = [reply(kind, text, seed, True, ROOM) for text, seed in zip(CONTEXTS[0], (None, 1), strict=True)]
    assert [list(row) for row in zip(*rows, strict=True)] == [one.token_ids for one in made] == want


def test_ten_sessions_of_one_shape_are_traced_once():
    model, run = MODELS["plain"], compiled("plain", "eager")
    torch._dynamo.utils.counters.clear()
    state = fresh("plain")
    for _ in range(10):
        state, carry = nv.begin(model, state, [[1, 2, 3, 4, 5], [9, 8, 7]], options(None, False), room=ROOM)
        for _ in range(ROOM):
            carry, _ = run(model.params, carry)
        state, made = nv.commit(model, state, carry)
        assert made[0].token_ids == reply("plain", (1, 2, 3, 4, 5), None, False, ROOM)
        for one in made:
            state = nv.release(state, one.chunk)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
