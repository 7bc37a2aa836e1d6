"""Cascade attention through the engine: the same tokens as without it, whatever contexts share; the caller does nothing."""

from typing import Any

import numpy as np
import pytest
import torch

import nanovllm as nv
from nanovllm.ops.attention.cascade_plan import CascadePlan
from nanovllm.ops.attention.plan_table import lookup
from nanovllm.testing.models import random_model, tiny_config

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
GREEDY = nv.SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
LIMITS: dict[str, Any] = {"num_pages": 512, "max_num_seqs": 12, "max_num_batched_tokens": 48}


@pytest.fixture(scope="module", params=["Qwen3ForCausalLM", "LlamaForCausalLM"])
def model(request) -> nv.Model:
    return random_model(tiny_config(request.param), dtype="float64")


def texts(model, *lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model.config.vocab_size, size=n).tolist() for n in lengths]


def served(model, state, contexts, params=GREEDY):
    ids = []
    for context in contexts:
        state, rid = nv.submit(model, state, context, params)
        ids.append(rid)
    done = {}
    while len(done) < len(ids):
        state, outs = nv.step(model, state)
        done.update({out.request_id: out.output.token_ids for out in outs if out.output is not None})
    return state, [done[rid] for rid in ids]


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_tree_of_contexts(model, page_size):
    system, first, second, *own = texts(model, 37, 21, 18, 1, 5, 16, 2, 30)
    replies = []
    for cascade in (False, True):
        state = nv.init_state(model, page_size=page_size, cascade=cascade, **LIMITS)
        state, root = nv.prefill(model, state, system)
        state, left = nv.prefill(model, state, first, after=root)
        state, right = nv.prefill(model, state, second, after=root)
        contexts = [[left, own[0]], [left, own[1]], [right, own[2]], [right, own[3]], [root, own[4]], own[4], left]
        state, tokens = served(model, state, contexts)
        state, gens = nv.generate_many(model, state, contexts, GREEDY)
        state, carry = nv.begin(model, state, contexts, GREEDY, room=9)
        logits = []
        for _ in range(9):
            carry, out = nv.decode_step(model.params, carry, model.config)
            logits.append(out.logits)
        assert bool(carry.batch.plan) == cascade
        if cascade:
            runs = lookup(carry.batch.plan, CascadePlan).runs
            assert sorted(len(run.rows) for run in runs if len(run.rows) > 1) == [2, 3, 6]  # right, left, and all under the root
        state, scored = nv.commit(model, state, carry)
        nv.check(state)
        replies.append((tokens, [gen.token_ids for gen in gens], [gen.token_ids for gen in scored], torch.stack(logits), state.stats))
    (*plain, want, stats), (*shared, got, other) = replies
    assert plain == shared and stats == other
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    assert not torch.equal(got, want)  # else nothing was read in parts


def test_chunks_that_were_cut_and_moved(model):
    a, b, c, *own = texts(model, 20, 13, 9, 4, 2, 7)
    replies = []
    for cascade in (False, True):
        state = nv.init_state(model, page_size=4, cascade=cascade, **LIMITS)
        state, one = nv.prefill(model, state, a)
        state, two = nv.prefill(model, state, b)
        state, both = nv.compose(model, state, [one, two], recompute=3)
        state, gap = nv.drop(model, state, both, 9, 17, mode="gap")
        state, moved = nv.drop(model, state, both, 9, 18, mode="shift")
        state, long = nv.prefill(model, state, c, after=gap)
        contexts = [[chunk, tail] for chunk in (both, gap, moved, long) for tail in own]
        state, tokens = served(model, state, contexts)
        replies.append(tokens)
        nv.check(state)
    assert replies[0] == replies[1]


def test_prompts_that_arrive_together_read_their_beginning_once(model):
    shared, *own = texts(model, 40, 3, 5, 9, 1)
    state = nv.init_state(model, page_size=4, cascade=True, **LIMITS)
    plain = nv.init_state(model, page_size=4, **LIMITS)
    state, _ = nv.prefill(model, state, shared)
    state, got = served(model, state, [shared + tail for tail in own])
    plain, want = served(model, plain, [shared + tail for tail in own])
    assert got == want and state.stats.reused_tokens >= 4 * 36


def test_plans_go_with_their_sessions(model):
    (shared, *own), plans = texts(model, 30, 2, 3), []
    state = nv.init_state(model, page_size=4, cascade=True, **LIMITS)
    state, root = nv.prefill(model, state, shared)
    for _ in range(2):
        state, carry = nv.begin(model, state, [[root, tail] for tail in own], GREEDY, room=3)
        plans.append((carry, carry.batch.plan))
    for carry, handle in plans:
        state, _ = served(model, state, [[root, tail] for tail in own])
        after, _ = nv.decode_step(model.params, carry, model.config)
        state, _ = nv.commit(model, state, after)
        with pytest.raises(nv.NanoVLLMError, match="no live attention plan"):
            lookup(handle)


def interleaved(model, cascade):
    """Steps of requests and of a session in turns, over contexts that share pages: all tokens, and the session's logits."""
    root, middle, *own = texts(model, 24, 9, 2, 5, 3, 1)
    state = nv.init_state(model, page_size=4, cascade=cascade, **LIMITS)
    state, chunk = nv.prefill(model, state, root)
    rids = []
    for tail in own[:2]:
        state, rid = nv.submit(model, state, [chunk, tail], GREEDY)
        rids.append(rid)
    drawn: dict[int, list[int]] = {rid: [] for rid in rids}
    logits = []

    def step(state):
        state, outs = nv.step(model, state)
        for out in outs:
            drawn[out.request_id] += out.token_ids
        return state

    def decode(carry):
        carry, out = nv.decode_step(model.params, carry, model.config)
        logits.append(out.logits)
        return carry

    state = step(step(state))
    assert state.loaded is not None
    running = state.loaded[1].batch.plan
    state, carry = nv.begin(model, state, [[chunk, middle, tail] for tail in own], GREEDY, room=4)
    assert bool(running) == bool(cascade) and (carry.batch.plan != running or not cascade)
    state = step(state)
    assert state.loaded[1].batch.plan == running  # nothing was loaded anew
    carry = decode(carry)
    state = step(state)
    state, generations = nv.commit(model, state, decode(decode(carry)))
    state = step(state)
    nv.check(state)
    return drawn, [generation.token_ids for generation in generations], torch.stack(logits)


def test_a_session_begins_between_steps_of_requests(model):
    *want, plain = interleaved(model, None)
    *found, logits = interleaved(model, True)
    assert found == want and [len(tokens) for tokens in found[0].values()] == [5, 5] and [len(tokens) for tokens in found[1]] == [3] * 4
    torch.testing.assert_close(logits, plain, rtol=0, atol=1e-10)
    assert not torch.equal(logits, plain)  # else nothing was read in parts


@pytest.mark.parametrize("value", [1, "yes", 0])
def test_only_true_false_or_none(model, value, untyped):
    with pytest.raises(nv.InvalidRequestError, match="cascade="):
        nv.init_state(model, cascade=value, **LIMITS)
