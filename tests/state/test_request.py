"""`Queue`: order of arrival, whatever is pushed back or taken out of the middle."""

import time

from hypothesis import given
from hypothesis import strategies as st

from nanovllm.sampling.params import SamplingParams
from nanovllm.state.request import Queue, Request, Sequence
from nanovllm.state.vector import IntVector


def waiting(request_id: int) -> Sequence:
    request = Request(
        request_id=request_id,
        num_prompt=1,
        sampling=SamplingParams(),
        seed=0,
        max_len=2,
        stop_ids=frozenset(),
        arrival=0.0,
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
