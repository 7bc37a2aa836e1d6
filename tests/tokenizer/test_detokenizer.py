"""Streams of text: the pieces are the text of all tokens, whatever tokenizer, and cost the same however long the reply is."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from nanovllm.tokenizer import detokenizer as module
from nanovllm.tokenizer.detokenizer import REPLACEMENT, Detokenizer
from nanovllm.tokenizer.stream import TextStream
from nanovllm.tokenizer.token_texts import BYTE_OF, byte_set
from nanovllm.tokenizer.tokenizer import Tokenizer, make_tokenizer

LETTER_OF = {byte: letter for letter, byte in BYTE_OF.items()}
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def bpe(pieces: list[str], decoder: Any, **options: Any) -> Tokenizer:
    """A tokenizer with these tokens, two special tokens, and an added token that is none."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], **options))
    return with_added(backend, decoder)


def with_added(backend: tokenizers.Tokenizer, decoder: Any) -> Tokenizer:
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<é>", special=True)])
    backend.add_tokens([AddedToken("中▁ x", special=False)])  # not all its letters stand for bytes
    return make_tokenizer(backend, {}, None)


def spelled(text: bytes) -> str:
    return "".join(LETTER_OF[byte] for byte in text)


PARTS = [b"ab", b" a", "é🙂".encode(), "é".encode() + b"\xf0", b"\x9f\x99\x82x", b"\xe4\xb8", b"\xad ", "\ufffd".encode(), b"\n\n"]
LEVEL_PIECES = [*map(spelled, PARTS), *(LETTER_OF[byte] for byte in range(256))]
WORDS = ["▁", "▁a", "▁▁b", "a", "é", "中", REPLACEMENT, "▁" + REPLACEMENT, "ab ", "<0x+5>", "<0xZZ>"]


def wordpiece() -> Tokenizer:
    pieces = ["[UNK]", "a", "##b", "##", ".", "n't", "##é", "do", REPLACEMENT]
    backend = tokenizers.Tokenizer(models.WordPiece(vocab={piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    return with_added(backend, decoders.WordPiece())


def unigram(decoder: Any) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in ["<unk>", *WORDS]], 0, False))
    return with_added(backend, decoder)


TOKENIZERS = {
    "byte-level": bpe(LEVEL_PIECES, decoders.ByteLevel()),
    "byte-level in a sequence": bpe(LEVEL_PIECES, decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])),
    "llama": bpe([*BYTE_TOKENS, *WORDS], decoders.Sequence(LLAMA), byte_fallback=True),
    "gemma": bpe([*BYTE_TOKENS, *WORDS], decoders.Sequence(LLAMA[:3]), byte_fallback=True),
    "wordpiece": wordpiece(),
    "unigram": unigram(decoders.Metaspace()),
    "suffixes": bpe(["a</w>", "b", "é</w>", "</w>"], decoders.BPEDecoder()),
    "no decoder": bpe(["a", "b", "", REPLACEMENT], None),
    "bytes in another order": bpe([*BYTE_TOKENS, *WORDS], decoders.Sequence([*LLAMA[:2], LLAMA[3], LLAMA[2]]), byte_fallback=True),
}
SPELLINGS = {"byte-level": "bytes", "byte-level in a sequence": "bytes", "llama": "runs", "gemma": "runs"}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_the_pieces_are_the_text_of_all_tokens(kind: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    texts = tokenizer.texts[skip]
    assert texts.spelling == SPELLINGS.get(kind, "other")
    some = data.draw(st.lists(st.integers(0, tokenizer.max_token_id + 1), min_size=1, max_size=4))  # the last one stands for nothing
    ids = data.draw(st.lists(st.sampled_from(some), max_size=12))
    stream, text, at = Detokenizer.of(tokenizer, skip), "", 0
    while at < len(ids):
        count, before = data.draw(st.integers(1, 3)), stream
        stream, piece = stream.push(ids[at : at + count])
        assert before.push(ids[at : at + count])[1] == piece  # a value stays as it was
        assert not (texts.by_bytes and piece.endswith(REPLACEMENT))
        text, at = text + piece, at + count
        rest, whole = stream.rest(), tokenizer.decode(ids[:at], skip)
        assert text + rest == whole
        last = data.draw(st.integers(1, 4))
        ended = stream.rest(last)
        assert rest.endswith(ended) and len(ended) >= min(last, len(rest))


ODD = [0x61, 0x80, 0xBF, 0xC3, 0xA9, 0xE4, 0xB8, 0xAD, 0xED, 0xA0, 0xF0, 0x90, 0x9F, 0xF4, 0xC0, 0xFF]


@pytest.mark.parametrize(("kind", "first"), [("byte-level", len(PARTS)), ("llama", 0)])
@given(text=st.lists(st.sampled_from(ODD), max_size=12))
def test_broken_utf8_is_read_as_the_library_reads_it(kind: str, first: int, text: list[int]) -> None:
    stream, shown, ids = Detokenizer.of(TOKENIZERS[kind]), "", [first + byte for byte in text]
    for token in ids:
        stream, piece = stream.push([token])
        shown += piece
    assert shown + stream.rest() == TOKENIZERS[kind].decode(ids)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_one_space_is_dropped_at_the_beginning_whatever_spells_it(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    some = [0x20, 0x61, 0xC3, *(256 + WORDS.index(piece) for piece in ("▁", "▁a", "▁▁b")), tokenizer.max_token_id]
    for ids in (list(ids) for count in (1, 2, 3) for ids in product(some, repeat=count)):
        stream, shown = Detokenizer.of(tokenizer), ""
        for token in ids:
            stream, piece = stream.push([token])
            shown += piece
        assert shown + stream.rest() == tokenizer.decode(ids)


WRITTEN = {
    "text": {"byte-level": [0, 1], "llama": [259, 256 + 5], "wordpiece": [1, 2], "unigram": [2], "suffixes": [0], "no decoder": [0]},
    "special tokens": {kind: [-2] for kind in TOKENIZERS if kind != "bytes in another order"},
    "broken bytes": {"byte-level": [len(PARTS) + 0x80], "llama": [0x80, 0x61]},
    "characters of bytes": {"byte-level": [5, 6], "llama": [0xC3, 0xA9]},
    "the replacement character": {"byte-level": [7], "llama": [256 + 6], "wordpiece": [8], "unigram": [7], "no decoder": [3]},
}


@pytest.mark.parametrize(("written", "kind"), [(written, kind) for written, kinds in WRITTEN.items() for kind in kinds])
def test_the_work_for_a_token_does_not_grow(written: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted are characters that are decoded, joined or looked at, and calls of the library, over replies of two lengths."""
    tokenizer, work = TOKENIZERS[kind], Counter[str]()
    ids = [i if i >= 0 else tokenizer.max_token_id + 1 + i for i in WRITTEN[written][kind]]

    def counting(name: str, function: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            found = function(*args, **options)
            work[name] += len(found[0] if isinstance(found, tuple) else found) + 1
            return found

        return counted

    monkeypatch.setattr(module, "_joined", counting("joined", module._joined))
    monkeypatch.setattr(module, "_ended", counting("ended", module._ended))
    monkeypatch.setattr(module, "utf_8_decode", counting("decoded", module.utf_8_decode))
    decode = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", counting("library", decode))
    totals = []
    for count in (100, 200):
        work.clear()
        stream = TextStream.of(tokenizer, ["zq"])
        for place in range(count):
            stream, _ = stream.push([ids[place % len(ids)]])
            assert stream.detokenizer is not None
            stream.detokenizer.rest(3)
        totals.append(work.total())
    assert totals[1] <= 2 * totals[0] + 50 and totals[1] <= 200 * 40


def test_bytes_that_a_token_lacks() -> None:
    """Unknown until the token is looked up: then nothing is said to be absent."""
    texts = bpe(LEVEL_PIECES, decoders.ByteLevel()).texts[1]
    assert not texts.absent.any() and len(texts.absent) == len(LEVEL_PIECES) + 3 + 1
    for place, part in enumerate(PARTS):
        assert texts[place] == part
        assert (texts.absent[place] == ~byte_set(part)).all()
    assert texts[10**6] == b"" and not texts.absent[-1].any()
    for byte in range(256):
        assert [bool((byte_set(bytes([byte])) & byte_set(bytes([other]))).any()) for other in (byte, (byte + 1) % 256)] == [True, False]


def test_a_real_tokenizer_is_read_without_the_library() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]))
    assert set(pre_tokenizers.ByteLevel.alphabet()) == set(BYTE_OF)
    backend.decoder = decoders.ByteLevel()
    texts = make_tokenizer(backend, {}, None).texts[0]
    assert sorted(texts[i] for i in range(256)) == [bytes([byte]) for byte in range(256)]
