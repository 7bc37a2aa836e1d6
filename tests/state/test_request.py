"""`Queue`: order of rank and arrival, whatever is pushed back or taken out of the middle."""

import time

from hypothesis import given
from hypothesis import strategies as st

from nanovllm.sampling.params import SamplingParams
from nanovllm.state.request import Queue, Request, Sequence
from nanovllm.state.vector import IntVector


def waiting(request_id: int, rank: int = 0) -> Sequence:
    request = Request(
        request_id=request_id,
        num_prompt=1,
        sampling=SamplingParams(),
        seed=0,
        max_len=2,
        stop_ids=frozenset(),
        arrival=0.0,
        rank=rank,
    )
    return Sequence(request=request, tokens=IntVector.of([0]), pages=IntVector.of())


@given(st.lists(st.integers(0, 30), max_size=40))
def test_order_of_arrival(ids):
    queue, shadow = Queue(), set()
    for rid in ids:
        if rid in shadow:
            queue = queue.pop(rid)
            shadow.remove(rid)
        else:
            queue = queue.push(waiting(rid))
            shadow.add(rid)
        first = queue.first()
        assert (None if first is None else first.request.request_id) == min(shadow, default=None)
        assert [s.request.request_id for s in queue] == sorted(shadow)
        assert len(queue) == len(shadow)


@given(st.lists(st.integers(0, 30), max_size=60), st.lists(st.integers(-3, 3), min_size=31, max_size=31))
def test_order_of_rank(ids, ranks):
    queue, shadow, kept = Queue(), set(), []
    for rid in ids:
        if rid in shadow:
            queue = queue.pop(rid)
            shadow.remove(rid)
        else:
            queue = queue.push(waiting(rid, ranks[rid]))
            shadow.add(rid)
        first, expected = queue.first(), sorted(shadow, key=lambda one: (ranks[one], one))
        assert (None if first is None else first.request.request_id) == (expected[0] if expected else None)
        kept.append((queue, expected))
    for old, expected in kept:  # a value never changes
        assert [s.request.request_id for s in old] == expected


def test_what_was_taken_out_of_the_middle_does_not_pile_up():
    queue = Queue().push(waiting(0, -1))
    for rid in range(1, 2000):
        queue = queue.push(waiting(rid)).pop(rid)
    assert len(queue) == 1 and queue.num_turns < 200


def test_another_value_of_a_sequence_has_one_turn():
    queue = Queue().push(waiting(0)).push(waiting(1))
    assert queue.push(waiting(0)).num_turns == 2


def test_ids_that_never_waited_cost_nothing_at_each_look():
    queue = Queue().push(waiting(0)).push(waiting(300_000)).pop(0)
    start = time.thread_time()
    for _ in range(100):
        assert queue.first() is not None
    assert time.thread_time() - start < 0.3


def test_ids_that_are_gone_cost_nothing_at_each_pop():
    first, queue = 300_000, Queue()
    for rid in range(first, first + 100):
        queue = queue.push(waiting(rid))
    start = time.thread_time()
    for rid in range(first, first + 100):
        queue = queue.pop(rid)
    assert time.thread_time() - start < 0.3
