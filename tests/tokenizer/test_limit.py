"""Texts that are too long are refused after their beginning; no text that fits is refused."""

from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

import nanovllm as nv
from nanovllm.testing.models import byte_tokenizer, random_model, tiny_config
from nanovllm.tokenizer.limit import TokenLimit

GPT2 = r"""'s|'t| ?\p{L}+| ?\p{N}{1,3}(?=(?:\p{N}{3})*\b)|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGED = ["ab", "abab", "Ġa", "Ġab", "ĠĠ", "ĠĠĠĠ"]
MERGES = [("a", "b"), ("ab", "ab"), ("Ġ", "a"), ("Ġ", "ab"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]
FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]


def made(model: Any, normalizer: Any = None, pre_tokenizer: Any = None, **added: bool) -> tokenizers.Tokenizer:
    backend: Any = tokenizers.Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.add_tokens([AddedToken("<x>", special=True, **added), AddedToken("b <y>", **added)])
    return backend


def by_bytes() -> Any:
    return models.BPE(vocab={text: i for i, text in enumerate([*BYTES, *MERGED])}, merges=MERGES)


def by_pieces(**options: Any) -> Any:
    pieces = ["<unk>", *FALLBACK, "▁", "a", "b", "ab", "▁ab"]
    return models.BPE(
        vocab={text: i for i, text in enumerate(pieces)}, merges=[("a", "b"), ("▁", "ab")], unk_token="<unk>", fuse_unk=True, **options
    )


def split() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(GPT2), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)])


WORDS = {"[UNK]": 0, "a": 1, "ab": 2, "##b": 3}
BACKENDS = {
    "bytes": (made(by_bytes(), None, split()), 5),
    "bytes without words": (made(by_bytes(), None, pre_tokenizers.ByteLevel(use_regex=False)), 5),
    "composed": (made(by_bytes(), normalizers.NFKC(), split()), 20),
    "pieces": (made(by_pieces(byte_fallback=True), normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])), 6),
    "spaces at its tokens": (made(by_pieces(byte_fallback=True), normalizers.Replace(" ", "▁"), None, lstrip=True, rstrip=True), 6),
    "shorter": (made(by_pieces(byte_fallback=True), normalizers.Replace("aaa", "b")), 18),
    "joined unknown characters": (made(by_pieces(), normalizers.Replace(" ", "▁")), None),
    "accents": (made(by_bytes(), normalizers.StripAccents(), split()), None),
    "many for one": (made(by_bytes(), normalizers.Replace(Regex("a+"), "a"), split()), None),
    "nothing": (made(by_bytes(), normalizers.Replace("a", ""), split()), None),
    "removed": (made(by_bytes(), None, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split()])), None),
    "spaces removed": (made(by_bytes(), None, pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), split()])), None),
    "too few bytes": (made(models.BPE(vocab={"a": 0, "Ġ": 1}, merges=[]), None, split()), None),
    "whole words": (made(models.WordLevel(WORDS, unk_token="[UNK]"), None, pre_tokenizers.Whitespace()), None),
    "parts of words": (
        made(models.WordPiece(WORDS, unk_token="[UNK]"), normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()),
        None,
    ),
    "probable parts": (
        made(models.Unigram([("<unk>", 0.0), ("▁", -2.0), ("a", -1.0), ("▁ab", -1.5)], 0), None, pre_tokenizers.Metaspace()),
        None,
    ),
}


def limit_of(backend: tokenizers.Tokenizer) -> TokenLimit:
    return TokenLimit.of(backend, backend.get_vocab(with_added_tokens=True))


@pytest.mark.parametrize("name", BACKENDS)
def test_the_bound_of_a_tokenizer(name: str) -> None:
    backend, widest = BACKENDS[name]
    limit = limit_of(backend)
    assert (limit.widest, limit.strips) == (widest, name == "spaces at its tokens")


PARTS = st.sampled_from(
    ["a", "b", "ab", " ", "  ", "\n", "1", "12", "é", "e\u0301", "\u0301", "<x>", "b <y>", "b <", "!", "漢", "\t", "\u1f82", "\x00"]
)
RUNS = st.lists(st.tuples(st.lists(PARTS, min_size=1, max_size=4), st.sampled_from([1, 2, 50, 700])), min_size=1, max_size=8)


@pytest.mark.parametrize("name", BACKENDS)
@given(runs=RUNS, most=st.integers(0, 600))
@settings(max_examples=60)
def test_what_fits_is_not_refused(name: str, runs: list[tuple[list[str], int]], most: int) -> None:
    limit, text = limit_of(BACKENDS[name][0]), "".join("".join(parts) * times for parts, times in runs)
    count = len(limit.backend.encode(text, add_special_tokens=False).ids)
    assert not limit.exceeded(text, most) or count > most


class Counting:
    """A tokenizer that counts the characters that it encodes."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self.backend, self.chars = backend, 0

    def encode(self, text: str, **options: Any) -> Any:
        self.chars += len(text)
        return self.backend.encode(text, **options)

    def decode(self, ids: list[int], **options: Any) -> str:
        return self.backend.decode(ids, **options)


@pytest.mark.unhooked
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("text", ["ab a! ", "a"], ids=["words", "one word"])
def test_how_much_is_encoded_does_not_depend_on_the_length(name: str, text: str) -> None:
    backend, widest = BACKENDS[name]
    endless = widest is None and (text == "a" or backend.pre_tokenizer is None)  # one word without a bound, so it may fit
    chars = []
    for length in (100_000, 400_000):
        counting: Any = Counting(backend)
        found = replace(limit_of(backend), backend=counting).exceeded(text * length, 100)
        assert found or endless
        chars.append(counting.chars)
    assert chars[0] == chars[1] <= 20_000 or endless


def test_a_text_of_exactly_the_limit_is_not_refused() -> None:
    limit = limit_of(BACKENDS["whole words"][0])
    text = "a " * 100 + " " * 10_000
    assert not limit.exceeded(text, 100)
    assert limit.exceeded(text, 99)


def test_a_text_that_is_not_unicode_is_left_to_the_encoder() -> None:
    limit = replace(limit_of(BACKENDS["bytes"][0]), widest=None)
    assert not limit.exceeded("\ud800" + "a b " * 10_000, 10)


@pytest.fixture
def model() -> nv.Model:
    tokenizer = byte_tokenizer()
    counting: Any = Counting(tokenizer.backend)
    return random_model(tiny_config(), tokenizer=replace(tokenizer, backend=counting, limit=replace(tokenizer.limit, backend=counting)))


@pytest.mark.unhooked
@pytest.mark.parametrize("length", [1 << 16, 1 << 20])
@pytest.mark.parametrize("text", ["ab a! ", "a"], ids=["words", "one word"])
def test_every_call_refuses_a_long_text(model: nv.Model, text: str, length: int) -> None:
    long, greedy, most = text * length, nv.SamplingParams(temperature=0, max_tokens=2), model.config.max_position_embeddings
    llm = nv.LLM(model, num_pages=16, page_size=4)
    state, base = nv.prefill(model, nv.init_state(model, num_pages=16, page_size=4), [1, 2, 3])
    says = f"more than {most} tokens"
    calls = {
        "submit": lambda: nv.submit(model, state, long),
        "submit after a chunk": lambda: nv.submit(model, state, [base, "a", long, "a"]),
        "submit of parts": lambda: nv.submit(model, state, ["a" * 300] * length),
        "prefill": lambda: nv.prefill(model, state, long),
        "prefill after": lambda: nv.prefill(model, state, long, after=base),
        "generate": lambda: nv.generate(model, state, long, greedy),
        "generate_many": lambda: nv.generate_many(model, state, ["a", long], greedy),
        "begin": lambda: nv.begin(model, state, [long], greedy, room=1),
        "score": lambda: nv.score(model, state, [long], ["a"]),
        "score of a continuation": lambda: nv.score(model, state, ["a"], [long]),
        "LLM.generate": lambda: llm.generate(["a", long], greedy),
        "LLM.stream": lambda: llm.stream(long, greedy),
        "LLM.chat": lambda: llm.chat([{"role": "user", "content": long}], greedy),
    }
    assert model.tokenizer is not None
    counting: Any = model.tokenizer.backend
    for name, call in calls.items():
        counting.chars = 0
        with pytest.raises(nv.InvalidRequestError, match=says if name != "submit of parts" else "the prompt has") as caught:
            call()
        assert type(caught.value) is nv.InvalidRequestError
        assert counting.chars < 32 * most, name
    nv.check(state)
    nv.check(llm.state)
    assert llm.generate("a", greedy)
