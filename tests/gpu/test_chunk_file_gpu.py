"""Chunk files from and to a GPU: through several windows of pinned memory, between page sizes, and from one kind of device to the other."""

from pathlib import Path

import numpy as np
import pytest
import torch

import nanovllm as nv
from nanovllm.chunks.storage import blocks
from nanovllm.testing.models import random_model, tiny_config
from tests.gpu.small import SMALL

pytestmark = pytest.mark.gpu

GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
CONFIG = tiny_config(**SMALL)
TOKENS = [(7 * i + 3) % 200 for i in range(301)]


def bits(state: nv.EngineState, chunk: nv.Chunk) -> torch.Tensor:
    """KV of a chunk's tokens, [L, T, 2, K, D], as integers."""
    (pool,), size, at = state.kv.pools, state.config.page_size, np.arange(len(chunk))
    pages = torch.from_numpy(chunk.pages.array()[at // size].astype(np.int64)).to(pool.device)
    found = pool.permute(0, 1, 4, 2, 3, 5)[:, pages, torch.from_numpy(at % size).to(pool.device)]
    return found.contiguous().view(torch.int16).cpu()


@pytest.mark.parametrize("block", [2048, 100_000, 2 << 20])
def test_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(blocks, "BLOCK", block)
    monkeypatch.setattr(blocks, "WINDOW", 4)
    model = random_model(CONFIG, 0, "bfloat16", device="cuda", std=0.05)
    state = nv.init_state(model, num_pages=64, page_size=16, max_model_len=512, compile=False)
    state, chunk = nv.prefill(model, state, TOKENS)
    state, head = nv.prefill(model, state, TOKENS[:40])
    nv.save_chunk(state, chunk, tmp_path / "chunk")
    host = random_model(CONFIG, 0, "bfloat16", device="cpu", std=0.05)
    for other, size in ((model, 16), (model, 8), (host, 5)):
        there = nv.init_state(other, num_pages=128, page_size=size, max_model_len=512, compile=False)
        there, loaded = nv.load_chunk(other, there, tmp_path / "chunk")
        assert torch.equal(bits(there, loaded), bits(state, chunk))
        nv.check(there)
        if other is model and size == 16:
            there, reply = nv.generate(model, there, [loaded, [5]], GREEDY)
            state, expected = nv.generate(model, state, [chunk, [5]], GREEDY)
            assert reply.token_ids == expected.token_ids
    nv.save_chunk(there, loaded, tmp_path / "back")
    assert (tmp_path / "back").stat().st_size > 0
    state, again = nv.load_chunk(model, state, tmp_path / "back")
    assert again.pages.array()[:18].tolist() == chunk.pages.array()[:18].tolist()
    raw = bytearray((tmp_path / "chunk").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "chunk").write_bytes(raw)
    with pytest.raises(nv.ChunkFileError, match="KV was changed"):
        nv.load_chunk(model, state, tmp_path / "chunk")
    nv.check(state)
    assert torch.equal(bits(state, head), bits(state, chunk)[:, :40])
