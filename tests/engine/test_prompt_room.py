"""How many prompt tokens a step may run while replies go on."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.config import EngineConfig
from nanovllm.engine.prompt_room import GRANULE, LEAST, PromptRoom
from nanovllm.engine.scheduler import schedule
from nanovllm.errors import InvalidRequestError
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.pool import init_pool
from nanovllm.state.request import Queue, Request, Sequence, rank_of
from nanovllm.state.vector import IntVector
from tests.engine.test_scheduler import ids, queue, settled, waiting


def config(**limits):
    return EngineConfig(
        **{
            "num_pages": 4096, "page_size": 2, "max_model_len": 8192, "max_num_seqs": 8, "max_num_batched_tokens": 4096, "seed": 0,
            "max_prefill_tokens": 100, **limits,
        }
    )  # fmt: skip


def counts(plan):
    return {s.request.request_id: count for s, count in plan.prefill}


def with_one_reply(limits, *behind):
    """A pool in which request 0 decodes, and a queue of others."""
    plan = schedule(init_pool(limits.num_pages, limits.page_size), [], queue(waiting(0, 3, 50)), limits)
    pool, running, _ = settled(plan)
    return pool, running, queue(*behind)


def test_the_bound_holds_only_while_a_reply_goes_on():
    limits = config()
    plan = schedule(init_pool(4096, 2), [], queue(waiting(1, 250), waiting(2, 30)), limits)
    assert counts(plan) == {1: 250, 2: 30}  # nobody waits for this step
    pool, running, left = with_one_reply(limits, waiting(1, 250), waiting(2, 300))
    plan = schedule(pool, running, left, limits)
    assert ids(plan.decode) == [0] and counts(plan) == {1: 100}
    pool, running, left = settled(plan)
    plan = schedule(pool, running, left, limits)
    assert counts(plan) == {1: 100} and ids(plan.waiting) == [2]
    pool, running, left = settled(plan)
    plan = schedule(pool, running, left, limits)
    assert counts(plan) == {1: 50, 2: 50}


def test_a_long_prompt_leaves_a_quarter_to_a_short_one():
    limits = config()
    pool, running, left = with_one_reply(limits, waiting(1, 600), waiting(2, 60), waiting(3, 10))
    firsts = {}
    for number in range(9):
        plan = schedule(pool, running, left, limits)
        assert sum(counts(plan).values()) <= 100
        firsts.update({rid: number for rid, count in counts(plan).items() if count < 100 and rid > 1})
        pool, running, left = settled(plan)
    # The short ones run beside the long one, one after the other, from the step that admits it.
    assert firsts == {2: 2, 3: 2} and [s.todo for s in running if s.request.request_id == 1] == [1]


def test_a_long_prompt_leaves_nothing_to_another_long_one():
    limits = config()
    pool, running, left = with_one_reply(limits, waiting(1, 600), waiting(2, 601))
    for _ in range(5):
        plan = schedule(pool, running, left, limits)
        assert counts(plan) == {1: 100}
        pool, running, left = settled(plan)


def test_the_first_prompt_advances_however_many_decode():
    """Three decode and the budget is three; a request of higher priority has a long prompt."""
    limits = config(max_num_batched_tokens=3, max_prefill_tokens=None)
    pool, running, left = init_pool(4096, 2), [], queue(*(ranked(i, 1, 90, 0) for i in range(3)))
    for _ in range(2):
        pool, running, left = settled(schedule(pool, running, left, limits))
    assert len(running) == 3
    first = ranked(3, 50, 4, -1)
    plan = schedule(pool, running[:2], left.push(first), limits)
    assert ids(plan.running) == [3, 0, 1] and counts(plan) == {3: 1}
    pool, rows, left = settled(plan)
    plan = schedule(pool, [*rows, running[2]], left, limits)
    assert counts(plan) == {3: 1} and ids(plan.decode) == [0, 1]


def ranked(request_id, num_tokens, max_tokens, priority):
    request = Request(
        request_id=request_id, num_prompt=num_tokens, sampling=SamplingParams(), seed=0, max_len=num_tokens + max_tokens,
        stop_ids=frozenset(), arrival=0.0, priority=priority, rank=rank_of(priority, 0),
    )  # fmt: skip
    tokens = [(request_id * 100 + i) % 1000 for i in range(num_tokens)]
    return Sequence(request=request, tokens=IntVector.of(tokens), pages=IntVector.of())


def prompt(num_filled, todo):
    return Sequence(
        request=ranked(0, 1, 9, 0).request, tokens=IntVector.of(np.zeros(num_filled + todo, np.int32)), pages=IntVector.of(),
        num_filled=num_filled,
    )  # fmt: skip


@given(work=st.integers(1, 5000), doubling=st.integers(1, 50_000), filled=st.integers(0, 30_000), todo=st.integers(1, 9000))
def test_tokens_with_much_before_them_count_more(work, doubling, filled, todo):
    room = PromptRoom(tokens=8192, work=work, bound=work, doubling=doubling)
    count = room.most(prompt(filled, todo))
    cost = lambda n: n + n * (2 * filled + n) / (2 * doubling)  # noqa: E731
    least = min(LEAST, work, todo)
    assert least <= count <= min(todo, 8192)
    assert count == least or cost(count) <= work
    if least < count < min(todo, 8192):
        assert count % GRANULE == 0 and cost(count + GRANULE) > work
    left = room.after(prompt(filled, todo), count)
    assert left.tokens == 8192 - count and left.work is not None and 0 <= left.work <= max(0, work - count)
    assert left.work >= work - cost(count) - 1 or (left.work == 0 and work - cost(count) < GRANULE)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"max_prefill_tokens": 0}, "max_prefill_tokens=0 must"),
        ({"max_prefill_tokens": True}, "max_prefill_tokens=True must"),
        ({"max_prefill_tokens": 2.5}, r"max_prefill_tokens=2\.5 must"),
        ({"context_doubling": -1}, "context_doubling=-1 must"),
    ],
)
def test_bad_bounds_are_named(given, named, untyped):
    with pytest.raises(InvalidRequestError, match=named):
        config(**given)


def test_an_empty_queue_has_no_first():
    assert Queue().first() is None


def test_a_spent_bound_leaves_nothing_to_share():
    """A second long prompt runs nothing if what is left belongs to a short one; it ran one token more than the bound."""
    room = PromptRoom(tokens=100, work=16, bound=64, doubling=0)
    assert not room.without_share() and not PromptRoom(tokens=100, work=0, bound=64, doubling=0).without_share()
    assert [PromptRoom(tokens=100, work=bound, bound=bound, doubling=0).without_share().work for bound in (1, 3, 4, 64)] == [1, 3, 3, 48]


def test_a_long_prompt_leaves_a_part_in_the_step_that_admits_it():
    limits = config()
    pool, running, left = with_one_reply(limits, waiting(1, 600), waiting(2, 20), waiting(3, 90))
    assert counts(schedule(pool, running, left, limits)) == {1: 75, 2: 20, 3: 5}
    pool, running, left = with_one_reply(limits, waiting(1, 600), waiting(2, 101), waiting(3, 20))
    assert counts(schedule(pool, running, left, limits)) == {1: 100}  # the next in order is long too
    pool, running, left = with_one_reply(limits, waiting(1, 600), waiting(2, 20))
    assert counts(schedule(pool, running, left, replace(limits, max_num_seqs=2))) == {1: 100}  # no place for the short one
