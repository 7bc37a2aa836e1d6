"""Heads that get zeros behind their channels, for kernels that serve certain widths alone: the same model."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch.utils import _pytree as pytree

from nanovllm.config import ModelConfig, RopeConfig
from nanovllm.loading import weights
from nanovllm.loading.load_model import load_model
from nanovllm.models import registry
from nanovllm.models.common import params
from nanovllm.models.registry import REGISTRY, fitted
from nanovllm.testing.driver import layout, run_chunks
from nanovllm.testing.models import random_model, save_hf_folder, tiny_config

CASES = {
    "llama": ("LlamaForCausalLM", {"head_dim": 24, "attention_bias": True}),
    "phi3": ("Phi3ForCausalLM", {"head_dim": 24, "rope": RopeConfig(partial=0.5), "windows": (7, 7)}),
    "ernie": ("Ernie4_5ForCausalLM", {"head_dim": 20, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2ForCausalLM", {"head_dim": 12, "rope": RopeConfig(kind="yarn", factor=2.0, original_max_position_embeddings=64)}),
    "gemma": ("GemmaForCausalLM", {"head_dim": 10}),
}


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose kernels serve heads of 16 and 32 channels alone."""
    monkeypatch.setattr(registry, "FLASHINFER_HEAD_DIMS", (16, 32))
    monkeypatch.setattr(registry, "attention_backend", lambda _, __, width, ___: "flashinfer" if width in (16, 32) else "reference")


def config_of(case: str) -> ModelConfig:
    architecture, changes = CASES[case]
    return tiny_config(architecture, **{"num_heads": 4, "num_kv_heads": 2, **changes})


@pytest.mark.parametrize("case", CASES)
def test_zeros_behind_heads_change_nothing(case: str, narrow: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(case)
    folder = save_hf_folder(tmp_path, config)
    padded = load_model(folder, device="cpu")
    monkeypatch.undo()
    plain = load_model(folder, device="cpu")
    assert plain.config.head_dim == config.head_dim
    assert padded.config.head_dim in (16, 32) and padded.config.stored_head_dim == config.head_dim
    rows = [[int(token) for token in torch.randint(0, config.vocab_size, (length,))] for length in (40, 1, 13)]
    found = [run_chunks(model, rows, layout(model, [len(row) for row in rows], 4), 7) for model in (plain, padded)]
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_what_is_padded_is_stored_without_the_zeros(case: str, narrow: ModuleType, tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path / "given", config_of(case))
    model = load_model(folder, device="cpu")
    (tmp_path / "saved").mkdir()
    weights.save_params(model.params, model.config, tmp_path / "saved", torch.float32)
    given, saved = (load_file(next(place.glob("*.safetensors"))) for place in (folder, tmp_path / "saved"))
    assert given.keys() == saved.keys()
    for name, tensor in given.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-6, atol=1e-6)  # gains less one are rounded


def test_random_weights_have_zeros_there_too(narrow: ModuleType) -> None:
    config = fitted(config_of("llama"), torch.device("cpu"), torch.float32)
    layer = random_model(config).params.layers[0]
    heads = layer.qkv.unflatten(0, (-1, 32))
    kept = [*range(12), *range(16, 28)]
    assert not heads[:6, [*range(12, 16), *range(28, 32)]].any() and heads[:6, kept].all()
    assert not heads[6:, 24:].any() and not layer.o.unflatten(1, (-1, 32))[:, :, 24:].any()


def test_what_cannot_be_padded_stays(narrow: ModuleType) -> None:
    cpu = torch.device("cpu")
    for config in (
        tiny_config("LlamaForCausalLM", head_dim=16),  # served
        tiny_config("LlamaForCausalLM", head_dim=48),  # wider than all
        tiny_config("Qwen3ForCausalLM", head_dim=24),  # a norm over the head would count the zeros
        tiny_config("GPT2LMHeadModel"),  # its table does not know heads
    ):
        assert fitted(config, cpu, torch.float32) is config


def test_nothing_is_padded_on_a_cpu() -> None:
    config = config_of("llama")
    assert fitted(config, torch.device("cpu"), torch.float32) is config


@pytest.mark.parametrize("architecture", REGISTRY)
def test_what_is_kept_is_stored_again(architecture: str) -> None:
    config = tiny_config(architecture)
    for info, param in zip(
        pytree.tree_leaves(REGISTRY[architecture].param_table(config)), pytree.tree_leaves(random_model(config).params), strict=True
    ):
        if info is not None and info.sources:
            flat = torch.cat([part.reshape(-1) for part in params.as_stored(info, param)])
            torch.testing.assert_close(params.as_kept(info, flat.clone()), param, rtol=1e-6, atol=1e-6)
