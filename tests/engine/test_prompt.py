"""What a context may be, and that each bad one is named."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import processors

from nanovllm.chunks.generate import generate
from nanovllm.chunks.handles import release
from nanovllm.chunks.prefill import prefill
from nanovllm.engine.init_state import init_state
from nanovllm.engine.prompt import resolve, token_array
from nanovllm.engine.requests import submit
from nanovllm.errors import ForeignChunkError, InvalidRequestError, NanoVLLMError, ReleasedChunkError
from nanovllm.sampling.params import SamplingParams
from nanovllm.testing.models import byte_tokenizer, random_model, tiny_config

MODEL = random_model(tiny_config(hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=8))
MUTE = random_model(tiny_config(vocab_size=50, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=8))
GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


def engine(model=MODEL):
    return init_state(model, num_pages=16, page_size=4)


def tokens_of(context, model=MODEL, state=None):
    return list(resolve(model, engine(model) if state is None else state, context).tokens)


def text(string):
    assert MODEL.tokenizer is not None
    return MODEL.tokenizer.encode(string, add_special_tokens=False)


@pytest.mark.parametrize("ids", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), np.array([1, 2, 3], np.uint8), [np.int64(1), 2, np.uint16(3)]])
def test_ids(ids):
    assert tokens_of(ids) == [1, 2, 3]


def test_text_ids_and_lists_of_these():
    assert tokens_of("abc") == text("abc")
    assert tokens_of(["ab", "c"]) == text("ab") + text("c")
    assert tokens_of([[1, 2], "a", np.array([3])]) == [1, 2, *text("a"), 3]
    assert tokens_of(("a", [5])) == [*text("a"), 5]
    assert tokens_of([[], [7]]) == [7]


def test_a_chunk_stands_first():
    state, base = prefill(MODEL, engine(), [1, 2, 3])
    assert tokens_of(base, state=state) == [1, 2, 3]
    assert tokens_of([base], state=state) == [1, 2, 3]
    assert tokens_of([base, "a", [9]], state=state) == [1, 2, 3, *text("a"), 9]
    assert resolve(MODEL, state, [base, [9]]).base is base
    with pytest.raises(InvalidRequestError, match="a chunk at index 1"):
        resolve(MODEL, state, [[1], base])
    with pytest.raises(InvalidRequestError, match="a chunk at index 1"):
        resolve(MODEL, state, [base, base])


def test_the_chunk_is_live_and_of_this_engine():
    state, base = prefill(MODEL, engine(), [1, 2, 3])
    released = release(state, base)
    for context in (base, [base, [9]]):
        with pytest.raises(ForeignChunkError):
            resolve(MODEL, engine(), context)
        with pytest.raises(ReleasedChunkError):
            resolve(MODEL, released, context)


def test_the_chunk_is_not_changed_by_what_comes_after():
    state, base = prefill(MODEL, engine(), [1, 2, 3])
    tokens_of([base, [9]], state=state)
    assert tokens_of([base, [8, 8]], state=state) == [1, 2, 3, 8, 8]
    assert base.token_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("context", "words"),
    [
        ([], "empty"),
        ("", "empty"),
        ([[], ""], "empty"),
        (np.array([]), "empty"),
        ([1, -1], "token id -1 is outside the vocabulary 0 ... 263"),
        ([1, 264], "token id 264 is outside"),
        ([2**31], "token id 2147483648 is outside"),
        ([2**63], "token id 9223372036854775808 is outside"),
        ([0, 2**80], "token id 1208925819614629174706176 is outside"),
        ([-1, 2**63], "token id -1 is outside"),
        ([1, 264, 2, 300], "token id 264 is outside"),
        ([300, -1], "token id 300 is outside"),
        ([1.0, 2], "token id 1.0 is of type float"),
        ([True], "token id True is of type bool"),
        ([1, 0, 5, False], "token id False is of type bool"),
        ([2, np.True_], "token id np.True_ is of type bool"),
        ([torch.tensor(True), 3], "is of type Tensor, not an integer"),
        ([1, None, 2], "token id None is of type NoneType"),
        (["a", 3], "not int"),
        (["a", 3], "^part 1 of the context must be a chunk, a text or token ids, not int"),
        ([[1, [2]]], "type list"),
        ([3, "a"], "^part 0 of the context must be a chunk, a text or token ids, not int"),
        (["a", ["b"]], "^part 1 of the context: token id 'b' is of type str, not an integer; a part must be a chunk, a text or"),
        (["a", [1], [264]], "^part 2 of the context: token id 264 is outside the vocabulary 0 ... 263"),
        (np.array([1.5]), "array of float64"),
        (np.array([[1], [2]]), "2 axes"),
        (np.array([True]), "array of bool"),
        ("a\ud800b", "Unicode|surrogate|UTF-8"),
        (["ab", "\udfff"], "Unicode|surrogate|UTF-8"),
    ],
)
def test_bad_contexts_are_named_and_change_nothing(context, words):
    state = engine()
    for call in (
        lambda: submit(MODEL, state, context, GREEDY),
        lambda: prefill(MODEL, state, context),
        lambda: generate(MODEL, state, context, GREEDY),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            call()
    state, made = generate(MODEL, state, [1, 2, 3], GREEDY)
    assert len(made.token_ids) == 3


@pytest.mark.parametrize("context", [7, 1.5, {"a": 1}, b"abc", {1, 2}, object()])
def test_other_objects(context):
    with pytest.raises(Exception) as caught:  # where types are checked at run time, these do not get as far
        submit(MODEL, engine(), context, GREEDY)
    assert isinstance(caught.value, InvalidRequestError) or "parameter" in str(caught.value)


def test_text_needs_a_tokenizer():
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        submit(MUTE, engine(MUTE), "abc", GREEDY)
    with pytest.raises(InvalidRequestError, match="stop"):
        submit(MUTE, engine(MUTE), [1], SamplingParams(stop="x"))


def test_options_are_checked_against_the_vocabulary():
    for params in (SamplingParams(stop_token_ids=[50]), SamplingParams(logit_bias={50: 1.0})):
        with pytest.raises(NanoVLLMError, match="50"):
            submit(MUTE, engine(MUTE), [1], params)


def test_ids_come_as_int32_of_their_own():
    source = np.array([1, 2], np.int32)
    array = token_array(source, 10)
    source[0] = 5
    assert array.tolist() == [1, 2] and array.dtype == np.int32


def test_the_start_token_is_before_the_first_text_alone():
    """Empty parts do not count. Texts after a chunk, after other texts or after token ids get no start token."""
    tokenizer = byte_tokenizer()
    (start,) = tokenizer.encode("<|endoftext|>", add_special_tokens=False)
    template = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", start)])
    tokenizer.backend.post_processor = template  # pyright: ignore[reportAttributeAccessIssue]
    model = replace(MODEL, tokenizer=tokenizer)
    state, base = prefill(model, engine(model), [1, 2])
    for context, wanted in (
        ("ab", [start, *text("ab")]),
        (["a", "b"], [start, *text("ab")]),
        ([[], "a", "b"], [start, *text("ab")]),
        ([[3], "a"], [3, *text("a")]),
        ([base, "a"], [1, 2, *text("a")]),
        ([base, [], "a"], [1, 2, *text("a")]),
    ):
        assert tokens_of(context, model, state) == wanted
