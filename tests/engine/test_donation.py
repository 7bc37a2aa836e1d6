"""What was donated is not used again, and what belongs to another model or engine is refused; the next good call is served."""

from dataclasses import replace

import pytest
import torch

import nanovllm as nv
from nanovllm.config import RopeConfig
from nanovllm.engine.donation import enter, guarded
from nanovllm.testing.models import random_model, tiny_config

GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def model() -> nv.Model:
    return random_model(tiny_config(), 0)


@pytest.fixture
def state(model: nv.Model) -> nv.EngineState:
    return nv.init_state(model, num_pages=32, page_size=4, max_model_len=64, max_num_seqs=4)


def steps(model: nv.Model, carry: nv.DecodeCarry, count: int, token: int | None = None) -> nv.DecodeCarry:
    forced = None if token is None else torch.tensor([token], dtype=torch.int32)
    for _ in range(count):
        carry, _ = nv.decode_step(model.params, carry, model.config, token_ids=forced)
    return carry


def test_a_carry_stepped_from_twice_is_refused(model: nv.Model, state: nv.EngineState) -> None:
    state, first = nv.begin(model, state, [PROMPT], GREEDY, room=8)
    carry = steps(model, first, 2)
    with pytest.raises(nv.DonatedStateError, match="2 were run"):
        steps(model, first, 1)
    with pytest.raises(nv.DonatedStateError, match="0 steps"):
        nv.commit(model, state, first)
    state, gens = nv.commit(model, state, steps(model, carry, 6))
    state, want = nv.generate(model, state, PROMPT, GREEDY)
    assert gens[0].token_ids == want.token_ids
    nv.check(state)


def test_a_carry_after_its_commit_is_refused_and_harmless(model: nv.Model, state: nv.EngineState) -> None:
    state, carry = nv.begin(model, state, [PROMPT], GREEDY, room=12)
    carry = steps(model, carry, 2)
    state, gens = nv.commit(model, state, carry)
    with pytest.raises(nv.DonatedStateError, match="committed"):
        steps(model, carry, 1)
    with pytest.raises(nv.DonatedStateError):
        nv.commit(model, state, carry)
    for gen in gens:
        state = nv.release(state, gen.chunk)
    state, chunk = nv.prefill(model, state, [9, 8, 7, 6, 5, 4, 3, 2])
    before = state.kv.pools[0][:, chunk.pages.array().tolist()].clone()
    slots = carry.batch.page_tables.unique().tolist()
    assert slots == [state.config.num_pages]  # traced steps, which do not look, have only the dummy page to write to
    assert torch.equal(state.kv.pools[0][:, chunk.pages.array().tolist()], before)


def test_log_probabilities_reach_the_commit(model: nv.Model, state: nv.EngineState) -> None:
    params = nv.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)
    state, want = nv.generate(model, state, PROMPT, params)
    state, carry = nv.begin(model, state, [PROMPT], params, room=4)
    state, gens = nv.commit(model, state, steps(model, carry, 4))
    assert want.logprobs is not None
    assert gens[0].logprobs is not None
    assert [e.logprob for e in gens[0].logprobs] == pytest.approx([e.logprob for e in want.logprobs], abs=1e-5)


def test_room_stands_in_the_place_of_max_tokens(model: nv.Model, state: nv.EngineState) -> None:
    state, carry = nv.begin(model, state, [PROMPT], nv.SamplingParams(temperature=0.0, ignore_eos=True), room=24)
    state, gens = nv.commit(model, state, steps(model, carry, 24))
    assert len(gens[0].token_ids) == 24


def test_more_contexts_than_rows_are_refused(model: nv.Model, state: nv.EngineState) -> None:
    with pytest.raises(nv.InvalidRequestError, match="max_num_seqs=4"):
        nv.begin(model, state, [PROMPT] * 5, GREEDY, room=2)
    state, carry = nv.begin(model, state, [PROMPT] * 4, GREEDY, room=2)
    state, gens = nv.commit(model, state, carry)
    assert [g.token_ids for g in gens] == [[]] * 4


def test_another_model_is_refused(model: nv.Model, state: nv.EngineState) -> None:
    other = random_model(tiny_config(), 1)
    state, chunk = nv.prefill(model, state, PROMPT)
    calls = [
        lambda: nv.prefill(other, state, PROMPT),
        lambda: nv.generate(other, state, [chunk, [7]], GREEDY),
        lambda: nv.submit(other, state, PROMPT, GREEDY),
        lambda: nv.step(other, state),
        lambda: nv.begin(other, state, [chunk], GREEDY, room=1),
    ]
    for call in calls:
        with pytest.raises(nv.InvalidRequestError, match="is not the model of this state"):
            call()
    state, gen = nv.generate(model, state, chunk, GREEDY)
    assert len(gen.token_ids) == 8


def test_a_prompt_that_live_chunks_leave_no_room_for_ends_with_an_error(model: nv.Model) -> None:
    state = nv.init_state(model, num_pages=4, page_size=4, max_model_len=64)
    state, chunk = nv.prefill(model, state, list(range(12)))
    state, rid = nv.submit(model, state, [9] * 6, GREEDY)
    state, (out,) = nv.step(model, state)
    assert isinstance(out.error, nv.OutOfPagesError) and f"request {rid} failed: its 6 tokens do not fit" in str(out.error)
    assert not state.running and not state.waiting
    nv.check(state)
    assert nv.release(state, chunk).pool.num_available == 4


def test_check_refuses_a_donated_state():
    model = random_model(tiny_config())
    old = nv.init_state(model, num_pages=4)
    state, _ = nv.prefill(model, old, [1, 2])
    nv.check(state)
    with pytest.raises(nv.DonatedStateError):
        nv.check(old)


def test_the_same_weights_in_another_form_are_refused(model: nv.Model, state: nv.EngineState) -> None:
    """The fingerprint is of the weights. KV of another dtype or of other rotations does not fit either."""
    turned = replace(model, config=replace(model.config, rope=RopeConfig(theta=500.0)))
    for other in (random_model(tiny_config(), 0, "bfloat16"), turned):
        assert other.fingerprint == model.fingerprint
        with pytest.raises(nv.InvalidRequestError, match="is not the model of this state"):
            nv.prefill(other, state, PROMPT)
    nv.prefill(model, state, PROMPT)


def test_the_decode_carry_is_loaded_again_after_a_failed_call(model: nv.Model, state: nv.EngineState) -> None:
    """The failed call may have advanced the carry in place, although it took no pages."""
    state, _ = nv.submit(model, state, PROMPT, GREEDY)
    for _ in range(2):
        state, _ = nv.step(model, state)
    assert enter(state).loaded is not None
    with pytest.raises(KeyboardInterrupt), guarded(state):
        raise KeyboardInterrupt
    assert state.runtime.lease.lost == frozenset()
    assert state.loaded is not None and enter(state).loaded is None
    state, _ = nv.step(model, state)
    assert enter(state).loaded is not None
