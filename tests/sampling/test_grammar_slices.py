"""The sets of tokens that llguidance allows at once change the time that a mask takes, and no mask."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nanovllm as nv
from nanovllm.sampling.compiled_grammar import SLICES, _source, compile_for
from nanovllm.testing.models import byte_tokenizer
from nanovllm.tokenizer.tokenizer import Tokenizer

llguidance = pytest.importorskip("llguidance")


def of_object(**properties: Any) -> nv.Grammar:
    closed = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return nv.Grammar.json_schema(closed)


GRAMMARS = [
    nv.Grammar.json_object(),
    of_object(a={"type": "string", "maxLength": 24}, b={"type": "string", "minLength": 2, "maxLength": 5}, c={"type": "string"}),
    of_object(a={"type": "string", "pattern": "^[A-Za-z_][a-z0-9_]{0,9}$"}, b={"enum": ["one", "two three"]}, c={"type": "number"}),
    of_object(a={"type": "array", "items": {"anyOf": [{"type": "string", "maxLength": 7}, {"type": "null"}]}, "maxItems": 4}),
    nv.Grammar.regex("([+][0-9]{2} )?[0-9]{3}-[0-9]{4,7}|[A-Z][a-z]{1,8}( [A-Z][a-z]+)*"),
    nv.Grammar.regex('[^"]{1,12}'),
    nv.Grammar.regex("(.|\n){0,9}"),
    nv.Grammar.lark('start: (NAME "(" (NAME | TEXT) ")" "\\n")+\nNAME: /[a-z_]{1,9}/\nTEXT: /"[^"\\n]{0,20}"/'),
]
KNOWN: dict[str, tuple[Tokenizer, int, Any]] = {}


def plain(name: str) -> tuple[Tokenizer, int, Any]:
    """A tokenizer, the size of its vocabulary, and the tree of its tokens without such sets."""
    if name not in KNOWN:
        tokenizer = nv.load_model("tiny").tokenizer if name == "tiny" else byte_tokenizer()
        assert tokenizer is not None
        size = tokenizer.backend.get_vocab_size()
        KNOWN[name] = tokenizer, size, llguidance.LLTokenizer(tokenizer.backend.to_str(), n_vocab=size, eos_token=[size - 1], slices=[])
    return KNOWN[name]


@settings(max_examples=80)
@given(data=st.data())
def test_masks_are_those_without_slices(data: st.DataObject) -> None:
    tokenizer, size, vocabulary = plain(data.draw(st.sampled_from(["tiny", "tiny", "bytes"])))
    grammar = data.draw(st.sampled_from(GRAMMARS))
    fast = compile_for(tokenizer, grammar, size, (size - 1,)).matcher.deep_copy()
    slow = llguidance.LLMatcher(vocabulary, _source(llguidance, grammar), log_level=0)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for _ in range(40):
        mask = slow.compute_bitmask()
        assert fast.compute_bitmask() == mask and not slow.is_error() and not fast.is_error()
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
        token = int(random.choice(allowed))
        assert slow.consume_token(token) and fast.consume_token(token)
        if slow.is_stopped():
            assert fast.is_stopped()
            break


def test_slices_are_those_of_llguidance_and_more() -> None:
    assert set(llguidance.LLTokenizer.json_slices()) <= set(SLICES)
