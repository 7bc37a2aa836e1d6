"""The digest of a state tells engines apart whose next calls could differ, and does not depend on what was read of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import nanovllm as nv
from nanovllm.state.digest import digest

LONG = nv.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> nv.Model:
    return nv.load_model("tiny", device="cpu")


def run(model: nv.Model, look: Callable[[nv.EngineState], Any], params: nv.SamplingParams = LONG, steps: int = 12) -> nv.EngineState:
    state = nv.init_state(model, num_pages=64, page_size=8)
    state, chunk = nv.prefill(model, state, "The cat")
    for context in ("Once upon a time", "Hello", [chunk, " sat"]):
        state, _ = nv.submit(model, state, context, params)
    for _ in range(steps):
        state, _ = nv.step(model, state)
        look(state)
    return state


def test_reading_changes_nothing(model: nv.Model) -> None:
    plain = run(model, lambda state: None)
    for look in (lambda state: list(state.running), repr, nv.memory, lambda state: state.running[0].tokens.array()):
        other = run(model, look)
        assert digest(other) == digest(plain)
        assert digest(other, whole=True) == digest(plain, whole=True)
        assert other.runtime.lease.engine != plain.runtime.lease.engine


@pytest.mark.parametrize(
    "change",
    [
        lambda model, state: nv.cancel(state, 2),
        lambda model, state: nv.release(state, state.chunks[0]),
        lambda model, state: nv.submit(model, state, "A")[0],
        lambda model, state: nv.step(model, state)[0],
        lambda model, state: replace(state, expected_reply=state.expected_reply + 1),
        lambda model, state: replace(state, stats=state.stats.add(reused_tokens=1)),
        lambda model, state: replace(state, next_id=state.next_id + 1),
        lambda model, state: replace(state, chunks=state.chunks.delete(0)),
    ],
)
def test_changes_are_seen(model: nv.Model, change: Callable[[nv.Model, nv.EngineState], nv.EngineState]) -> None:
    state = run(model, lambda state: None)
    before = digest(state), digest(state, whole=True)
    after = change(model, state)
    assert all(a != b for a, b in zip(before, (digest(after), digest(after, whole=True)), strict=True))


def test_another_token_is_seen(model: nv.Model) -> None:
    drawn = [replace(LONG, temperature=1.0, seed=seed) for seed in (0, 1)]
    for steps in (2, 3, 9):  # while the sequences are values, and while they are `Steady`
        assert len({digest(run(model, lambda state: None, params, steps)) for params in drawn}) == 2
