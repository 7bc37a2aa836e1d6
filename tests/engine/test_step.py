"""`submit`, `step` and `cancel`: the same replies however requests share steps, budget and pages, and each token counted."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.chunks.generate import generate, generate_many
from nanovllm.chunks.handles import release, truncate
from nanovllm.chunks.prefill import prefill
from nanovllm.engine.init_state import init_state
from nanovllm.engine.requests import cancel, submit
from nanovllm.engine.scheduler import schedule
from nanovllm.engine.step import step
from nanovllm.errors import InvalidRequestError
from nanovllm.sampling.params import SamplingParams
from nanovllm.state import pool as pools
from nanovllm.state.invariants import check
from nanovllm.state.pool_sizes import LOOKAHEAD
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.worlds import ModelWorld, SymbolicWorld, drain
from nanovllm.testing.strategies import Limits

CONFIG = tiny_config(vocab_size=50, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8)
MODEL = random_model(CONFIG)
WORLD = ModelWorld(MODEL)
SYMBOLIC = SymbolicWorld(vocab_size=8)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3], [9], [1, 2, 3, 4, 5, 8, 8, 8, 8, 8, 8], [7, 7]]


def greedy(count, **options):
    return SamplingParams(temperature=0.0, max_tokens=count, **options)


def engine(**limits):
    return init_state(MODEL, **{"num_pages": 64, "page_size": 4, "max_num_seqs": 8, **limits})


def alone(prompt, params):
    """What a fresh engine replies to one prompt."""
    state, rid = submit(MODEL, engine(), prompt, params)
    return drain(MODEL, state)[1][rid]


def serve(state, prompts, params):
    """The outputs of some prompts, in order, each step checked."""
    ids, ended = [], {}
    for prompt in prompts:
        state, rid = submit(MODEL, state, prompt, params)
        ids.append(rid)
    while state.running or state.waiting:
        state, outputs = step(MODEL, state)
        check(state)
        ended.update({out.request_id: out.output for out in outputs if out.output is not None})
    return state, [ended[rid] for rid in ids]


REPLIES = [alone(prompt, greedy(9)).token_ids for prompt in PROMPTS]


def test_a_schedule_is_made_only_where_pages_are_missing(monkeypatch):
    """Neither the step that takes pages nor the end of a reply asks for one more."""
    plans = []

    def noted(*args):
        plans.append(schedule(*args))
        return plans[-1]

    monkeypatch.setattr("nanovllm.engine.step.schedule", noted)
    state, params = engine(num_pages=200, max_model_len=400), [greedy(count, ignore_eos=True) for count in (10, 20, 30, 150)]
    _, gens = generate_many(MODEL, state, PROMPTS[:4], params)
    assert [len(gen.token_ids) for gen in gens] == [10, 20, 30, 150]
    prompts, *decodes = plans
    assert len(prompts.prefill) == 3 and all(plan.only_decodes and plan.grew for plan in decodes[1:])
    assert len(decodes) <= 1 + 150 // LOOKAHEAD + 1


@pytest.mark.parametrize("max_num_seqs", [2, 8])
def test_replies_do_not_depend_on_who_looks_at_the_sequences(max_num_seqs):
    """Looked at, running sequences are made at every step; else where something happens to them."""
    params = [greedy(count, stop_token_ids=stops) for count, stops in ((30, ()), (9, ()), (20, (REPLIES[2][5],)), (1, ()), (14, ()))]
    ended = []
    for looks in (True, False):
        state, outputs = engine(max_num_seqs=max_num_seqs), []
        for prompt, options in zip(PROMPTS, params, strict=True):
            state, _ = submit(MODEL, state, prompt, options)
        while state.running or state.waiting:
            before = state
            state, drawn = step(MODEL, state)
            outputs.append([(out.request_id, out.token_ids, out.finish_reason, out.output and out.output.token_ids) for out in drawn])
            if looks:
                check(state)
                assert len(list(before.running)) == len(before.running)
        check(state)
        ended.append((outputs, state.stats, state.pool.num_available))
    assert ended[0] == ended[1]


def test_sequences_that_nobody_looked_at_are_there_for_whoever_asks():
    state, rid = submit(MODEL, engine(), PROMPTS[0], greedy(20))
    state, other = submit(MODEL, state, PROMPTS[1], greedy(20))
    drawn = {rid: [], other: []}
    for _ in range(6):
        state, outputs = step(MODEL, state)
        for out in outputs:
            drawn[out.request_id].extend(out.token_ids)
    assert {s.request.request_id: s.tokens.array(s.request.num_prompt).tolist() for s in state.running} == drawn
    state = cancel(state, rid)
    check(state)
    (left,) = state.running
    assert left.tokens.array(left.request.num_prompt).tolist() == drawn[other]
    state, replies = drain(MODEL, state)
    assert replies[other].token_ids == alone(PROMPTS[1], greedy(20)).token_ids


def test_alone_is_a_plain_forward():
    for prompt, reply in zip(PROMPTS, REPLIES, strict=True):
        logits, _ = WORLD.uncached([*prompt, *reply[:-1]])
        assert logits[len(prompt) - 1 :].argmax(1).tolist() == reply


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 3},
        {"max_num_batched_tokens": 7},
        {"max_num_seqs": 1},
        {"max_num_seqs": 2, "max_num_batched_tokens": 1},
        {"num_pages": 6},
        {"num_pages": 5},
        {"num_pages": 20, "page_size": 1},
        {"num_pages": 9, "page_size": 3, "max_num_batched_tokens": 5},
        {"num_pages": 1, "page_size": 32},
    ],
    ids=str,
)
def test_replies_do_not_depend_on_the_limits(limits):
    state, outputs = serve(engine(**limits), PROMPTS, greedy(9))
    assert [out.token_ids for out in outputs] == REPLIES
    assert {out.finish_reason for out in outputs} == {"length"}
    stats = state.stats
    needed = sum(len(prompt) + 8 for prompt in PROMPTS)
    assert stats.prefill_tokens + stats.decode_tokens + stats.reused_tokens == needed + stats.rerun_tokens
    assert state.pool.num_available == state.config.num_pages


@pytest.mark.parametrize("budget", [1, 3, 7])
def test_no_step_exceeds_the_token_budget(budget):
    state = engine(max_num_batched_tokens=budget)
    for prompt in PROMPTS:
        state, _ = submit(MODEL, state, prompt, greedy(6))
    before = state.stats
    while state.running or state.waiting:
        state, _ = step(MODEL, state)
        run = state.stats.prefill_tokens + state.stats.decode_tokens - before.prefill_tokens - before.decode_tokens
        assert 0 < run <= budget
        before = state.stats


def test_requests_join_and_leave_between_steps():
    state, ended, ids, left = engine(max_num_batched_tokens=5), {}, {}, list(range(len(PROMPTS)))
    for turn in range(100):
        if left and turn % 3 == 0:
            index = left.pop()
            state, rid = submit(MODEL, state, PROMPTS[index], greedy(9))
            ids[rid] = index
        state, outputs = step(MODEL, state)
        ended.update({ids[out.request_id]: out.output.token_ids for out in outputs if out.output is not None})
        if len(ended) == len(PROMPTS):
            break
    assert [ended[i] for i in range(len(PROMPTS))] == REPLIES


def test_steps_tell_each_token_once():
    state, told = engine(num_pages=5), {}
    for prompt in PROMPTS:
        state, rid = submit(MODEL, state, prompt, greedy(9))
        told[rid] = []
    while state.running or state.waiting:
        state, outputs = step(MODEL, state)
        for out in outputs:
            told[out.request_id] += out.token_ids
            assert (out.finish_reason is None) == (out.output is None)
    assert list(told.values()) == REPLIES
    assert state.stats.preemptions > 0


def test_a_step_with_nothing_to_do():
    state, outputs = step(MODEL, engine())
    assert outputs == []
    check(state)


def test_preempted_requests_run_again_and_are_counted():
    state, outputs = serve(engine(num_pages=5), PROMPTS, greedy(9))
    assert [out.token_ids for out in outputs] == REPLIES
    assert state.stats.preemptions > 0
    assert state.stats.rerun_tokens > 0


def test_a_prompt_after_a_shared_page_waits_for_pages_and_is_not_preempted():
    state, chunk = prefill(MODEL, engine(num_pages=8, page_size=2), PROMPTS[1])
    state, first = submit(MODEL, state, [7, 7, 7], greedy(2))
    state, _ = step(MODEL, state)
    more = [4, 5, 6, 7, 8, 9, 10, 11]
    state, second = submit(MODEL, state, [chunk, more], greedy(2))
    state, ended = drain(MODEL, state)
    assert state.stats.preemptions == 0
    assert ended[first].token_ids == alone([7, 7, 7], greedy(2)).token_ids
    assert ended[second].token_ids == alone([*PROMPTS[1], *more], greedy(2)).token_ids


@pytest.mark.parametrize("options", [greedy(4), greedy(20, stop_token_ids=[REPLIES[0][3]])], ids=["length", "stop"])
def test_a_waiting_request_is_admitted_in_the_step_after_a_row_has_ended(options):
    state, asked = engine(max_num_seqs=2), []
    for prompt, params in zip(PROMPTS, (options, greedy(30), greedy(5)), strict=False):
        state, rid = submit(MODEL, state, prompt, params)
        asked.append(rid)
    outputs = []
    while not any(out.request_id == asked[0] and out.finish_reason for out in outputs):
        state, outputs = step(MODEL, state)
        assert [out.request_id for out in outputs] == asked[:2]
    state, outputs = step(MODEL, state)
    assert [out.request_id for out in outputs] == asked[1:]


def test_the_oldest_request_is_never_preempted():
    state = engine(num_pages=5)
    for prompt in PROMPTS:
        state, _ = submit(MODEL, state, prompt, greedy(9))
    order = []
    while state.running or state.waiting:
        oldest = min([s.request.request_id for s in (*state.running, *state.waiting)])
        state, outputs = step(MODEL, state)
        assert oldest in [s.request.request_id for s in state.running] + [out.request_id for out in outputs]
        order += [out.request_id for out in outputs if out.output is not None]
    assert order[0] == 0


# Reuse


def test_a_prompt_seen_before_is_reused_up_to_its_last_whole_page():
    state, (first,) = serve(engine(), [PROMPTS[0]], greedy(9))
    before = state.stats
    state, (second,) = serve(state, [PROMPTS[0]], greedy(9))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 4)
    assert state.stats.reused_tokens - before.reused_tokens == 4
    assert state.stats.prefill_tokens - before.prefill_tokens == 3
    assert second.token_ids == first.token_ids


def test_a_reply_is_reused_as_a_prompt():
    state, (first,) = serve(engine(), [PROMPTS[0]], greedy(9))
    whole = PROMPTS[0] + first.token_ids
    state, (second,) = serve(state, [whole], greedy(2))
    assert second.num_cached_tokens == 12  # of 16: the last token was never run, so the fourth page is not whole
    assert second.token_ids == alone(whole, greedy(2)).token_ids


def test_a_prompt_that_is_wholly_indexed_runs_its_last_token_again():
    state, _ = serve(engine(), [[1, 2, 3, 4]], greedy(1))
    before = state.stats
    state, (out,) = serve(state, [[1, 2, 3, 4]], greedy(3))
    assert state.stats.prefill_tokens - before.prefill_tokens == 1
    assert state.stats.rerun_tokens == 0
    assert out.num_cached_tokens == 3
    assert out.token_ids == alone([1, 2, 3, 4], greedy(3)).token_ids


def test_requests_of_one_step_share_what_is_indexed_by_then():
    state, _ = serve(engine(), [PROMPTS[3]], greedy(1))
    pages = state.pages.num_free
    state, _ = submit(MODEL, state, PROMPTS[3], greedy(2))
    state, _ = submit(MODEL, state, PROMPTS[3], greedy(2))
    state, _ = step(MODEL, state)
    assert pages - state.pages.num_free == 2  # two whole pages are shared, and each request has a third of its own
    check(state)


def test_the_prompt_used_longest_ago_is_evicted():
    first, second, third = [1] * 8, [2] * 8, [3] * 8
    state = engine(num_pages=6)
    for prompt in (first, second):
        state, _ = serve(state, [prompt], greedy(1))
    state, (out,) = serve(state, [first], greedy(1))  # used again: now the second is the oldest
    assert out.num_cached_tokens == 7
    state, _ = serve(state, [third], greedy(1))
    state, _ = serve(state, [[4] * 4], greedy(1))
    state, (again,) = serve(state, [first], greedy(1))
    assert again.num_cached_tokens == 7
    state, (gone,) = serve(state, [second], greedy(1))
    assert gone.num_cached_tokens < 7


# Ends


def test_max_tokens():
    assert alone([1, 2], greedy(1)).token_ids == alone([1, 2], greedy(5)).token_ids[:1]


def test_the_end_of_the_model_is_length():
    out = serve(engine(max_model_len=10), [PROMPTS[0]], greedy(100))[1][0]
    assert (out.token_ids, out.finish_reason) == (REPLIES[0][:3], "length")


def test_a_prompt_leaves_room_for_one_token():
    state = engine(max_model_len=len(PROMPTS[0]) + 1)
    with pytest.raises(InvalidRequestError, match="the prompt has 8 tokens; this engine holds at most 8, one of them generated"):
        submit(MODEL, state, [*PROMPTS[0], 8], greedy(1))
    out = serve(state, [PROMPTS[0]], greedy(9))[1][0]
    assert (out.token_ids, out.finish_reason) == (REPLIES[0][:1], "length")


def test_the_end_of_the_pool_is_length():
    out = serve(engine(num_pages=2), [PROMPTS[1]], greedy(100))[1][0]
    assert (out.token_ids, out.finish_reason) == (REPLIES[1][:5], "length")


def test_a_stop_id_ends_the_reply_and_is_part_of_it():
    stop = REPLIES[0][2]
    out = alone(PROMPTS[0], greedy(9, stop_token_ids=[stop]))
    assert (out.token_ids, out.finish_reason) == (REPLIES[0][: REPLIES[0].index(stop) + 1], "stop")


def test_a_stop_at_the_last_token_is_a_stop():
    out = alone(PROMPTS[0], greedy(1, stop_token_ids=[REPLIES[0][0]]))
    assert out.finish_reason == "stop"


@pytest.mark.parametrize("ignore", [False, True])
def test_the_models_own_end(ignore):
    config = replace(CONFIG, eos_token_ids=(REPLIES[0][1],))
    model = replace(MODEL, config=config)
    state, rid = submit(model, init_state(model, num_pages=8), PROMPTS[0], greedy(9, ignore_eos=ignore))
    out = drain(model, state)[1][rid]
    if ignore:
        assert (out.token_ids, out.finish_reason) == (REPLIES[0], "length")
    else:
        assert (out.token_ids, out.finish_reason) == (REPLIES[0][: REPLIES[0].index(REPLIES[0][1]) + 1], "stop")


# Log-probabilities and randomness


@pytest.mark.parametrize("limits", [{}, {"num_pages": 6}, {"max_num_batched_tokens": 2}], ids=str)
def test_logprobs_are_those_of_the_model(limits):
    _, outputs = serve(engine(**limits), PROMPTS, greedy(9, logprobs=3))
    for prompt, out in zip(PROMPTS, outputs, strict=True):
        logits, _ = WORLD.uncached([*prompt, *out.token_ids[:-1]])
        expected = logits[len(prompt) - 1 :].log_softmax(1)
        assert out.logprobs is not None and len(out.logprobs) == len(out.token_ids)
        for token, entry, row in zip(out.token_ids, out.logprobs, expected, strict=True):
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
            assert [i for i, _ in entry.top] == row.topk(3).indices.tolist()
            assert entry.top[0][1] == pytest.approx(row.max().item(), abs=1e-4)


def test_no_logprobs_unless_asked_for():
    assert alone([1, 2], greedy(2)).logprobs is None
    chosen = alone([1, 2], greedy(2, logprobs=0)).logprobs
    assert chosen is not None and [entry.top for entry in chosen] == [(), ()]


@settings(max_examples=15)
@given(
    st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=9), min_size=2, max_size=5, unique_by=lambda prompt: prompt[0]),
    st.integers(0, 2**40),
)
def test_invariant_8_a_seeded_reply_is_bitwise_the_same_in_any_batch(prompts, seed):
    params = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=6, seed=seed, frequency_penalty=0.5, logprobs=2)
    _, together = serve(engine(), prompts, params)
    for prompt, out in zip(prompts, together, strict=True):
        single = alone(prompt, params)
        assert out.token_ids == single.token_ids
        assert out.logprobs is not None and single.logprobs is not None
        assert [(e.logprob, e.top) for e in out.logprobs] == [(e.logprob, e.top) for e in single.logprobs]


def test_a_seeded_reply_survives_preemption():
    params = SamplingParams(temperature=1.5, max_tokens=9, seed=11)
    roomy, tight = serve(engine(), PROMPTS, params), serve(engine(num_pages=5), PROMPTS, params)
    assert tight[0].stats.preemptions > 0
    assert [out.token_ids for out in tight[1]] == [out.token_ids for out in roomy[1]]


def test_the_engines_seed_makes_replies_reproducible():
    params = SamplingParams(temperature=2.0, max_tokens=9)
    runs = [[out.token_ids for out in serve(engine(seed=seed), PROMPTS, params)[1]] for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]
    same = [out.token_ids for out in serve(engine(seed=3), [PROMPTS[0]] * 2, params)[1]]
    assert same[0] != same[1]  # two requests for one prompt draw differently


# Cancelling


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 8])
def test_a_cancelled_request_gives_its_pages_back(steps):
    state, kept = submit(MODEL, engine(max_num_batched_tokens=4), PROMPTS[0], greedy(9))
    state, gone = submit(MODEL, state, PROMPTS[3], greedy(9))
    for _ in range(steps):
        state, _ = step(MODEL, state)
    state = cancel(state, gone)
    check(state)
    state, ended = drain(MODEL, state)
    assert ended[kept].token_ids == REPLIES[0]
    assert gone not in ended
    assert state.pool.num_available == state.config.num_pages
    state, (again,) = serve(state, [PROMPTS[3]], greedy(9))
    assert again.token_ids == REPLIES[3]


def test_a_cancelled_request_leaves_its_kv_for_reuse():
    state, rid = submit(MODEL, engine(), PROMPTS[3], greedy(9))
    state, _ = step(MODEL, state)
    state, (out,) = serve(cancel(state, rid), [PROMPTS[3]], greedy(9))
    assert out.num_cached_tokens == 8


# Live chunks


def test_a_request_that_live_chunks_starve_ends_with_length():
    state, chunk = prefill(MODEL, engine(num_pages=5), [9] * 8)
    state, rid = submit(MODEL, state, PROMPTS[0], greedy(9))
    state, ended = drain(MODEL, state)
    assert (ended[rid].token_ids, ended[rid].finish_reason) == (REPLIES[0][:6], "length")  # 12 tokens filled, the 13th drawn
    state, (out,) = serve(release(state, chunk), [PROMPTS[0]], greedy(9))
    assert (out.token_ids, out.finish_reason) == (REPLIES[0], "length")


def test_a_waiting_request_gives_way_before_the_oldest_is_starved():
    """Two requests hold the pages of one released chunk; the first needs them all."""
    state, chunk = prefill(MODEL, engine(num_pages=4), PROMPTS[0])
    state, first = submit(MODEL, state, [5] * 12, greedy(3))
    state, second = submit(MODEL, state, chunk, greedy(9))
    state, ended = drain(MODEL, release(state, chunk))
    assert ended[first].token_ids == alone([5] * 12, greedy(3)).token_ids
    assert ended[second].token_ids == REPLIES[0]


# Carries of decode steps


def test_a_carry_that_missed_steps_is_not_used_again():
    """B decodes alone, gives its pages up to A, and comes back over another copy of its tokens, decoding alone again."""
    state = SYMBOLIC.init_state(Limits(num_pages=7, page_size=2, max_model_len=64, max_num_seqs=3, max_num_batched_tokens=20))
    model, prompt = SYMBOLIC.model, [1, 2, 3, 4, 5]
    state, (copy,) = generate_many(model, state, [prompt], greedy(1))
    state = replace(state, pool=pools.forget(state.pool, frozenset(copy.chunk.pages)))
    state, (indexed,) = generate_many(model, state, [prompt], greedy(1))
    state, short = truncate(state, copy.chunk, 5)
    state = release(state, copy.chunk)
    state, _ = submit(model, state, [7, 7, 7, 6, 6], greedy(1))
    state, rid = submit(model, state, short, greedy(4))
    request = state.waiting.items[rid].request
    state, ended = drain(model, release(state, short))
    assert state.stats.preemptions == 1
    SYMBOLIC.require_reply(prompt, ended[rid].token_ids, request)
    SYMBOLIC.require_kv(state.kv, list(indexed.chunk.pages), indexed.chunk.token_ids.tolist())


# Host work


def count_calls(function):
    """Python calls that a function makes: the same on every machine."""
    calls = 0

    def profile(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def test_host_work_of_a_step_does_not_grow_with_the_pool():
    counts = []
    for num_pages in (200, 20_000):
        state = engine(num_pages=num_pages, page_size=1)
        for prompt in PROMPTS:
            state, _ = submit(MODEL, state, prompt, greedy(40))
        states = [state]

        def run(states=states):
            for _ in range(20):
                states.append(step(MODEL, states[-1])[0])

        run()
        counts.append(count_calls(run))
    assert counts[1] <= 1.05 * counts[0]


def test_outputs_are_plain_values():
    out = alone(PROMPTS[0], greedy(2))
    assert isinstance(out.prompt_token_ids, np.ndarray) and out.prompt_token_ids.tolist() == PROMPTS[0]
    assert all(type(token) is int for token in out.token_ids)
    assert out.metrics.total_time >= out.metrics.time_to_first_token > 0


def test_generating_in_between_leaves_submitted_requests_alone():
    state = engine()
    for prompt in PROMPTS[:3]:
        state, _ = submit(MODEL, state, prompt, greedy(9))
    for _ in range(3):
        state, _ = step(MODEL, state)
    state, made = generate(MODEL, state, PROMPTS[3], greedy(9))
    check(state)
    assert made.token_ids == REPLIES[3]
    assert [out.token_ids for _, out in sorted(drain(MODEL, state)[1].items())] == REPLIES[:3]
    assert torch.is_grad_enabled() is False


def test_two_requests_copy_the_same_page_in_one_step():
    """A page that nobody but the index holds once both have their copies: it becomes evictable once."""
    state = engine(page_size=2)
    state, whole = prefill(MODEL, state, [1, 2, 3, 4])
    state, cut = truncate(state, whole, 3)
    replies = []
    for _ in range(2):
        state, rid = submit(MODEL, state, [cut, [5]], greedy(2))
        replies.append(rid)
    state = release(release(state, whole), cut)
    while state.running or state.waiting:
        state, _ = step(MODEL, state)
        check(state)
    assert state.pool.num_available == state.config.num_pages
