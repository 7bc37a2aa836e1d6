"""Log-probabilities on their way from an engine's step to an event: nothing is lost or doubled when frames pile up or a client is slow."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.entrypoints.server import scores
from nanovllm.entrypoints.server.engine_client import EngineClient
from nanovllm.entrypoints.server.row_logprobs import Listed, RowLogprobs
from nanovllm.entrypoints.server.text_places import TextPlaces
from nanovllm.entrypoints.server.wire import Ended, Hello, Scored, Stepped, frame
from nanovllm.errors import NanoVLLMError
from nanovllm.state.logprobs import StepScores, TokenLogprobs
from nanovllm.tokenizer.stream import TextStream
from tests.tokenizer.test_detokenizer import TOKENIZERS

HELLO = Hello(64, 100, 4, "cpu", "float32", 8, 16, [])


def scored(values: list[float], tops: list[list[tuple[int, float]]]) -> Scored:
    entries = [TokenLogprobs(token_id=0, logprob=value, top=tuple(top)) for value, top in zip(values, tops, strict=True)]
    made = scores.of_entries(entries)
    assert made is not None
    return made


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_a_step_and_a_whole_reply_are_packed_alike(num_top: int) -> None:
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal(5).astype(np.float32), rng.integers(0, 99, (5, 3)).astype(np.int32), rng.standard_normal((5, 3))
    step = StepScores(arrays[0], arrays[1], arrays[2].astype(np.float32))
    entries = [step.entry(row, num_top, 7) for row in (2, 3)]
    assert scores.of_step((step, 2, num_top), 2) == scores.of_entries(entries)
    assert scores.of_step(None, 2) is None and scores.of_entries(None) is None
    assert len(scores.of_step((StepScores(None, None, None), 0, 0), 2).logprobs) == 8


@given(data=st.data())
def test_what_is_taken_piece_by_piece_is_the_whole(data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[data.draw(st.sampled_from(["byte-level", "llama", "wordpiece"]))]
    ids = data.draw(st.lists(st.integers(0, tokenizer.max_token_id), min_size=1, max_size=12))
    width = data.draw(st.integers(0, 2))
    values = [-0.5 * i for i in range(len(ids))]
    tops = [[(i + k, values[i] - k) for k in range(width)] for i in range(len(ids))]
    last = data.draw(st.integers(0, len(ids)))
    text = tokenizer.decode(ids)
    cut = data.draw(st.integers(0, len(text)))
    reason = data.draw(st.sampled_from(["stop", "length"]))
    shown_text = text[:cut] if reason == "stop" else text
    stop_ids = frozenset(ids[-1:]) if data.draw(st.booleans()) else frozenset()

    def end(start: int) -> Ended:
        packed = scored(values[start:], tops[start:])
        return Ended(0, reason, shown_text, 0, np.array(ids[start:], np.int32).tobytes(), len(ids), None, None, packed)

    whole = RowLogprobs(TextPlaces(tokenizer), stop_ids, 5)
    whole.end(end(0))
    expected = whole.take_all()
    counter = TextPlaces(tokenizer)
    listed = [Listed(i, counter.push(i) + 5, value, top) for i, value, top in zip(ids, values, tops, strict=True)]
    cuts = reason == "stop" and ids[-1] not in stop_ids
    assert expected == [one for one in listed if not cuts or one.place - 5 < len(shown_text)]

    row, stream = RowLogprobs(TextPlaces(tokenizer), stop_ids, 5), TextStream.of(tokenizer)
    found, at, shown = list[Listed](), 0, 0
    while at < last:
        count = data.draw(st.integers(1, last - at))
        row.add(scored(values[at : at + count], tops[at : at + count]))
        row.push(ids[at : at + count])
        stream, _ = stream.push(ids[at : at + count])
        at += count
        shown = data.draw(st.integers(shown, max(shown, min(stream.num_shown, len(shown_text)))))
        found += row.take(shown)
    row.end(end(last))
    assert found + row.take_all() == expected and not row.take_all()


class Waiting:
    """A receiver that keeps what it is told."""

    def __init__(self) -> None:
        self.row, self.ended = RowLogprobs(TextPlaces(None)), False

    def accepted(self) -> None: ...

    def push(self, token_ids: list[int]) -> None:
        self.row.push(token_ids)

    def scored(self, scored: Scored) -> None:
        self.row.add(scored)

    def end(self, ended: Ended) -> None:
        self.row.end(ended)
        self.ended = True

    def fail(self, error: NanoVLLMError) -> None:
        raise error


class Wire:
    """A transport that forgets what is written."""

    def write(self, data: bytes) -> None: ...


@given(data=st.data())
def test_log_probabilities_survive_frames_that_pile_up(data: st.DataObject) -> None:
    client, wire, rows = EngineClient(), Wire(), [Waiting() for _ in range(3)]
    client.connection_made(wire)
    client.data_received(frame(HELLO))
    widths: list[int | None] = data.draw(st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=3, max_size=3))
    ids = client.submit([[b""]] * 3, [{}] * 3, [*rows], streamed=True)
    frames, wanted, value = b"", [list[Any]() for _ in rows], 0.0

    def drawn(row: int) -> tuple[int, Scored | None]:
        nonlocal value
        value -= 0.25
        token, width = len(wanted[row]), widths[row]
        if width is None:
            return token, None
        top = [(token + k, value - k) for k in range(width)]
        wanted[row].append(Listed(token, 0, value, top))
        return token, scored([value], [top])

    for _ in range(data.draw(st.integers(0, 5))):
        some = data.draw(st.lists(st.integers(0, 2), unique=True))
        each = [(row, *drawn(row)) for row in some]
        given_scores = {ids[row]: packed for row, _, packed in each if packed is not None}
        tokens = np.array([token for _, token, _ in each], np.int32).tobytes()
        frames += frame(
            Stepped(np.array([ids[row] for row in some], np.uint32).tobytes(), bytes([1] * len(some)), tokens, [], given_scores)
        )
    ends = list[Ended]()
    for row, number in enumerate(ids):
        token, packed = drawn(row)
        ends.append(Ended(number, "length", "", 0, np.array([token], np.int32).tobytes(), 1, None, None, packed))
    frames += frame(Stepped(b"", b"", b"", ends))
    while frames:
        size = data.draw(st.integers(1, len(frames)))
        client.data_received(frames[:size])
        frames = frames[size:]
    assert all(row.ended for row in rows)
    assert [row.row.take_all() for row in rows] == wanted
