"""Models with sliding windows on a GPU: pages and frames go to pinned host memory and come back, and replies do not change."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from immutables import Map

import nanovllm as nv
from nanovllm.executor.kv_offload import HostMemory
from nanovllm.state.kv_cache import KVState
from nanovllm.state.offload import Moves, Rates
from nanovllm.testing.models import random_model, tiny_config
from tests.gpu.small import require_same

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SIZES = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 1024, "num_layers": 4}
ALWAYS = Rates(tokens_per_second=1.0, bytes_per_second=1e15)
LIMITS: dict[str, Any] = {"num_pages": 40, "num_frames": 24, "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 256}
GREEDY = nv.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def small_model(windows: tuple[int, ...]) -> nv.Model:
    return random_model(tiny_config(windows=windows, **SIZES), dtype="bfloat16", device=CUDA, std=0.05)


def prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(264) for _ in range(length)] for length in lengths]


def engine(model: nv.Model, host_kv_gib: float, **options: Any) -> nv.EngineState:
    """A small pool, so that prompts push each other out."""
    state = nv.init_state(model, **{**LIMITS, **options}, host_kv_gib=host_kv_gib)
    host = state.pool.host
    return state if host is None else replace(state, pool=replace(state.pool, host=replace(host, rates=ALWAYS)))


def serve(model: nv.Model, state: nv.EngineState, prompt: list[int]) -> tuple[nv.EngineState, list[int]]:
    state, _ = nv.submit(model, state, prompt, GREEDY)
    tokens: list[int] = []
    while state.running or state.waiting:
        state, outputs = nv.step(model, state)
        tokens += [token for output in outputs for token in output.token_ids]
    nv.check(state)
    return state, tokens


def test_pages_and_frames_may_be_written_at_once_and_come_back_as_they_were() -> None:
    pools = tuple(torch.randn(layers, 32, 2, 2, 16, 64, device=CUDA, dtype=torch.bfloat16) for layers in (1, 5))
    kv, before = KVState(pools=pools), tuple(pool.clone() for pool in pools)
    memory = HostMemory(kv, 64, stage_bytes=3 * before[1][:, 0].nbytes)
    for _ in range(4):
        memory.move(kv, Moves(out=Map((at, at) for at in range(32)), frames_out=Map((at, 31 - at) for at in range(32))))
        for pool in pools:
            pool.zero_()
        memory.move(kv, Moves(into=tuple((at, at) for at in range(32)), frames_into=tuple((at, 31 - at) for at in range(32))))
        for pool, wanted in zip(pools, before, strict=True):
            assert torch.equal(pool, wanted)


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
@pytest.mark.parametrize("windows", [(96, 0, 96, 0), (96, 96, 96, 96)], ids=["some", "all"])
def test_replies_are_those_of_an_engine_without_host_memory(windows: tuple[int, ...], kv_dtype: str | None, tmp_path: Path) -> None:
    """A chunk that moves with its frames has the same file wherever it is."""
    model, asked = small_model(windows), prompts(300, 310, 290, 305, 200)
    plain, wanted = engine(model, 0, kv_dtype=kv_dtype), []
    for prompt in asked:
        plain, drawn = serve(model, plain, prompt)
        wanted.append(drawn)
    state = engine(model, 0.05, kv_dtype=kv_dtype)
    for turn in range(3):
        for prompt, want in zip(asked, wanted, strict=True):
            state, drawn = serve(model, state, prompt)
            require_same(model, prompt, drawn, want, {**LIMITS, "kv_dtype": kv_dtype})
        assert not turn or state.stats.loaded_tokens > 0
    state, chunk = nv.prefill(model, state, asked[0])
    nv.save_chunk(state, chunk, tmp_path / "chunk.safetensors")
    content = (tmp_path / "chunk.safetensors").read_bytes()
    state = nv.offload(state, chunk)
    state, _ = serve(model, state, asked[1])
    state, reply = nv.generate(model, state, chunk, GREEDY)
    nv.save_chunk(state, chunk, tmp_path / "chunk.safetensors")
    assert (tmp_path / "chunk.safetensors").read_bytes() == content and len(reply.token_ids) == 8
    nv.check(state)
