"""`decode_loop`: the tokens of single steps, stops of rows, and what is refused."""

from typing import Any

import pytest
import torch

import nanovllm as nv
from nanovllm.testing.models import random_model, tiny_config

MODEL = random_model(tiny_config(vocab_size=50), 0)
GREEDY = nv.SamplingParams(temperature=0, ignore_eos=True, max_tokens=12)
CONTEXTS = [[1, 2, 3, 4, 5, 6, 7], [9], [8, 7, 6, 5]]


def engine() -> nv.EngineState:
    return nv.init_state(MODEL, num_pages=64, page_size=4, max_num_seqs=8)


def plain() -> list[list[int]]:
    _, gens = nv.generate_many(MODEL, engine(), CONTEXTS, GREEDY)
    return [gen.token_ids for gen in gens]


def test_a_loop_is_its_steps():
    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=12)
    carry, first = nv.decode_loop(MODEL, state, carry, 5)
    carry, second = nv.decode_loop(MODEL, state, carry, 7)
    assert torch.cat((first, second)).T.tolist() == plain()
    state, gens = nv.commit(MODEL, state, carry)
    assert [gen.token_ids for gen in gens] == plain()
    nv.check(state)


def test_a_body_may_return_any_tree():
    def body(carry: nv.DecodeCarry) -> tuple[nv.DecodeCarry, dict[str, Any]]:
        carry, out = nv.decode_step(MODEL.params, carry, MODEL.config)
        carry, more = nv.decode_step(MODEL.params, carry, MODEL.config)
        return carry, {"pair": (out.token_ids, more.token_ids), "best": more.logits.amax(1)}

    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=6)
    carry, ys = nv.decode_loop(MODEL, state, carry, 3, body)
    assert tuple(ys["best"].shape) == (3, 3)
    assert torch.stack(ys["pair"], 1).flatten(0, 1).T.tolist() == [row[:6] for row in plain()]
    state, _ = nv.commit(MODEL, state, carry)


@pytest.mark.parametrize("steps", [2, 12])
def test_rows_stop_by_themselves_and_the_loop_ends_with_the_last(steps: int):
    whole = plain()
    stops = torch.tensor([row[k] for row, k in zip(whole, (0, 3, 1), strict=True)])
    ends = [row.index(stop) + 1 for row, stop in zip(whole, stops.tolist(), strict=True)]
    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=12)
    carry, tokens = nv.decode_loop(MODEL, state, carry, steps, until=lambda tokens: tokens == stops)
    assert tuple(tokens.shape) == (steps, 3)
    assert not tokens[max(ends) :].any()
    for row, (ids, end) in enumerate(zip(whole, ends, strict=True)):
        assert tokens[: min(end, steps), row].tolist() == ids[: min(end, steps)]
    state, gens = nv.commit(MODEL, state, carry)
    nv.check(state)
    for gen, ids, end, context in zip(gens, whole, ends, CONTEXTS, strict=True):
        assert gen.token_ids == ids[: min(end, steps)]
        assert gen.finish_reason == ("stop" if end <= steps else "length")
        state, more = nv.generate(MODEL, state, gen.chunk, nv.SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        _, want = nv.generate(MODEL, engine(), context + gen.token_ids, nv.SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        assert more.token_ids == want.token_ids


@pytest.mark.usefixtures("untyped")
def test_what_is_refused_leaves_the_carry_usable():
    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=3)
    for steps in (0, -1, True, 1.5, None):
        with pytest.raises(nv.InvalidRequestError, match="must be an integer of at least 1"):
            nv.decode_loop(MODEL, state, carry, steps)
    with pytest.raises(nv.InvalidRequestError, match="steps=4 exceed"):
        nv.decode_loop(MODEL, state, carry, 4)
    other, _ = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=3)
    with pytest.raises(nv.InvalidRequestError, match="began in another engine"):
        nv.decode_loop(MODEL, other, carry, 1)
    with pytest.raises(nv.InvalidRequestError, match="must be a DecodeCarry"):
        nv.decode_loop(MODEL, state, None, 1)
    later, _ = nv.decode_loop(MODEL, state, carry, 1)
    with pytest.raises(nv.DonatedStateError):
        nv.decode_loop(MODEL, state, carry, 1)
    state, _ = nv.commit(MODEL, state, later)
    nv.check(state)


@pytest.mark.compile
def test_a_loop_traces():
    whole = plain()
    stop = whole[0][2]

    def loop(params: Any, carry: nv.DecodeCarry) -> tuple[nv.DecodeCarry, torch.Tensor]:
        def body(carry: nv.DecodeCarry) -> tuple[nv.DecodeCarry, torch.Tensor]:
            carry, out = nv.decode_step(params, carry, MODEL.config)
            return carry, out.token_ids

        return nv.decode_loop(MODEL, state, carry, 4, body, until=lambda tokens: tokens == stop)

    found = []
    for run in (loop, torch.compile(loop, fullgraph=True)):
        state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=8)
        rows = []
        for _ in range(2):
            carry, tokens = run(MODEL.params, carry)
            rows.append(tokens)
        state, gens = nv.commit(MODEL, state, carry)
        nv.check(state)
        found.append((torch.cat(rows).tolist(), [gen.token_ids for gen in gens]))
    assert found[0] == found[1]
    assert found[0][1][0] == whole[0][: whole[0].index(stop) + 1]


@pytest.mark.usefixtures("untyped")
def test_a_step_may_be_the_body():
    """Its output has fields that are None."""

    def step(carry: nv.DecodeCarry) -> tuple[nv.DecodeCarry, nv.DecodeOutput]:
        return nv.decode_step(MODEL.params, carry, MODEL.config)

    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=12)
    carry, out = nv.decode_loop(MODEL, state, carry, 4, step)
    carry, more = nv.decode_loop(MODEL, state, carry, 4, step, until=lambda out: out.token_ids >= 0)
    assert out.token_ids.T.tolist() == [row[:4] for row in plain()] and tuple(out.logits.shape) == (4, 3, 50)
    assert out.logprobs is None and more.logprobs is None
    assert more.token_ids[0].tolist() == [row[4] for row in plain()] and not more.token_ids[1:].any()
    state, gens = nv.commit(MODEL, state, carry)
    assert [gen.token_ids for gen in gens] == [row[:5] for row in plain()]
    nv.check(state)


@pytest.mark.parametrize(
    ("body", "until", "message"),
    [
        (lambda carry: nv.decode_step(MODEL.params, carry, MODEL.config)[0], None, "body returns DecodeCarry: it must return the next"),
        (lambda carry: (1, 2), None, "body returns tuple"),
        (lambda carry: None, lambda row: row, "body returns NoneType"),
        (None, lambda tokens: (tokens == 0).all(), r"until returns bool\[\] on cpu: it must return bool \[3\], one for each row"),
        (None, lambda tokens: (tokens == 0).unsqueeze(1), r"until returns bool\[3, 1\] on cpu"),
        (None, lambda tokens: tokens, r"until returns int32\[3\] on cpu"),
        (None, lambda tokens: True, "until returns True"),
    ],
)
@pytest.mark.usefixtures("untyped")
def test_results_of_another_form_are_refused(body: Any, until: Any, message: str):
    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=3)
    with pytest.raises(nv.InvalidRequestError, match=message):
        nv.decode_loop(MODEL, state, carry, 2, body, until=until)


@pytest.mark.parametrize("until", [None, lambda tokens: tokens < 0], ids=["plain", "until"])
def test_the_first_step_may_run_prompts(until: Any):
    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=12, fill=False)
    carry, tokens = nv.decode_loop(MODEL, state, carry, 12, until=until)
    assert tokens.T.tolist() == plain()
    state, _ = nv.commit(MODEL, state, carry)
    nv.check(state)


def test_a_loop_takes_no_more_steps_than_its_rows():
    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=12)
    carry, tokens = nv.decode_loop(MODEL, state, carry, 6, until=lambda tokens: tokens >= 0)
    assert carry.log is not None and int(carry.log.num_steps) == 1 and not tokens[1:].any()
    carry, tokens = nv.decode_loop(MODEL, state, carry, 6, until=lambda tokens: tokens >= 0)
    assert carry.log is not None and int(carry.log.num_steps) == 2 and not tokens.any()  # results of rows that have stopped are zeros
    state, gens = nv.commit(MODEL, state, carry)
    assert [gen.token_ids for gen in gens] == [row[:1] for row in plain()]
    nv.check(state)
