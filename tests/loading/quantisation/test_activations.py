"""The option `fp8_activations`: where it is possible, what it changes, and what it says otherwise."""

import pytest
import torch

import nanovllm as nv
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES
from nanovllm.entrypoints.cli.check.preflight import outlook
from nanovllm.loading import load_model
from nanovllm.loading.quantisation import activations
from nanovllm.loading.quantisation.activations import with_fp8_activations
from nanovllm.ops.linear.linear import linear
from nanovllm.ops.linear.quantise import Kind
from nanovllm.ops.linear.quantised import QuantisedMatrix

CPU = torch.device("cpu")


def test_it_is_refused_where_nothing_multiplies_fp8() -> None:
    with pytest.raises(nv.InvalidRequestError, match=r"fp8_activations=True needs a GPU .*the device is cpu"):
        nv.load_model("tiny", "cpu", quantization="fp8", fp8_activations=True)
    with pytest.raises(nv.InvalidRequestError, match=r"fp8_activations"):
        nv.LLM(nv.load_model("tiny", "cpu"), fp8_activations=True)


def test_a_value_that_is_no_answer_is_refused(untyped: None) -> None:
    with pytest.raises(nv.InvalidRequestError, match="fp8_activations=1 must be True or False"):
        nv.load_model("tiny", "cpu", quantization="fp8", fp8_activations=1)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("kind", "why"), [(None, "no matrix"), ("int8", "the codes are int8"), ("int4", "the codes are int4")])
def test_it_needs_weights_in_fp8(kind, why: str) -> None:
    with pytest.raises(nv.InvalidRequestError, match=why):
        with_fp8_activations(nv.load_model("tiny", "cpu", quantization=kind))


@pytest.mark.parametrize(("kind", "why"), [(None, "the checkpoint is not quantised"), ("int8", "quantization='int8' makes other codes")])
def test_weights_that_will_not_be_in_fp8_are_not_loaded_first(kind, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "against_device", lambda device, dtype: "")
    monkeypatch.setattr(load_model, "load_params", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(nv.InvalidRequestError, match=why):
        nv.load_model("tiny", "cpu", quantization=kind, fp8_activations=True)


@pytest.mark.parametrize("name", ["tiny", "qwen3-0.6b"])
def test_the_outlook_knows_which_weights_will_not_be_in_fp8(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "against_device", lambda device, dtype: "")
    cases: tuple[tuple[Kind | None, str], ...] = ((None, "the checkpoint is not quantised"), ("int8", "makes other codes"), ("fp8", ""))
    for kind, why in cases:
        found = outlook(name, CPU, None, shapes=SHAPES, quantization=kind, fp8_activations=True)
        told = [problem for problem in found.problems if "fp8_activations" in problem]
        assert len(told) == bool(why) and all(why in problem for problem in told)


def test_it_marks_attention_and_mlp_and_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "against_device", lambda device, dtype: "")
    plain = nv.load_model("tiny", "cpu", quantization="fp8", quantize_head=True)
    model = nv.load_model("tiny", "cpu", quantization="fp8", quantize_head=True, fp8_activations=True)
    assert model.fingerprint != plain.fingerprint and "activations" in model.quantization
    for w in model.params.layers:
        for matrix in (w.qkv, w.o, w.gate_up, w.down):
            assert isinstance(matrix, QuantisedMatrix) and matrix.fp8_activations
    assert isinstance(model.params.head, QuantisedMatrix) and not model.params.head.fp8_activations
    x = torch.randn(4, model.config.hidden_size)
    for one, other in zip(model.params.layers, plain.params.layers, strict=True):  # a CPU rounds nothing
        assert torch.equal(linear(x, one.qkv), linear(x, other.qkv))
