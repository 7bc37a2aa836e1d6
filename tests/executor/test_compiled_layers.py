"""One layer's function compiled alone, and the whole forward compiled by somebody else."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import models
from nanovllm.config import EngineConfig
from nanovllm.executor.batch import HostBatch, sample_prompts, to_device
from nanovllm.executor.cascade_policy import own_runs
from nanovllm.executor.compiled import COMPILED_PROMPTS, compiled_forward
from nanovllm.models.common.batch import Batch
from nanovllm.ops.attention.cascade import PromptCascade
from nanovllm.ops.attention.cascade_plan import CascadePlan, CascadeWorkspace
from nanovllm.testing.driver import layout, run_greedy, step_batch
from nanovllm.testing.models import random_model, tiny_config

pytestmark = pytest.mark.compile


class Counter:
    """A compiler that runs what it is given as it stands and counts the calls."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.num_graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("architecture", models.REGISTRY)
def test_layer_compiles_twice_for_28_layers(architecture: str) -> None:
    """Twice for each form that layers have: with experts or without, and with each window."""
    model = random_model(tiny_config(architecture, num_layers=28))
    forms = {(w.experts is None, model.config.window(index)) for index, w in enumerate(model.params.layers)}
    counter = Counter()
    compiled = torch.compile(model.spec.layer, fullgraph=True, backend=counter)
    at = layout(model, [9, 9], 4)
    batch = step_batch(at, [(0, [3], 0), (1, [5], 0)], model.device, decode=True)
    plain, _ = model.spec.forward(model.params, at.kv, batch, model.config)
    fast, _ = models.forward(model.params, at.kv, batch, model.config, layer=compiled)
    assert torch.equal(plain, fast)
    assert counter.num_graphs <= 2 * len(forms)


@pytest.mark.parametrize("architecture", models.REGISTRY)
def test_compiled_layer_gives_the_same_tokens(architecture: str) -> None:
    model = random_model(tiny_config(architecture))
    compiled = torch.compile(model.spec.layer, fullgraph=True)
    prompts = [[1, 2, 3], [4] * 11]
    ids, logits = run_greedy(model, prompts, 6)
    fast_ids, fast_logits = run_greedy(model, prompts, 6, layer=compiled)
    assert ids == fast_ids
    for one, other in zip(logits, fast_logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_what_a_warm_up_compiles_serves_all_prompts() -> None:
    """Decode steps over two plans, then `sample_prompts`: nothing that comes later is compiled anew."""
    model = random_model(tiny_config())
    at = layout(model, [150, 30, 90, 40], 4)
    num_pages = at.kv.pools[0].shape[1] - 1
    limits = EngineConfig(num_pages=num_pages, page_size=4, max_model_len=200, max_num_seqs=8, max_num_batched_tokens=256, seed=0)
    forward, space = compiled_forward(model), CascadeWorkspace(8, 4, 16, model.device)

    def num_graphs(batch: Batch) -> int:
        logits, _ = forward(model.params, at.kv, batch, model.config)
        assert torch.isfinite(logits).all()
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    kept: list[Any] = []
    for rows in (2, 3):
        kept.append(CascadePlan(space, rows, 4, 2, 4, model.device))
        assert kept[-1].update(own_runs(np.ones(rows, np.int32)))
        batch = step_batch(at, [(row, [5], 0) for row in range(rows)], model.device, decode=True)
        num_graphs(to_device(_host(batch), model.device, kept[-1].handle))
    samples, compiled = sample_prompts(limits, COMPILED_PROMPTS, model.config), 0
    assert [len(host.seq_lens) for host in samples] == [1, 2]
    for host in samples:
        kept.append(_followed(host))
        compiled = num_graphs(to_device(host, model.device, kept[-1].handle))
    assert compiled >= 4
    one, two, three = [(0, [5] * 100, 0)], [(3, [4] * 30, 0), (2, [1] * 5, 80)], [(0, [3] * 40, 100), (1, [2], 17), (2, [9] * 80, 0)]
    for pieces in (one, two, three, [(1, [7] * 17, 0)]):
        host = _host(step_batch(at, pieces, model.device))
        kept.append(_followed(host))
        assert num_graphs(to_device(host, model.device, kept[-1].handle)) == compiled


def _host(batch: Batch) -> HostBatch:
    names = ("input_ids", "positions", "slots", "page_tables", "seq_lens")
    cu_seqlens = None if batch.cu_seqlens is None else batch.cu_seqlens.numpy()
    page_counts = -(-batch.seq_lens.numpy() // 4)
    return HostBatch(**{name: getattr(batch, name).numpy() for name in names}, page_counts=page_counts, cu_seqlens=cu_seqlens)


def _followed(host: HostBatch) -> PromptCascade:
    plan = PromptCascade()
    assert host.cu_seqlens is not None
    plan.update(host.seq_lens, host.cu_seqlens, own_runs(host.page_counts), torch.device("cpu"))
    return plan


def test_whole_forward_compiles_without_a_break_or_a_copy() -> None:
    model = random_model(tiny_config())
    at = layout(model, [9], 4)

    @torch.compile(fullgraph=True)
    def greedy_step(params: Any, kv: Any, batch: Any) -> Any:
        logits, kv = models.forward(params, kv, batch, model.config)
        return logits.argmax(-1), kv

    first = step_batch(at, [(0, [7], 0)], model.device, decode=True)
    ids, kv = greedy_step(model.params, at.kv, first)
    assert kv.pools[0].data_ptr() == at.kv.pools[0].data_ptr()
    plain = layout(model, [9], 4)
    logits, _ = models.forward(model.params, plain.kv, replace(first), model.config)
    assert torch.equal(ids, logits.argmax(-1))
    torch.testing.assert_close(kv.pools[0], plain.kv.pools[0])
