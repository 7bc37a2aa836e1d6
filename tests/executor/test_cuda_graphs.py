"""The static buffers of captured steps, on a CPU: what is filled in is what a replay would read."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from immutables import Map

from nanovllm import models
from nanovllm.config import EngineConfig
from nanovllm.executor.batch import HostBatch, padded
from nanovllm.executor.cascade_policy import Cascades, cascade_policy
from nanovllm.executor.cuda_graphs import StepGraphs
from nanovllm.executor.decode_carry import DecodeCarry
from nanovllm.models.fast.cuts import Cuts, StepCuts
from nanovllm.ops.attention.fused_plan import FusedDecodePlan, cut_of
from nanovllm.ops.backends import LARGEST
from nanovllm.sampling.params import SamplingParams
from nanovllm.sampling.penalty_tables import PenaltyTables
from nanovllm.sampling.row_options import packed_options, row_options
from nanovllm.state.kv_cache import init_kv
from nanovllm.testing.models import random_model, tiny_config

pytestmark = pytest.mark.unhooked  # objects of torch.cuda are replaced by None

PAGE, NUM_PAGES, LONGEST = 4, 40, 48
LAYOUT = {"page_size": PAGE, "dummy_page": NUM_PAGES}
MOVED = ("input_ids", "positions", "slots", "seq_lens")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> StepGraphs:
    """Steps of 2 and 8 rows, none of which is ever recorded."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    model = random_model(tiny_config(vocab_size=50))
    limits = EngineConfig(num_pages=NUM_PAGES, page_size=PAGE, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=LONGEST, seed=0)
    cascades = Cascades(model, limits, cascade_policy(model, limits, always=True))
    tables = PenaltyTables.empty(8, 50, model.device)
    return StepGraphs(model, limits, (2, 8), models.forward, tables, None, cascades, fused=False, warm=model.params)


def carry_of(graphs: StepGraphs, size: int) -> DecodeCarry:
    model = graphs._model
    kv = init_kv(model.config, num_pages=NUM_PAGES, page_size=PAGE, dtype=model.dtype, device=model.device)
    return graphs._carry(kv, size, "shared", ())


def batch(rows: int, width: int, seed: int) -> HostBatch:
    values = np.random.default_rng(seed)

    def ints(*shape: int) -> np.ndarray:
        return values.integers(1, NUM_PAGES, shape).astype(np.int32)

    return HostBatch(
        input_ids=ints(rows), positions=ints(rows), slots=ints(rows), page_tables=ints(rows, width), seq_lens=ints(rows),
        page_counts=ints(rows),
    )  # fmt: skip


def test_buffers_hold_the_newest_batch_and_nothing_of_older_ones(graphs: StepGraphs) -> None:
    carries = {size: carry_of(graphs, size) for size in graphs.sizes}
    for seed, (rows, width) in enumerate([(2, 3), (7, 12), (2, 1), (8, 5), (1, 12), (0, 1), (3, 2)]):
        size = graphs.size(rows)
        host, carry = padded(batch(rows, width, seed), size, **LAYOUT), carries[size]
        drawing = [(packed_options(SamplingParams(temperature=seed + row / 8)), seed, row) for row in range(rows)] if seed % 2 else None
        graphs._fill(carry, host, rows, drawing)
        for name in MOVED:
            assert getattr(carry.batch, name).tolist() == getattr(host, name).tolist(), name
        assert carry.active.tolist() == [1] * rows + [0] * (size - rows)
        if drawing is not None:
            options = row_options(graphs._lines(size)[graphs._num_lines :], size)
            assert options.temperature.tolist() == [seed + row / 8 for row in range(rows)] + [0] * (size - rows)
            assert options.seeds.tolist() == [seed] * rows + [0] * (size - rows)
            assert options.slots.tolist() == [*range(rows)] + [-1] * (size - rows)
        tables = carry.batch.page_tables.numpy()
        assert tables.shape == (size, LONGEST // PAGE)
        assert (tables[:, :width] == host.page_tables).all() and (tables[:, width:] == NUM_PAGES).all()


def test_tuned_tiles_of_attention_are_not_those_of_kv_in_fp8() -> None:
    """They are measured over KV in the dtype of the model, whose tiles have twice the bytes."""
    cut, cuts = (32, 4, 3, 2), Cuts(steps=Map({8: StepCuts(attend=(32, 4, 3, 2))}))
    for fp8, used in ((False, cut), (True, cut_of(8, tiny_config().num_kv_heads, 8, LARGEST, fp8=True))):
        model, device = random_model(tiny_config(head_dim=8)), torch.device("cpu")
        graphs: Any = SimpleNamespace(_fused_plans={}, _model=model, _cuts=cuts, _device=device, _fp8=fp8)
        plan = StepGraphs._fused_plan(graphs, 8)
        assert (plan.tile, plan.warps, plan.stages, plan.splits) == used


@pytest.mark.parametrize("ready", [True, False])
def test_few_long_rows_attend_by_our_own_kernel_where_flashinfer_has_no_plans(graphs: StepGraphs, ready: bool) -> None:
    """All rows of many do, then, by the plans that divide each row by its length; and rows that are not long in the usual way."""
    graphs._fused, graphs._seen, graphs._longest = True, 40_000, 1
    graphs._attention = SimpleNamespace(ready=lambda: ready, decode_plans=lambda size: SimpleNamespace(update=lambda host: None))  # pyright: ignore[reportAttributeAccessIssue]
    graphs._cascade_plans = {4: SimpleNamespace(update=lambda runs: False), 24: SimpleNamespace(update=lambda runs: True)}  # pyright: ignore[reportAttributeAccessIssue]
    graphs._cascades = SimpleNamespace(policy=SimpleNamespace(decode=lambda host: None, may_share=lambda size, longest: False))  # pyright: ignore[reportAttributeAccessIssue]
    few, many = ("planned", "planned") if ready else ("long", "shared")
    assert graphs.ways(4) == ["fused", few] and graphs.ways(24) == ["fused", many]
    for size, long in ((4, few), (24, many)):
        for tokens, way in ((100, "fused"), (30_000, long)):
            host = replace(batch(size, 1, 0), seq_lens=np.full(size, tokens, np.int32), page_counts=np.ones(size, np.int32))
            host.seq_lens[1:] = 100
            assert graphs._follow(host) == way, (size, tokens)
    assert graphs.fused_handle(replace(host, page_counts=np.array([30_000 // PAGE, *[1] * 23], np.int32))) is None
    medium = replace(batch(16, 1, 0), seq_lens=np.full(16, 2048, np.int32), page_counts=np.full(16, 2048 // PAGE, np.int32))
    graphs._cascade_plans[16] = graphs._cascade_plans[4]
    graphs._fused_plans[16] = FusedDecodePlan(16, 8, 8, 16, torch.device("cpu"))  # of so many KV heads that it leaves such rows to others
    assert graphs._follow(medium) == ("planned" if ready else "fused") and graphs.fused_handle(medium) == (None if ready else 0)
    some = replace(batch(4, 1, 0), page_counts=np.array([30_000 // PAGE, 1, 1, 1], np.int32))
    handle = graphs.fused_handle(some)
    assert handle is None if ready else handle == graphs._long_plan(4).handle
    assert graphs.fused_handle(replace(some, page_counts=np.ones(4, np.int32))) == 0
