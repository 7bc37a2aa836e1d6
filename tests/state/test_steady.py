"""`Steady` against sequences that are made at every step, whoever looks and whenever."""

from collections.abc import Sequence as Seq

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.engine.output import draw_token, finish_reason
from nanovllm.executor.executor import Drawn
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.pool import init_pool
from nanovllm.state.request import Queue, Request, Sequence
from nanovllm.state.steady import Steady
from nanovllm.state.vector import IntVector

POOL, WAITING, STEPS = init_pool(64, 16), Queue(), 12


def decoding(request_id: int, max_tokens: int, stop_ids: frozenset[int]) -> Sequence:
    """A sequence that has drawn one token."""
    request = Request(
        request_id=request_id,
        num_prompt=2,
        sampling=SamplingParams(),
        seed=0,
        max_len=2 + max_tokens,
        stop_ids=stop_ids,
        arrival=0.0,
    )
    tokens = IntVector.of([request_id, 7, 8])
    return Sequence(request=request, tokens=tokens, pages=IntVector.of([request_id]), num_filled=2, most_filled=2, first_token=1.0)


def seen(sequences: Seq[Sequence]) -> list[tuple]:
    return [(s.request.request_id, s.tokens.array().tolist(), s.num_filled, s.most_filled, s.first_token) for s in sequences]


@given(data=st.data())
def test_every_value_is_what_its_steps_made_it(data):
    stops = st.frozensets(st.integers(0, 5), max_size=1)
    rows = data.draw(st.lists(st.tuples(st.integers(2, STEPS + 3), stops), min_size=1, max_size=5))
    shadow = [decoding(i, *row) for i, row in enumerate(rows)]
    running, kept = Steady.of(tuple(shadow), STEPS, POOL, WAITING), []
    for step in range(data.draw(st.integers(1, STEPS))):
        assert running.holds(POOL, WAITING) and running.steps == STEPS - step
        kept.append((running, seen(shadow)))
        if data.draw(st.booleans()):
            looked_at = data.draw(st.sampled_from(kept))
            assert seen(looked_at[0]) == looked_at[1]
        tokens = data.draw(st.lists(st.integers(0, 5), min_size=len(shadow), max_size=len(shadow)))
        drawn = Drawn(token_ids=np.array(tokens, np.int32))
        shadow = [draw_token(s, token, drawn, row, 2.0) for row, (s, token) in enumerate(zip(shadow, tokens, strict=True))]
        reasons = [finish_reason(s, token) for s, token in zip(shadow, tokens, strict=True)]
        running = running.after(drawn.token_ids)
        if data.draw(st.booleans()):
            assert seen(running) == seen(shadow)
        rows = running.ending(tokens, {})
        assert rows == [row for row, reason in enumerate(reasons) if reason is not None]
        gone, rest = running.part(rows)
        assert seen(gone) == seen([shadow[row] for row in rows])
        shadow = [s for s, reason in zip(shadow, reasons, strict=True) if reason is None]
        if not isinstance(rest, Steady):
            assert not shadow
            break
        assert len(rest) == len(shadow) and rest.ids == tuple(s.request.request_id for s in shadow)
        running = rest if rows or data.draw(st.booleans()) else running
        assert running.newest(np.arange(len(running))).tolist() == [s.tokens[-1] for s in shadow]
        room = [s.request.max_len - s.tokens.length for s in shadow]
        assert (running.left - running.age).tolist() == room
    for value, before in kept:
        assert seen(value) == before


def test_it_holds_for_its_own_pool_and_queue_alone():
    running = Steady.of((decoding(0, 9, frozenset()),), 1, POOL, WAITING)
    assert running.holds(POOL, WAITING)
    assert not running.holds(init_pool(64, 16), WAITING)
    assert not running.holds(POOL, Queue())
    assert not running.after(np.array([1], np.int32)).holds(POOL, WAITING)
