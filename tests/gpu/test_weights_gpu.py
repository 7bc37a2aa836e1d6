"""Random weights drawn on a GPU: repeatable, as wide as asked, and no second copy of a matrix in float32."""

import pytest
import torch

from nanovllm.entrypoints.cli.bench.model_shapes import random_model
from nanovllm.models import init_params
from nanovllm.testing.models import random_model as drawn_on_the_host
from nanovllm.testing.models import tiny_config

pytestmark = pytest.mark.gpu
CONFIG = tiny_config(vocab_size=100_000, hidden_size=512)


def test_a_gpu_draws_its_own_values() -> None:
    one, same, other = (random_model("drawn", CONFIG, device="cuda", dtype="bfloat16", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.params.embed, same.params.embed) and not torch.equal(one.params.embed, other.params.embed)
    assert one.fingerprint == same.fingerprint != other.fingerprint
    host = random_model("drawn", CONFIG, device="cpu", dtype="bfloat16")
    assert host.fingerprint != one.fingerprint and not torch.equal(host.params.embed, one.params.embed.cpu())
    values = one.params.embed.float()
    assert values.std().item() == pytest.approx(0.02, rel=0.01) and abs(values.mean().item()) < 1e-4
    assert values.abs().max() < 0.2 and values.unique().numel() > 1000
    assert one.params.final_norm.float().mean().item() == pytest.approx(1.0, abs=0.01)


def test_elsewhere_the_values_are_the_hosts() -> None:
    there, here = (drawn_on_the_host(CONFIG, device=device, std=0.02) for device in ("cuda", "cpu"))
    assert torch.equal(there.params.embed.cpu(), here.params.embed) and there.fingerprint == here.fingerprint


def test_drawing_holds_little_beside_the_weights() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = random_model("drawn", CONFIG, device="cuda", dtype="bfloat16")
    grown = torch.cuda.max_memory_allocated() - before
    held = torch.cuda.memory_allocated() - before
    assert model.params.embed.numel() * 4 > 2.5 * 4 * init_params.DRAWN  # a copy of it in float32 would show
    assert grown <= held + 2 * 4 * init_params.DRAWN
