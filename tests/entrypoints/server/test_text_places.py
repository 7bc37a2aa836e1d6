"""Where tokens begin in a text: the same as in the text of all tokens before them, whatever spells it."""

from codecs import utf_8_decode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.entrypoints.server.text_places import TextPlaces
from tests.tokenizer.test_detokenizer import TOKENIZERS


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_a_token_begins_where_the_text_before_it_ends(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    texts = tokenizer.texts[1]
    ids = data.draw(st.lists(st.integers(0, tokenizer.max_token_id), max_size=12))
    counter, found = TextPlaces(tokenizer), list[int]()
    for i, token in enumerate(ids):
        place, before = counter.push(token), tokenizer.decode(ids[:i])
        found.append(place)
        assert place <= len(before)
        if texts.spelling == "bytes":
            known = utf_8_decode(b"".join([texts[one] for one in ids[:i]]), "replace", False)[0]
            assert place == len(known)  # the same as `before`, but for a character that is not complete
        elif texts.spelling == "runs" and texts[token] and isinstance(texts[token], str):
            assert place == len(before)
    assert found == sorted(found)


def test_bytes_of_one_character_begin_where_it_begins() -> None:
    tokenizer = TOKENIZERS["llama"]
    counter = TextPlaces(tokenizer)
    assert [counter.push(byte) for byte in "a€b😀".encode()] == [0, 1, 1, 1, 2, 3, 3, 3, 3]


def test_without_a_tokenizer_all_tokens_begin_at_the_beginning() -> None:
    counter = TextPlaces(None)
    assert [counter.push(token) for token in (3, 70_000)] == [0, 0]
