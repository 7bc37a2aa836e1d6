"""What the layers for a GPU launch, by the ops that they call: each is one kernel, `linear_add_norm` a product and the sum behind it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.models.check.compare import compare, spread_rows
from nanovllm.models.common import layers
from nanovllm.models.fast import cpu, fused
from nanovllm.models.fast.choice import LayerFunction
from nanovllm.models.init_params import without_memory
from nanovllm.models.registry import REGISTRY
from nanovllm.ops.linear.quantise import KINDS, Kind
from nanovllm.state.kv_cache import init_kv
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.quantised_problems import dequantised, rounded

PLAIN, GEMMA = ("Qwen3ForCausalLM", "LlamaForCausalLM", "GemmaForCausalLM"), ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
FEW = ["norm_linear", "rope_attend", "norm_linear", "norm_linear", "norm_linear"]
FEW_BEHIND = ["norm_linear", "rope_attend", "norm_linear", "norm_add", "norm_linear", "norm_linear", "norm_add"]
MANY = ["norm_linear", "rope_attend", "linear_add_norm", "norm_linear", "linear_add_norm"]


class Launched(TorchDispatchMode):
    """The ops that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def launches(architecture: str, layer: LayerFunction, rows: int, **more: Any) -> list[str]:
    model = random_model(tiny_config(architecture), dtype="bfloat16")
    batch, w = spread_rows(model, 16, rows, 4).batch, model.params.layers[0]
    kv = init_kv(model.config, num_pages=64, page_size=4, dtype=model.dtype, device=model.device)
    x = torch.randn(rows, model.config.hidden_size).to(model.dtype)
    angles = layers.rope_angles(batch.positions, model.params.inv_freq, model.config.rope)
    with Launched() as launched:
        layer(w, x, *more.values(), kv.pools[0], 0, *angles, batch, model.config)
    return launched.names


@pytest.mark.parametrize(("architecture", "few"), [*((name, FEW) for name in PLAIN), *((name, FEW_BEHIND) for name in GEMMA)])
def test_a_layer_of_few_rows(architecture: str, few: list[str]) -> None:
    assert launches(architecture, fused.decode_layer, 2) == few


@pytest.mark.parametrize("architecture", [*PLAIN, *GEMMA])
def test_a_layer_of_many_rows(architecture: str) -> None:
    h, gain = torch.randn(20, 32).bfloat16(), torch.ones(32)
    assert launches(architecture, fused.wide_layer, 20, h=h, gain=gain) == MANY
    assert launches(architecture, fused.layer, 20) == ["norm_add", *MANY]


@pytest.mark.parametrize("architecture", REGISTRY)
def test_the_kernels_serve_every_architecture_or_say_why_not(architecture: str) -> None:
    beyond = {"GPT2LMHeadModel": "layer norms with biases"}
    config = tiny_config(architecture)
    assert fused.unknown(without_memory(config, torch.bfloat16), config) == beyond.get(architecture, "")


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "silu"])
def test_the_kernels_serve_every_activation(act: str) -> None:
    config = tiny_config("LlamaForCausalLM", hidden_act=act)
    assert fused.unknown(without_memory(config, torch.bfloat16), config) == ""


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17])
def test_products_whose_norm_comes_behind_are_of_many_rows_from_three_on(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a norm or a residual `norm_linear` of three rows is the kernel of many, which takes other cuts."""
    monkeypatch.setattr(fused.few, "serves", lambda device, dtype, rows, *_: rows <= fused.few.ROWS)
    for architecture, most in (("GemmaForCausalLM", 16), *((name, 2) for name in GEMMA)):
        params = random_model(tiny_config(architecture)).params
        assert fused.follows_closely(params, rows) == (rows <= most)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma2ForCausalLM", "Qwen3MoeForCausalLM", "GPT2LMHeadModel"])
def test_quantised_models_are_served(architecture: str, kind: Kind) -> None:
    """On a GPU and on a CPU: what serves an unquantised model serves a quantised one. Of experts, both matrices must be quantised."""
    model = random_model(tiny_config(architecture))
    params = rounded(model.params, kind)
    assert fused.unknown(params, model.config) == ("layer norms with biases" if architecture.startswith("GPT2") else "")
    if architecture == "Qwen3MoeForCausalLM":
        some = tuple(
            w if w.experts is None or old.experts is None else replace(w, experts=replace(w.experts, down=old.experts.down))
            for w, old in zip(params.layers, model.params.layers, strict=True)
        )
        assert fused.unknown(replace(params, layers=some), model.config) == "experts of which only one matrix is quantised"
    assert cpu.unknown(params, model.config) == cpu.unknown(model.params, model.config)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_a_quantised_layer_is_that_of_the_matrices_that_it_stands_for(architecture: str, kind: Kind, rows: int) -> None:
    model = random_model(tiny_config(architecture))
    params = rounded(model.params, kind)
    batch = spread_rows(model, 16, rows, 4).batch
    x = torch.randn(rows, model.config.hidden_size)
    angles = layers.rope_angles(batch.positions, params.inv_freq, model.config.rope)

    def out(weights: Any) -> torch.Tensor:
        kv = init_kv(model.config, num_pages=200, page_size=4, dtype=model.dtype, device=model.device)
        layer = fused.decode_layer if rows == 1 else fused.layer
        return layer(weights.layers[0], x, kv.pools[0], 0, *angles, batch, model.config)

    torch.testing.assert_close(out(params), out(dequantised(params, torch.float32)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_the_check_widens_quantised_matrices_to_what_they_stand_for(architecture: str, kind: Kind) -> None:
    model = random_model(tiny_config(architecture))
    compared = compare(replace(model, params=rounded(model.params, kind)), None, list(range(12)), (1, 3), 4)
    assert all(each.output < 1e-4 and each.kv < 1e-4 for each in compared.plain) and compared.plain_head < 1e-4
