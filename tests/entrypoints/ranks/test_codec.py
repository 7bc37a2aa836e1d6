"""Arguments of calls survive as bytes: values, types and texts that no encoding has."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nanovllm.entrypoints.ranks.codec import decode, encode
from nanovllm.errors import InvalidRequestError
from nanovllm.sampling.grammar import Grammar
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.chunk import EXACT, Chunk
from nanovllm.state.vector import IntVector

CHUNKS = {
    number: Chunk(
        tokens=IntVector.of([1]), pages=IntVector.of([0]), provenance=EXACT, num_exact=1, fingerprint="", engine="e", liveness=number
    )
    for number in range(4)
}
TEXTS = st.text(st.characters(categories=None), max_size=8)  # lone surrogates too
GRAMMARS = st.one_of(
    st.just(Grammar.json_object()),
    st.sampled_from([["yes", "no"], ["ä"]]).map(Grammar.choice),
    st.just(Grammar.regex("[0-9]+")),
    st.just(Grammar.lark('start: "a"')),
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0, 0.1, 1 / 3, 2.5]),
        "top_k": st.integers(0, 2**31 - 1),
        "top_p": st.floats(0.01, 1.0),
        "min_p": st.floats(0, 1),
        "max_tokens": st.integers(5, 2**31 - 1),
        "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3),
        "stop_token_ids": st.sets(st.integers(0, 2**31 - 1), max_size=4),
        "ignore_eos": st.booleans(),
        "seed": st.none() | st.integers(0, 2**63 - 1),
        "repetition_penalty": st.floats(0.1, 10),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.none() | st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3),
        "logprobs": st.none() | st.integers(0, 20),
        "min_tokens": st.integers(0, 5),
        "bad_words": st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
        "skip_special_tokens": st.booleans(),
        "grammar": st.none() | GRAMMARS,
    },
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    TEXTS,
    st.lists(st.integers(0, 1 << 40)),
    hnp.arrays(st.sampled_from([np.int32, np.int64, np.uint8, np.float32, np.bool_]), hnp.array_shapes(min_dims=0, max_dims=2, min_side=0)),
    st.sampled_from([np.int32(7), np.float64(0.5), np.bool_(True)]),
    st.sampled_from([*CHUNKS.values()]),
    OPTIONS.map(lambda options: SamplingParams(**options)),
    GRAMMARS,
    st.sampled_from([Path("a/b"), Path("/tmp/ä.safetensors")]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, with equal types everywhere."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Chunk):
        return a is b
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@given(VALUES)
@example([True, 1])
@example([True])
@example([-0.0, float("nan"), "\ud800"])
@example([1 << 70, -1])
def test_values_survive(value: Any) -> None:
    assert same(decode(encode(value), CHUNKS.__getitem__), value)


@pytest.mark.parametrize("value", [lambda logits: logits, object(), b"bytes", {1: 2}, {1, 2}, SimpleNamespace(), np.array([object()])])
def test_what_cannot_be_told_is_named(value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"a value of type {type(value).__name__} cannot be sent"):
        encode(["call", {"context": [value]}])


def test_an_unknown_kind_is_refused() -> None:
    data = bytearray(encode(("a",)))
    at = bytes(data).index(b"tuple")
    data[at : at + 5] = b"tupl3"
    with pytest.raises(ValueError, match="tupl3"):
        decode(bytes(data), CHUNKS.__getitem__)
