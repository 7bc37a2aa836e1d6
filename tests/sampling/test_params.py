"""`SamplingParams`: what is accepted is normalised, and everything else is an `InvalidRequestError` that names the value."""

import copy
import dataclasses
import inspect
import itertools
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.errors import InvalidRequestError
from nanovllm.sampling.params import SamplingParams, from_generation_config, validate_for

NAN, INF = float("nan"), float("inf")
NAMES = [f.name for f in dataclasses.fields(SamplingParams)]

REFUSED = {
    "temperature": [NAN, INF, -INF, -1, -1e-9, 1e-9, 101, 1e300, "1", None, True, [1.0], 10**400, np.nan, np.float32("inf"), 1j, b"1"],
    "top_k": [-1, 1.0, "3", None, True, 2**31, NAN, [5], 10**5000],
    "top_p": [0, 0.0, -0.1, 1.5, 1.0000001, NAN, INF, "0.5", None, True],
    "min_p": [-0.1, 1.1, NAN, INF, "0", None, False],
    "max_tokens": [0, -1, 2**31, 10**30, 10**5000, 1.5, None, "16", True, NAN],
    "stop": [
        "",
        [""],
        ["a", ""],
        [1],
        5,
        b"x",
        [b"x"],
        None,
        ["a"] * 17,
        "a" * 1025,
        ["b", "a" * 1025],
        "\ud800",
        {"a": 1},
        itertools.count(),
        True,
    ],
    "stop_token_ids": [[-1], ["a"], "12", b"12", 5, [1.5], [True], None, [2**31], {1: 2}, itertools.count(), np.array(5), [[1]]],
    "ignore_eos": [1, 0, "yes", None, np.True_],
    "seed": [-1, 2**63, 1.0, "1", True, NAN],
    "repetition_penalty": [0, -1, 10.5, NAN, INF, "1", None, True],
    "presence_penalty": [-2.5, 2.1, NAN, INF, "0", None, True],
    "frequency_penalty": [-2.5, 2.1, NAN, -INF, "0", None, True],
    "logit_bias": [
        *({-1: 1.0}, {"a": 1.0}, {True: 1.0}, {1.5: 1.0}, {2**31: 0.0}, [1, 2], [(1, 2, 3)], "ab", 5, itertools.count(), True),
        *({1: bad} for bad in (NAN, INF, 101, -100.5, "x", None, True)),
    ],
    "logprobs": [-1, 21, 1.0, "5", True, NAN],
}

ACCEPTED = {
    "temperature": [
        (0, 0.0),
        (-0.0, 0.0),
        (1, 1.0),
        (1e-3, 1e-3),
        (100, 100.0),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (Fraction(1, 2), 0.5),
    ],
    "top_k": [(0, 0), (2**31 - 1, 2**31 - 1), (np.int32(5), 5)],
    "top_p": [(1, 1.0), (1e-30, 1e-30), (np.float64(0.9), 0.9)],
    "min_p": [(0, 0.0), (1, 1.0)],
    "max_tokens": [(1, 1), (np.uint8(3), 3)],
    "stop": [("a", ("a",)), (["a", "b"], ("a", "b")), (("é",), ("é",)), ([], ()), (["x"] * 16, ("x",) * 16), ("x" * 1024, ("x" * 1024,))],
    "stop_token_ids": [([3, 1, 3], (1, 3)), (np.array([2, 1]), (1, 2)), ({5}, (5,)), ((), ()), (range(3), (0, 1, 2))],
    "ignore_eos": [(True, True)],
    "seed": [(None, None), (0, 0), (2**63 - 1, 2**63 - 1), (np.int64(7), 7)],
    "repetition_penalty": [(1e-9, 1e-9), (10, 10.0)],
    "presence_penalty": [(-2, -2.0), (2, 2.0)],
    "frequency_penalty": [(-2, -2.0), (2, 2.0)],
    "logit_bias": [
        ({3: 1, 1: -100}, ((1, -100.0), (3, 1.0))),
        ({}, None),
        (None, None),
        (((1, 2.0),), ((1, 2.0),)),
        ({np.int64(4): np.float32(0.5)}, ((4, 0.5),)),
    ],
    "logprobs": [(None, None), (0, 0), (20, 20)],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values], ids=lambda v: str(type(v))
)
def test_refused(name, value):
    with pytest.raises(InvalidRequestError, match=name) as refusal:
        SamplingParams(**{name: value})
    assert "must be" in str(refusal.value) and len(str(refusal.value)) < 400


@pytest.mark.parametrize(("name", "value", "kept"), [(name, *pair) for name, pairs in ACCEPTED.items() for pair in pairs])
def test_accepted_and_normalised(name, value, kept):
    found = getattr(SamplingParams(**{name: value}), name)
    assert found == kept and repr(found) == repr(kept)


class Hostile:
    def __repr__(self):
        raise RuntimeError("no")

    def __index__(self):
        raise TypeError("no")


text, numbers = st.text(max_size=2), st.one_of(st.integers(), st.floats())
odd = [np.float32(1), np.float64("nan"), np.int64(-1), np.array([1, 2]), np.array(1.0), np.str_("x"), Fraction(1, 3), object, len, 1j]
anything = st.one_of(
    st.sampled_from(odd),
    st.one_of(st.none(), st.booleans(), numbers, text, st.binary(max_size=3), st.builds(Hostile)),
    st.lists(numbers | text, max_size=3),
    st.dictionaries(st.integers() | text, numbers | st.none(), max_size=3),
)


@given(st.dictionaries(st.sampled_from(NAMES), anything, max_size=3))
@settings(deadline=None, max_examples=300)
def test_whatever_is_given_is_taken_or_refused_by_our_error(options):
    try:
        params = SamplingParams(**options)
    except InvalidRequestError as refusal:
        assert str(refusal)
        return
    assert params.temperature == 0 or 1e-3 <= params.temperature <= 100
    assert params.top_k >= 0 and 0 < params.top_p <= 1 and 0 <= params.min_p <= 1 and 1 <= params.max_tokens < 2**31
    assert hash(params) == hash(dataclasses.replace(params)) and params == dataclasses.replace(params)


@pytest.mark.parametrize(
    ("wrong", "right"), [("temprature", "temperature"), ("max_new_tokens", "max_tokens"), ("topk", "top_k"), ("temp", "temperature")]
)
def test_an_unknown_keyword_is_named_with_the_closest(wrong, right):
    with pytest.raises(InvalidRequestError, match=f"'{wrong}'.*'{right}'"):
        SamplingParams(**{wrong: 1})


def test_every_unknown_keyword_is_refused():
    with pytest.raises(InvalidRequestError, match=r"unknown sampling option ''\. Valid options: temperature, "):
        SamplingParams(**{"": 1})
    with pytest.raises(InvalidRequestError, match="zzz"):
        SamplingParams(temperature=1.0, zzz=None)


def test_signature_is_visible_and_keyword_only():
    parameters = inspect.signature(SamplingParams).parameters
    assert list(parameters) == NAMES
    assert parameters["max_tokens"].default == 16
    with pytest.raises(TypeError):
        SamplingParams(0.5)


def test_a_value_frozen_slotted_and_copyable():
    params = SamplingParams(stop="a", logit_bias={1: 2.0}, stop_token_ids=[4])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 2.0
    assert not hasattr(params, "__dict__")
    assert params == pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == eval(repr(params))
    assert len({params, SamplingParams(stop=["a"], logit_bias=[(1, 2)], stop_token_ids=(4,))}) == 1


@pytest.mark.parametrize("options", [{"stop_token_ids": [10]}, {"logit_bias": {10: 1.0}}, {"logit_bias": {3: 1.0, 2**31 - 1: 1.0}}])
def test_ids_outside_the_vocabulary(options):
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        validate_for(SamplingParams(**options), 10)
    validate_for(SamplingParams(**options), 2**31)


def test_ids_inside_the_vocabulary():
    validate_for(SamplingParams(stop_token_ids=[0, 9], logit_bias={0: 1.0, 9: 1.0}), 10)


def test_generation_config():
    qwen3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "transformers_version": "4.51.0"}
    assert from_generation_config(qwen3) == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert from_generation_config(qwen3 | {"do_sample": False}) == SamplingParams(temperature=0.0)
    assert from_generation_config({}) == SamplingParams(temperature=0.0)
    assert from_generation_config({"repetition_penalty": 1.1, "max_new_tokens": 5, "top_p": None}) == SamplingParams(
        temperature=0.0, repetition_penalty=1.1, max_tokens=5
    )
    assert from_generation_config({"do_sample": True, "min_p": 0.1, "top_k": None}) == SamplingParams(min_p=0.1, top_k=50)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        for wrong in ("7", True, NAN, [1]):
            with pytest.raises(InvalidRequestError, match=name):
                from_generation_config({"do_sample": True, name: wrong})
            assert from_generation_config({name: wrong}) == SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        *(({"temperature": cold}, {"temperature": 0.0}) for cold in (0, 1e-6, 9e-4, -1.0)),
        ({"top_p": 0.0}, {"temperature": 0.0}),
        ({"temperature": 500, "top_k": -1}, {"temperature": 100.0}),
        ({"top_p": 7, "top_k": 0}, {}),
        ({"min_p": -0.5, "top_k": 5}, {"top_k": 5}),
        ({"min_p": 1.5}, {"min_p": 1.0, "top_k": 50}),
    ],
)
def test_generation_config_of_other_engines(given, meant):
    assert from_generation_config({"do_sample": True} | given) == SamplingParams(**meant)


def test_generation_config_takes_as_many_tokens_as_transformers():
    from transformers import GenerationConfig

    assert from_generation_config({"do_sample": True}).top_k == GenerationConfig._get_default_generation_params()["top_k"]
