"""Replies that follow a grammar, whatever runs beside them: each is in the language, or begins a text of it if it ends by its length."""

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nanovllm as nv
from nanovllm.engine import constrained as constrained_rows
from nanovllm.engine.constrained import compiled_for
from nanovllm.executor.executor import Runtime, executor_of, runtime_of
from nanovllm.sampling.matchers import Matcher, Matchers
from nanovllm.testing.models import byte_tokenizer, random_model, tiny_config
from nanovllm.testing.shadows.run_ahead_executor import AheadExecutor

EOS = (256, 258)
MODELS = [
    random_model(tiny_config(vocab_size=vocab, eos_token_ids=ends), seed, tokenizer=byte_tokenizer())
    for seed, (vocab, ends) in enumerate([(300, EOS), (261, (258,)), (290, ())])
]
MODEL = MODELS[0]
LETTERS = st.text("abc", min_size=1, max_size=4)
PIECES = st.sampled_from(["a", "b", "[ab]", "c{1,3}", "(ab|c)", "a?", "(b|cc){2}"])
GRAMMARS = st.one_of(
    st.lists(LETTERS, min_size=1, max_size=4, unique=True).map(nv.Grammar.choice),
    st.lists(PIECES, min_size=1, max_size=4).map("".join).map(nv.Grammar.regex),
)


def pattern_of(grammar: nv.Grammar) -> str:
    """A grammar of these tests as an expression of `re`."""
    if grammar.form == "regex":
        return grammar.source
    return "|".join(re.escape(text) for text in json.loads(grammar.source))


def in_language(grammar: nv.Grammar, text: str) -> bool:
    return re.fullmatch(pattern_of(grammar), text) is not None


def require_follows(model: nv.Model, params: nv.SamplingParams, token_ids: list[int], text: str, reason: str) -> None:
    """The reply is in the language, or is a beginning of a text in it."""
    grammar = params.grammar
    assert grammar is not None
    if reason == "stop":
        assert in_language(grammar, text), (grammar, text)
    else:
        assert reason == "length" and len(token_ids) == params.max_tokens
        matcher = Matcher(compiled_for(model, grammar))
        for token in token_ids:
            matcher.read(token)


def drained(model: nv.Model, state: nv.EngineState) -> tuple[nv.EngineState, dict[int, nv.RequestOutput]]:
    outputs = {}
    while state.running or state.waiting:
        state, outs = nv.step(model, state)
        outputs.update({out.request_id: out.output for out in outs if out.output})
    return state, outputs


@pytest.mark.unhooked
@settings(max_examples=40)
@given(data=st.data())
def test_replies_are_in_the_language(data: st.DataObject) -> None:
    """In batches, with tiny pools, cancellation, steps ahead, other requests, and failures of passes over the device."""
    model = data.draw(st.sampled_from(MODELS))
    limits = {"num_pages": data.draw(st.integers(6, 16)), "page_size": 2, "max_num_batched_tokens": 8, "max_num_seqs": 3}
    state, wanted, outputs = nv.init_state(model, **limits), dict[int, nv.SamplingParams](), dict[int, nv.RequestOutput]()
    if data.draw(st.booleans()):
        ahead = AheadExecutor.over(executor_of(state), 2)
        state = replace(state, runtime=Runtime(state.runtime.lease, ahead))
    for seed in range(data.draw(st.integers(1, 5))):
        params = nv.SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 1.0, 2.0])),
            top_k=data.draw(st.sampled_from([0, 1, 3])),
            top_p=data.draw(st.sampled_from([0.5, 1.0])),
            seed=seed,
            max_tokens=data.draw(st.integers(1, 7)),
            frequency_penalty=data.draw(st.sampled_from([0.0, 1.0])),
            logit_bias=data.draw(st.sampled_from([None, {100: 100.0}])),
            logprobs=data.draw(st.sampled_from([None, 2])),
            ignore_eos=data.draw(st.booleans()),
            grammar=data.draw(st.none() | GRAMMARS),
        )
        state, rid = nv.submit(model, state, [1, 2, 3][: data.draw(st.integers(1, 3))], params)
        wanted[rid] = params
        for _ in range(data.draw(st.integers(0, 3))):
            if state.running or state.waiting:
                state, outs = nv.step(model, state)
                outputs.update({out.request_id: out.output for out in outs if out.output})
        live = [s.request.request_id for s in (*state.running, *state.waiting)]
        if live and data.draw(st.integers(0, 3)) == 0:
            gone = data.draw(st.sampled_from(live))
            state = nv.cancel(state, gone)
            del wanted[gone]
    state, last = drained(model, state)
    outputs |= last
    nv.check(state)
    assert set(outputs) == set(wanted)
    for rid, params in wanted.items():
        if params.grammar is not None:
            require_follows(model, params, outputs[rid].token_ids, outputs[rid].text, outputs[rid].finish_reason)
    assert not len(runtime_of(state).matchers._known)  # nothing is kept of requests that have ended


def by_hand(model: nv.Model, prompt: list[int], params: nv.SamplingParams) -> list[int]:
    """Greedy tokens by a loop of its own, with a fresh matcher in every step."""
    assert params.grammar is not None
    compiled, tokens = compiled_for(model, params.grammar), list[int]()
    while len(tokens) < params.max_tokens:
        matcher, complete = Matcher(compiled), False
        for token in tokens:
            complete = matcher.read(token)
        if complete or (tokens and tokens[-1] in model.config.eos_token_ids):
            break
        words = np.zeros((1, -(-model.config.vocab_size // 32)), np.int32)
        Matchers().fill([matcher], words, [0])
        matcher.finish(words[0], may_end=True)
        state = nv.init_state(model, num_pages=32)
        state, carry = nv.begin(model, state, [[*prompt, *tokens]], nv.SamplingParams(temperature=0), room=1)
        _, out = nv.decode_step(model.params, carry, model.config)
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: model.config.vocab_size].astype(bool)
        tokens.append(int(torch.where(torch.from_numpy(allowed), out.logits[0], -torch.inf).argmax()))
    return tokens


SCHEMA = nv.Grammar.json_schema(
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yz"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize("num_pages", [40, 10])
def test_greedy_replies_are_those_of_a_loop_with_fresh_matchers(num_pages: int) -> None:
    params = nv.SamplingParams(temperature=0, max_tokens=24, grammar=SCHEMA)
    prompts = [[1, 2, 3], [4], [9, 9]]
    state = nv.init_state(MODEL, num_pages=num_pages, page_size=4, max_num_seqs=3, max_num_batched_tokens=8)
    ids = []
    for prompt in prompts:
        state, rid = nv.submit(MODEL, state, prompt, params)
        ids.append(rid)
    state, outputs = drained(MODEL, state)
    assert (state.stats.preemptions > 0) == (num_pages == 10)
    assert [outputs[rid].token_ids for rid in ids] == [by_hand(MODEL, prompt, params) for prompt in prompts]


def test_every_way_to_generate_takes_a_grammar() -> None:
    model = nv.load_model("tiny")
    booleans = {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}
    params = nv.SamplingParams(temperature=0, max_tokens=60, grammar=nv.Grammar.json_schema(booleans))
    state = nv.init_state(model, num_pages=64)
    state, alone = nv.generate(model, state, "A list:", params)
    assert alone.finish_reason == "stop" and isinstance(json.loads(alone.text), list)
    state, many = nv.generate_many(model, state, ["A list:", "Hello"], [params, None])
    state, twin = nv.fork(state, alone.chunk)
    yes = replace(params, grammar=nv.Grammar.choice(["yes", "no"]))
    state, after = nv.generate(model, state, [twin, " Is it good?"], yes)
    assert after.text in ("yes", "no")
    llm = nv.LLM(model, num_pages=64)
    (out,) = llm.generate("A list:", params)
    streamed = "".join(piece.text for piece in llm.stream("A list:", params))

    async def served() -> list[nv.RequestOutput]:
        async with nv.AsyncLLM(model, num_pages=64) as engine:
            with pytest.raises(nv.InvalidRequestError, match="uniqueItems"):
                await engine.generate("x", replace(params, grammar=nv.Grammar.json_schema({"uniqueItems": True})))
            return await engine.generate(["A list:", "A list:"], [params, yes])

    first, second = asyncio.run(served())
    assert {many[0].text, out.text, streamed, first.text} == {alone.text} and second.text in ("yes", "no")


def test_sessions_take_no_grammar() -> None:
    state, params = nv.init_state(MODEL, num_pages=16), nv.SamplingParams(grammar=SCHEMA)
    with pytest.raises(nv.InvalidRequestError, match="begin, and generate_many with process_logits, take no grammar"):
        nv.begin(MODEL, state, [[1]], params, room=2)
    with pytest.raises(nv.InvalidRequestError, match="take no grammar"):
        nv.generate(MODEL, state, [1], params, process_logits=lambda logits: logits)
    nv.check(state)


def test_functions_between_logits_and_samples_come_before_the_grammar() -> None:
    params = nv.SamplingParams(temperature=0, max_tokens=24, grammar=SCHEMA)
    state = nv.init_state(MODEL, num_pages=32)
    state, rid = nv.submit(MODEL, state, [1], params, process_logits=lambda logits: -logits)
    state, outputs = drained(MODEL, state)
    assert outputs[rid].token_ids != by_hand(MODEL, [1], params)
    matcher = Matcher(compiled_for(MODEL, SCHEMA))
    assert [matcher.read(token) for token in outputs[rid].token_ids][-1] is (outputs[rid].finish_reason == "stop")


def test_log_probabilities_are_those_of_the_model() -> None:
    params = nv.SamplingParams(temperature=0, max_tokens=2, logprobs=0, grammar=nv.Grammar.regex("zq"))
    state = nv.init_state(MODEL, num_pages=16)
    state, free = nv.generate(MODEL, state, [1, 2], replace(params, grammar=None, logit_bias={89: 100.0}, max_tokens=1))
    state, bound = nv.generate(MODEL, state, [1, 2], params)
    assert bound.text == "zq" and bound.finish_reason == "stop"
    assert free.logprobs and bound.logprobs and free.token_ids == bound.token_ids[:1]
    assert free.logprobs[0].logprob == bound.logprobs[0].logprob


def test_a_reply_ends_where_nothing_more_is_allowed_even_without_end_tokens() -> None:
    state = nv.init_state(MODELS[2], num_pages=16)
    for text, ignore in (("abc", True), ("abc", False)):
        params = nv.SamplingParams(temperature=1, max_tokens=9, ignore_eos=ignore, grammar=nv.Grammar.choice([text]))
        state, reply = nv.generate(MODELS[2], state, [1], params)
        assert (reply.text, reply.finish_reason, len(reply.token_ids)) == (text, "stop", len(text))


def test_ignore_eos_makes_a_reply_as_long_as_the_grammar_allows() -> None:
    params = nv.SamplingParams(temperature=1, max_tokens=20, ignore_eos=True, grammar=nv.Grammar.regex("a{1,7}"))
    state = nv.init_state(MODEL, num_pages=16)
    state, reply = nv.generate(MODEL, state, [1], params)
    assert reply.text == "a" * 7 and reply.finish_reason == "stop"


def test_a_grammar_that_fails_ends_its_own_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    finish, calls = Matcher.finish, list[int]()

    def failing(self: Matcher, words: Any, *, may_end: bool) -> None:
        calls.append(len(self.token_ids))
        if self.compiled.grammar == SCHEMA and len(self.token_ids) == 3:
            raise constrained_rows.NotAllowedError("a limit of the parser")
        finish(self, words, may_end=may_end)

    monkeypatch.setattr(Matcher, "finish", failing)
    state, params = nv.init_state(MODEL, num_pages=32), nv.SamplingParams(temperature=0, max_tokens=8)
    state, free = nv.submit(MODEL, state, [5], params)
    state, broken = nv.submit(MODEL, state, [1, 2], replace(params, grammar=SCHEMA))
    state, other = nv.submit(MODEL, state, [3], replace(params, grammar=nv.Grammar.regex("[ab]{8}")))
    state, outputs = drained(MODEL, state)
    nv.check(state)
    assert outputs[broken].finish_reason == "error" and len(outputs[broken].token_ids) == 3
    assert isinstance(outputs[broken].error, nv.RequestFailedError)
    assert re.search(r"in its grammar Grammar.json_schema.*a limit of the parser", str(outputs[broken].error))
    assert len(outputs[free].token_ids) == 8 and outputs[other].finish_reason == "stop"


def test_a_token_that_the_grammar_does_not_allow_is_an_error_of_the_request() -> None:
    def only(logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf)

    state = nv.init_state(MODEL, num_pages=32)
    state, broken = nv.submit(MODEL, state, [1], nv.SamplingParams(grammar=SCHEMA), process_logits=only)
    state, free = nv.submit(MODEL, state, [1], nv.SamplingParams(max_tokens=4, ignore_eos=True))
    state, outputs = drained(MODEL, state)
    assert outputs[broken].finish_reason == "error" and "is not allowed as number 1 of the reply" in str(outputs[broken].error)
    assert len(outputs[free].token_ids) == 4


def test_a_step_that_is_interrupted_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar has read the tokens of the interrupted step, and goes back."""
    params = nv.SamplingParams(temperature=0, max_tokens=24, grammar=SCHEMA)
    want, got, turn = by_hand(MODEL, [1, 2], params), list[int](), 0
    state = nv.init_state(MODEL, num_pages=32)
    state, _ = nv.submit(MODEL, state, [1, 2], params)
    read = constrained_rows.Constrained.read

    def interrupted(self: Any, token_ids: Any) -> Any:
        read(self, token_ids)
        raise KeyboardInterrupt

    while state.running or state.waiting:
        turn += 1
        with monkeypatch.context() as patch:
            if turn % 3 == 0:
                patch.setattr(constrained_rows.Constrained, "read", interrupted)
            try:
                state, outs = nv.step(MODEL, state)
            except KeyboardInterrupt:
                continue
        got += [token for out in outs for token in out.token_ids]
    assert got == want


def test_matchers_that_were_dropped_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.sampling.matchers.MOST", 1)
    params = nv.SamplingParams(temperature=0, max_tokens=24, grammar=SCHEMA)
    state = nv.init_state(MODEL, num_pages=32)
    prompts, ids = [[1], [2, 3], [4]], []
    for prompt in prompts:
        state, rid = nv.submit(MODEL, state, prompt, params)
        ids.append(rid)
    state, outputs = drained(MODEL, state)
    assert [outputs[rid].token_ids for rid in ids] == [by_hand(MODEL, prompt, params) for prompt in prompts]
