"""Steps in a caller's program on a GPU: captured, compiled and eager steps in any order; errors of captures; splits; loops."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import nanovllm as nv
from tests.gpu.small import random_prompts, require_same, small_model

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")]  # torch.compile warns when it starts

GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LIMITS: dict[str, Any] = {"num_pages": 256, "page_size": 16, "max_num_seqs": 12, "max_num_batched_tokens": 64, "max_model_len": 256}


@pytest.fixture(scope="module")
def model() -> nv.Model:
    return small_model()


@pytest.fixture(scope="module")
def contexts(model: nv.Model) -> list[list[int]]:
    return random_prompts(model, 5, 16, 33)


def kinds(model: nv.Model, carry: nv.DecodeCarry) -> dict[str, Callable[[nv.DecodeCarry], nv.DecodeCarry]]:
    def step(carry: nv.DecodeCarry) -> nv.DecodeCarry:
        return nv.decode_step(model.params, carry, model.config)[0]

    def with_params(params: Any, carry: nv.DecodeCarry) -> nv.DecodeCarry:
        return nv.decode_step(params, carry, model.config)[0]

    compiled = torch.compile(with_params, fullgraph=True)
    reduced = torch.compile(with_params, fullgraph=True, mode="reduce-overhead")
    captured = nv.capture(step, carry)
    inside = nv.capture(lambda carry: compiled(model.params, carry), carry)
    return {
        "eager": step,
        "compiled": lambda carry: compiled(model.params, carry),
        "reduced": lambda carry: reduced(model.params, carry),
        "captured": captured,
        "compiled and captured": inside,
    }


ORDERS = {
    "captured alone": ["captured"] * 20,
    "reduced alone": ["reduced"] * 20,
    "compiled alone": ["compiled"] * 20,
    "compiled and captured": ["compiled and captured"] * 20,
    "all in turn": [
        *("compiled and captured", "captured", "reduced", "compiled", "captured", "eager", "eager", "compiled", "compiled"),
        "captured",
        "captured",
        "eager",
        "captured",
        "compiled",
        "eager",
        "reduced",
        "reduced",
        "reduced",
        "captured",
        "captured",
    ],
}


@torch.no_grad()
@pytest.mark.parametrize("order", list(ORDERS.values()), ids=list(ORDERS))
def test_any_order_of_steps_gives_the_tokens_of_generate(model: nv.Model, contexts: list[list[int]], order: list[str]):
    state = nv.init_state(model, **LIMITS)
    state, want = nv.generate_many(model, state, contexts, GREEDY)
    for _ in range(2):  # a second session has other memory
        state, carry = nv.begin(model, state, contexts, GREEDY, room=len(order))
        steps = kinds(model, carry)
        for kind in order:
            carry = steps[kind](carry)
        state, gens = nv.commit(model, state, carry)
        nv.check(state)
        for prompt, a, b in zip(contexts, gens, want, strict=True):
            require_same(model, prompt, a.token_ids, b.token_ids[: len(order)], LIMITS)


def test_a_captured_function_is_pure_in_form(model: nv.Model, contexts: list[list[int]]):
    state = nv.init_state(model, **LIMITS)
    state, carry = nv.begin(model, state, contexts, GREEDY, room=8)
    first = carry
    step = nv.capture(lambda carry: nv.decode_step(model.params, carry, model.config), carry)
    outs, before = [], carry
    for _ in range(6):
        before, (carry, out) = carry, step(carry)
        outs.append(out)
    assert carry.log is not None
    tokens = torch.stack([out.token_ids for out in outs], 1)
    assert torch.equal(tokens.cpu(), carry.log.token_ids[:, :6].cpu())
    assert not torch.equal(outs[0].logits, outs[1].logits)
    for stale in (first, before):
        for use in (step, lambda stale: nv.decode_step(model.params, stale, model.config), lambda stale: nv.commit(model, state, stale)):
            with pytest.raises(nv.DonatedStateError):
                use(stale)
    carry, _ = step(step(carry)[0])
    with pytest.raises(nv.InvalidRequestError, match="has seen 8 steps and its session has room=8"):
        step(carry)
    state, gens = nv.commit(model, state, carry)
    nv.check(state)
    assert [gen.token_ids[:6] for gen in gens] == tokens.tolist()
    with pytest.raises(nv.DonatedStateError, match="committed"):
        step(carry)
    # the function serves the next session of the same shapes
    state, again = nv.begin(model, state, contexts, GREEDY, room=8)
    for _ in range(8):
        again, _ = step(again)
    state, gens_again = nv.commit(model, state, again)
    assert [gen.token_ids for gen in gens_again] == [gen.token_ids for gen in gens]
    nv.check(state)


def test_a_function_holds_one_session_at_a_time(model: nv.Model, contexts: list[list[int]]):
    state = nv.init_state(model, **LIMITS)
    state, one = nv.begin(model, state, contexts, GREEDY, room=4)
    step = nv.capture(lambda carry: nv.decode_step(model.params, carry, model.config)[0], one)
    state, other = nv.begin(model, state, contexts, GREEDY, room=4)
    one = step(one)
    with pytest.raises(nv.InvalidRequestError, match="is in the memory of this function: commit it first"):
        step(other)
    state, _ = nv.commit(model, state, step(one))
    state, _ = nv.commit(model, state, step(other))
    nv.check(state)


def test_errors_of_a_capture_name_the_line(model: nv.Model, contexts: list[list[int]]):
    state = nv.init_state(model, **LIMITS)
    state, carry = nv.begin(model, state, contexts, GREEDY, room=8)
    kept = []

    def waits(carry: nv.DecodeCarry) -> nv.DecodeCarry:
        carry, out = nv.decode_step(model.params, carry, model.config)
        assert out.token_ids.sum().item() >= 0  # this line waits
        return carry

    def allocates(carry: nv.DecodeCarry) -> nv.DecodeCarry:
        carry, out = nv.decode_step(model.params, carry, model.config)
        kept.append(out.token_ids + 1)
        return carry

    def sized(carry: nv.DecodeCarry) -> tuple[nv.DecodeCarry, torch.Tensor]:
        carry, out = nv.decode_step(model.params, carry, model.config)
        return carry, out.token_ids.nonzero()

    def changes(carry: nv.DecodeCarry) -> nv.DecodeCarry:
        carry.active.zero_()
        return nv.decode_step(model.params, carry, model.config)[0]

    def no_carry(carry: nv.DecodeCarry) -> torch.Tensor:
        return nv.decode_step(model.params, carry, model.config)[1].token_ids

    with pytest.raises(nv.CaptureError, match=r"test_capture_gpu.py, line \d+, `assert out.token_ids.sum\(\).item\(\) >= 0"):
        nv.capture(waits, carry)
    with pytest.raises(nv.CaptureError, match=r"test_capture_gpu.py, line \d+, `return carry, out.token_ids.nonzero\(\)`"):
        nv.capture(sized, carry)
    with pytest.raises(nv.CaptureError, match=r"allocates \(test_capture_gpu.py, line \d+\) keeps \d+ bytes"):
        nv.capture(allocates, carry)
    kept.clear()
    with pytest.raises(nv.CaptureError, match=r"changes .* changed carry.active in place"):
        nv.capture(changes, carry)
    with pytest.raises(nv.InvalidRequestError, match="the function returns Tensor"):
        nv.capture(no_carry, carry)
    step = nv.capture(lambda carry: nv.decode_step(model.params, carry, model.config)[0], carry)  # nothing is broken
    for _ in range(8):
        carry = step(carry)
    state, gens = nv.commit(model, state, carry)
    state, want = nv.generate_many(model, state, contexts, GREEDY)
    nv.check(state)
    for prompt, a, b in zip(contexts, gens, want, strict=True):
        require_same(model, prompt, a.token_ids, b.token_ids[:8], LIMITS)


def test_inputs_are_copied_in(model: nv.Model, contexts: list[list[int]]):
    state = nv.init_state(model, **LIMITS)
    text = torch.randint(0, model.config.vocab_size, (6, len(contexts)), dtype=torch.int32, device=model.device)

    def score(carry: nv.DecodeCarry, token_ids: torch.Tensor) -> tuple[nv.DecodeCarry, torch.Tensor | None]:
        carry, out = nv.decode_step(model.params, carry, model.config, token_ids=token_ids)
        return carry, out.logprobs

    found = []
    for captured in (False, True):
        state, carry = nv.begin(model, state, contexts, GREEDY, room=6)
        run = nv.capture(score, carry, text[0]) if captured else score
        rows = []
        if captured:
            with pytest.raises(nv.InvalidRequestError, match=r"input 0 is torch\.int32"):
                run(carry, text[0][:2])
        for token_ids in text:
            carry, logprobs = run(carry, token_ids)
            rows.append(logprobs)
        state, gens = nv.commit(model, state, carry)
        assert [gen.token_ids for gen in gens] == text.T.tolist()
        found.append(torch.stack(rows))
    torch.testing.assert_close(*found, rtol=0, atol=0.05)  # the second session's prompts run otherwise, since the index has their pages


@torch.no_grad()
@pytest.mark.parametrize("how", ["eager", "compiled", "reduced", "captured"])
@pytest.mark.parametrize("lengths", [(33, 33, 33), (5, 16, 33)])
def test_splits(model: nv.Model, how: str, lengths: tuple[int, ...]):
    prompts = [random_prompts(model, n)[0] for n in lengths]
    state = nv.init_state(model, **{**LIMITS, "num_pages": 512})
    state, carry = nv.begin(model, state, prompts, GREEDY, room=24, branching=True)
    draw = torch.Generator().manual_seed(3)
    given = torch.randint(0, model.config.vocab_size, (24, 3), generator=draw, dtype=torch.int32).cuda()
    parents = torch.randint(0, 3, (24, 3), generator=draw).cuda()

    def body(carry: nv.DecodeCarry, parents: torch.Tensor, token_ids: torch.Tensor) -> nv.DecodeCarry:
        carry, _ = nv.decode_step(model.params, carry, model.config)
        return nv.split_rows(carry, parents, token_ids)

    run: Any = body
    if how in ("compiled", "reduced"):
        run = torch.compile(body, fullgraph=True, mode="reduce-overhead" if how == "reduced" else None)
    if how == "captured":
        run = nv.capture(body, carry, parents[0], given[0])
    texts = [list(prompt) for prompt in prompts]
    for row, token_ids in zip(parents, given, strict=True):
        carry = run(carry, row, token_ids)
        texts = [texts[parent] + [token] for parent, token in zip(row.tolist(), token_ids.tolist(), strict=True)]
    state, gens = nv.commit(model, state, carry)
    nv.check(state)
    plain = nv.init_state(model, **LIMITS)
    for gen, text in zip(gens, texts, strict=True):
        assert gen.chunk.token_ids.tolist() == text
        state, more = nv.generate(model, state, gen.chunk, nv.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        plain, want = nv.generate(model, plain, text, nv.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        require_same(model, text, more.token_ids, want.token_ids, LIMITS)


def test_a_loop_with_a_stop_on_the_device(model: nv.Model, contexts: list[list[int]]):
    state = nv.init_state(model, **LIMITS)
    state, want = nv.generate_many(model, state, contexts, GREEDY)
    stop = want[0].token_ids[10]
    state, carry = nv.begin(model, state, contexts, GREEDY, room=24)
    carry, tokens = nv.decode_loop(model, state, carry, 24, until=lambda tokens: tokens == stop)
    state, gens = nv.commit(model, state, carry)
    nv.check(state)
    assert tuple(tokens.shape) == (24, 3)
    for gen, whole in zip(gens, want, strict=True):
        ids = whole.token_ids
        end = ids.index(stop) + 1 if stop in ids else len(ids)
        assert gen.token_ids == ids[:end] or len(gen.token_ids) <= 24
    state, carry = nv.begin(model, state, contexts[:1], GREEDY, room=200)
    carry, tokens = nv.decode_loop(model, state, carry, 200, until=lambda tokens: tokens >= 0)
    assert carry.log is not None and int(carry.log.num_steps) < 40 and tokens[1:].eq(0).all()
    state, (gen,) = nv.commit(model, state, carry)
    assert len(gen.token_ids) == 1
    nv.check(state)


def guided(logits: torch.Tensor) -> torch.Tensor:
    pairs = logits.float().unflatten(0, (-1, 2))
    return (pairs[:, :1] * 1.5 - pairs[:, 1:] * 0.5).expand_as(pairs).flatten(0, 1).to(logits.dtype)


def pushed(logits: torch.Tensor, tokens: nv.TokensSoFar, carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    place = (tokens.last().long() + carried).remainder(logits.shape[1]).unsqueeze(1)
    return logits.scatter_add(1, place, torch.full_like(place, 4, dtype=logits.dtype)), carried + 3


PUSHED = nv.LogitsProcessor(pushed, lambda tokens: tokens.lengths.long())


def test_a_function_that_mixes_rows(model: nv.Model, contexts: list[list[int]]):
    pairs = [*contexts, contexts[0][::-1]]
    eager = nv.init_state(model, compile=False, **LIMITS)
    eager, want = nv.generate_many(model, eager, pairs, GREEDY, process_logits=guided)
    state = nv.init_state(model, **LIMITS)
    for _ in range(3):  # later calls replay the first call's graph
        state, gens = nv.generate_many(model, state, pairs, GREEDY, process_logits=guided)
        nv.check(state)
        for row in (0, 2):
            assert gens[row].token_ids == gens[row + 1].token_ids
        same = sum(a.token_ids[:8] == b.token_ids[:8] for a, b in zip(gens, want, strict=True))
        assert same >= 2  # a tie may be drawn otherwise
        for gen in gens:
            state = nv.release(state, gen.chunk)
    assert len(state.runtime.executor._captured) == 1


def test_functions_of_submitted_requests(model: nv.Model, contexts: list[list[int]]):
    choices = [None, nv.LogitsProcessor(lambda logits: -logits), PUSHED]
    params = nv.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    want = []
    for prompt, processor in zip(contexts, choices, strict=True):
        eager = nv.init_state(model, compile=False, **LIMITS)
        eager, rid = nv.submit(model, eager, prompt, params, process_logits=processor)
        while eager.running or eager.waiting:
            eager, outs = nv.step(model, eager)
        want.append(outs[0].output.token_ids)
    for pages in (256, 9):
        state = nv.init_state(model, **{**LIMITS, "num_pages": pages})
        ids, got = [], {}
        for prompt, processor in zip(contexts, choices, strict=True):
            state, rid = nv.submit(model, state, prompt, params, process_logits=processor)
            ids.append(rid)
            for _ in range(2):
                state, outs = nv.step(model, state)
                got.update({out.request_id: out.output.token_ids for out in outs if out.output})
        while state.running or state.waiting:
            state, outs = nv.step(model, state)
            nv.check(state)
            got.update({out.request_id: out.output.token_ids for out in outs if out.output})
        same = [sum(a == b for a, b in zip(got[rid], tokens, strict=True)) for rid, tokens in zip(ids, want, strict=True)]
        assert same[1] >= 4 and same[2] >= 4 and sum(same) >= 40, same  # kernels round otherwise, and a text goes on from a tie


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma2ForCausalLM"])
def test_prompts_in_a_compiled_pipeline(architecture: str):
    model = small_model(architecture)
    contexts = random_prompts(model, 5, 16, 33)
    state = nv.init_state(model, **LIMITS)
    state, want = nv.generate_many(model, state, contexts, GREEDY)
    for chunk in (gen.chunk for gen in want):
        state = nv.release(state, chunk)

    def pipeline(params: Any, carry: nv.DecodeCarry) -> nv.DecodeCarry:
        for _ in range(4):
            carry, _ = nv.decode_step(params, carry, model.config)
        return carry

    compiled = torch.compile(pipeline, fullgraph=True)
    for run in (pipeline, compiled, compiled):
        fresh = nv.init_state(model, **LIMITS)
        fresh, carry = nv.begin(model, fresh, contexts, GREEDY, room=4, fill=False)
        fresh, _ = nv.prefill(model, fresh, list(range(40)))  # another batch of prompts does not disturb the plan
        with torch.no_grad():
            carry = run(model.params, carry)
        fresh, gens = nv.commit(model, fresh, carry)
        nv.check(fresh)
        for prompt, a, b in zip(contexts, gens, want, strict=True):
            require_same(model, prompt, a.token_ids, b.token_ids[:4], LIMITS)
