"""Two threads that use one state: the call of one is refused, and changes nothing."""

import threading
import timeit
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import nanovllm as nv
from nanovllm.engine.donation import enter, guarded
from nanovllm.executor.executor import Runtime
from nanovllm.state.lease import Lease
from nanovllm.testing.models import random_model, tiny_config

MODEL = random_model(tiny_config(vocab_size=40), 0)
GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = [1, 2, 3, 4, 5]


def engine() -> nv.EngineState:
    return nv.init_state(MODEL, num_pages=32, page_size=4, max_num_seqs=4)


class Interrupted:
    """An executor that lets another thread act in the middle of each of its calls."""

    def __init__(self, inner: Any, act: Callable[[], None]) -> None:
        self._inner, self._act, self._acting = inner, act, False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*args: Any, **options: Any) -> Any:
            if not self._acting:
                self._acting = True
                in_another_thread(self._act)
                self._acting = False
            return method(*args, **options)

        return call


def in_another_thread(act: Callable[[], Any]) -> Any:
    """What the function returns or raises, run in a thread of its own."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(act())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


CALLS: dict[str, Callable[[nv.EngineState, nv.Chunk, nv.DecodeCarry], Any]] = {
    "prefill": lambda state, chunk, carry: nv.prefill(MODEL, state, [7, 8]),
    "generate": lambda state, chunk, carry: nv.generate(MODEL, state, [7, 8], GREEDY),
    "generate_many": lambda state, chunk, carry: nv.generate_many(MODEL, state, [[7, 8]], GREEDY, process_logits=lambda logits: logits),
    "submit": lambda state, chunk, carry: nv.submit(MODEL, state, [7, 8], GREEDY),
    "step": lambda state, chunk, carry: nv.step(MODEL, state),
    "fork": lambda state, chunk, carry: nv.fork(state, chunk),
    "release": lambda state, chunk, carry: nv.release(state, chunk),
    "truncate": lambda state, chunk, carry: nv.truncate(state, chunk, 3),
    "compose": lambda state, chunk, carry: nv.compose(MODEL, state, [chunk, chunk]),
    "score": lambda state, chunk, carry: nv.score(MODEL, state, [[7]], [[8]]),
    "begin": lambda state, chunk, carry: nv.begin(MODEL, state, [[7, 8]], GREEDY, room=2),
    "commit": lambda state, chunk, carry: nv.commit(MODEL, state, carry),
    "abandon": lambda state, chunk, carry: nv.abandon(state, carry),
}


@pytest.mark.parametrize("inner", ["generate", "step", "prefill", "score", "commit"])
def test_calls_during_the_work_of_another_thread_are_refused(inner: str):
    """In the middle of each device call of one thread, another thread tries every public call."""
    state, chunk = nv.prefill(MODEL, engine(), PROMPT)
    state, carry = nv.begin(MODEL, state, [PROMPT], GREEDY, room=2)
    state, _ = nv.submit(MODEL, state, PROMPT, GREEDY)
    refused = []

    def others() -> None:
        for name, call in CALLS.items():
            with pytest.raises(nv.DonatedStateError, match=r"another thread|call old"):
                call(state, chunk, carry)
            refused.append(name)

    plain, errors = state.runtime, []

    def act() -> None:
        try:
            others()
        except BaseException as error:
            errors.append(error)

    state = replace(state, runtime=Runtime(plain.lease, Interrupted(plain.executor, act)))  # pyright: ignore[reportAttributeAccessIssue]
    after, *_ = CALLS[inner](state, chunk, carry)
    assert not errors and set(refused) == set(CALLS)
    after = replace(after, runtime=plain)
    nv.check(after)
    _, reply = nv.generate(MODEL, after, PROMPT, GREEDY)
    assert reply.token_ids == nv.generate(MODEL, engine(), PROMPT, GREEDY)[1].token_ids


def test_of_two_threads_that_call_at_once_one_is_refused():
    """Calls without device work: both may have begun, and one commits."""
    for _ in range(30):
        state, start, results = engine(), threading.Barrier(4), []

        def call(state: nv.EngineState = state, start: threading.Barrier = start, results: list[Any] = results) -> None:
            start.wait()
            try:
                results.append(nv.submit(MODEL, state, PROMPT, GREEDY))
            except nv.DonatedStateError as error:
                results.append(error)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (done,) = [result for result in results if isinstance(result, tuple)]
        assert sum(isinstance(result, nv.DonatedStateError) for result in results) == 3
        assert len(done[0].waiting) == 1
        nv.check(done[0])


def test_a_call_that_began_before_another_failed_is_refused():
    state = engine()
    entered = enter(state, MODEL)

    def fail() -> None:
        with guarded(enter(state)):
            raise KeyboardInterrupt

    assert isinstance(in_another_thread(fail), KeyboardInterrupt)
    with pytest.raises(nv.DonatedStateError, match="failed meanwhile"), guarded(entered):
        pass
    state, reply = nv.generate(MODEL, state, PROMPT, GREEDY)
    assert reply.token_ids == nv.generate(MODEL, engine(), PROMPT, GREEDY)[1].token_ids


def test_a_failed_call_lets_other_threads_in():
    state = engine()
    with pytest.raises(KeyboardInterrupt), guarded(state):
        raise KeyboardInterrupt
    (after, reply) = in_another_thread(lambda: nv.generate(MODEL, state, PROMPT, GREEDY))
    assert len(reply.token_ids) == 6
    nv.check(after)


@pytest.mark.unhooked
def test_the_lock_costs_less_than_a_microsecond():
    lease: Lease = engine().runtime.lease
    assert min(timeit.repeat(lambda: lease.check(0), number=2000, repeat=20)) / 2000 < 2e-6  # twice as much, because machines differ
