"""Chunks that nobody reads make room for requests in `LLM`, `AsyncLLM` and the server, instead of an error."""

import asyncio
from typing import Any

import numpy as np
import pytest

import nanovllm as nv
from nanovllm.entrypoints.conversation import Conversation, turn
from nanovllm.entrypoints.server.chunk_pages import moved_away, require_pages
from nanovllm.entrypoints.server.named_chunks import NamedChunks
from nanovllm.testing.machines.engine_holder import kv_bytes
from nanovllm.testing.models import random_model, tiny_config

MODEL = random_model(tiny_config("LlamaForCausalLM", vocab_size=64, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=2))
GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
LIMITS: dict[str, Any] = {"num_pages": 12, "page_size": 4}


def prompt(seed: int, length: int = 18) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, length).tolist()


def with_chunks(llm: nv.LLM, count: int = 2) -> list[nv.Chunk]:
    """Chunks of 5 pages each."""
    chunks = []
    for seed in range(count):
        llm.state, chunk = nv.prefill(llm.model, llm.state, prompt(seed))
        chunks.append(chunk)
    return chunks


def test_an_llm_moves_chunks_for_a_prompt_and_brings_them_back() -> None:
    alone = nv.LLM(MODEL, **LIMITS).generate([prompt(7, 30)], GREEDY)[0].token_ids
    plain = nv.LLM(MODEL, **LIMITS)
    with_chunks(plain)
    (output,) = plain.generate([prompt(7, 30)], GREEDY)
    assert isinstance(output.error, nv.OutOfPagesError)
    llm = nv.LLM(MODEL, **LIMITS, host_kv_gib=0.01)
    chunks = with_chunks(llm)
    kv = [kv_bytes(llm.state, chunk) for chunk in chunks]
    (output,) = llm.generate([prompt(7, 30)], GREEDY)
    assert output.error is None and output.token_ids == alone
    assert sorted(llm.state.pool.host.moved) == [chunk.liveness for chunk in chunks]
    for chunk, content in zip(chunks, kv, strict=True):  # each finds room, for which the other may have to go
        expected = nv.LLM(MODEL, **LIMITS).generate([[*chunk.token_ids.tolist(), *prompt(8, 20)]], GREEDY)[0].token_ids
        assert llm.generate([[chunk, prompt(8, 20)]], GREEDY)[0].token_ids == expected
        assert kv_bytes(llm.state, chunk) == content
    nv.check(llm.state)


def test_pinned_chunks_stay() -> None:
    llm = nv.LLM(MODEL, **LIMITS, host_kv_gib=0.01)
    chunks = with_chunks(llm)
    llm.pinned.update(chunk.liveness for chunk in chunks)
    (output,) = llm.generate([prompt(7, 30)], GREEDY)
    assert isinstance(output.error, nv.OutOfPagesError) and not llm.state.pool.host.moved
    llm.pinned.remove(chunks[1].liveness)
    (output,) = llm.generate([prompt(7, 22)], GREEDY)
    assert output.error is None and list(llm.state.pool.host.moved) == [chunks[1].liveness]


def test_chunks_stay_while_requests_can_go_on() -> None:
    llm = nv.LLM(MODEL, **LIMITS, host_kv_gib=0.01)
    with_chunks(llm, 1)
    outputs = llm.generate([prompt(seed, 20) for seed in range(5, 9)], GREEDY)  # they wait for one another
    assert all(out.error is None for out in outputs) and not llm.state.pool.host.moved


def test_a_long_prompt_behind_running_requests_gets_the_pages_of_chunks() -> None:
    """A step looks at the requests that wait now and then, and would end one that chunks leave no pages."""
    llm = nv.LLM(MODEL, **LIMITS, host_kv_gib=0.01)
    with_chunks(llm, 1)
    params = [nv.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (16, 2)]
    outputs = llm.generate([prompt(5, 4), prompt(7, 38)], params)
    assert all(out.error is None and out.finish_reason == "length" and not out.out_of_pages for out in outputs)
    assert len(llm.state.pool.host.moved) == 1
    nv.check(llm.state)


def test_an_event_loop_moves_them_too() -> None:
    async def main() -> None:
        async with nv.AsyncLLM(MODEL, **LIMITS, host_kv_gib=0.01) as llm:
            chunks = [await llm.apply(lambda model, state, seed=seed: nv.prefill(model, state, prompt(seed))) for seed in range(2)]
            (output,) = await llm.generate([prompt(7, 30)], GREEDY)
            assert output.error is None and len(llm.state.pool.host.moved) == 2
            (output,) = await llm.generate([[chunks[0], prompt(8, 20)]], GREEDY)
            assert output.error is None and output.num_cached_tokens == 18

    asyncio.run(main())


def test_a_server_moves_chunks_that_a_prompt_does_not_begin_with() -> None:
    llm = nv.LLM(MODEL, **LIMITS, host_kv_gib=0.01)
    one, two = with_chunks(llm)
    named, contexts = NamedChunks(), [[two, np.array(prompt(8, 14), np.int32)]]
    own = {"whole": False, "namespace": 0}
    with pytest.raises(nv.OutOfPagesError):
        require_pages(llm.state, named, contexts, **own)
    assert moved_away(llm.state, NamedChunks(pinned=(("", one),)), contexts) is llm.state, "one is being saved"
    state = moved_away(llm.state, named, contexts)
    assert list(state.pool.host.moved) == [one.liveness]
    state, _ = require_pages(state, named, contexts, **own)
    state = moved_away(state, named, [[one, np.array(prompt(8, 14), np.int32)]])  # it comes back, and the other goes
    assert sorted(state.pool.host.moved) == [one.liveness, two.liveness]
    state, reply = nv.generate(MODEL, state, [one, prompt(8, 14)], GREEDY)
    nv.check(state)
    assert len(reply.token_ids) == 4


def test_a_conversation_whose_chunk_finds_no_room_runs_its_tokens_again() -> None:
    model = nv.load_model("tiny", device="cpu")
    state = nv.init_state(model, num_pages=24, page_size=8, host_kv_gib=0.01)
    asked = Conversation(messages=({"role": "user", "content": "Hello"},), thinking=False, retain="all")
    params = nv.SamplingParams(temperature=0, max_tokens=8)
    state, first, _ = turn(model, state, asked, params, lambda piece: None)
    assert first.chunk is not None
    again = Conversation(messages=(*first.messages, {"role": "user", "content": "And?"}), chunk=first.chunk, thinking=False, retain="all")
    state = nv.offload(state, first.chunk)
    state, other = nv.prefill(model, state, [5] * 8 * 23)
    state, after, figures = turn(model, state, again, params, lambda piece: None)
    nv.check(state)
    assert figures.error is not None or after.messages[-1]["role"] == "assistant"
    for chunk in list(state.chunks.values()):
        state = nv.release(state, chunk)
    nv.check(state)
    assert other.liveness not in state.chunks
