"""A namespace is a number of at least 0, wherever one can be given."""

import pytest

import nanovllm as nv
from nanovllm.engine.requests import submit_many
from nanovllm.testing.models import random_model, tiny_config

MODEL = random_model(tiny_config())


@pytest.mark.parametrize("namespace", [-1, -(2**70), True])
def test_other_values_are_refused_and_change_nothing(namespace: int) -> None:
    state = nv.init_state(MODEL, num_pages=16, page_size=4)
    state, chunk = nv.prefill(MODEL, state, list(range(16)))
    before, message = state.pool, "namespace=.* must be an integer of at least 0"
    with pytest.raises(nv.InvalidRequestError, match=message):
        nv.prefill(MODEL, state, [1, 2], namespace=namespace)
    with pytest.raises(nv.InvalidRequestError, match=message):
        nv.score(MODEL, state, [[1, 2]], [[3]], namespace=namespace)
    with pytest.raises(nv.InvalidRequestError, match=message):
        nv.compose(MODEL, state, [chunk], namespace=namespace)
    with pytest.raises(nv.InvalidRequestError, match=message):
        nv.drop(MODEL, state, chunk, 2, 4, namespace=namespace)
    with pytest.raises(nv.InvalidRequestError, match=message):
        submit_many(MODEL, state, [[1, 2]], [nv.SamplingParams()], namespace=namespace)
    assert state.pool is before
    nv.check(state)
    state, _ = nv.prefill(MODEL, state, [1, 2], namespace=3)
