"""Log-probabilities of each step and of each piece of a stream: together they are those of the reply, whatever happens to the request."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nanovllm as nv
from nanovllm.state.logprobs import Scores, StepScores, last_entries
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.worlds import SymbolicWorld
from nanovllm.testing.strategies import Limits

WORLD = SymbolicWorld(vocab_size=5)
MODEL = random_model(tiny_config())
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def values(entries):
    return None if entries is None else [(one.token_id, one.logprob, one.top) for one in entries]


def stepped(model, state, seen, cancelled=None):
    """Steps to the end of all requests; the tokens and log-probabilities of each are added to `seen`, its result is returned."""
    ended, num_steps = {}, 0
    while state.running or state.waiting:
        if num_steps == (cancelled or {}).get("after"):
            state = nv.cancel(state, cancelled["request"])
        if not (state.running or state.waiting):
            break
        state, outputs = nv.step(model, state)
        num_steps += 1
        for out in outputs:
            tokens, entries = seen.setdefault(out.request_id, ([], []))
            tokens += out.token_ids
            entries.append(values(out.logprobs))
            if out.output is not None:
                ended[out.request_id] = out.output
    nv.check(state)
    return state, ended


def joined(parts):
    return None if all(part is None for part in parts) else [one for part in parts for one in part or ()]


@settings(deadline=None, max_examples=40)
@given(
    requests=st.lists(
        st.tuples(
            st.lists(st.integers(0, 4), min_size=1, max_size=5),
            st.integers(1, 12),
            st.sampled_from([None, 0, 1, 3]),
            st.lists(st.integers(0, 4), max_size=1),
        ),
        min_size=1,
        max_size=6,
    ),
    num_pages=st.integers(9, 24),
    ahead=st.booleans(),
    cancelled=st.one_of(st.none(), st.integers(1, 8)),
)
def test_the_steps_of_a_request_have_the_log_probabilities_of_its_reply(requests, num_pages, ahead, cancelled):
    """With preemption, steps ahead, end tokens, and requests beside it that ask for others, for none, or are cancelled."""
    state = WORLD.init_state(
        Limits(num_pages=num_pages, page_size=2, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=8, ahead=ahead)
    )
    for prompt, count, logprobs, ends in requests:
        params = nv.SamplingParams(**GREEDY, max_tokens=count, logprobs=logprobs, stop_token_ids=ends)
        state, _ = nv.submit(WORLD.model, state, prompt, params)
    seen = {}
    try:
        state, ended = stepped(WORLD.model, state, seen, None if cancelled is None else {"after": cancelled, "request": 0})
    except nv.InvalidRequestError:  # the request had ended
        return
    for rid, output in ended.items():
        tokens, entries = seen[rid]
        assert tokens == output.token_ids
        assert joined(entries) == values(output.logprobs)
        assert (output.logprobs is None) == (requests[rid][2] is None)


def test_preempted_requests_do_too():
    state = WORLD.init_state(Limits(num_pages=9, page_size=2, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=8))
    for i in range(3):
        state, _ = nv.submit(WORLD.model, state, [i, 1], nv.SamplingParams(**GREEDY, max_tokens=12, logprobs=2))
    seen = {}
    state, ended = stepped(WORLD.model, state, seen)
    assert state.stats.preemptions
    for rid, output in ended.items():
        assert joined(seen[rid][1]) == values(output.logprobs) and len(output.logprobs) == 12


STREAMED = nv.SamplingParams(**GREEDY, max_tokens=14, logprobs=2)


def stop_of(model, prompt):
    """Options whose stop string ends in the middle of the reply, and is found with a later token."""
    (output,) = nv.LLM(model, num_pages=64).generate([prompt], STREAMED)
    return nv.SamplingParams(**GREEDY, max_tokens=14, logprobs=2, stop=output.text[4:9])


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_the_pieces_of_a_stream_have_those_of_its_tokens(stopped, beside):
    """Tokens of a stop string count, and so do steps that other calls run."""
    model = nv.load_model("tiny", "cpu")
    params = stop_of(model, "Once upon a time") if stopped else STREAMED
    llm = nv.LLM(model, num_pages=64)
    (wanted,) = llm.generate("Once upon a time", params)
    assert wanted.finish_reason == ("stop" if stopped else "length")
    pieces = []
    for piece in llm.stream("Once upon a time", params):
        pieces.append(piece)
        if beside and len(pieces) % 3 == 1:
            llm.generate("The cat", nv.SamplingParams(**GREEDY, max_tokens=2))
    assert joined([values(piece.logprobs) for piece in pieces]) == values(pieces[-1].output.logprobs)
    assert [len(piece.token_ids) for piece in pieces] == [len(piece.logprobs) for piece in pieces]
    got, logprobs = zip(*((one.token_id, one.logprob) for piece in pieces for one in piece.logprobs), strict=True)
    assert [*got] == wanted.token_ids
    np.testing.assert_allclose(logprobs, [one.logprob for one in wanted.logprobs], rtol=0, atol=1e-4)
    assert all(piece.logprobs is None for piece in llm.stream("Once upon a time", nv.SamplingParams(**GREEDY, max_tokens=3)))


@pytest.mark.parametrize("slow", [False, True])
def test_the_pieces_of_an_asynchronous_stream_do_too(slow):
    async def main():
        async with nv.AsyncLLM(MODEL, num_pages=64, page_size=4) as llm:
            pieces, others = [], asyncio.create_task(llm.generate([[1, 2], [3]], STREAMED))
            async for piece in llm.stream([1, 2, 3], STREAMED):
                pieces.append(piece)
                await asyncio.sleep(0.02 * slow)
            plain = [piece async for piece in llm.stream([1, 2, 3], nv.SamplingParams(**GREEDY, max_tokens=3))]
            return pieces, plain, await others

    pieces, plain, _ = asyncio.run(main())
    assert joined([values(piece.logprobs) for piece in pieces]) == values(pieces[-1].output.logprobs)
    assert sum(len(piece.token_ids) for piece in pieces) == 14
    assert all(piece.logprobs is None for piece in plain)


@given(sizes=st.lists(st.integers(1, 4), max_size=5), count=st.integers(0, 20))
def test_the_last_entries_of_a_list_of_parts(sizes, count):
    total, linked, at = sum(sizes), None, 0
    for size in sizes:
        linked, at = (linked, Scores(size, np.arange(at, at + size, dtype=np.float32), None, None)), at + size
    count = min(count, total)
    tokens = [*range(total - count, total)]
    assert [(one.token_id, one.logprob) for one in last_entries(linked, tokens)] == [(token, float(token)) for token in tokens]


def test_values_are_made_only_when_they_are_read(monkeypatch):
    """The outputs of a step share its arrays; no value is made for rows that nobody reads."""
    made = []
    whole = StepScores.entry
    monkeypatch.setattr(StepScores, "entry", lambda *args: (made.append(1), whole(*args))[1])
    state = nv.init_state(MODEL, num_pages=64, page_size=4)
    for i in range(3):
        state, _ = nv.submit(MODEL, state, [i, 7], nv.SamplingParams(**GREEDY, max_tokens=8, logprobs=1 if i else None))
    for _ in range(5):
        state, outputs = nv.step(MODEL, state)
    assert not made and [out.scored is None for out in outputs] == [True, False, False]
    assert outputs[1].scored[0] is outputs[2].scored[0]
    assert len(outputs[1].logprobs) == 1 and made == [1]
    assert outputs[0].logprobs is None
