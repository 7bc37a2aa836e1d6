"""What a CPU cannot show of steps in a caller's program: memory that captured functions share, tensors that are written in place."""

from typing import Any

import pytest
import torch

import nanovllm as nv
from tests.gpu.small import random_prompts, require_same, small_model

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")]  # torch.compile warns when it starts

GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LIMITS: dict[str, Any] = {"num_pages": 256, "page_size": 16, "max_num_seqs": 12, "max_num_batched_tokens": 64, "max_model_len": 256}


@pytest.fixture(scope="module")
def model() -> nv.Model:
    return small_model()


@pytest.fixture(scope="module")
def contexts(model: nv.Model) -> list[list[int]]:
    return random_prompts(model, 5, 16, 33)


def require_replies(model: nv.Model, state: nv.EngineState, contexts: list[list[int]], gens: list[nv.Generation], count: int) -> None:
    _, want = nv.generate_many(model, state, contexts, GREEDY)
    for prompt, a, b in zip(contexts, gens, want, strict=True):
        require_same(model, prompt, a.token_ids, b.token_ids[:count], LIMITS)


def test_functions_of_one_memory_hold_one_session(model: nv.Model, contexts: list[list[int]]):
    """Two functions that were captured from one carry write the same memory: the session of one must not be lost to the other."""
    state = nv.init_state(model, **LIMITS)
    state, first = nv.begin(model, state, contexts, GREEDY, room=4)
    one = nv.capture(lambda carry: nv.decode_step(model.params, carry, model.config)[0], first)
    two = nv.capture(lambda carry: nv.decode_step(model.params, carry, model.config), first)
    first, _ = two(one(first))
    state, _ = nv.commit(model, state, first)
    state, second = nv.begin(model, state, contexts, GREEDY, room=4)
    state, third = nv.begin(model, state, contexts, GREEDY, room=4)
    second = one(second)
    with pytest.raises(nv.InvalidRequestError, match="is in the memory of this function: commit it first"):
        two(third)
    for _ in range(3):
        second, _ = two(second)
    state, gens = nv.commit(model, state, second)
    require_replies(model, nv.init_state(model, **LIMITS), contexts, gens, 4)
    for _ in range(4):
        third = one(third)
    state, gens = nv.commit(model, state, third)
    require_replies(model, nv.init_state(model, **LIMITS), contexts, gens, 4)
    nv.check(state)


@torch.no_grad()
@pytest.mark.parametrize("how", ["eager", "compiled", "reduced", "captured", "generate"])
def test_carried_tensors_may_be_exchanged(model: nv.Model, contexts: list[list[int]], how: str):
    """All that a processor returns is read before what it carries is written in place."""
    vocab = model.config.vocab_size

    def delayed(logits: torch.Tensor, tokens: nv.TokensSoFar, carried: Any) -> Any:
        newest, older, late = carried
        return late, (tokens.last(), newest, (logits.float() + 0.01 * older.unsqueeze(1) * (newest.unsqueeze(1) % 7)).to(logits.dtype))

    def first(tokens: nv.TokensSoFar) -> Any:
        zeros = torch.zeros(1, dtype=torch.int32, device=model.device).expand(len(tokens.lengths))
        return zeros, zeros, torch.zeros(len(tokens.lengths), vocab, dtype=model.dtype, device=model.device)

    processor = nv.LogitsProcessor(delayed, first)

    def run(steps: int, how: str) -> list[list[int]]:
        state = nv.init_state(model, **LIMITS)
        if how == "generate":
            state, gens = nv.generate_many(model, state, contexts, GREEDY, process_logits=processor)
            return [gen.token_ids[:steps] for gen in gens]
        state, carry = nv.begin(model, state, contexts, GREEDY, room=steps, process_logits=processor)

        def step(params: Any, carry: nv.DecodeCarry) -> nv.DecodeCarry:
            return nv.decode_step(params, carry, model.config)[0]

        turn: Any = step
        if how in ("compiled", "reduced"):
            turn = torch.compile(step, fullgraph=True, mode="reduce-overhead" if how == "reduced" else None)
        if how == "captured":
            captured = nv.capture(lambda carry: step(model.params, carry), carry)
            turn = lambda params, carry: captured(carry)  # noqa: E731
        for _ in range(steps):
            carry = turn(model.params, carry)
        state, gens = nv.commit(model, state, carry)
        nv.check(state)
        return [gen.token_ids for gen in gens]

    want, got = run(8, "eager"), run(8, how)
    # The first token comes from logits of zeros, the second from the first logits; kernels round otherwise, and a text goes on from a tie.
    assert [row[:2] for row in got] == [row[:2] for row in want]
    assert sum(a == b for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True)) >= 16


def test_a_loop_may_begin_with_prompts_and_return_whole_outputs(model: nv.Model, contexts: list[list[int]]):
    state = nv.init_state(model, **LIMITS)
    state, carry = nv.begin(model, state, contexts, GREEDY, room=8, fill=False)
    with pytest.raises(nv.InvalidRequestError, match="run the first step as it is"):
        nv.capture(lambda carry: nv.decode_step(model.params, carry, model.config), carry)
    carry, out = nv.decode_loop(model, state, carry, 8, lambda carry: nv.decode_step(model.params, carry, model.config))
    assert tuple(out.logits.shape) == (8, 3, model.config.vocab_size) and out.logprobs is None
    state, gens = nv.commit(model, state, carry)
    assert [gen.token_ids for gen in gens] == out.token_ids.T.tolist()
    require_replies(model, nv.init_state(model, **LIMITS), contexts, gens, 8)
    nv.check(state)


def test_a_capture_of_several_splits_leaves_the_carry(model: nv.Model):
    prompts = random_prompts(model, 20, 36, 5)

    def body(carry: nv.DecodeCarry) -> nv.DecodeCarry:
        for _ in range(2):
            carry, _ = nv.decode_step(model.params, carry, model.config)
            carry = nv.split_rows(carry, torch.tensor([1, 2, 0], device=model.device))
        return carry

    state = nv.init_state(model, **LIMITS)
    state, carry = nv.begin(model, state, prompts, GREEDY, room=7, branching=True)
    carry, _ = nv.decode_step(model.params, carry, model.config)
    before = [pool.clone() for pool in carry.kv.pools]
    last = carry.batch.page_tables.gather(1, (carry.batch.seq_lens.long() - 1).unsqueeze(1) // 16).squeeze(1).long()
    parents = torch.tensor([1, 2, 0], device=model.device)  # made outside, because a graph holds no copy from the host

    def on_device(carry: nv.DecodeCarry) -> nv.DecodeCarry:
        for _ in range(2):
            carry, _ = nv.decode_step(model.params, carry, model.config)
            carry = nv.split_rows(carry, parents)
        return carry

    step = nv.capture(on_device, carry)
    for pool, old in zip(carry.kv.pools, before, strict=True):
        assert torch.equal(pool[:, last], old[:, last])
    for _ in range(3):
        carry = step(carry)
    state, gens = nv.commit(model, state, carry)
    nv.check(state)
    plain = nv.init_state(model, **LIMITS)
    plain, want = nv.begin(model, plain, prompts, GREEDY, room=7, branching=True)
    want, _ = nv.decode_step(model.params, want, model.config)
    for _ in range(3):
        want = body(want)
    plain, replies = nv.commit(model, plain, want)
    for prompt, a, b in zip((prompts[0], prompts[1], prompts[2]), gens, replies, strict=True):
        require_same(model, prompt, a.token_ids, b.token_ids, LIMITS)


def test_a_split_before_any_step_leaves_shared_full_pages(model: nv.Model):
    """The contexts fill their pages, which a chunk owns too."""
    ids = random_prompts(model, 1, 32, 33)[0][:32]
    state, chunk = nv.prefill(model, nv.init_state(model, **LIMITS), ids)
    before = [pool[:, list(chunk.pages)].clone() for pool in state.kv.pools]
    state, carry = nv.begin(model, state, [chunk, chunk], GREEDY, room=4, branching=True)

    def body(carry: nv.DecodeCarry) -> nv.DecodeCarry:
        return nv.split_rows(nv.decode_step(model.params, carry, model.config)[0], torch.zeros_like(carry.active))

    carry = nv.split_rows(carry, torch.tensor([1, 0], device=model.device))
    carry = nv.split_rows(carry, torch.tensor([0, 0], device=model.device))
    run = nv.capture(body, carry)
    for _ in range(3):
        carry = run(carry)
    state, gens = nv.commit(model, state, carry)
    nv.check(state)
    assert all(map(torch.equal, before, [pool[:, list(chunk.pages)] for pool in state.kv.pools]))
    _, alone = nv.generate(model, nv.init_state(model, **LIMITS), ids, GREEDY)
    for gen in gens:
        require_same(model, ids, gen.token_ids, alone.token_ids[:3], LIMITS)


def test_alternatives_and_the_table_of_tokens_of_processed_requests(model: nv.Model, contexts: list[list[int]]):
    params = nv.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3)
    state, gens = nv.generate_many(model, nv.init_state(model, **LIMITS), contexts, params, process_logits=lambda logits: -logits)
    for gen in gens:
        assert gen.logprobs is not None and [entry.top[0][0] for entry in gen.logprobs] == gen.token_ids
        assert all(len(entry.top) == 3 for entry in gen.logprobs)

    def quoting(logits: torch.Tensor, tokens: nv.TokensSoFar, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        prompt = torch.zeros_like(logits, dtype=torch.int32).scatter_add(1, tokens.token_ids.long(), first.int())
        return logits.masked_fill(prompt == 0, -torch.inf), first

    processor, prompt_of = nv.LogitsProcessor(quoting, lambda tokens: tokens.valid()), {}
    for prompt in contexts:
        state, rid = nv.submit(model, state, prompt, params, process_logits=processor)
        prompt_of[rid] = prompt
        state, _ = nv.step(model, state)
    replies = {}
    while state.running or state.waiting:
        state, outputs = nv.step(model, state)
        replies |= {out.request_id: out.output.token_ids for out in outputs if out.output is not None}
    assert all(len(replies[rid]) == 6 and set(replies[rid]) <= set(prompt) for rid, prompt in prompt_of.items())
