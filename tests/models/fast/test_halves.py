"""Prompts that run as two halves give what they give as a whole."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from nanovllm.config import Mesh
from nanovllm.executor.batch import HostBatch, to_device
from nanovllm.executor.prompt_halves import cut
from nanovllm.models.fast import fused, halves
from nanovllm.models.fast.choice import FastChoice, all_fast
from nanovllm.models.registry import REGISTRY
from nanovllm.ops.distributed.in_process import ThreadGroup, run_ranks
from nanovllm.ops.linear.quantise import KINDS
from nanovllm.state.kv_cache import init_kv
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.quantised_problems import rounded

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
SIZE = 4  # tokens per page
FUSED = [name for name in REGISTRY if name != "GPT2LMHeadModel"]


def prompts(config: Any, pieces: list[tuple[int, int]], wanted: list[int] | None) -> HostBatch:
    """Prompts, each with tokens in its pages and the number of new ones."""
    counts, lens = [count for _, count in pieces], np.array([sum(piece) for piece in pieces], np.int32)
    width, bounds = -(-int(lens.max()) // SIZE), np.cumsum([0, *counts]).astype(np.int32)
    tables = np.arange(len(pieces) * width, dtype=np.int32).reshape(len(pieces), width)[:, ::-1].copy()
    positions = np.concatenate([np.arange(before, before + count) for before, count in pieces]).astype(np.int32)
    row_of = np.repeat(np.arange(len(pieces)), counts)
    slots = (tables[row_of, positions // SIZE] * SIZE + positions % SIZE).astype(np.int32)
    second = len(config.pool_sizes) == 2
    return HostBatch(
        input_ids=(np.arange(bounds[-1], dtype=np.int32) * 7 + 3) % config.vocab_size,
        positions=positions,
        slots=slots,
        page_tables=tables,
        seq_lens=lens,
        page_counts=-(-lens // SIZE),
        cu_seqlens=bounds,
        logit_indices=np.array(bounds[1:] - 1 if wanted is None else wanted, np.int32),
        frame_tables=tables if second else None,
        frame_slots=slots if second else None,
    )


def both_ways(model: Any, host: HostBatch, at: int, *, fp8: bool = False, choice: FastChoice | None = None) -> None:
    """Compare the logits and the KV of a batch that runs whole with those of its halves."""
    pages = int(host.page_tables.max()) + 1
    dtype = torch.float8_e4m3fn if fp8 else model.dtype
    kv = init_kv(model.config, num_pages=pages, page_size=SIZE, dtype=dtype, device=model.device)
    if not fp8:
        for number, pool in enumerate(kv.pools):
            pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(number)))
    plain = None if choice is None else model.spec.layer
    want, want_kv = fused.forward(
        model.params, pytree.tree_map(torch.clone, kv), to_device(host, model.device), model.config, plain=plain, choice=choice
    )
    batches = [to_device(half, model.device) for half in cut(host, at, SIZE)]
    got, got_kv = halves.forward(model.params, kv, batches, model.config, choice=choice)
    exact = {"rtol": 0, "atol": 1e-12} if model.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(got, want, **exact)
    for one, other in zip(got_kv.pools, want_kv.pools, strict=True):
        torch.testing.assert_close(*((pool.view(torch.uint8) if fp8 else pool) for pool in (one, other)), **exact)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few tokens run as many do."""
    monkeypatch.setattr(fused, "follows_closely", lambda *_: False)
    yield


PIECES = [(0, 21), (6, 5), (3, 11)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("architecture", FUSED)
def test_halves_are_the_whole(architecture: str, size: int) -> None:
    config = tiny_config(architecture)

    def run(mesh: Mesh | None) -> None:
        model = random_model(config, dtype="float64", mesh=mesh)
        for at, wanted in ((9, None), (21, [3]), (24, [0, 8, 9, 30]), (36, []), (1, [36])):
            both_ways(model, prompts(model.config, PIECES, wanted), at)
        both_ways(model, replace(prompts(model.config, PIECES, None), logit_indices=None), 12)

    if size == 1:
        run(None)
    else:
        run_ranks(run, size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma2ForCausalLM"])
def test_of_quantised_matrices(architecture: str, kind: Any) -> None:
    config = tiny_config(architecture, hidden_size=128, intermediate_size=512, num_heads=4, head_dim=64, num_kv_heads=4)

    def run(mesh: Mesh) -> None:
        model = random_model(config, dtype="float32", mesh=mesh)
        model = replace(model, params=rounded(model.params, kind))
        both_ways(model, prompts(model.config, PIECES, None), 15)

    run_ranks(run, 2)


def test_of_kv_in_fp8() -> None:
    def run(mesh: Mesh) -> None:
        model = random_model(tiny_config(), dtype="float64", mesh=mesh)
        both_ways(model, prompts(model.config, PIECES, None), 15, fp8=True)

    run_ranks(run, 2)


def test_a_head_that_runs_in_plain_torch() -> None:
    model = random_model(tiny_config(), dtype="float64")
    both_ways(model, prompts(model.config, PIECES, None), 15, choice=replace(all_fast(model.config), head=False))


def test_sums_begin_in_the_same_order_and_end_after_the_other_half_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sum of a layer begins for the first half, then for the second, and only then does the first half wait."""
    seen: list[str] = []
    begin = ThreadGroup.begin_all_reduce

    def noted(self: ThreadGroup, x: torch.Tensor) -> Any:
        wait, rows = begin(self, x), len(x)
        if not self.rank:
            seen.append(f"begin {rows}")

        def waited() -> torch.Tensor:
            if not self.rank:
                seen.append(f"wait {rows}")
            return wait()

        return waited

    monkeypatch.setattr(ThreadGroup, "begin_all_reduce", noted)
    config = tiny_config(num_layers=2)

    def run(mesh: Mesh) -> None:
        model = random_model(config, dtype="float64", mesh=mesh)
        both_ways(model, replace(prompts(model.config, [(0, 21)], None), logit_indices=None), 8)

    run_ranks(run, 2)
    turns = ["begin 8", "begin 13", *["wait 8", "begin 8", "wait 13", "begin 13"] * 3, "wait 8", "wait 13"]
    assert seen == turns
