"""The tensors of a step: tokens of prompts as rows of a decode batch, and rows of padding."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nanovllm import models
from nanovllm.chunks.prefill import plain_request
from nanovllm.executor.batch import HostBatch, decode_batch, padded, prefill_batch, to_device, token_rows
from nanovllm.executor.cascade_policy import CascadePolicy
from nanovllm.ops.attention.cascade_plan import CascadePlan, CascadeWorkspace
from nanovllm.state.kv_cache import KVState, init_kv
from nanovllm.state.request import Sequence
from nanovllm.state.vector import IntVector
from nanovllm.testing.models import random_model, tiny_config

CPU = torch.device("cpu")
MODEL = random_model(tiny_config(vocab_size=50), dtype="float64")
SIZE, NUM_PAGES, WIDTH = 4, 12, 16
LAYOUT = {"page_size": SIZE, "dummy_page": NUM_PAGES}


def sequence(num_tokens: int, pages: list[int], num_filled: int = 0, seed: int = 0) -> Sequence:
    """A prompt of which the first tokens are filled; those in pages 3 and 7 are the same in all."""
    own = np.random.default_rng(seed).integers(0, 50, num_tokens)
    ids = np.concatenate((np.arange(8), own))[:num_tokens] if pages[0] == 3 else own
    return Sequence(
        request=plain_request(num_tokens), tokens=IntVector.of(ids.astype(np.int32)), pages=IntVector.of(pages), num_filled=num_filled
    )


def prompts() -> HostBatch:
    """Two prompts behind two pages that they share, one of which runs in part, and one that shares nothing."""
    rows = [(sequence(13, [3, 7, 0, 5], 8, 1), 5), (sequence(6, [9, 2], 0, 2), 6), (sequence(12, [3, 7, 11], 8, 3), 3)]
    return prefill_batch(rows, draw=False, **LAYOUT)


def memory() -> KVState:
    """KV memory in which the shared pages are filled."""
    kv = init_kv(MODEL.config, num_pages=NUM_PAGES, page_size=SIZE, dtype=MODEL.dtype, device=CPU)
    return run(prefill_batch([(sequence(8, [3, 7]), 8)], draw=False, **LAYOUT), kv)[1]


def run(host: HostBatch, kv: KVState, plan: int = 0) -> tuple[torch.Tensor, KVState]:
    batch = replace(to_device(host, CPU, plan), logit_indices=None)
    return models.forward(MODEL.params, kv, batch, MODEL.config)


def cascade(host: HostBatch) -> CascadePlan:
    """A plan for what the rows of a decode batch share."""
    config = MODEL.config
    runs = CascadePolicy(always=True, page_size=SIZE, page_bytes=1, group=config.num_heads // config.num_kv_heads).decode(host)
    shared = [run.rows.tolist() for run in runs or [] if len(run.rows) > 1]
    assert runs is not None and shared == [[*range(5), 11, 12, 13], [8, 9, 10], [3, 4]]  # two prompts, then rows of one
    rows = len(host.seq_lens)
    plan = CascadePlan(
        CascadeWorkspace(rows, config.num_heads, config.head_dim, CPU), rows, config.num_heads, config.num_kv_heads, SIZE, CPU
    )
    assert plan.update(runs)
    return plan


@pytest.mark.parametrize("size", [14, WIDTH])
@pytest.mark.parametrize("shares", [False, True])
def test_tokens_of_prompts_as_rows(size: int, shares: bool) -> None:
    want, expected = run(prompts(), memory())
    rows = padded(token_rows(prompts(), SIZE), size, **LAYOUT)
    plan = cascade(rows) if shares else None
    got, kv = run(rows, memory(), 0 if plan is None else plan.handle)
    assert got.shape == (size, 50) and want.shape == (14, 50)
    torch.testing.assert_close(got[:14], want, rtol=0, atol=1e-10)
    torch.testing.assert_close(kv.pools[0][:, :NUM_PAGES], expected.pools[0][:, :NUM_PAGES], rtol=0, atol=1e-10)


def test_a_row_that_saw_its_whole_prompt_would_show() -> None:
    want, _ = run(prompts(), memory())
    rows = token_rows(prompts(), SIZE)
    assert rows.seq_lens.tolist() == [9, 10, 11, 12, 13, 1, 2, 3, 4, 5, 6, 9, 10, 11]
    assert rows.page_counts.tolist() == [3, 3, 3, 3, 4, 1, 1, 1, 1, 2, 2, 3, 3, 3]
    got, _ = run(replace(rows, seq_lens=np.repeat(np.array([13, 6, 11], np.int32), [5, 6, 3])), memory())
    assert ((got - want).abs().amax(1) > 1e-6).all()  # the last of each too: in the second layer it attends to what the others made


def test_padding_owns_the_dummy_page() -> None:
    host = decode_batch([sequence(9, [3, 7, 1], 8), sequence(3, [9], 2)], **LAYOUT)
    wide = padded(host, 5, **LAYOUT)
    for name in ("input_ids", "positions", "slots", "page_tables", "seq_lens", "page_counts"):
        before, after = getattr(host, name), getattr(wide, name)
        assert after.dtype == before.dtype and np.array_equal(after[:2], before), name
    assert (wide.page_tables[2:] == NUM_PAGES).all() and (wide.slots[2:] == NUM_PAGES * SIZE).all()
    assert (wide.seq_lens[2:] == 1).all() and (wide.page_counts[2:] == 1).all() and (wide.positions[2:] == 0).all()
    want, (first,) = run(host, memory())[0], memory().pools
    got, kv = run(wide, memory())
    torch.testing.assert_close(got[:2], want, rtol=0, atol=1e-10)
    written = (kv.pools[0] != first).flatten(2).any(2).any(0).nonzero()[:, 0].tolist()
    assert written == [1, 9, NUM_PAGES]
    same = padded(host, 2, **LAYOUT)
    assert np.array_equal(same.page_tables, host.page_tables) and np.array_equal(same.seq_lens, host.seq_lens)
