"""The check of a quantised model: its plain form runs none of the products that it is compared with."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import nanovllm as nv
from nanovllm.loading.quantisation.activations import with_fp8_activations
from nanovllm.models.check import examine as check_module
from nanovllm.models.check.compare import Compared, compare
from nanovllm.models.check.report import chosen
from nanovllm.models.fast.path import FastPath
from nanovllm.ops.linear import quantised_linear
from nanovllm.ops.linear.quantise import KINDS, Kind, quantise
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.testing.models import random_model, tiny_config

MODEL = random_model(tiny_config(hidden_size=64, head_dim=16, intermediate_size=96))


def rounded(kind: Kind) -> nv.Model:
    """The model with all its matrices quantised, and the head."""
    params, names = MODEL.params, ("qkv", "o", "gate_up", "down")
    layers = tuple(replace(w, **{name: quantise(getattr(w, name), kind) for name in names}) for w in params.layers)
    head = quantise(params.embed if params.head is None else params.head, kind)
    return replace(MODEL, params=replace(params, layers=layers, head=head), quantization=kind)


def compared(model: nv.Model) -> Compared:
    """The plain layers compared as if they were a fast form: both call the products of the ops."""
    same = FastPath(name="same", layer=model.spec.layer, head=model.spec.head, plan=lambda _: None)
    return compare(model, same, list(range(20)), [1, 3], page_size=4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_that_is_wrong_everywhere_is_seen(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    model = rounded(kind)
    assert chosen(compared(model), model.dtype).whole
    product = quantised_linear.cpu_product.product
    monkeypatch.setattr(quantised_linear.cpu_product, "product", lambda *given: product(*given) * 1.01)
    monkeypatch.setattr(quantised_linear.cpu_product, "serves", lambda *_: True)
    found = chosen(compared(model), torch.float32)
    assert not found.head and not any(found.layers)


def test_kernels_are_compared_without_rounded_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The option rounds more than kernels may differ, so layers would leave the fast path and tuning files would be ignored."""
    model = with_fp8_activations(nv.load_model("tiny", "cpu", quantization="fp8"))
    seen_models, inner = list[nv.Model](), check_module.compare

    def noted(model: nv.Model, *given: Any) -> Any:
        seen_models.append(model)
        return inner(model, *given)

    monkeypatch.setattr(check_module, "compare", noted)
    check_module.examine(model, 16)
    (seen,) = seen_models
    matrices = [w for layer in seen.params.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    assert all(isinstance(w, QuantisedMatrix) and not w.fp8_activations for w in matrices)
    assert any(isinstance(w, QuantisedMatrix) and w.fp8_activations for w in (model.params.layers[0].qkv,))
