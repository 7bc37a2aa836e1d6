"""Stop strings: found as soon as the reply's text has them, in text that the detokenizer still holds too."""

from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

import nanovllm as nv
from nanovllm.engine.output import draw_token, finish_reason, reply_text, result
from nanovllm.engine.requests import new_sequence
from nanovllm.executor.executor import Drawn
from nanovllm.state.stop_scan import StopScan
from nanovllm.testing.models import byte_tokenizer, random_model, tiny_config
from nanovllm.tokenizer.stream import TextStream
from nanovllm.tokenizer.tokenizer import Tokenizer, make_tokenizer


def fallback_tokenizer() -> Tokenizer:
    """Byte tokens 0 to 255 as TinyLlama has them, and letters; what no letter spells is bytes, a newline too."""
    pieces = [*[f"<0x{byte:02X}>" for byte in range(256)], "a", "b", "é"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return make_tokenizer(backend, {}, None)


FALLBACK, LEVEL = fallback_tokenizer(), byte_tokenizer()
MODEL = random_model(tiny_config())
STATE = nv.init_state(MODEL, num_pages=64)
NEWLINE, A, B = 10, 256, 257


def drawn_reply(tokenizer: Tokenizer, ids: list[int], stops: list[str], least: int = 0) -> tuple[list[int], str, StopScan | None]:
    """The tokens and the text of a reply that draws `ids`, and its scan; its stream shows the same text."""
    model, params = replace(MODEL, tokenizer=tokenizer), nv.SamplingParams(stop=stops, max_tokens=500, min_tokens=least)
    _, sequence, _ = new_sequence(model, STATE, [1], params)
    stream, shown = TextStream.of(model.tokenizer, params.stop), ""
    for token in ids:
        sequence = draw_token(sequence, token, Drawn(token_ids=np.zeros(1, np.int32)), 0, 0.0)
        if finish_reason(sequence, token):
            break
        stream, piece = stream.push([token])
        shown += piece
    text = reply_text(model, sequence)
    assert text.startswith(shown)
    assert shown + stream.end(text) == text
    return ids[: sequence.num_generated], text, sequence.stops


@pytest.mark.parametrize(
    ("ids", "stop", "used", "text"),
    [
        ([A, NEWLINE, NEWLINE, NEWLINE], "\n", 2, "a"),
        ([A, NEWLINE, NEWLINE, B], "\n\n", 3, "a"),
        ([A, NEWLINE, 0xE4, B], "\n", 2, "a"),
        ([A, NEWLINE, NEWLINE, B], "\nb", 4, "a\n"),
        ([A, *"é".encode(), B], "é", 3, "a"),
        ([A, 0xE4, B], "\ufffd", 3, "a"),
        ([A, *"é".encode(), B], "\ufffd", 4, "aéb"),
    ],
)
def test_byte_tokens(ids: list[int], stop: str, used: int, text: str) -> None:
    assert drawn_reply(FALLBACK, ids, [stop])[:2] == (ids[:used], text)


@pytest.mark.parametrize("tokenizer", [FALLBACK, LEVEL], ids=["fallback", "byte-level"])
@given(data=st.data())
def test_stop_strings_of_the_first_tokens_do_not_count(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """A stop string counts if it ends in text that tokens after the first `min_tokens` give, characters that they complete included."""
    some = [NEWLINE, A, B, *"é🙂".encode()] if tokenizer is FALLBACK else tokenizer.encode("\nabé🙂")
    ids = data.draw(st.lists(st.sampled_from(some), max_size=16))
    stops = data.draw(st.lists(st.text("\nabé🙂", min_size=1, max_size=3), min_size=1, max_size=3))
    least = data.draw(st.integers(0, len(ids)))
    early = len(tokenizer.decode(ids[:least]).rstrip("\ufffd"))
    count, text = len(ids), tokenizer.decode(ids)
    for n in range(least + 1, len(ids) + 1):
        shown = tokenizer.decode(ids[:n])
        ends = [at for stop in stops for at in range(len(shown)) if shown.startswith(stop, at) and at + len(stop) > early]
        if ends:
            count, text = n, shown[: min(ends)]
            break
    assert drawn_reply(tokenizer, ids, stops, least)[:2] == (ids[:count], text)


@pytest.mark.parametrize("tokenizer", [FALLBACK, LEVEL], ids=["fallback", "byte-level"])
@given(data=st.data())
def test_a_reply_ends_with_the_first_token_that_shows_a_stop(tokenizer: Tokenizer, data: st.DataObject) -> None:
    some = [NEWLINE, A, B, 258, *"é🙂".encode()] if tokenizer is FALLBACK else tokenizer.encode("\nabé🙂")
    ids = data.draw(st.lists(st.sampled_from(some), max_size=20))
    stops = data.draw(st.lists(st.text("\nabé🙂", min_size=1, max_size=3), min_size=1, max_size=3))
    texts = [tokenizer.decode(ids[: n + 1]) for n in range(len(ids))]
    count, text = len(ids), tokenizer.decode(ids)
    for n, shown in enumerate(texts):
        if places := [shown.find(stop) for stop in stops if stop in shown]:
            count, text = n + 1, shown[: min(places)]
            break
    assert drawn_reply(tokenizer, ids, stops)[:2] == (ids[:count], text)


def test_the_first_of_several_stops_ends_the_text() -> None:
    assert drawn_reply(FALLBACK, [B, A, B, A], ["b\n", "b", "ab"])[:2] == ([B], "")
    assert drawn_reply(FALLBACK, [A, A, B, A], ["b", "aab", "ab"])[:2] == ([A, A, B], "")


def test_the_token_that_stops_a_reply_is_not_in_its_text() -> None:
    model = replace(MODEL, tokenizer=FALLBACK)
    for drawn, text in (([A, A, B], "aa"), ([A, A], "aa")):
        _, sequence, _ = new_sequence(model, STATE, [1], nv.SamplingParams(stop_token_ids=[B], max_tokens=3))
        for token in drawn:
            sequence = draw_token(sequence, token, Drawn(token_ids=np.zeros(1, np.int32)), 0, 0.0)
        assert reply_text(model, sequence) == text


@pytest.mark.parametrize(("count", "speed"), [(1, 0.0), (2, 0.5), (5, 2.0)])
def test_the_speed_is_that_of_the_tokens_after_the_first(count: int, speed: float) -> None:
    _, sequence, _ = new_sequence(MODEL, STATE, [1, 2], nv.SamplingParams(max_tokens=9))
    begun = sequence.request.arrival
    for place in range(count):
        sequence = draw_token(sequence, A, Drawn(token_ids=np.zeros(1, np.int32)), 0, begun + 1 + place)
    metrics = result(sequence, "", "length", begun + 3).metrics
    assert metrics.time_to_first_token == pytest.approx(1) and metrics.total_time == pytest.approx(3)
    assert metrics.decode_tokens_per_second == pytest.approx(speed)


def test_a_long_reply_keeps_a_short_tail() -> None:
    _, text, scan = drawn_reply(FALLBACK, [A, B] * 200, ["ba!", "\n"])
    assert len(text) == 400
    assert scan is not None and len(scan.tail) == 2 and scan.start == 398
