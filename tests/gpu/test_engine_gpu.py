"""The engine on a GPU: graphs equal eager steps, whatever the batch; compiled regions of the caller's; faults that only a GPU has."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import nanovllm as nv
from nanovllm.executor.cuda_graphs import batch_sizes
from nanovllm.executor.graph_executor import GraphExecutor
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.worlds import drain
from tests.gpu.small import random_prompts, require_same, small_model

pytestmark = pytest.mark.gpu

GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
LIMITS: dict[str, Any] = {"num_pages": 256, "page_size": 16, "max_num_seqs": 12, "max_num_batched_tokens": 64, "max_model_len": 256}


@pytest.fixture(scope="module")
def model() -> nv.Model:
    return small_model()


@pytest.fixture(scope="module")
def contexts(model: nv.Model) -> list[list[int]]:
    return random_prompts(model, 1, 5, 16, 17, 33, 64, 70, 100, 3)


def test_graphs_equal_eager_steps(model: nv.Model, contexts: list[list[int]]):
    eager = nv.init_state(model, compile=False, **LIMITS)
    eager, want = nv.generate_many(model, eager, contexts, GREEDY)
    graphs = nv.init_state(model, **LIMITS)
    assert isinstance(graphs.runtime.executor, GraphExecutor)
    address = graphs.kv.pools[0].data_ptr()
    graphs, got = nv.generate_many(model, graphs, contexts, GREEDY)
    nv.check(graphs)
    assert graphs.kv.pools[0].data_ptr() == address
    for prompt, a, b in zip(contexts, got, want, strict=True):
        require_same(model, prompt, a.token_ids, b.token_ids, LIMITS)


WIDE: dict[str, Any] = {"num_pages": 600, "page_size": 16, "max_num_seqs": 12, "max_num_batched_tokens": 1024, "max_model_len": 512}


def test_steps_of_bounded_time(model: nv.Model):
    """The bound is measured without a trace, and prompts that arrive while a reply goes on run in pieces."""
    prompts = random_prompts(model, 20, 450, 30, 430)
    unbounded = nv.init_state(model, **WIDE)
    unbounded, want = nv.generate_many(model, unbounded, prompts, GREEDY)
    for bound in ({"max_step_ms": 3.0}, {"max_prefill_tokens": 64}):
        state = nv.init_state(model, **WIDE, **bound)
        most = state.config.max_prefill_tokens
        assert most is not None and (most % 256 == 0 or "max_prefill_tokens" in bound)
        assert state.pages.num_free == WIDE["num_pages"]
        state, first = nv.submit(model, state, prompts[0], GREEDY)
        state, _ = nv.step(model, state)
        ids = [first]
        for prompt, priority in zip(prompts[1:], (0, -1, 1), strict=True):
            state, request_id = nv.submit(model, state, prompt, GREEDY, priority=priority)
            ids.append(request_id)
        replies: dict[int, list[int]] = {}
        while state.running or state.waiting:
            before = state.stats.prefill_tokens
            state, outputs = nv.step(model, state)
            assert first in replies or state.stats.prefill_tokens - before <= most
            replies.update({out.request_id: out.output.token_ids for out in outputs if out.output is not None})
        nv.check(state)
        for prompt, request_id, reply in zip(prompts, ids, want, strict=True):
            require_same(model, prompt, replies[request_id], reply.token_ids, WIDE)


def test_captured_prompts_equal_eager_ones(model: nv.Model):
    prompts = random_prompts(model, 150, 192, 193, 400, 130, 140, 160, 170, 180, 190, 129, 131)
    eager = nv.init_state(model, compile=False, **WIDE)
    eager, want = nv.generate_many(model, eager, prompts, GREEDY)
    for together in (False, True):
        state = nv.init_state(model, **WIDE)
        executor = state.runtime.executor
        assert isinstance(executor, GraphExecutor) and executor._short is not None and len(executor._short.kinds) == 11
        ran = []
        run = executor._short.run
        executor._short.run = lambda *args, run=run, ran=ran: ran.append(run(*args)) or ran[-1]
        got = []
        for batch in [prompts] if together else [[prompt] for prompt in prompts]:
            state, replies = nv.generate_many(model, state, batch, GREEDY)
            got += replies
        nv.check(state)
        assert any(logits is not None for logits in ran)
        for prompt, a, b in zip(prompts, got, want, strict=True):
            require_same(model, prompt, a.token_ids, b.token_ids, WIDE)
        # Tokens after a chunk, by graphs that start behind filled pages.
        more = random_prompts(model, 250)[0]
        state, a = nv.generate(model, state, [got[0].chunk, more], GREEDY)
        eager, b = nv.generate(model, eager, [want[0].chunk, more], GREEDY)
        if got[0].token_ids == want[0].token_ids:
            require_same(model, prompts[0] + want[0].token_ids + more, a.token_ids, b.token_ids, WIDE)


def test_captured_prompts_of_experts_are_near_those_that_are_launched():
    """Rounding may route a token to other experts, so that a few may differ by more."""
    model = small_model("Qwen3MoeForCausalLM")
    prompts, likeliest = random_prompts(model, *range(130, 510, 20)), nv.SamplingParams(temperature=0.0, max_tokens=1, logprobs=1)
    found = []
    for captured in (False, True):
        state, ran = nv.init_state(model, **WIDE), []
        executor = state.runtime.executor
        assert isinstance(executor, GraphExecutor) and executor._short is not None and executor._short.kinds
        run = executor._short.run
        executor._short.run = (lambda *args, run=run, ran=ran: ran.append(run(*args)) or ran[-1]) if captured else lambda *_: None
        state, replies = nv.generate_many(model, state, prompts, likeliest)
        nv.check(state)
        assert (len([logits for logits in ran if logits is not None]) > 3) == captured
        found.append([reply.logprobs[0].top[0][1] for reply in replies if reply.logprobs is not None])
    differences = np.abs(np.subtract(*found))
    assert len(differences) == len(prompts) and np.median(differences) < 0.02 and differences.max() < 0.5, differences


def test_continuous_batching_and_preemption(model: nv.Model, contexts: list[list[int]]):
    alone = nv.init_state(model, **LIMITS)
    want = []
    for prompt in contexts:
        alone, gen = nv.generate(model, alone, prompt, GREEDY)
        want.append(gen.token_ids)
        alone = nv.release(alone, gen.chunk)
    state = nv.init_state(model, **{**LIMITS, "num_pages": 24})
    ids = []
    for i, prompt in enumerate(contexts):
        state, rid = nv.submit(model, state, prompt, GREEDY)
        ids.append(rid)
        for _ in range(i % 3):
            state, _ = nv.step(model, state)
    done: dict[int, nv.RequestOutput] = {}
    while state.running or state.waiting:
        state, outs = nv.step(model, state)
        nv.check(state)
        done.update({o.request_id: o.output for o in outs if o.output is not None})
    assert state.stats.preemptions > 0
    for prompt, rid, tokens in zip(contexts, ids, want, strict=True):
        if rid in done:
            require_same(model, prompt, done[rid].token_ids, tokens, LIMITS)


def test_sampling_on_the_device(model: nv.Model, contexts: list[list[int]]):
    options = [
        nv.SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True),
        nv.SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=8, max_tokens=24, ignore_eos=True, logprobs=3),
        nv.SamplingParams(temperature=1.0, seed=9, max_tokens=24, ignore_eos=True, presence_penalty=1.0, repetition_penalty=1.2),
    ]
    replies = []
    for compile in (False, None):
        state = nv.init_state(model, compile=compile, **LIMITS)
        state, gens = nv.generate_many(model, state, contexts[:3], options)
        again, same = nv.generate_many(model, state, contexts[:3], options)
        assert [g.token_ids for g in gens] == [g.token_ids for g in same]
        nv.check(again)
        replies.append([g.token_ids for g in gens])
    assert sum(a == b for a, b in zip(*replies, strict=True)) >= 2  # a draw may fall between two bf16 roundings


def test_two_steps_in_one_fullgraph_region(model: nv.Model, contexts: list[list[int]]):
    state = nv.init_state(model, **LIMITS)
    state, want = nv.generate_many(model, state, contexts[:3], GREEDY)
    state, carry = nv.begin(model, state, contexts[:3], GREEDY, room=20)
    address = carry.kv.pools[0].data_ptr()

    @torch.compile(fullgraph=True)
    def twice(params: Any, carry: nv.DecodeCarry) -> nv.DecodeCarry:
        carry, _ = nv.decode_step(params, carry, model.config)
        carry, _ = nv.decode_step(params, carry, model.config)
        return carry

    with torch.no_grad():
        for _ in range(10):
            carry = twice(model.params, carry)
    assert carry.kv.pools[0].data_ptr() == address
    state, gens = nv.commit(model, state, carry)
    nv.check(state)
    for prompt, a, b in zip(contexts, gens, want, strict=False):
        require_same(model, prompt, a.token_ids, b.token_ids[:20], LIMITS)


def test_chunks_share_pages(model: nv.Model, contexts: list[list[int]]):
    state = nv.init_state(model, **LIMITS)
    whole = contexts[7]
    state, fresh = nv.generate(model, state, whole, GREEDY)
    state, head = nv.prefill(model, state, whole[:37])
    state, rest = nv.prefill(model, state, whole[37:], after=head)
    before = state.stats
    state, gen = nv.generate(model, state, rest, GREEDY)
    assert state.stats.prefill_tokens - before.prefill_tokens == 1
    require_same(model, whole, gen.token_ids, fresh.token_ids, LIMITS)
    state, cut = nv.truncate(state, gen.chunk, 50)
    state, more = nv.generate(model, state, cut, GREEDY)
    nv.check(state)
    assert len(more.token_ids) == 40


def test_a_step_without_memory_is_run_again(model: nv.Model, contexts: list[list[int]], monkeypatch: pytest.MonkeyPatch):
    state = nv.init_state(model, **{**LIMITS, "num_pages": 20})
    state, rid = nv.submit(model, state, contexts[5], GREEDY)
    state, want = drain(model, state)
    state, again = nv.submit(model, state, contexts[5], GREEDY)
    for _ in range(4):
        state, _ = nv.step(model, state)
    with monkeypatch.context() as patch:

        def broken(*_: Any, **__: Any) -> Any:
            raise torch.OutOfMemoryError("planted")

        patch.setattr(GraphExecutor, "decode", broken)
        state, (out,) = nv.step(model, state)
        assert out.request_id == again and isinstance(out.error, nv.OutOfPagesError)
    state, again = nv.submit(model, state, contexts[5], GREEDY)
    state, got = drain(model, state)
    nv.check(state)
    require_same(model, contexts[5], got[again].token_ids, want[rid].token_ids, LIMITS)


def test_a_pool_that_does_not_fit_is_refused(model: nv.Model):
    with pytest.raises(nv.OutOfPagesError, match="num_pages"):
        nv.init_state(model, num_pages=10**9)
    state = nv.init_state(model, **LIMITS)
    state, gen = nv.generate(model, state, [1, 2, 3], GREEDY)
    assert len(gen.token_ids) == 40


@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_plain_torch_attention_where_flashinfer_cannot_serve(contexts: list[list[int]]):
    odd = random_model(tiny_config(head_dim=24), 0, "float32", device="cuda")
    with pytest.warns(UserWarning, match="FlashInfer"):
        state = nv.init_state(odd, **LIMITS)
    eager = nv.init_state(odd, compile=False, **LIMITS)
    state, got = nv.generate_many(odd, state, contexts[:4], GREEDY)
    eager, want = nv.generate_many(odd, eager, contexts[:4], GREEDY)
    assert [g.token_ids for g in got] == [g.token_ids for g in want]


def test_batch_sizes():
    assert batch_sizes(1) == [1]
    assert batch_sizes(12) == [1, 2, 4, 8, 12]
    assert batch_sizes(256)[-1] == 256 and batch_sizes(300)[-1] == 300


def test_steps_that_nobody_asked_for_do_not_show(model: nv.Model, contexts: list[list[int]]):
    """The next step is launched ahead: rows come, go and read pages that others hold in between, and draw what they draw alone."""
    state = nv.init_state(model, **LIMITS)
    want = []
    for prompt in contexts[4:8]:
        state, gen = nv.generate(model, state, prompt, GREEDY)
        want.append(gen.token_ids)
        state = nv.release(state, gen.chunk)
    executor = state.runtime.executor
    assert isinstance(executor, GraphExecutor)
    state, long = nv.prefill(model, state, contexts[6])
    state, short = nv.truncate(state, long, 21)  # whose last page holds what is valid in the other
    state, alone = nv.generate(model, state, [short], GREEDY)
    ids, ahead, done = [], 0, {}
    for turn, prompt in enumerate([contexts[4], contexts[5], short, long, contexts[7]]):
        state, rid = nv.submit(model, state, prompt, GREEDY)
        ids.append(rid)
        for _ in range(3 + turn):
            state, outs = nv.step(model, state)
            done.update({o.request_id: o.output for o in outs if o.output is not None})
            ahead += executor._ahead.launched
        if turn == 1:
            state, gone = nv.submit(model, state, contexts[8], GREEDY)
            state, _ = nv.step(model, state)
            state = nv.cancel(state, gone)
    state, rest = drain(model, state)
    done |= rest
    assert ahead > 5
    for prompt, tokens, rid in zip(contexts[4:8], want, [ids[0], ids[1], ids[3], ids[4]], strict=True):
        require_same(model, prompt, done[rid].token_ids, tokens, LIMITS)
    require_same(model, contexts[6][:21], done[ids[2]].token_ids, alone.token_ids, LIMITS)
    nv.check(state)


def test_rows_that_end_become_padding(model: nv.Model, contexts: list[list[int]]):
    """Replies of all lengths in one batch of few rows, and of many: each is what it is alone, and few steps are loaded."""
    for count in (9, 30):
        prompts = [[i, *contexts[i % 8]] for i in range(count)]
        each = [replace(GREEDY, max_tokens=n) for n in np.random.default_rng(count).integers(3, 41, count).tolist()]
        limits = {**LIMITS, "max_num_seqs": count, "num_pages": 512, "max_num_batched_tokens": 256}
        state, want = nv.init_state(model, **limits), []
        for prompt, params in zip(prompts, each, strict=True):
            state, gen = nv.generate(model, state, prompt, params)
            want.append(gen.token_ids)
            state = nv.release(state, gen.chunk)
        state = nv.init_state(model, **limits)
        executor, loads = state.runtime.executor, []
        assert isinstance(executor, GraphExecutor)
        load = executor.load
        executor.load = lambda *args, seen=loads, load=load, **options: seen.append(len(args[-1])) or load(*args, **options)
        state, gens = nv.generate_many(model, state, prompts, each)
        for prompt, gen, tokens in zip(prompts, gens, want, strict=True):
            require_same(model, prompt, gen.token_ids, tokens, LIMITS)
        assert len(loads) <= 12, loads
        nv.check(state)


def test_the_largest_steps_hold_no_more_than_was_measured():
    """What the pool leaves for them: prompts that fill a step, and draws of all rows by what asks for the most memory."""
    from nanovllm.engine.init_state import init_state
    from nanovllm.executor.kv_budget import GRAPHS, measured

    config = tiny_config(vocab_size=50000, num_layers=6, head_dim=64, hidden_size=512, intermediate_size=2048, max_position_embeddings=4096)
    model = random_model(config, dtype="bfloat16", device="cuda", std=0.05)
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "max_model_len": 4096}
    state = init_state(model, num_pages=2048, **limits)
    needed = measured(model, state.config, None, None)
    assert GRAPHS + 64 * 50000 * 4 < needed < GRAPHS + (2 << 30)
    params = nv.SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, max_tokens=4, ignore_eos=True)
    for start in range(64):
        state, _ = nv.submit(model, state, [start % 50000, *range(400)], params)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    while state.running or state.waiting:
        state, _ = nv.step(model, state)
    assert torch.cuda.max_memory_reserved() - before <= needed
