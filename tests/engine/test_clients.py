"""Replies with stop strings and log-probabilities are those of a search after every token, whatever skips the schedule.

An executor runs nothing and samples what a script says, so that few letters meet stop strings of the same letters at every boundary.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

import nanovllm as nv
from nanovllm.engine import output as output_module
from nanovllm.engine import step as step_module
from nanovllm.executor.executor import Drawn
from nanovllm.state.stop_scan import StopScan
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.tokenizer.tokenizer import Tokenizer, make_tokenizer
from tests.tokenizer.test_detokenizer import LLAMA, spelled

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
VOCAB, LONGEST = 24, 14
BYTES = [b"a", b"b", b"ab", b" a", b"ba", b"b\xc3", b"\xa9", b"\xc3", "é".encode(), "éa".encode(), b"\x80", b" aba"]
TEXTS = ["a", "b", "ab", "▁a", "ba", "é", "▁", "<0x61>", "<0x62>", "<0xC3>", "<0xA9>", "<0x20>", "\ufffd"]
WORDS = ["[UNK]", "a", "##b", "##ab", "b", "é", "##é"]


def tokenizer_of(pieces: list[str], decoder: Any) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return make_tokenizer(backend, {}, None)


TOKENIZERS = {
    "bytes": tokenizer_of([spelled(piece) for piece in BYTES], decoders.ByteLevel()),
    "runs": tokenizer_of(TEXTS, decoders.Sequence(LLAMA)),
    "other": tokenizer_of(WORDS, decoders.WordPiece()),
}
CONFIG = tiny_config(vocab_size=VOCAB, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4, hidden_size=4, intermediate_size=4)
MODELS = {kind: replace(random_model(CONFIG), tokenizer=tokenizer) for kind, tokenizer in TOKENIZERS.items()}
TOP = 3


@dataclass(slots=True)
class Script:
    """An executor that runs nothing: the token of request r at index i of its reply is `requests[r].tokens[i]`.

    The log-probabilities tell request and index. As many of the most probable tokens are reported as one of the rows asked for.
    """

    requests: "list[Asked]"

    def drawn(self, rows: list[tuple[int, int]]) -> Drawn:
        ids = np.array([self.requests[rid].tokens[at] for rid, at in rows])
        asked = [num_top for rid, _ in rows if (num_top := self.requests[rid].options["logprobs"]) is not None]
        if not asked:
            return Drawn(token_ids=ids)
        base = np.array([100 * rid + at for rid, at in rows], np.float32)
        top = base[:, None] + np.arange(max(asked), dtype=np.float32) / 4
        return Drawn(token_ids=ids, logprobs=base, top_ids=(top * 4).astype(np.int32), top_logprobs=top)

    def prefill(self, model: Any, kv: Any, rows: Any, *, draw: bool = True, frames: Any = None) -> Any:
        whole = [(s.request.request_id, s.num_generated) for s, count in rows if count == s.todo]
        return (self.drawn(whole) if whole else None), kv

    def load(self, model: Any, kv: Any, rows: Any, *, frames: Any = None) -> Any:
        return [(s.request.request_id, s.num_generated) for s in rows]

    def refresh(self, model: Any, carry: Any, rows: Any, *, frames: Any = None) -> Any:
        return self.load(model, None, rows)

    def narrow(self, model: Any, carry: Any, keep: Any, rows: Any, *, grew: bool = False, frames: Any = None) -> Any:
        return [carry[place] for place in keep]

    def decode(self, model: Any, carry: Any, masks: Any = None) -> Any:
        return [(rid, at + 1) for rid, at in carry], self.drawn(carry)

    def take_discarded_count(self) -> int:
        return 0

    score = begin = end = captured = take_discarded_count  # not called


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: its tokens as it would sample them, when it comes, and its options."""

    tokens: list[int]
    arrival: int
    options: dict[str, Any]


def expected(tokenizer: Tokenizer, asked: Asked) -> tuple[list[int], str, str]:
    """The tokens, the text and the finish reason, by decoding all tokens anew after each."""
    ids, most = asked.tokens[: asked.options["max_tokens"]], asked.options["max_tokens"]
    skip = asked.options["skip_special_tokens"]
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count], skip_special_tokens=skip)
        places = [text.find(stop) for stop in asked.options["stop"] if stop in text]
        if places or ids[count - 1] in asked.options["stop_token_ids"]:
            text = tokenizer.decode(ids[: count - 1], skip_special_tokens=skip) if not places else text[: min(places)]
            return ids[:count], text, "stop"
        if count == most:
            return ids[:count], text, "length"
    raise AssertionError("a reply ends")


def serve(kind: str, requests: list[Asked], num_pages: int, looks: frozenset[int] = frozenset()) -> list[nv.RequestOutput]:
    """The output of each request. In the steps of `looks` somebody reads all running sequences."""
    state = nv.init_state(MODELS[kind], num_pages=num_pages, page_size=2, max_num_seqs=4, max_num_batched_tokens=16)
    state.runtime.executor = cast(Any, Script(requests))  # pyright: ignore[reportAttributeAccessIssue]
    ended, submitted, step = dict[int, Any](), 0, 0
    while submitted < len(requests) or state.running or state.waiting:
        while submitted < len(requests) and requests[submitted].arrival <= step:
            params = nv.SamplingParams(temperature=0, **requests[submitted].options)
            state, rid = nv.submit(MODELS[kind], state, [1], params)
            assert rid == submitted
            submitted += 1
        state, outputs = nv.step(MODELS[kind], state)
        if step in looks:
            nv.check(state)
        ended.update({out.request_id: out.output for out in outputs if out.output is not None})
        step += 1
    return [ended[rid] for rid in range(len(requests))]


def seen(output: nv.RequestOutput) -> tuple[Any, ...]:
    scores = None if output.logprobs is None else [(one.token_id, one.logprob, one.top) for one in output.logprobs]
    return output.token_ids, output.text, output.finish_reason, scores


@st.composite
def workloads(draw: st.DrawFn, kind: str, letters: str) -> list[Asked]:
    few = st.lists(st.integers(0, TOKENIZERS[kind].max_token_id + 1), min_size=1, max_size=4)
    requests = []
    for arrival in sorted(draw(st.lists(st.integers(0, 8), min_size=1, max_size=5))):
        options = {
            "max_tokens": draw(st.integers(1, LONGEST)),
            "stop": draw(st.lists(st.text(letters, min_size=1, max_size=4), max_size=2)),
            "stop_token_ids": draw(st.lists(st.integers(0, 12), max_size=1)),
            "logprobs": draw(st.sampled_from([None, 0, 1, TOP])),
            "skip_special_tokens": draw(st.booleans()),
        }
        tokens = draw(st.lists(st.sampled_from(draw(few)), min_size=LONGEST, max_size=LONGEST))
        requests.append(Asked(tokens, arrival, options))
    return requests


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60)
@given(data=st.data())
def test_replies_are_those_of_a_search_after_every_token(kind: str, data: st.DataObject) -> None:
    requests, num_pages = data.draw(workloads(kind, "abé <>")), data.draw(st.integers(8, 40))
    outputs = serve(kind, requests, num_pages, data.draw(st.frozensets(st.integers(0, 30), max_size=4)))
    for rid, (asked, output) in enumerate(zip(requests, outputs, strict=True)):
        tokens, text, reason = expected(TOKENIZERS[kind], asked)
        scores, most = None, asked.options["logprobs"]
        if most is not None:
            chosen = [(token, 100.0 * rid + at) for at, token in enumerate(tokens)]
            scores = [(token, value, tuple((int(4 * value) + k, value + k / 4) for k in range(most))) for token, value in chosen]
        assert seen(output) == (tokens, text, reason, scores)
        for entry in output.logprobs or ():
            assert type(entry.logprob) is float and all(type(token) is int and type(value) is float for token, value in entry.top)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=20)
@given(data=st.data())
def test_a_schedule_at_every_step_changes_nothing(kind: str, data: st.DataObject) -> None:
    """The same for stop strings with U+FFFD, which are searched in text that is certain."""
    requests = data.draw(workloads(kind, "ab\ufffdé>"))
    with patch.object(step_module, "steady", lambda *_: None):
        wanted = serve(kind, requests, 40)
    assert list(map(seen, serve(kind, requests, 40))) == list(map(seen, wanted))


def test_rows_with_stops_and_logprobs_need_no_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, scans = [], []
    schedule, scan = step_module.schedule, output_module.scan
    monkeypatch.setattr(step_module, "schedule", lambda *args: plans.append(0) or schedule(*args))
    monkeypatch.setattr(output_module, "scan", lambda *args: scans.append(args[1]) or scan(*args))
    options = {"max_tokens": 60, "stop": ["é\n", "abb"], "stop_token_ids": [], "logprobs": 2}
    outputs = serve("bytes", [Asked([0, 1, 2] * 20, 0, options) for _ in range(4)], 200)
    assert [(out.text, len(out.logprobs or ())) for out in outputs] == [("abab" * 20, 60)] * 4
    assert len(plans) <= 3
    read = [tokens[-1] for tokens in scans]
    assert read.count(1) >= 4 * 18 and len(read) - read.count(1) <= 4 * 3  # only "b" can end one; all are searched where pages were taken
    assert sum(map(len, scans)) <= 4 * 60


@pytest.mark.parametrize("kind", ["bytes", "runs"])
@pytest.mark.parametrize("first", [0, 1])
def test_each_row_reads_special_tokens_in_its_own_way(kind: str, first: int) -> None:
    """For one row a special token is text, in which its stop string is. For the row beside it, which knows the token, it is nothing."""
    special = TOKENIZERS[kind].backend.token_to_id("<s>")
    common = {"max_tokens": LONGEST, "stop_token_ids": [], "logprobs": None}
    shows = Asked([0] * 6 + [special] * 8, 0, {**common, "stop": ["s><s"], "skip_special_tokens": False})
    skips = Asked([special, 0] * 7, 0, {**common, "stop": ["zz"], "skip_special_tokens": True})
    requests = [skips, shows] if first else [shows, skips]
    outputs = serve(kind, requests, 40)
    for asked, output in zip(requests, outputs, strict=True):
        assert (output.token_ids, output.text, output.finish_reason) == expected(TOKENIZERS[kind], asked)
    assert outputs[first].finish_reason == "stop"


def test_work_of_a_search_does_not_grow_with_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token may end a stop string, and the text is held back until the end."""
    seen = []
    places = output_module._places
    monkeypatch.setattr(output_module, "_places", lambda *args: seen.append(sum(map(len, args[1:]))) or places(*args))
    for stop, broken in (("xa", [TEXTS.index("<0xC3>"), TEXTS.index("<0x61>")]), ("ba", [TEXTS.index("<0x61>")])):
        stops, ids = StopScan.of(TOKENIZERS["runs"], [stop]), []
        seen.clear()
        for place in range(300):
            ids.append(broken[place % len(broken)])
            stops = output_module.scan(stops, ids[-1:], nv.SamplingParams(stop=stop))
        assert stops.found is None and stops.num_read == 300 and len(seen) == 300 and max(seen) < 20
        assert stops.detokenizer.rest() == TOKENIZERS["runs"].decode(ids)


@pytest.mark.parametrize("kind", ["bytes", "runs"])
def test_a_token_may_end_a_string_that_some_text_before_it_completes(kind: str) -> None:
    for string in ("".join(letters) for count in (1, 2, 3) for letters in product("ab é", repeat=count)):
        stops, wanted = StopScan.of(TOKENIZERS[kind], [string]), string.encode()
        for token in range(TOKENIZERS[kind].max_token_id + 2):
            text = stops.detokenizer.texts[token]
            text = text.encode() if isinstance(text, str) else text
            completed = any(wanted in wanted[:count] + text for count in range(len(wanted)))
            assert stops.may_end_with(token) == completed
            if completed:
                assert (stops.ends & ~stops.detokenizer.texts.absent[token]).any()
