"""`begin`, `decode_step`, `commit`: decode steps in the caller's hands give what `generate` gives."""

from dataclasses import replace

import pytest
import torch

from nanovllm.chunks.generate import generate, generate_many
from nanovllm.chunks.handles import release
from nanovllm.chunks.prefill import prefill
from nanovllm.chunks.session import abandon, begin, commit
from nanovllm.engine.init_state import init_state
from nanovllm.engine.requests import submit
from nanovllm.engine.step import step
from nanovllm.errors import DonatedStateError, InvalidRequestError, OutOfPagesError, ReleasedChunkError
from nanovllm.executor.branches import split_rows
from nanovllm.executor.decode import decode_step
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.invariants import check
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.worlds import ModelWorld, drain

MODEL = random_model(tiny_config(vocab_size=50, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=8))
WINDOWED = random_model(tiny_config(vocab_size=50, windows=(8, 0)))
WORLD = ModelWorld(MODEL)
IDS = [1, 2, 3, 4, 5, 6, 7]


def engine(**limits):
    return init_state(MODEL, **{"num_pages": 32, "page_size": 4, "max_num_seqs": 8, **limits})


def greedy(count=1, **options):
    return SamplingParams(temperature=0.0, max_tokens=count, **options)


def steps(carry, count):
    drawn = []
    for _ in range(count):
        carry, out = decode_step(MODEL.params, carry, MODEL.config)
        drawn.append(out.token_ids)
    return carry, drawn


def right(state, *chunks):
    check(state)
    for chunk in chunks:
        WORLD.require_kv(state.kv, list(chunk.pages), chunk.token_ids.tolist())


def reply(prompt, count, **options):
    return generate(MODEL, engine(), prompt, greedy(count, **options))[1].token_ids


@pytest.mark.parametrize("room", [1, 2, 6, 9])
def test_the_same_as_generate(room):
    contexts = [IDS, [9], IDS[:4]]
    state, carry = begin(MODEL, engine(), contexts, greedy(), room=room)
    check(state)
    carry, _ = steps(carry, room)
    state, made = commit(MODEL, state, carry)
    assert [generation.token_ids for generation in made] == [reply(prompt, room) for prompt in contexts]
    right(state, *(generation.chunk for generation in made))
    stats = state.stats
    assert stats.prefill_tokens + stats.decode_tokens + stats.reused_tokens == 12 + 3 * room


@pytest.mark.parametrize("params", [greedy(), SamplingParams(temperature=1.0, seed=5, top_p=0.9, frequency_penalty=0.3)])
@pytest.mark.parametrize("more", [[], [8], [8, 9, 10]])
def test_from_a_chunk(params, more):
    state, base = prefill(MODEL, engine(), IDS)
    state, carry = begin(MODEL, state, [[base, more]], params, room=5)
    carry, _ = steps(carry, 5)
    state, (made,) = commit(MODEL, state, carry)
    params = SamplingParams(**{**{name: getattr(params, name) for name in params.__dataclass_fields__}, "max_tokens": 5})
    assert made.token_ids == generate(MODEL, engine(), IDS + more, params)[1].token_ids
    assert made.chunk.token_ids.tolist() == IDS + more + made.token_ids
    right(state, base, made.chunk)


def test_a_stop_counts_at_commit_and_what_ran_ahead_is_discarded():
    tokens = reply(IDS, 6)
    end = min(tokens.index(tokens[2]), tokens.index(tokens[4])) + 1
    state, carry = begin(MODEL, engine(), [IDS], greedy(stop_token_ids=[tokens[2], tokens[4]]), room=6)
    carry, _ = steps(carry, 6)
    state, (made,) = commit(MODEL, state, carry)
    assert (made.token_ids, made.finish_reason) == (tokens[:end], "stop")
    assert state.stats.discarded_tokens == 6 - end
    right(state, made.chunk)


def test_fewer_steps_than_room_give_the_other_pages_back():
    state, carry = begin(MODEL, engine(), [IDS], greedy(), room=16)
    assert state.pages.num_free == 32 - 6
    carry, _ = steps(carry, 3)
    state, (made,) = commit(MODEL, state, carry)
    assert (made.token_ids, made.finish_reason) == (reply(IDS, 3), "length")
    assert state.pages.num_free == 32 - 3
    right(state, made.chunk)


@pytest.mark.parametrize("filled", [False, True])
def test_no_step_at_all_gives_the_context_as_a_chunk(filled):
    state, context = engine(), IDS
    if filled:
        state, context = prefill(MODEL, state, IDS)
    before = state.stats
    state, carry = begin(MODEL, state, [context], greedy(), room=2)
    state, (made,) = commit(MODEL, state, carry)
    assert made.token_ids == [] and made.chunk.token_ids.tolist() == IDS
    stats = state.stats
    assert stats.prefill_tokens - before.prefill_tokens == (0 if filled else 7)
    assert stats.prefill_tokens + stats.decode_tokens + stats.reused_tokens == 7 + (7 if filled else 0)
    right(state, made.chunk)


def test_logprobs_of_the_drawn_tokens():
    state, carry = begin(MODEL, engine(), [IDS], greedy(logprobs=2), room=4)
    carry, _ = steps(carry, 4)
    _, (made,) = commit(MODEL, state, carry)
    _, whole = generate(MODEL, engine(), IDS, greedy(4, logprobs=2))
    assert made.logprobs is not None and whole.logprobs is not None
    assert [e.token_id for e in made.logprobs] == made.token_ids
    assert [e.logprob for e in made.logprobs] == pytest.approx([e.logprob for e in whole.logprobs], abs=1e-5)


def test_given_tokens_are_scored():
    given = reply(IDS, 3)
    state, carry = begin(MODEL, engine(), [IDS], greedy(logprobs=0), room=3)
    scores = []
    for token in given:
        carry, out = decode_step(MODEL.params, carry, MODEL.config, token_ids=torch.tensor([token], dtype=torch.int32))
        assert out.logprobs is not None
        scores.append(out.logprobs.item())
    state, (made,) = commit(MODEL, state, carry)
    assert made.token_ids == given
    logits, _ = WORLD.uncached([*IDS, *given[:-1]])
    expected = logits[6:].log_softmax(1).gather(1, torch.tensor(given)[:, None])[:, 0]
    assert scores == pytest.approx(expected.tolist(), abs=1e-4)
    right(state, made.chunk)


def test_sessions_and_requests_take_turns():
    state, first = begin(MODEL, engine(), [IDS], greedy(), room=4)
    state, second = begin(MODEL, state, [[9], IDS[:3]], greedy(), room=3)
    state, rid = submit(MODEL, state, IDS[:5], greedy(6))
    ended = {}
    for _ in range(3):
        first, _ = steps(first, 1)
        second, _ = steps(second, 1)
        state, _ = step(MODEL, state)
        check(state)
    state, two = commit(MODEL, state, second)
    first, _ = steps(first, 1)
    state, one = commit(MODEL, state, first)
    state, ended = drain(MODEL, state)
    assert [g.token_ids for g in (*one, *two)] == [reply(IDS, 4), reply([9], 3), reply(IDS[:3], 3)]
    assert ended[rid].token_ids == reply(IDS[:5], 6)
    right(state, *(g.chunk for g in (*one, *two)))


def test_a_tight_pool_leaves_a_sessions_pages_alone():
    state, carry = begin(MODEL, engine(num_pages=6), [IDS], greedy(), room=5)
    carry, _ = steps(carry, 2)
    for _ in range(3):
        state, rid = submit(MODEL, state, [8] * 5, greedy(5))
        state, ended = drain(MODEL, state)
        assert len(ended[rid].token_ids) == 5
    carry, _ = steps(carry, 3)
    state, (made,) = commit(MODEL, state, carry)
    assert made.token_ids == reply(IDS, 5)
    right(state, made.chunk)


# Refusals


def test_a_carry_is_committed_once():
    state, carry = begin(MODEL, engine(), [IDS], greedy(), room=3)
    old = carry
    carry, _ = steps(carry, 2)
    with pytest.raises(DonatedStateError, match="seen 0 steps"):
        commit(MODEL, state, old)
    with pytest.raises(DonatedStateError):
        steps(old, 1)
    state, (made,) = commit(MODEL, state, carry)
    with pytest.raises(DonatedStateError, match="committed already"):
        commit(MODEL, state, carry)
    with pytest.raises(DonatedStateError, match="committed"):
        steps(carry, 1)
    right(state, made.chunk)


def test_a_carry_of_another_engine_is_refused():
    state, mine = begin(MODEL, engine(), [IDS], greedy(), room=3)
    other, foreign = begin(MODEL, engine(), [[9]], greedy(), room=3)
    with pytest.raises(DonatedStateError, match="another engine"):
        commit(MODEL, state, foreign)
    state, (made,) = commit(MODEL, state, steps(mine, 3)[0])
    assert made.token_ids == reply(IDS, 3)
    other, (theirs,) = commit(MODEL, other, steps(foreign, 3)[0])
    assert theirs.token_ids == reply([9], 3)


def test_a_step_beyond_the_room_is_refused_and_the_carry_stays_usable():
    state, carry = begin(MODEL, engine(), [IDS], greedy(), room=3)
    carry, _ = steps(carry, 3)
    with pytest.raises(InvalidRequestError, match="has seen 3 steps and its session has room=3: commit it, or begin with more room"):
        steps(carry, 1)
    state, (made,) = commit(MODEL, state, carry)
    assert made.token_ids == reply(IDS, 3) and made.num_dropped == 0
    assert state.stats.discarded_tokens == 0
    right(state, made.chunk)


def test_steps_beyond_the_room_of_traced_code_are_discarded_and_counted():
    state, carry = begin(MODEL, engine(), [IDS], greedy(), room=3)  # 10 tokens; the third page has room for 12
    carry, _ = steps(carry, 3)
    for _ in range(2):  # traced code checks nothing, as a lease that is switched off
        lease = replace(carry.log.lease, checked=False)
        carry, _ = steps(replace(carry, log=replace(carry.log, lease=lease)), 1)
    state, (made,) = commit(MODEL, state, carry)
    assert made.token_ids == reply(IDS, 3) and made.num_dropped == 2
    assert state.stats.discarded_tokens == 2
    right(state, made.chunk)


def test_the_room_may_reach_the_engines_last_token():
    limits = {"max_model_len": len(IDS) + 3}
    with pytest.raises(
        InvalidRequestError,
        match=r"room=4 exceeds .* limit of 10 tokens per request: room may be at most 3",
    ):
        begin(MODEL, engine(**limits), [IDS], greedy(), room=4)
    state, carry = begin(MODEL, engine(**limits), [IDS], greedy(), room=3)
    carry, _ = steps(carry, 3)
    state, (made,) = commit(MODEL, state, carry)
    assert made.token_ids == reply(IDS, 3)
    right(state, made.chunk)


@pytest.mark.parametrize("room", [0, -1, 1.5, True, None])
def test_bad_room(room):
    with pytest.raises(Exception) as caught:
        begin(MODEL, engine(), [IDS], greedy(), room=room)
    assert isinstance(caught.value, InvalidRequestError) or "parameter" in str(caught.value)


def test_impossible_sessions_are_refused_and_cost_nothing():
    state = engine(num_pages=4, max_num_seqs=2)
    with pytest.raises(InvalidRequestError, match="room=10 exceeds this engine's limit of 16"):
        begin(MODEL, state, [IDS], greedy(), room=10)
    with pytest.raises(InvalidRequestError, match="3 contexts exceed max_num_seqs=2"):
        begin(MODEL, state, [IDS] * 3, greedy(), room=1)
    with pytest.raises(InvalidRequestError, match="at least one"):
        begin(MODEL, state, [], greedy(), room=1)
    with pytest.raises(OutOfPagesError):
        begin(MODEL, state, [IDS, IDS], greedy(), room=5)
    state, base = prefill(MODEL, state, [1])
    state = release(state, base)
    with pytest.raises(ReleasedChunkError):
        begin(MODEL, state, [base], greedy(), room=1)
    assert state.pool.num_available == 4
    state, carry = begin(MODEL, state, [IDS, IDS[:3]], greedy(), room=1)
    state, made = commit(MODEL, state, steps(carry, 1)[0])
    assert [g.token_ids for g in made] == [reply(IDS, 1), reply(IDS[:3], 1)]


def test_a_carry_that_is_not_from_begin():
    state = engine()
    state, _ = submit(MODEL, state, IDS, greedy(5))
    state, _ = step(MODEL, state)
    state, _ = step(MODEL, state)
    with pytest.raises(InvalidRequestError, match="begin"):
        commit(MODEL, state, state.loaded[1])


@pytest.mark.parametrize("model", [MODEL, WINDOWED], ids=["plain", "windowed"])
def test_prompts_may_run_in_the_first_step(model):
    state = init_state(model, num_pages=64, page_size=4, max_num_seqs=8)
    state, base = prefill(model, state, IDS[:5])
    state, _ = prefill(model, state, [9, 8, 7, 6, 5])
    contexts = [[base, IDS[5:]], [9, 8, 7, 6, 5, 4], IDS[:3], base]
    state, want = generate_many(model, state, contexts, greedy(4, ignore_eos=True))
    before = state.stats
    state, carry = begin(model, state, contexts, greedy(), room=4, fill=False)
    check(state)
    assert state.stats.prefill_tokens == before.prefill_tokens
    assert carry.prompt is not None and len(carry.prompt.cu_seqlens) == 5
    for _ in range(4):
        carry, _ = decode_step(model.params, carry, model.config)
        assert carry.prompt is None
    state, made = commit(model, state, carry)
    assert [generation.token_ids for generation in made] == [generation.token_ids for generation in want]
    check(state)
    for generation in made:
        state, more = generate(model, state, generation.chunk, greedy(2, ignore_eos=True))
        fresh = init_state(model, num_pages=64, page_size=4)
        assert more.token_ids == generate(model, fresh, generation.chunk.token_ids.tolist(), greedy(2, ignore_eos=True))[1].token_ids


def test_prompts_of_the_first_step_are_counted_once():
    state, carry = begin(MODEL, engine(), [IDS, [9, 8]], greedy(), room=3, fill=False)
    carry, _ = steps(carry, 3)
    state, made = commit(MODEL, state, carry)
    stats = state.stats
    assert (stats.prefill_tokens, stats.decode_tokens, stats.discarded_tokens, stats.reused_tokens) == (9, 6, 0, 0)
    right(state, *(generation.chunk for generation in made))
    state, carry = begin(MODEL, engine(), [IDS], greedy(), room=3, fill=False)  # no step at all
    state, (made,) = commit(MODEL, state, carry)
    assert made.chunk.token_ids.tolist() == IDS and state.stats.prefill_tokens == 7
    right(state, made.chunk)


def test_prompts_longer_than_a_step_are_refused():
    state = engine(max_num_batched_tokens=8)
    with pytest.raises(InvalidRequestError, match="fill=False leaves 9 tokens to the first step, more than max_num_batched_tokens=8"):
        begin(MODEL, state, [IDS, [9, 8]], greedy(), room=1, fill=False)
    state, carry = begin(MODEL, state, [IDS], greedy(), room=1, fill=False)
    state, _ = commit(MODEL, state, steps(carry, 1)[0])
    right(state)


@pytest.mark.parametrize("inside", [(True, True, False), (False, True, True), (True, False, True), (False, True, False)])
@pytest.mark.parametrize("branching", [False, True])
@pytest.mark.parametrize("processed", [False, True])
def test_tensors_of_inference_mode_may_be_in_a_carry(inside, branching, processed):
    """`begin`, a step with a split, and another step, some of them in `torch.inference_mode`."""
    params = greedy(repetition_penalty=1.3)
    function = (lambda logits, tokens: logits - tokens.lengths.unsqueeze(1)) if processed else None
    want = reply(IDS, 3, repetition_penalty=1.3, ignore_eos=True)
    state = engine()
    with torch.inference_mode(inside[0]):
        state, carry = begin(MODEL, state, [IDS], replace(params, ignore_eos=True), room=3, branching=branching, process_logits=function)
    for mode in inside[1:]:
        with torch.inference_mode(mode):
            carry, _ = steps(carry, 1)
            carry = split_rows(carry, torch.tensor([0])) if branching else carry
    carry, _ = steps(carry, 1)
    state, (made,) = commit(MODEL, state, carry)
    assert made.token_ids == want
    right(state, made.chunk)


@pytest.mark.parametrize("branching", [False, True])
def test_a_row_that_is_stopped_before_the_first_step_has_run_its_prompt(branching):
    contexts = [list(range(1, 12)), [5, 6, 7]]
    state, carry = begin(MODEL, engine(), contexts, greedy(), room=4, fill=False, branching=branching)
    carry, _ = steps(replace(carry, active=torch.tensor([0, 1], dtype=torch.int32)), 2)
    state, (stopped, going) = commit(MODEL, state, carry)
    assert (stopped.token_ids, stopped.finish_reason, len(going.token_ids)) == ([], "stop", 2)
    assert (state.stats.prefill_tokens, state.stats.rerun_tokens) == (14, 0)
    right(state, stopped.chunk, going.chunk)


def test_an_error_of_a_commit_in_another_mode_loses_nothing():
    state, keep = prefill(MODEL, engine(), IDS)
    state, carry = begin(MODEL, state, [keep], greedy(), room=2)
    with torch.inference_mode():
        carry, _ = steps(carry, 2)
    state, (made,) = commit(MODEL, state, carry)
    right(state, made.chunk, keep)


@pytest.mark.parametrize("by", ["newest", "used", "number", "split"])
def test_an_abandoned_session_gives_its_pages_back(by):
    state, keep = prefill(MODEL, engine(), IDS)
    state, first = begin(MODEL, state, [keep, IDS], greedy(), room=6, branching=True)
    carry, _ = steps(first, 2)
    carry = split_rows(carry, torch.tensor([1, 1])) if by == "split" else carry
    state = abandon(state, {"newest": carry, "used": first, "number": int(carry.log.session), "split": carry}[by])
    check(state)
    assert not state.sessions
    for old in (first, carry):
        with pytest.raises(DonatedStateError):
            steps(old, 1)
        with pytest.raises(DonatedStateError):
            commit(MODEL, state, old)
        with pytest.raises(DonatedStateError):
            abandon(state, old)
    with pytest.raises(InvalidRequestError, match="have begun"):
        abandon(state, int(carry.log.session))
    right(state, keep)
    state = release(state, keep)
    assert state.pool.num_available == 32


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("session", [None, True, 3, "1", 1.0])
def test_what_is_no_session_cannot_be_abandoned(session):
    state, carry = begin(MODEL, engine(), [IDS], greedy(), room=2)
    with pytest.raises(InvalidRequestError):
        abandon(state, session)
    with pytest.raises(DonatedStateError):
        abandon(engine(), carry)
    right(commit(MODEL, state, carry)[0])
