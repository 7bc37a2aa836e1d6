"""Log-probabilities of prompts: those of every token after the first, and the most probable tokens in its place."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import nanovllm as nv
from nanovllm.executor import scoring
from nanovllm.loading.hub import TINY
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.worlds import ModelWorld

MODEL = random_model(tiny_config(vocab_size=50, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=8))
WINDOWED = random_model(tiny_config("Gemma3ForCausalLM", vocab_size=50, windows=(4, 0)))
TEXTS = ["Once upon a time, there was a little", "Hello", "The king of Aistonia is Oswin. The capital of Aistonia is"]


def engine(model=MODEL, **limits):
    return nv.init_state(model, **{"num_pages": 64, "page_size": 4, "max_num_seqs": 4, **limits})


def prompts_scored(model, state, prompts, k):
    return nv.score(model, state, [ids[:1] for ids in prompts], [ids[1:] for ids in prompts], top_logprobs=k)


def require_equal(one, ids, logits, k):
    """The values of `one` are those of plain logits `[n, V]`, in float32."""
    wanted = logits[:-1].float().log_softmax(-1)
    top = wanted.topk(min(k, wanted.shape[1]))
    assert one.token_ids == ids[1:] and one.top_ids.dtype == np.int32 and one.top_logprobs.dtype == np.float32
    np.testing.assert_allclose(one.logprobs, wanted.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], rtol=0, atol=1e-4)
    np.testing.assert_allclose(one.top_logprobs, top.values, rtol=0, atol=1e-4)
    at = np.take_along_axis(wanted.numpy(), one.top_ids, 1)  # ties come in any order
    np.testing.assert_allclose(at, top.values, rtol=0, atol=1e-4)
    assert [[entry.token_id, entry.logprob, *entry.top] for entry in one.entries] == [
        [token, value, *zip(ids, values, strict=True)]
        for token, value, ids, values in zip(
            one.token_ids, one.logprobs.tolist(), one.top_ids.tolist(), one.top_logprobs.tolist(), strict=True
        )
    ]


def test_the_packaged_model_gives_what_transformers_gives():
    model = nv.load_model("tiny", "cpu")
    theirs = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    prompts = [model.tokenizer.encode(text) for text in TEXTS if len(model.tokenizer.encode(text)) > 1]
    _, scores = prompts_scored(model, engine(model, page_size=16), prompts, 5)
    for ids, one in zip(prompts, scores, strict=True):
        with torch.no_grad():
            require_equal(one, ids, theirs(torch.tensor([ids])).logits[0], 5)


@settings(deadline=None, max_examples=25)
@given(
    prompts=st.lists(st.lists(st.integers(0, 49), min_size=2, max_size=14), min_size=1, max_size=5),
    k=st.sampled_from([0, 1, 3, 20]),
    most=st.sampled_from([1, 4, 1000]),
    piece=st.integers(1, 9),
    budget=st.sampled_from([3, 64]),
    windowed=st.booleans(),
    cached=st.booleans(),
)
def test_the_same_as_a_forward_pass(prompts, k, most, piece, budget, windowed, cached):
    """In batches and pieces of any size, and whether the prefix index has the prompts or not: every position is run again."""
    model = WINDOWED if windowed else MODEL
    state = engine(model, max_num_batched_tokens=budget)
    for ids in prompts if cached else ():
        state, chunk = nv.prefill(model, state, ids)
        state = nv.release(state, chunk)
    before = state.stats.prefill_tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "LOGIT_BYTES", 4 * 50 * most)
        patch.setattr(scoring, "PIECE_BYTES", 4 * 50 * piece)
        state, scores = prompts_scored(model, state, prompts, k)
    nv.check(state)
    assert state.stats.prefill_tokens - before == len({ids[0] for ids in prompts}) + sum(len(ids) - 2 for ids in prompts)
    for ids, one in zip(prompts, scores, strict=True):
        require_equal(one, ids, ModelWorld(model).uncached(ids)[0], k)


def test_a_small_vocabulary_has_fewer_tokens():
    model = random_model(tiny_config(vocab_size=7))
    _, (one,) = prompts_scored(model, engine(model), [[1, 2, 3]], 20)
    assert one.top_ids.shape == one.top_logprobs.shape == (2, 7)
    np.testing.assert_allclose(np.exp(one.top_logprobs).sum(1), 1, atol=1e-5)


def test_the_logits_that_are_normalised_at_once_are_bounded(monkeypatch):
    monkeypatch.setattr(scoring, "PIECE_BYTES", 4 * 50 * 3)
    seen, whole = [], torch.Tensor.log_softmax
    monkeypatch.setattr(torch.Tensor, "log_softmax", lambda self, *args: (seen.append(len(self)), whole(self, *args))[1])
    prompts_scored(MODEL, engine(), [[*range(40)]], 3)
    assert max(seen) == 3 and sum(seen) == 39


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("wrong", [-1, 21, True, 1.5, None, "3"])
def test_a_wrong_number_is_refused(wrong):
    with pytest.raises(nv.InvalidRequestError, match=r"top_logprobs=.*: must be an integer in \[0, 20\]"):
        nv.score(MODEL, engine(), [[1]], [[2]], top_logprobs=wrong)


def test_the_shells_score_too():
    llm = nv.LLM(MODEL, num_pages=64)
    (own,) = llm.score([[1]], [[2, 3]], top_logprobs=2)

    async def main():
        async with nv.AsyncLLM(MODEL, num_pages=64) as engine:
            reply = asyncio.create_task(engine.generate([[1, 2, 3]], nv.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)))
            (scored,) = await engine.score([[1]], [[2, 3]], top_logprobs=2)
            with pytest.raises(nv.InvalidRequestError, match="continuation=\\[\\] is empty"):
                await engine.score([[1]], [[]])
            return scored, (await reply)[0]

    theirs, reply = asyncio.run(main())
    _, (wanted,) = nv.score(MODEL, engine(), [[1]], [[2, 3]], top_logprobs=2)
    for one in (own, theirs):
        assert one.top_ids.tolist() == wanted.top_ids.tolist()
        np.testing.assert_allclose(one.logprobs, wanted.logprobs, rtol=0, atol=1e-5)
    assert len(reply.token_ids) == 5
