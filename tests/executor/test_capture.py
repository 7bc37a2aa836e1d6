"""`capture` on a CPU, where no graph is made: the checks of a carry and of inputs, and what a trial run leaves behind."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import nanovllm as nv
from nanovllm.executor.session_lease import SessionLease
from nanovllm.testing.models import random_model, tiny_config

MODEL = random_model(tiny_config(vocab_size=50), 0)
WINDOWED = random_model(tiny_config(vocab_size=50, windows=(8, 0)), 0)
GREEDY = nv.SamplingParams(temperature=0, ignore_eos=True)
CONTEXTS = [[1, 2, 3, 4, 5, 6, 7], [9], [8, 7, 6, 5]]


def engine(model: nv.Model = MODEL) -> nv.EngineState:
    return nv.init_state(model, num_pages=64, page_size=4, max_num_seqs=8)


def step(carry: nv.DecodeCarry) -> tuple[nv.DecodeCarry, torch.Tensor]:
    carry, out = nv.decode_step(MODEL.params, carry, MODEL.config)
    return carry, out.token_ids


def forced(carry: nv.DecodeCarry, token_ids: torch.Tensor, scale: float = 1.0) -> nv.DecodeCarry:
    return nv.decode_step(MODEL.params, carry, MODEL.config, token_ids=token_ids)[0]


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int32)


def test_what_a_step_and_a_capture_cannot_take_is_named(untyped: None):
    state = engine()
    with pytest.raises(
        nv.InvalidRequestError, match=r"room=300 exceeds .* of 256 tokens per request: room may be at most 249; max_model_len"
    ):
        nv.begin(MODEL, engine(), CONTEXTS[:1], GREEDY, room=300)
    state, carry = nv.begin(MODEL, state, CONTEXTS, GREEDY, room=3)
    wrong: Any = state.config
    with pytest.raises(nv.InvalidRequestError, match="must be a ModelConfig: pass"):
        nv.decode_step(MODEL.params, carry, wrong)
    both: Any = lambda logits, tokens: logits  # noqa: E731
    with pytest.raises(nv.InvalidRequestError, match=r"it must take the logits alone: give begin\(..., process_logits=...\)"):
        nv.decode_step(MODEL.params, carry, MODEL.config, process_logits=both)
    number: Any = 3
    with pytest.raises(nv.InvalidRequestError, match="function=3 must be a function of a carry"):
        nv.capture(number, carry)
    carry, _ = nv.decode_step(MODEL.params, carry, MODEL.config)  # nothing was donated
    nv.commit(MODEL, state, carry)


@pytest.mark.parametrize("model", [MODEL, WINDOWED], ids=["plain", "windowed"])
def test_a_trial_with_two_splits_leaves_the_pages_of_the_carry(model: nv.Model):
    """After the first split the last page of each row is spare, and the second split writes into it."""

    def body(carry: nv.DecodeCarry) -> nv.DecodeCarry:
        for _ in range(2):
            carry, _ = nv.decode_step(model.params, carry, model.config)
            carry = nv.split_rows(carry, torch.tensor([1, 2, 0]))
        return carry

    found = []
    for captured in (False, True):
        state, carry = nv.begin(model, engine(model), CONTEXTS, GREEDY, room=7, branching=True)
        carry, _ = nv.decode_step(model.params, carry, model.config)
        run = nv.capture(body, carry) if captured else body
        for _ in range(3):
            carry = run(carry)
        state, made = nv.commit(model, state, carry)
        nv.check(state)
        found.append([one.token_ids for one in made])
    assert found[0] == found[1]


def test_a_trial_that_fails_leaves_the_pages_too():
    def body(carry: nv.DecodeCarry) -> nv.DecodeCarry:
        for _ in range(2):
            carry = nv.split_rows(step(carry)[0], torch.tensor([1, 2, 0]))
        raise ValueError("no")

    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=7, branching=True)
    carry, _ = step(carry)
    before = [pool.clone() for pool in carry.kv.pools]
    kept = carry.batch.page_tables.gather(1, (carry.batch.seq_lens.long() - 1).unsqueeze(1) // 4).squeeze(1).long()
    with pytest.raises(ValueError, match="no"):
        nv.capture(body, carry)
    for pool, old in zip(carry.kv.pools, before, strict=True):
        assert torch.equal(pool[:, kept], old[:, kept])
    state, _ = nv.commit(MODEL, state, carry)


def test_several_steps_need_their_room_together():
    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=3)
    twice = nv.capture(lambda carry: step(step(carry)[0]), carry)
    carry, _ = twice(carry)
    with pytest.raises(nv.InvalidRequestError, match="has seen 2 steps and its session has room=3"):
        twice(carry)
    carry, _ = step(carry)  # which the refused call has left
    state, made = nv.commit(MODEL, state, carry)
    assert [len(one.token_ids) for one in made] == [3, 3, 3]


@pytest.mark.usefixtures("untyped")
def test_inputs_and_carries_like_those_of_the_capture():
    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=4)
    run = nv.capture(forced, carry, ids(1, 2, 3), 1.0)
    for inputs, message in (
        ((), "built in another way"),
        ((ids(1, 2), 1.0), r"input 0 is torch.int32 \[2\], but was torch.int32 \[3\]"),
        ((ids(1, 2, 3).long(), 1.0), r"input 0 is torch.int64 \[3\]"),
        ((ids(1, 2, 3), 2.0), "input 1 is 2.0, but was 1.0 at the capture: pass values that change as tensors"),
        ((ids(1, 2, 3), ids(1)), "input 1 is tensor"),
        ((5, 1.0), "input 0 is 5, but was torch.int32"),
    ):
        with pytest.raises(nv.InvalidRequestError, match=message):
            run(carry, *inputs)
    state, narrow = nv.begin(MODEL, state, CONTEXTS[:2], GREEDY, room=4)
    with pytest.raises(nv.InvalidRequestError, match="has other shapes, options or plans than the captured carry"):
        run(narrow, ids(1, 2, 3), 1.0)
    state, hot = nv.begin(MODEL, state, CONTEXTS, nv.SamplingParams(temperature=1, seed=1, ignore_eos=True), room=4)
    with pytest.raises(nv.InvalidRequestError, match="has other shapes, options or plans"):
        run(hot, ids(1, 2, 3), 1.0)
    _, foreign = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=4)
    with pytest.raises(nv.InvalidRequestError, match="other KV memory"):
        run(foreign, ids(1, 2, 3), 1.0)
    with pytest.raises(nv.InvalidRequestError, match="must be a DecodeCarry"):
        run(None, ids(1, 2, 3), 1.0)
    for token in range(4):
        carry = run(carry, ids(token, token, token), 1.0)
    state, made = nv.commit(MODEL, state, carry)
    assert [one.token_ids for one in made] == [[0, 1, 2, 3]] * 3
    for other in (narrow, hot):
        state, _ = nv.commit(MODEL, state, other)
    nv.check(state)


def test_a_captured_function_holds_its_processor():
    def doubled(logits: torch.Tensor) -> torch.Tensor:
        return logits * 2

    def negated(logits: torch.Tensor) -> torch.Tensor:
        return -logits

    state = engine()
    state, carry = nv.begin(MODEL, state, CONTEXTS, GREEDY, room=2, process_logits=doubled)
    state, same = nv.begin(MODEL, state, CONTEXTS, GREEDY, room=2, process_logits=doubled)
    state, other = nv.begin(MODEL, state, CONTEXTS, GREEDY, room=2, process_logits=negated)
    run = nv.capture(step, carry)
    same, _ = run(same)
    with pytest.raises(nv.InvalidRequestError, match="has other shapes, options or plans"):
        run(other)
    for one in (carry, same, other):
        state, _ = nv.commit(MODEL, state, one)
    nv.check(state)


@pytest.mark.usefixtures("untyped")
def test_what_cannot_be_captured_leaves_the_carry():
    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=4)

    def stops(carry: nv.DecodeCarry) -> nv.DecodeCarry:
        carry.active.zero_()
        return step(carry)[0]

    def penalises(carry: nv.DecodeCarry) -> nv.DecodeCarry:
        carry.batch.page_tables.add_(0)
        return step(carry)[0]

    def narrows(carry: nv.DecodeCarry) -> nv.DecodeCarry:
        carry, _ = step(carry)
        return replace(carry, active=carry.active[:2])

    def plans(carry: nv.DecodeCarry) -> nv.DecodeCarry:
        carry, _ = step(carry)
        return replace(carry, batch=replace(carry.batch, plan=2))

    refused: list[tuple[Any, type[Exception], str]] = [
        (stops, nv.CaptureError, r"stops \(test_capture.py, line \d+\) changed carry.active in place"),
        (penalises, nv.CaptureError, "changed carry.batch.page_tables in place"),
        (narrows, nv.CaptureError, "returns a carry of other shapes or another structure"),
        (plans, nv.CaptureError, "returns a carry of other shapes or another structure"),
        (lambda carry: step(carry)[1], nv.InvalidRequestError, "the function returns Tensor"),
        (lambda carry: None, nv.InvalidRequestError, "the function returns NoneType"),
    ]
    for function, error, message in refused:
        with pytest.raises(error, match=message):
            nv.capture(function, carry)
    with pytest.raises(nv.InvalidRequestError, match="must be a DecodeCarry"):
        nv.capture(step, None)
    assert int(carry.log.ran) == 0
    for _ in range(4):
        carry, _ = step(carry)
    state, made = nv.commit(MODEL, state, carry)
    _, want = nv.generate_many(MODEL, engine(), CONTEXTS, nv.SamplingParams(temperature=0, ignore_eos=True, max_tokens=4))
    assert [one.token_ids for one in made] == [one.token_ids for one in want]


def test_a_change_in_place_after_the_trial_is_found():
    _, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=4)
    late = [False]

    def body(carry: nv.DecodeCarry) -> nv.DecodeCarry:
        if late[0]:
            carry.active.zero_()
        return step(carry)[0]

    run = nv.capture(body, carry)
    late[0] = True
    with pytest.raises(nv.CaptureError, match=r"changed carry.active in place"):
        run(carry)


def test_inference_mode_around_everything():
    """Its tensors do not count the writes to them, by which the host sees a step that it does not know."""
    with torch.inference_mode():
        state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=4)
        run, used = nv.capture(step, carry), carry
        for turn in (run, step, run, step):
            used, (carry, _) = carry, turn(carry)
            with pytest.raises(nv.DonatedStateError):
                step(used)
        state, made = nv.commit(MODEL, state, carry)
    _, want = nv.generate_many(MODEL, engine(), CONTEXTS, nv.SamplingParams(temperature=0, ignore_eos=True, max_tokens=4))
    assert [one.token_ids for one in made] == [one.token_ids for one in want]
    nv.check(state)


# The lease by itself


def test_a_lease_knows_the_newest_carry_until_something_writes():
    lease, ran, newest = SessionLease(session=1), torch.tensor(0), torch.tensor(0)
    assert not lease.knows(newest, [ran])
    lease.note(newest, [ran], 3)
    assert lease.knows(newest, [ran]) and lease.num_steps == 3
    assert not lease.knows(torch.tensor(0), [ran])
    ran.add_(1)
    assert not lease.knows(newest, [ran])
    lease.note(newest, [ran], 4)
    assert lease.knows(newest, [ran])


def test_every_counter_of_a_lease_counts():
    lease, ran, splits, newest = SessionLease(session=1), torch.tensor(0), torch.tensor(0), torch.tensor(0)
    lease.note(newest, [ran, splits], 0)
    splits.add_(1)
    assert not lease.knows(newest, [ran, splits])


def test_a_lease_of_tensors_without_versions_knows_nothing():
    with torch.inference_mode():
        ran, newest = torch.tensor(0), torch.tensor(0)
    lease = SessionLease(session=1)
    lease.note(newest, [ran], 2)
    assert not lease.knows(newest, [ran]) and lease.num_steps == 2


def test_a_lease_keeps_no_carry_alive():
    lease, ran, newest = SessionLease(session=1), torch.tensor(0), torch.tensor(0)
    lease.note(newest, [ran], 0)
    del newest
    assert not lease.knows(torch.tensor(0), [ran])


def test_shared_memory_is_of_the_newest_carry_alone():
    lease, ran, memory = SessionLease(session=1), torch.tensor(0), torch.tensor(0)
    first, second, other = memory.view(()), memory.view(()), torch.tensor(0)
    lease.note(first, [ran], 0)
    assert not lease.outdated(second)  # nothing is shared yet
    lease.share([memory])
    assert lease.outdated(second) and not lease.outdated(first) and not lease.outdated(other)
    lease.note(second, [ran], 1)
    assert lease.outdated(first) and not lease.outdated(second)
