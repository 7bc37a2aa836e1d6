"""Priorities: who runs first, how waiting counts, who gives way, and that no reply changes."""

from dataclasses import replace

import pytest

import nanovllm as nv
from nanovllm.engine.requests import submit, submit_many
from nanovllm.engine.step import step
from nanovllm.errors import InvalidRequestError
from nanovllm.state.invariants import check
from nanovllm.state.request import AGEING, rank_of
from nanovllm.testing.models import random_model, tiny_config

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
MODEL = random_model(tiny_config(vocab_size=50))
PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11, 12], [13], [14, 15]]


def greedy(count):
    return nv.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def engine(**limits):
    return nv.init_state(MODEL, **{"num_pages": 64, "page_size": 2, "max_num_seqs": 1, **limits})


def ended(state):
    """The replies by request id, in the order in which they ended."""
    replies = {}
    while state.running or state.waiting:
        state, outputs = step(MODEL, state)
        check(state)
        replies.update({out.request_id: out.output.token_ids for out in outputs if out.output})
    return replies


def test_lower_numbers_first_and_equals_in_order_of_arrival():
    state = engine()
    for prompt, priority in zip(PROMPTS, (1, 0, 1, -2, 0, -2), strict=True):
        state, _ = submit(MODEL, state, prompt, greedy(2), priority=priority)
    assert [s.request.request_id for s in state.waiting] == [3, 5, 1, 4, 0, 2]
    assert list(ended(state)) == [3, 5, 1, 4, 0, 2]


@pytest.mark.parametrize("steps", [AGEING - 1, AGEING])
def test_who_has_waited_for_a_level_comes_first(steps):
    """A request of level 1 waits while the engine runs so many steps; one of level 0 then comes behind it or before it."""
    state, old = submit(MODEL, engine(), PROMPTS[0], greedy(1), priority=1)
    state, new = submit(MODEL, replace(state, num_steps=steps), PROMPTS[1], greedy(1))
    assert list(ended(state)) == ([old, new] if steps == AGEING else [new, old])


def test_steps_are_counted():
    state = engine(max_num_seqs=4)
    state, _ = submit(MODEL, state, PROMPTS[0], greedy(9))
    for number in range(9):
        assert state.num_steps == number
        state, _ = step(MODEL, state)
    state, request_id = submit(MODEL, state, PROMPTS[0], greedy(1), priority=3)
    request = state.waiting.items[request_id].request
    assert (request.priority, request.rank) == (3, rank_of(3, 9)) == (3, 3 * AGEING + 9)


def test_the_lowest_priority_gives_way():
    """Two requests grow until the pool is full. The older one has the higher number, so it is preempted."""
    state = engine(num_pages=6, max_num_seqs=4)
    state, ids = submit_many(MODEL, state, PROMPTS[:2], [greedy(6)] * 2, priorities=[1, 0])
    preempted = None
    while state.running or state.waiting:
        state, _ = step(MODEL, state)
        if state.stats.preemptions and preempted is None:
            preempted = [s.request.request_id for s in state.waiting]
    assert preempted == [ids[0]]


@pytest.mark.parametrize("num_pages", [64, 9])
@pytest.mark.parametrize("bound", [None, 1, 2])
def test_no_reply_changes(num_pages, bound):
    alone = {i: ended(submit(MODEL, engine(), prompt, greedy(7))[0])[0] for i, prompt in enumerate(PROMPTS)}
    for priorities in ([0] * 6, [5, 4, 3, 2, 1, 0], [0, -1, 1, -1, 0, 9]):
        state = engine(num_pages=num_pages, max_num_seqs=3, max_prefill_tokens=bound)
        state, _ = submit_many(MODEL, state, PROMPTS, [greedy(7)] * 6, priorities=priorities)
        assert ended(state) == alone


@pytest.mark.parametrize("priority", [1.0, True, "1", None, 1 << 53, -(1 << 53)])
def test_a_bad_priority_is_named(priority, untyped):
    state = engine()
    with pytest.raises(InvalidRequestError, match=f"priority={priority!r} must be an integer"):
        submit(MODEL, state, PROMPTS[0], greedy(1), priority=priority)
    with pytest.raises(InvalidRequestError, match="prompt 1: priority"):
        submit_many(MODEL, state, PROMPTS[:2], [greedy(1)] * 2, priorities=[0, priority])
    assert not submit(MODEL, state, PROMPTS[0], greedy(1))[1]
