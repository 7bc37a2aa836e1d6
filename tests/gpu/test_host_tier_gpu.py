"""KV in host memory on a GPU: kernels against plain indexing, copies beside the engine's stream, and replies of an engine that loads."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from immutables import Map

import nanovllm as nv
from nanovllm.executor.executor import executor_of, runtime_of
from nanovllm.executor.graph_executor import GraphExecutor
from nanovllm.executor.kv_offload import HostMemory
from nanovllm.ops.kv_cache import page_images
from nanovllm.ops.kv_cache.fp8 import as_bytes
from nanovllm.state.kv_cache import KVState
from nanovllm.state.offload import Moves, Rates
from nanovllm.state.prefix_keys import keys_of
from tests.gpu.small import random_prompts, require_same, small_model

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LIMITS: dict[str, Any] = {"num_pages": 48, "page_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 1024, "max_model_len": 512}
ALWAYS = Rates(tokens_per_second=1.0, bytes_per_second=1e15)


def random_pages(dtype: torch.dtype, num_pages: int = 64, layers: int = 4) -> torch.Tensor:
    """A pool whose bytes are random."""
    width = 64 + 4 * (dtype == torch.float8_e4m3fn)
    shape = (layers, num_pages, 2, 2, 16, width * dtype.itemsize)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=CUDA).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_images_have_the_bits_of_plain_indexing(dtype: torch.dtype) -> None:
    pages = random_pages(dtype)
    ids = torch.randperm(64, device=CUDA)[:37].int()
    images, want = (torch.zeros(37, 4, *pages.shape[2:], device=CUDA).to(dtype) for _ in range(2))
    page_images._gather(pages, ids, want)
    page_images.gather_pages(pages, ids, images)
    assert torch.equal(images.view(torch.uint8), want.view(torch.uint8))
    one, other = torch.zeros_like(as_bytes(pages)).view(dtype), torch.zeros_like(as_bytes(pages)).view(dtype)
    page_images._scatter(one, ids, images)
    page_images.scatter_pages(other, ids, images)
    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_pages_may_be_written_at_once_and_come_back_as_they_were(dtype: torch.dtype) -> None:
    """Each round writes over the pages that it copied out, without a wait, and loads pages of earlier rounds in other places."""
    pages, layers, num_host = random_pages(dtype, 64, 8), 8, 256
    page_bytes = layers * pages[0, 0].numel() * pages.dtype.itemsize
    memory = HostMemory(KVState(pools=(pages,)), num_host, stage_bytes=3 * page_bytes)
    assert memory.images[0].is_pinned()
    kv, contents = KVState(pools=(pages,)), []
    for at in range(0, num_host, 32):
        contents.append(as_bytes(pages)[:, :32].clone())
        kv = memory.move(kv, Moves(out=Map({at + page: page for page in range(32)})))
        as_bytes(pages)[:, :32] = as_bytes(random_pages(dtype, 32, layers))
    for place, at in reversed(list(enumerate(range(0, num_host, 32)))):
        kv = memory.move(kv, Moves(into=tuple((at + page, 63 - page) for page in range(32))))
        found = as_bytes(pages)[:, 32:].flip(1)
        assert torch.equal(found.view(torch.uint8), contents[place].view(torch.uint8)), f"round {place}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_pages_that_are_copied_ahead_may_be_written_once_the_memory_lets_them(dtype: torch.dtype) -> None:
    """Each round copies pages ahead, reads those of the round before, and writes over the pages, without a wait of the host."""
    pages, layers, num_host = random_pages(dtype, 64, 8), 8, 256
    page_bytes = layers * pages[0, 0].numel() * pages.dtype.itemsize
    memory = HostMemory(KVState(pools=(pages,)), num_host, stage_bytes=3 * page_bytes)
    kv, contents, spare = KVState(pools=(pages,)), [], random_pages(dtype, 32, layers)
    for at in range(0, num_host, 32):
        contents.append(as_bytes(pages)[:, :32].clone())
        kv = memory.move_ahead(kv, Moves(out=Map({at + page: page for page in range(32)})))
        if at:
            kv = memory.move(kv, Moves(into=tuple((at - 32 + page, 63 - page) for page in range(32))))
            found = as_bytes(pages)[:, 32:].flip(1)
            assert torch.equal(found.view(torch.uint8), contents[-2].view(torch.uint8)), f"round {at}"
        memory.let_write(range(32))
        as_bytes(pages)[:, :32] = as_bytes(spare)
        spare = random_pages(dtype, 32, layers)
    memory.synchronize()
    for place, at in enumerate(range(0, num_host, 32)):
        found = as_bytes(memory.images[0])[at : at + 32].transpose(0, 1).to(CUDA)
        assert torch.equal(found.view(torch.uint8), contents[place].view(torch.uint8)), f"round {place}"


def test_the_next_prompt_evicts_nothing_that_is_not_in_host_memory() -> None:
    """Prompts of which the pool holds one: all of their pages are copied ahead, and they have the replies of an engine with many pages."""
    model = small_model()
    prompts, short = random_prompts(model, 300, 310, 320), replace(GREEDY, max_tokens=4)
    plain = nv.LLM(model, **{**LIMITS, "num_pages": 600})
    wanted = [plain.generate([prompt], short)[0].token_ids for prompt in prompts]
    llm = nv.LLM(model, **{**LIMITS, "num_pages": 30}, host_kv_gib=0.05)
    memory, host, moved = runtime_of(llm.state).host, llm.state.pool.host, list[int]()
    assert memory is not None and host is not None
    llm.state = replace(llm.state, pool=replace(llm.state.pool, host=replace(host, rates=ALWAYS)))
    move = memory.move
    memory.move = lambda kv, moves, *more: moved.append(len(moves.out)) or move(kv, moves, *more)  # type: ignore[method-assign]
    for _ in range(4):
        for prompt, want in zip(prompts, wanted, strict=True):
            (output,) = llm.generate([prompt], short)
            require_same(model, prompt, output.token_ids, want, LIMITS)
    assert llm.state.stats.loaded_tokens > 3 * 3 * 280 and not any(moved)


def test_pinned_memory_is_given_back() -> None:
    for _ in range(3):
        memory = HostMemory(KVState(pools=(random_pages(torch.bfloat16),)), 512)
        assert memory.images[0].is_pinned()
        del memory
        gc.collect()


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_replies_are_those_of_an_engine_that_loads_nothing(kv_dtype: str | None) -> None:
    model, limits = small_model(), {**LIMITS, "kv_dtype": kv_dtype}
    prompts = random_prompts(model, 300, 310, 290, 305, 200)
    plain = nv.LLM(model, **{**limits, "num_pages": 600})
    wanted = [plain.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    llm = nv.LLM(model, **limits, host_kv_gib=0.05)
    assert isinstance(executor_of(llm.state), GraphExecutor)
    host = llm.state.pool.host
    assert host is not None and host.rates.tokens_per_second > 1000 and host.rates.bytes_per_second > 1e8
    llm.state = replace(llm.state, pool=replace(llm.state.pool, host=replace(host, rates=ALWAYS)))
    cached = 0
    for round_ in range(4):
        for prompt, want in zip(prompts, wanted, strict=True):
            (output,) = llm.generate([prompt], GREEDY)
            require_same(model, prompt, output.token_ids, want, limits)
            cached += output.num_cached_tokens
        nv.check(llm.state)
        assert round_ == 0 or llm.state.stats.loaded_tokens > 0
    assert cached > 3 * 4 * 200


@pytest.mark.parametrize("per_step", [1, 3])
@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_prompts_are_loaded_beside_replies_that_go_on(kv_dtype: str | None, per_step: int) -> None:
    """Four replies go on, and get a token in each step that loads a prompt; all replies are those of an engine that loads nothing."""
    model, limits = small_model(), {**LIMITS, "kv_dtype": kv_dtype}
    prompts, going = random_prompts(model, 300, 310, 290, 305), random_prompts(model, 20, 30, 25, 35)
    short, long = replace(GREEDY, max_tokens=4), replace(GREEDY, max_tokens=120)
    plain = nv.LLM(model, **{**limits, "num_pages": 600})
    wanted = [plain.generate([prompt], short)[0].token_ids for prompt in prompts]
    wanted_long = [output.token_ids for output in plain.generate(going, long)]
    state = nv.init_state(model, **{**limits, "num_pages": 80, "max_num_seqs": 8}, host_kv_gib=0.05)
    host = state.pool.host
    assert host is not None and 0 < host.rates.step_seconds < 1
    rates = Rates(tokens_per_second=1e4, bytes_per_second=1e4 * host.page_bytes, step_seconds=per_step / 1e4)
    state = replace(state, pool=replace(state.pool, host=replace(host, rates=rates)))
    for prompt in prompts:
        state, _ = nv.submit(model, state, prompt, short)
        while state.running or state.waiting:
            state, _ = nv.step(model, state)
    asked: dict[int, int] = {}
    for place, prompt in enumerate(going):
        state, rid = nv.submit(model, state, prompt, long)
        asked[rid] = -1 - place
    for _ in range(6):
        state, _ = nv.step(model, state)
    for place, prompt in enumerate(prompts):
        state, rid = nv.submit(model, state, prompt, short)
        asked[rid] = place
    done, loading = dict[int, nv.RequestOutput](), 0
    while state.running or state.waiting:
        before = state
        state, outputs = nv.step(model, state)
        if state.stats.loaded_tokens > before.stats.loaded_tokens and not done:
            loading += 1
            assert {one.request_id for one in outputs} >= {rid for rid, place in asked.items() if place < 0}
        done |= {one.request_id: one.output for one in outputs if one.output is not None}
    nv.check(state)
    assert loading > 1 and state.stats.loaded_tokens > 100
    for rid, place in asked.items():
        if place < 0:
            require_same(model, going[-1 - place], done[rid].token_ids, wanted_long[-1 - place], limits)
        else:
            require_same(model, prompts[place], done[rid].token_ids, wanted[place], limits)


def test_what_is_in_host_memory_is_what_a_prefill_writes() -> None:
    """Host pages of one prompt have the bits of the device's pages from the same prefill."""
    model = small_model()
    prompt, other = random_prompts(model, 320, 330)
    llm = nv.LLM(model, **{**LIMITS, "num_pages": 24}, host_kv_gib=0.05)
    llm.generate([prompt], replace(GREEDY, max_tokens=1))
    pages = llm.state.prefix.pages()
    before = llm.state.kv.pools[0][:, pages].clone()
    memory, indexed = runtime_of(llm.state).host, llm.state.prefix
    assert memory is not None
    llm.generate([other], replace(GREEDY, max_tokens=1))
    memory.synchronize()
    host, found = llm.state.pool.host, 0
    assert host is not None
    for place, (page, key) in enumerate(zip(pages, keys_of(indexed, np.array(pages, np.int32)), strict=True)):
        if (at := host.by_key.get(key)) is not None:
            assert torch.equal(memory.images[0][at].to(CUDA), before[:, place]), f"page {page}"
            found += 1
    assert found > 10


def test_preempted_requests_load_their_pages() -> None:
    model = small_model()
    prompts, long = random_prompts(model, 150, 160, 170), replace(GREEDY, max_tokens=200)
    limits = {**LIMITS, "num_pages": 40}
    plain = nv.LLM(model, **{**limits, "num_pages": 600})
    wanted = [output.token_ids for output in plain.generate(prompts, long)]
    llm = nv.LLM(model, **limits, host_kv_gib=0.05)
    host = llm.state.pool.host
    assert host is not None
    llm.state = replace(llm.state, pool=replace(llm.state.pool, host=replace(host, rates=ALWAYS)))
    for prompt, output, want in zip(prompts, llm.generate(prompts, long), wanted, strict=True):
        require_same(model, prompt, output.token_ids, want, limits)
    nv.check(llm.state)
    assert llm.state.stats.preemptions > 0 and llm.state.stats.loaded_tokens > 0


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_a_chunk_comes_back_with_its_bits(kv_dtype: Any, tmp_path: Path) -> None:
    """Its pages are overwritten right after it was moved. Its file is the same wherever it is."""
    model, file = small_model(), tmp_path / "chunk.safetensors"
    state = nv.init_state(model, **{**LIMITS, "num_pages": 40, "kv_dtype": kv_dtype}, host_kv_gib=0.25)
    tokens, others = random_prompts(model, 300, 500)
    state, base = nv.prefill(model, state, tokens)
    state, chunk = nv.drop(model, state, base, 40, 57, "shift")
    state = nv.release(state, base)
    nv.save_chunk(state, chunk, file)
    content = file.read_bytes()
    for _ in range(3):
        state = nv.offload(state, chunk)
        state, other = nv.prefill(model, state, others)
        state = nv.release(state, other)
        nv.save_chunk(state, chunk, file)
        assert file.read_bytes() == content
        state, reply = nv.generate(model, state, chunk, GREEDY)
        state = nv.release(state, reply.chunk)
        nv.check(state)
        nv.save_chunk(state, chunk, file)
        assert len(state.chunks[chunk.liveness].pages) == 18 and file.read_bytes() == content
