"""Chunks by function calls: what they accept, and that what they refuse leaves the state as it was."""

from typing import Any

import numpy as np
import pytest

import nanovllm as nv
from nanovllm.testing.models import random_model, tiny_config

MODEL = random_model(tiny_config())
Made = tuple[nv.EngineState, nv.Chunk]


@pytest.fixture
def made() -> Made:
    """A state and a chunk of five tokens in it."""
    return nv.prefill(MODEL, nv.init_state(MODEL, num_pages=32, page_size=2), [1, 2, 3, 4, 5])


@pytest.mark.parametrize("bad", [None, 5, [5, 6], "chunk"])
@pytest.mark.usefixtures("untyped")
def test_what_is_no_chunk_is_named(made: Made, bad: Any) -> None:
    state, chunk = made
    for call in (nv.release, nv.fork, lambda s, c: nv.truncate(s, c, 1)):
        with pytest.raises(nv.InvalidRequestError, match=r"chunk=.* must be a chunk"):
            call(state, bad)
    if bad is not None:
        with pytest.raises(nv.InvalidRequestError, match=r"after=.* must be a chunk"):
            nv.prefill(MODEL, state, "ab", after=bad)
    state = nv.release(state, chunk)
    nv.check(state)


@pytest.mark.usefixtures("untyped")
def test_a_length_is_any_integer_but_a_bool(made: Made) -> None:
    state, chunk = made
    for length in (2, np.int64(2), np.uint8(2)):
        state, head = nv.truncate(state, chunk, length)
        assert head.token_ids.tolist() == [1, 2]
    for bad in (True, np.True_, 2.0, np.float32(2), np.array([2.0]), "2", None, 0, 6, -1, np.int64(6)):
        with pytest.raises(nv.InvalidRequestError, match="length="):
            nv.truncate(state, chunk, bad)  # pyright: ignore[reportArgumentType]
    nv.check(state)


@pytest.mark.parametrize("parts", [["ab", [7, 8], "c"], ([7, 8], np.array([9])), ["ab"], "ab", [7, 8], (7, 8), np.array([7])], ids=repr)
def test_parts_are_the_same_after_a_chunk_as_alone(made: Made, parts: Any) -> None:
    state, chunk = made
    state, alone = nv.prefill(MODEL, state, parts)
    state, behind = nv.prefill(MODEL, state, parts, after=chunk)
    assert behind.token_ids.tolist() == [1, 2, 3, 4, 5, *alone.token_ids.tolist()]
    with pytest.raises(nv.InvalidRequestError, match="only its first part"):
        nv.prefill(MODEL, state, [chunk, "ab"], after=chunk)
    nv.check(state)
