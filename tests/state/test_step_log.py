"""`StepLog` against lists: values made from one another, in any order, each with its own steps."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.state.step_log import StepLog

ROWS = 4


@given(data=st.data())
def test_every_value_has_its_own_steps(data: st.DataObject) -> None:
    def results(count: int) -> tuple[Any, ...]:
        tokens = data.draw(st.lists(st.integers(0, 99), min_size=count, max_size=count))
        each = np.array(tokens, np.int32)
        return each, each / np.float32(4), None, np.stack([each, each + 1], 1)

    first = results(ROWS)
    values: list[tuple[StepLog, Any, list[Any]]] = [
        (StepLog.of(first), None, [first[0]])
    ]  # each with its columns and its tokens, step by step
    for _ in range(data.draw(st.integers(1, 40))):
        log, columns, steps = values[-1] if data.draw(st.booleans()) else data.draw(st.sampled_from(values))
        count = len(steps[0])
        if count > 1 and data.draw(st.integers(0, 5)) == 0:
            rows = np.array(sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1))), np.intp)
            values.append((log, rows if columns is None else columns[rows], [step[rows] for step in steps]))
            continue
        more = results(count)
        assert log.fits(more) and not log.fits((*more[:2], more[0], more[3])) and not log.fits((*more[:3], more[3][:, :1]))
        values.append((log.append(len(steps), columns, more), columns, [*steps, more[0]]))
    for log, columns, steps in values:
        at = np.arange(ROWS) if columns is None else columns
        tokens, logprobs, nothing, pairs = log.results(len(steps), at)
        wanted = np.stack(steps)
        assert nothing is None
        assert np.array_equal(tokens, wanted) and np.array_equal(logprobs, wanted / 4)
        assert np.array_equal(pairs, np.stack([wanted, wanted + 1], 2))
        start = data.draw(st.integers(0, len(steps)))
        assert [log.tokens(start, len(steps), column) for column in at.tolist()] == wanted.T[:, start:].tolist()
        assert log.newest(len(steps), at).tolist() == wanted[-1].tolist()


def test_memory_grows_by_doubling_and_is_shared() -> None:
    log, arrays = StepLog.of((np.zeros(2, np.int32),)), set()
    for step in range(1, 201):
        log = log.append(step, None, (np.ones(2, np.int32),))
        arrays.add(id(log.arrays[0]))
    assert len(arrays) <= 6 and log.tokens(0, 201, 1) == [0] + [1] * 200
