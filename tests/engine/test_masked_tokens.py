"""`min_tokens` and `bad_words`: replies are those of a plain loop that masks logits by hand, whatever runs beside them."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nanovllm as nv
from nanovllm.executor.executor import Runtime, executor_of
from nanovllm.sampling.bad_words import bad_words_of
from nanovllm.sampling.sampler import sample
from nanovllm.sampling.tensors import build
from nanovllm.sampling.token_masks import all_tokens, leave_out
from nanovllm.testing.models import byte_tokenizer, random_model, tiny_config
from nanovllm.testing.shadows.run_ahead_executor import AheadExecutor

EOS = (256, 258)
MODEL = random_model(tiny_config(vocab_size=290, eos_token_ids=EOS), 0, tokenizer=byte_tokenizer())
LETTERS = byte_tokenizer().encode("abc ")
BIAS = {**dict.fromkeys(LETTERS, 60.0), 258: 60.0, 256: 58.0}  # the replies have these tokens alone
PROMPTS = [[1, 2, 3], [4], [9, 9, 7, 5, 5], [*LETTERS, *LETTERS[:2]]]
LOGITS = dict[tuple[int, ...], torch.Tensor]()


def drained(state: nv.EngineState) -> tuple[nv.EngineState, dict[int, nv.RequestOutput]]:
    outputs = {}
    while state.running or state.waiting:
        state, outs = nv.step(MODEL, state)
        outputs.update({out.request_id: out.output for out in outs if out.output})
    return state, outputs


def logits_after(tokens: list[int]) -> torch.Tensor:
    """The logits of the model after tokens, by a step of its own."""
    if (key := tuple(tokens)) not in LOGITS:
        _, carry = nv.begin(MODEL, nv.init_state(MODEL, num_pages=16), [tokens], nv.SamplingParams(temperature=0), room=1)
        LOGITS[key] = nv.decode_step(MODEL.params, carry, MODEL.config)[1].logits[0]
    return LOGITS[key]


def by_hand(prompt: list[int], params: nv.SamplingParams, seed: int) -> tuple[list[int], str]:
    """The tokens of a reply and its text, by masks of booleans and a search of the whole text after every token."""
    tokens, ends = list[int](), set(params.stop_token_ids) | (set() if params.ignore_eos else set(EOS))
    bad = [byte_tokenizer().encode(word.lstrip()) for word in params.bad_words]  # a space before it is one more token
    plain = build([(nv.SamplingParams(temperature=params.temperature), seed, np.empty(0), np.empty(0))], 290, "cpu")
    while True:
        logits = logits_after([*prompt, *tokens]).clone()
        for token, value in dict(params.logit_bias or ()).items():
            logits[token] += value
        if len(tokens) < params.min_tokens:
            logits[list(ends)] = -torch.inf
        for *before, last in bad:
            if tokens[max(0, len(tokens) - len(before)) :] == before:
                logits[last] = -torch.inf
        tokens.append(int(sample(logits[None], plain, torch.tensor([len(prompt) + len(tokens)])).token_ids))
        if tokens[-1] in ends:
            return tokens, MODEL.tokenizer.decode(tokens[:-1])
        text, early = MODEL.tokenizer.decode(tokens), len(MODEL.tokenizer.decode(tokens[: params.min_tokens]))
        matches = [m.start() for stop in params.stop for m in re.finditer(f"(?={re.escape(stop)})", text) if m.start() + len(stop) > early]
        if matches and len(tokens) > params.min_tokens:
            return tokens, text[: min(matches)]
        if len(tokens) == params.max_tokens:
            return tokens, text


@pytest.mark.unhooked
@settings(max_examples=40)
@given(data=st.data())
def test_replies_are_those_of_a_loop_with_masks_by_hand(data: st.DataObject) -> None:
    """In batches, with pools that preempt, steps ahead and other requests."""
    limits = {"num_pages": data.draw(st.integers(14, 24)), "page_size": 2, "max_num_batched_tokens": 8, "max_num_seqs": 3}
    state = nv.init_state(MODEL, **limits)
    if data.draw(st.booleans()):
        state = replace(state, runtime=Runtime(state.runtime.lease, AheadExecutor.over(executor_of(state), 2)))
    wanted, outputs = dict[int, tuple[list[int], str]](), dict[int, nv.RequestOutput]()
    for seed in range(data.draw(st.integers(1, 4))):
        most = data.draw(st.integers(1, 12))
        params = nv.SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 2.0, 50.0])),
            max_tokens=most,
            min_tokens=data.draw(st.integers(0, most)),
            stop=data.draw(st.lists(st.text("abc ", min_size=1, max_size=3), max_size=2)),
            stop_token_ids=data.draw(st.lists(st.sampled_from([*LETTERS[1:], 7]), max_size=2)),
            ignore_eos=data.draw(st.booleans()),
            bad_words=data.draw(st.lists(st.text("abc ", min_size=1, max_size=3).filter(str.strip), max_size=2)),
            logit_bias=BIAS,
            seed=seed,
        )
        prompt = data.draw(st.sampled_from(PROMPTS))
        state, rid = nv.submit(MODEL, state, prompt, params)
        wanted[rid] = by_hand(prompt, params, seed)
        for _ in range(data.draw(st.integers(0, 3))):
            state, outs = nv.step(MODEL, state)
            outputs.update({out.request_id: out.output for out in outs if out.output})
    state, last = drained(state)
    nv.check(state)
    assert {rid: (out.token_ids, out.text) for rid, out in (outputs | last).items()} == wanted


def test_requests_without_masks_are_unchanged_by_others() -> None:
    params = nv.SamplingParams(temperature=0, max_tokens=12, logit_bias=BIAS)
    masked = replace(params, min_tokens=9, bad_words=["ab", "c"])
    state = nv.init_state(MODEL, num_pages=64)
    state, alone = nv.generate_many(MODEL, state, PROMPTS, params)
    state, mixed = nv.generate_many(MODEL, state, [p for p in PROMPTS for _ in range(2)], [params, masked] * len(PROMPTS))
    assert [reply.token_ids for reply in mixed[::2]] == [reply.token_ids for reply in alone]
    assert [reply.token_ids for reply in mixed[1::2]] == [by_hand(prompt, masked, 0)[0] for prompt in PROMPTS]
    assert state.stats.discarded_tokens == 0


def test_replies_are_the_same_after_preemption() -> None:
    params = nv.SamplingParams(temperature=0, max_tokens=16, min_tokens=14, bad_words=["ca", "bb"], stop="a", logit_bias=BIAS)
    state, ids = nv.init_state(MODEL, num_pages=14, page_size=2, max_num_seqs=3), []
    for prompt in PROMPTS:
        state, rid = nv.submit(MODEL, state, prompt, params)
        ids.append(rid)
    state, outputs = drained(state)
    assert state.stats.preemptions > 0
    assert [(outputs[rid].token_ids, outputs[rid].text) for rid in ids] == [by_hand(prompt, params, 0) for prompt in PROMPTS]


def test_a_grammar_that_allows_an_end_alone_ends_a_reply_before_its_least_length() -> None:
    state = nv.init_state(MODEL, num_pages=16)
    params = nv.SamplingParams(temperature=1, max_tokens=9, min_tokens=6)
    for grammar, text in (
        (nv.Grammar.choice(["abc"]), "abc"),
        (nv.Grammar.regex("a{1,7}"), "a{6,7}"),
        (nv.Grammar.regex("a{1,4}"), "aaaa"),
    ):
        state, reply = nv.generate(MODEL, state, [1], replace(params, grammar=grammar))
        assert re.fullmatch(text, reply.text) and reply.finish_reason == "stop"


def test_an_end_token_that_ends_the_grammar_alone_waits_for_the_least_length() -> None:
    """It is none of the request's, but after it the reply is complete."""
    options = {"ignore_eos": True, "stop_token_ids": [258], "logit_bias": {256: 100.0}, "grammar": nv.Grammar.regex("a{1,7}")}
    state = nv.init_state(MODEL, num_pages=16)
    state, reply = nv.generate(MODEL, state, [1], nv.SamplingParams(temperature=0, max_tokens=9, min_tokens=6, **options))
    assert reply.text == "aaaaaa" and reply.token_ids[6:] == [256]


def test_a_grammar_that_allows_a_bad_word_alone_has_it() -> None:
    state = nv.init_state(MODEL, num_pages=16)
    params = nv.SamplingParams(temperature=1, max_tokens=9, bad_words=["ab", "x"], grammar=nv.Grammar.choice(["abc", "x"]))
    state, reply = nv.generate(MODEL, state, [1], params)
    assert reply.text == "abc"  # "x" may not begin it, and after "a" nothing else than "b" is allowed


def test_least_lengths_of_replies_without_end_tokens_need_no_masks() -> None:
    state, params = nv.init_state(MODEL, num_pages=16), nv.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    state, free = nv.generate(MODEL, state, [1], params)
    state, carry = nv.begin(MODEL, state, [[1]], replace(params, min_tokens=6), room=6)
    carry, _ = nv.decode_loop(MODEL, state, carry, 6)
    state, (reply,) = nv.commit(MODEL, state, carry)
    assert reply.token_ids == free.token_ids


@pytest.mark.parametrize(("option", "value"), [("min_tokens", 2), ("bad_words", ["a"])], ids=["min_tokens", "bad_words"])
def test_sessions_take_no_masks(option: str, value: object) -> None:
    state, params = nv.init_state(MODEL, num_pages=16), nv.SamplingParams(**{option: value})
    with pytest.raises(nv.InvalidRequestError, match=f"begin, and generate_many with process_logits, take no {option}"):
        nv.begin(MODEL, state, [[1]], params, room=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_tokens": -1}, r"min_tokens=-1: must be an integer in \[0, 16\], at most max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5: must be an integer"),
        ({"min_tokens": 1.0}, "min_tokens=1.0: must be an integer"),
        ({"min_tokens": True}, "min_tokens=True: must be an integer"),
        ({"bad_words": "abc"}, "bad_words='abc': must be a sequence of at most 128 strings"),
        ({"bad_words": ["a"] * 129}, "bad_words=.*: must be a sequence of at most 128 strings"),
        ({"bad_words": ["a" * 129]}, "bad_words=.*: must be a sequence of at most 128 strings of at most 128 characters"),
        ({"bad_words": [" "]}, "bad_words=.*not white space"),
        ({"bad_words": ["\ud800"]}, "bad_words=.*without lone surrogates"),
        ({"bad_words": [1]}, r"bad_words=\(1,\): must be"),
        ({"skip_special_tokens": 1}, "skip_special_tokens=1: must be True or False"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(nv.InvalidRequestError, match=message):
        nv.SamplingParams(**options)


def test_bad_words_need_tokens_that_spell_them() -> None:
    bare = random_model(tiny_config(vocab_size=8), 0)
    with pytest.raises(nv.InvalidRequestError, match=r"bad_words=\['a'\] needs a tokenizer"):
        nv.submit(bare, nv.init_state(bare, num_pages=8), [1], nv.SamplingParams(bad_words=["a"]))
    with pytest.raises(nv.InvalidRequestError, match="bad_words holds 'z', which the tokens of this model cannot spell"):
        bad_words_of(byte_tokenizer(), ("z",), byte_tokenizer().encode("z")[0])


def test_a_word_is_left_out_after_a_space_too() -> None:
    """As vLLM has it: with a space before it, if that gives as many tokens, of which the first is another."""
    model = nv.load_model("tiny")
    assert model.tokenizer is not None
    for word in ("the", "king", "once upon"):
        found = bad_words_of(model.tokenizer, (word,), model.config.vocab_size)
        assert found is not None
        each = {tuple(model.tokenizer.encode(before + word, add_special_tokens=False)) for before in ("", " ")}
        alone = model.tokenizer.encode(word, add_special_tokens=False)
        sequences = {(token,) for token in found.single} | {(*before, last) for pairs in found.longer.values() for before, last in pairs}
        assert sequences == {ids for ids in each if len(ids) == len(alone)}
        assert found.reach == len(alone) - 1
    params, state = nv.SamplingParams(temperature=0, max_tokens=30), nv.init_state(model, num_pages=64)
    state, free = nv.generate(model, state, "Once upon a time", params)
    word = free.text.split()[1]
    state, without = nv.generate(model, state, "Once upon a time", replace(params, bad_words=[word]))
    assert word in free.text.split() and word not in without.text.split() and len(without.token_ids) > 1


@given(vocab_size=st.integers(1, 100), left_out=st.sets(st.integers(0, 99)))
def test_masks_keep_at_least_a_token(vocab_size: int, left_out: set[int]) -> None:
    words = all_tokens(vocab_size)
    gone = {token for token in left_out if token < vocab_size}
    leave_out(words, gone)
    allowed = {token for token in range(len(words) * 32) if words[token // 32] >> token % 32 & 1}
    assert allowed == (set(range(vocab_size)) - gone or set(range(vocab_size)))
