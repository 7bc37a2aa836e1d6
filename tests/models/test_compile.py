"""One layer's function compiled alone, and the whole forward compiled by somebody else."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from nanovllm import models
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
    model = random_model(tiny_config(architecture, num_layers=28))
    counter = Counter()
    compiled = torch.compile(model.spec.layer, fullgraph=True, backend=counter)
    at = layout(model, [9, 9], 4)
    batch = step_batch(at, [(0, [3], 0), (1, [5], 0)], model.device, decode=True)
    plain, _ = model.spec.forward(model.params, at.kv, batch, model.config)
    fast, _ = models.forward(model.params, at.kv, batch, model.config, layer=compiled)
    assert torch.equal(plain, fast)
    assert counter.num_graphs <= 2


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
