"""Hidden states of fused steps on a GPU, and `forward` without KV memory there: against float64 on the CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils._pytree import tree_map

from nanovllm.models.common.batch import Batch
from nanovllm.models.fast import fused
from nanovllm.models.model import Model
from nanovllm.models.registry import forward
from nanovllm.ops.attention.fused_plan import FusedDecodePlan
from nanovllm.testing.driver import layout, step_batch
from nanovllm.testing.models import random_model, tiny_config

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def small(architecture: str, device: str, dtype: torch.dtype) -> Model:
    config = tiny_config(
        architecture, num_layers=3, hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=999
    )
    return random_model(config, device=device, dtype=dtype)


def wide(model: Model) -> Model:
    """The model on the CPU, in float64 with the weights of its own dtype."""
    params = tree_map(lambda t: t if t is None else t.cpu() if t.dtype != model.dtype else t.cpu().double(), model.params)
    return replace(model, params=params, device=torch.device("cpu"), dtype=torch.float64)


def error(got: Tensor, want: Tensor) -> float:
    """The mean error, of the mean value."""
    return float((got.double().cpu() - want).abs().mean() / want.abs().mean())


@pytest.mark.parametrize("tokens", [2, 60])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_fused_prompts_return_hidden_states(architecture: str, tokens: int) -> None:
    """Few tokens and many, of which logits of two are wanted. The logits have the bits of a step that returns no hidden states."""
    model = small(architecture, "cuda", BF16)
    exact, rows = wide(model), [[*range(3, 3 + tokens)], [*range(100, 100 + tokens)]]
    assert fused.serves(model.params, model.config)

    def run(model: Model, function: Any, **more: Any) -> Any:
        at = layout(model, [tokens] * 2, 16)
        batch = step_batch(at, [(0, rows[0], 0), (1, rows[1], 0)], model.device)
        ends = torch.tensor([tokens - 1, 2 * tokens - 1], dtype=torch.int32, device=model.device)
        return function(model.params, at.kv, replace(batch, logit_indices=ends), model.config, **more)

    for asked in ((0, 1), (2, 0)):
        got, _, hidden = run(model, fused.forward, capture_hidden=asked)
        _, _, plain = run(model, forward, capture_hidden=asked)
        _, _, want = run(exact, forward, capture_hidden=asked)
        for ours, theirs, double in zip(hidden, plain, want, strict=True):
            assert error(ours, double) < 1.5 * error(theirs, double) + 2e-3
        without, _ = run(model, fused.forward)
        torch.testing.assert_close(got, without, rtol=0.05, atol=0.05)
    assert torch.equal(run(model, fused.forward, capture_hidden=(0, 1))[0], run(model, fused.forward)[0])


def test_a_fused_decode_step_returns_hidden_states() -> None:
    model = small("Qwen3ForCausalLM", "cuda", BF16)
    plan = FusedDecodePlan(3, 4, 2, 64, torch.device("cuda"))
    at = layout(model, [9, 9, 9], 16)
    for place in range(8):
        batch = step_batch(at, [(row, [5 + row + place], place) for row in range(3)], model.device, decode=True)
        fast, _, hidden = fused.forward(model.params, at.kv, replace(batch, plan=plan.handle), model.config, capture_hidden=(2, 1))
        plain, _, want = forward(model.params, at.kv, batch, model.config, capture_hidden=(2, 1))
        for ours, theirs in zip((fast, *hidden), (plain, *want), strict=True):
            assert error(ours, theirs.double().cpu()) < 0.02


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM", "GPT2LMHeadModel"])
def test_without_kv_a_gpu_computes_what_a_cpu_does(architecture: str) -> None:
    own = {"num_kv_heads": 4} if architecture.startswith("GPT") else {}
    model = random_model(tiny_config(architecture, **own), device="cuda")
    exact, rows = wide(model), [[*range(3, 20)], [7], [*range(50, 62)]]
    vectors = torch.randn(3, 32)

    def run(model: Model, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch = Batch.of_prompts(rows, device=model.device)

        def logits(vector: Tensor) -> Tensor:
            return forward(model.params, None, batch, model.config, add_hidden={0: vector})[0]

        def score(embeds: Tensor) -> Tensor:
            return forward(model.params, None, batch, model.config, inputs_embeds=embeds)[0].logsumexp(-1).sum()

        return logits(vectors[0]), vmap(logits)(vectors), grad(score)(model.params.embed[batch.input_ids])

    for got, want in zip(run(model, vectors.cuda()), run(exact, vectors.double()), strict=True):
        torch.testing.assert_close(got.double().cpu(), want, rtol=1e-3, atol=1e-3)
