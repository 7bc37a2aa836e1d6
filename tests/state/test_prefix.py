"""The prefix index beside its machine in `tests/property`: what losing pages costs, and what goes with them."""

import time

import numpy as np

from nanovllm.state.prefix import forget, init_prefix, insert, match, set_idle


def test_forget_takes_all_that_stands_behind() -> None:
    runs = {(1, 2, 3, 4): (0, 1, 2, 3), (1, 2, 5): (0, 1, 4), (6, 7): (5, 6)}
    index = init_prefix(1)
    for tokens, pages in runs.items():
        index, _ = insert(index, np.array(tokens, np.int32), np.array(pages), 0)
    index = set_idle(index, [3, 4])
    left, gone = forget(index, frozenset({1, 3, 99}))
    assert gone == [1, 2, 3, 4]
    assert [match(left, np.array(tokens, np.int32)) for tokens in runs] == [[0], [0], [5, 6]]
    assert left.nodes[0].num_children == 0 and left.num_idle == 0
    assert forget(index, frozenset({99})) == (index, [])


def test_forget_is_linear_in_a_deep_index() -> None:
    count = 20_000
    index, _ = insert(init_prefix(1), np.arange(count, dtype=np.int32), np.arange(count), 0)
    start = time.perf_counter()
    _, gone = forget(index, frozenset({0}))
    assert len(gone) == count
    assert time.perf_counter() - start < 10  # a walk of the whole index for every level would take minutes
