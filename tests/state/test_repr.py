"""The text of long values is short, and a linked list in them needs no recursion."""

from typing import Any

import numpy as np
import pytest
from immutables import Map

import nanovllm as nv
from nanovllm.chunks.generation import Generation
from nanovllm.chunks.score import Score
from nanovllm.entrypoints.llm import Piece
from nanovllm.executor.session_lease import SessionLease
from nanovllm.sampling.params import MAX_STOP_LEN, SamplingParams
from nanovllm.state.array import IntArray
from nanovllm.state.engine_state import Session
from nanovllm.state.logprobs import TokenLogprobs
from nanovllm.state.request import Queue, Request, RequestOutput, Sequence, StepOutput
from nanovllm.state.steady import Steady
from nanovllm.state.step_log import StepLog
from nanovllm.state.vector import IntVector
from nanovllm.testing.models import byte_tokenizer, random_model, tiny_config
from nanovllm.tokenizer.detokenizer import Detokenizer
from nanovllm.types import brief

LONG = 100_000
IDS = list(range(LONG))
MODEL = random_model(tiny_config(vocab_size=50))
STATE, CHUNK = nv.prefill(MODEL, nv.init_state(MODEL, num_pages=8), [1, 2, 3])


def linked(entry: Any) -> Any:
    older = None
    for _ in range(LONG):
        older = (older, entry)
    return older


def values() -> list[Any]:
    logprob = TokenLogprobs(token_id=1, logprob=-1.0, top=tuple((i, -1.0) for i in IDS))
    params = SamplingParams(stop="x" * MAX_STOP_LEN, stop_token_ids=IDS, logit_bias=dict.fromkeys(IDS, 1.0))
    request = Request(request_id=0, num_prompt=LONG, sampling=params, seed=0, max_len=LONG, stop_ids=frozenset(IDS), arrival=0.0)
    sequence = Sequence(
        request=request, tokens=IntVector.of(IDS), pages=IntVector.of(IDS), logprobs=linked(logprob), gaps=tuple((i, i) for i in IDS),
        carried=linked(IDS),
    )  # fmt: skip
    many = (sequence,) * LONG
    queue = Queue(items=Map(dict.fromkeys(range(1000), sequence)))
    array = older = IntArray.full(LONG)
    for place in range(LONG):
        array = array.put(np.array([place % 7], np.int32), place)
    steady = Steady(
        base=many, ids=tuple(IDS), left=np.array(IDS), first_end=0, steps=1, pool=STATE.pool, waiting=queue, stop_ids=frozenset(IDS),
        log=StepLog.of((np.array(IDS),)), made=[many],
    )  # fmt: skip
    broken = byte_tokenizer().encode("é")[:1]  # half a character
    stream = Detokenizer.of(byte_tokenizer())
    for _ in range(LONG):
        stream, _ = stream.push(broken)
    session = Session(sequences=many, room=1, lease=SessionLease(session=0))
    output = RequestOutput(
        request_id=0, prompt_token_ids=np.array(IDS), token_ids=IDS, text="x" * LONG, finish_reason="stop", num_cached_tokens=0,
        logprobs=[logprob] * LONG, metrics=nv.Metrics(time_to_first_token=0.0, total_time=1.0, decode_tokens_per_second=2.0),
    )  # fmt: skip
    pairs = np.zeros((LONG, 2), np.int32)
    return [
        logprob, params, request, sequence, queue, array, older, steady, output, IntVector.of(IDS), session, stream,
        StepOutput(0, tuple(IDS), "stop", output), Piece(text="x" * LONG, token_ids=IDS, output=output),
        Score(token_ids=IDS, logprobs=np.zeros(LONG, np.float32), top_ids=pairs, top_logprobs=pairs.astype(np.float32)),
        Generation(chunk=CHUNK, token_ids=IDS, text="x" * LONG, finish_reason="stop", logprobs=[logprob] * LONG),
    ]  # fmt: skip


@pytest.mark.parametrize("value", values(), ids=lambda value: type(value).__name__)
def test_a_long_value_has_a_short_text(value: Any) -> None:
    text = repr(value)
    assert text.startswith(type(value).__name__ + "(")
    assert len(text) < 2000 and "\n" not in text


def test_lists_are_told_to_a_depth() -> None:
    assert brief(((((1,),),),)) == "((((1))))"
    assert brief(linked(1)) == "(((((...), 1), 1), 1), 1)"
    assert brief([1, 2, 3]) == "(1, 2, ... 1 more)"
    assert brief(np.zeros((2, 3), np.int32)) == "int32[2, 3]"
    assert brief(Map({1: 2})) == "Map of 1"


def test_short_options_are_told_in_full() -> None:
    params = SamplingParams(temperature=0.5, stop=["a", "b"], stop_token_ids=range(16), logit_bias={3: 1.0})
    assert eval(repr(params)) == params
    assert repr(SamplingParams(stop="END")).startswith(
        "SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=16, stop=('END',)"
    )
