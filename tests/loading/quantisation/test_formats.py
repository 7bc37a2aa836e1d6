"""Quantised checkpoints of every format become the weights that their formats say, and damaged ones are refused by name."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

import nanovllm as nv
from nanovllm.config import ModelConfig
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.loading.quantised_copy import write_quantised
from nanovllm.ops.linear.quantised import QuantisedMatrix, gpu_layout
from nanovllm.testing.models import save_hf_folder, tiny_config
from tests.loading.quantisation.encoders import ENCODERS, Encoder

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZES = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 128}
UP = "model.layers.1.mlp.up_proj"


def folders(path: Path, encoder: Encoder, config: ModelConfig, skip: Callable[[str], bool] = lambda _: False) -> tuple[Path, Path]:
    """A checkpoint whose projections are quantised, and one of the weights that they stand for, in float32."""
    quantised, plain = save_hf_folder(path / "quantised", config), save_hf_folder(path / "plain", config)
    random, stored, meant = np.random.default_rng(0), {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        module = name.removesuffix(".weight")
        stored[name] = meant[name] = tensor
        if module.endswith(PARTS) and name.endswith(".weight") and not skip(name):
            parts, weight = encoder.encode(random, *tensor.shape)
            del stored[name]
            stored |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
            meant[name] = torch.from_numpy(np.ascontiguousarray(weight)).float()
    save_file(stored, quantised / "model.safetensors")
    save_file(meant, plain / "model.safetensors")
    set_config(quantised, quantization_config=encoder.config)
    return quantised, plain


def set_config(folder: Path, **change: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))


def load(folder: Path, **how) -> nv.Model:
    return nv.load_model(folder, "cpu", "float32", tokenizer=False, **how)


def leaves(model: nv.Model) -> list[torch.Tensor | QuantisedMatrix]:
    return pytree.tree_leaves(model.params, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))


def require_equal(quantised: nv.Model, plain: nv.Model, kinds: set[str]) -> None:
    found = set()
    for one, other in zip(leaves(quantised), leaves(plain), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            weight = one.dequantised(torch.float32) if isinstance(one, QuantisedMatrix) else one
            torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-9)
            found |= {one.kind} if isinstance(one, QuantisedMatrix) else set()
    assert found == kinds


@pytest.mark.parametrize("name", ENCODERS)
def test_a_checkpoint_becomes_the_weights_that_it_stands_for(tmp_path: Path, name: str) -> None:
    quantised, plain = map(load, folders(tmp_path, ENCODERS[name], tiny_config(**SIZES)))
    require_equal(quantised, plain, {ENCODERS[name].kind})
    assert ENCODERS[name].kind in quantised.quantization and plain.quantization == ""
    assert quantised.fingerprint != plain.fingerprint
    params = nv.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    replies = [nv.LLM(model).generate([[1, 2, 3], [4, 5]], params) for model in (quantised, plain)]
    assert [reply.token_ids for reply in replies[0]] == [reply.token_ids for reply in replies[1]]


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("loading.quantisation.arranging", "ops.linear.quantise"):
        monkeypatch.setattr(f"nanovllm.{module}.laid_out", gpu_layout)


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "Ernie4_5ForCausalLM"])
@pytest.mark.parametrize("name", ["fp8 in blocks", "compressed W8A8, asymmetric", "awq"])
def test_matrices_are_laid_out_for_a_gpu(tmp_path: Path, name: str, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand for the same weights, those of experts and with rows that are moved too, and so do rounded ones."""
    folder, plain = folders(tmp_path, ENCODERS[name], tiny_config(architecture, **SIZES))
    here = load(plain, quantization="fp8", quantize_head=True)
    as_on_a_gpu(monkeypatch)
    quantised, rounded = load(folder), load(plain, quantization="fp8", quantize_head=True)
    require_equal(quantised, load(plain), {ENCODERS[name].kind})
    for model in (quantised, rounded):
        assert all(leaf.in_gpu_layout for leaf in leaves(model) if isinstance(leaf, QuantisedMatrix))
    assert rounded.fingerprint == here.fingerprint
    for one, other in zip(leaves(rounded), leaves(here), strict=True):
        assert isinstance(one, QuantisedMatrix) == isinstance(other, QuantisedMatrix)
        if isinstance(one, QuantisedMatrix) and isinstance(other, QuantisedMatrix):
            assert torch.equal(one.dequantised(torch.float32), other.dequantised(torch.float32))


@pytest.mark.parametrize("name", ["fp8 in blocks", "compressed W4A16, asymmetric", "gptq", "awq"])
def test_experts_are_quantised(tmp_path: Path, name: str) -> None:
    config = tiny_config("Qwen3MoeForCausalLM", **SIZES)
    quantised, plain = map(load, folders(tmp_path, ENCODERS[name], config))
    require_equal(quantised, plain, {ENCODERS[name].kind})
    mixtures = [layer.experts for layer in quantised.params.layers if layer.experts is not None]
    assert mixtures and all(isinstance(each.down, QuantisedMatrix) for each in mixtures)
    params = nv.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    replies = [nv.LLM(model).generate([[1, 2, 3], [4, 5]], params) for model in (quantised, plain)]
    assert [reply.token_ids for reply in replies[0]] == [reply.token_ids for reply in replies[1]]


def test_rows_of_rotated_heads_are_moved(tmp_path: Path) -> None:
    config = tiny_config("Ernie4_5ForCausalLM", **SIZES)  # pairs of channels are interleaved in the checkpoint
    for name in ("fp8 in blocks", "compressed W8A8, asymmetric"):
        require_equal(*map(load, folders(tmp_path / name, ENCODERS[name], config)), {ENCODERS[name].kind})


def test_a_matrix_that_is_partly_quantised_is_dequantised(tmp_path: Path) -> None:
    quantised, plain = map(load, folders(tmp_path, ENCODERS["gptq"], tiny_config(**SIZES), skip=lambda name: "k_proj" in name))
    require_equal(quantised, plain, {"int4"})
    assert isinstance(quantised.params.layers[0].qkv, torch.Tensor) and isinstance(quantised.params.layers[0].o, QuantisedMatrix)


def test_modules_with_settings_of_their_own(tmp_path: Path) -> None:
    dynamic = {"-:.*down_proj": {}, "+:.*layers\\.1\\..*": {"bits": 8, "group_size": 32}}
    wide, usual = ENCODERS["gptq of 8 bits"], ENCODERS["gptq, asymmetric"]

    quantised, plain = folders(tmp_path, usual, tiny_config(**SIZES), skip=lambda name: "down_proj" in name)
    stored, meant, random = load_file(quantised / "model.safetensors"), load_file(plain / "model.safetensors"), np.random.default_rng(1)
    for name in [name for name in meant if name.startswith("model.layers.1.") and name.removesuffix(".weight").endswith(PARTS[:-1])]:
        parts, weight = wide.encode(random, *meant[name].shape)
        stored |= {f"{name.removesuffix('.weight')}.{suffix}": part for suffix, part in parts.items()}
        meant[name] = torch.from_numpy(np.ascontiguousarray(weight)).float()
    save_file(stored, quantised / "model.safetensors")
    save_file(meant, plain / "model.safetensors")
    set_config(quantised, quantization_config={**usual.config, "dynamic": dynamic})
    require_equal(load(quantised), load(plain), {"int4", "int8"})


def test_the_file_of_an_older_gptq_tool(tmp_path: Path) -> None:
    quantised, plain = folders(tmp_path, ENCODERS["gptq"], tiny_config(**SIZES))
    set_config(quantised, quantization_config=None)
    (quantised / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 16, "sym": True, "desc_act": False}))
    edit(quantised, lambda tensors: tensors.update({f"{UP}.bias": torch.zeros(96, dtype=torch.float16)}))
    require_equal(load(quantised), load(plain), {"int4"})
    edit(quantised, lambda tensors: tensors.update({f"{UP}.bias": torch.ones(96, dtype=torch.float16)}))
    with pytest.raises(CheckpointError, match=rf"{UP}\.bias is not zero"):
        load(quantised)
    (quantised / "quantize_config.json").write_text(json.dumps({"bits": 3, "group_size": 16, "sym": True, "desc_act": False}))
    with pytest.raises(CheckpointError) as found:
        load(quantised)
    assert str(found.value).startswith(f"{quantised / 'quantize_config.json'}: ")


def test_symmetric_zero_points_are_not_read(tmp_path: Path) -> None:
    quantised, plain = folders(tmp_path, ENCODERS["gptq"], tiny_config(**SIZES))
    edit(quantised, lambda tensors: tensors.update({f"{UP}.qzeros": tensors[f"{UP}.qzeros"] * 0 - 0x77777778}))  # 8 in each nibble
    require_equal(load(quantised), load(plain), {"int4"})


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def one(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A copy whose first element is `value`."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(-1)[0] = value
        return changed

    return change


FAULTS = {
    "missing scale": ("fp8 in blocks", lambda t: t.pop(f"{UP}.weight_scale_inv"), rf"lacks the tensor {UP}\.weight_scale_inv \[6, 4\]"),
    "wrong block": ("fp8 in blocks", put(f"{UP}.weight_scale_inv", lambda s: s[:3]), r"_inv in .* has shape \[3, 4\].*\[6, 4\]"),
    "NaN code": ("fp8 in blocks", put(f"{UP}.weight", lambda w: (w.view(torch.uint8) | 0x7F).view(w.dtype)), rf"{UP}\.weight: a code is"),
    "wrong group": ("compressed W4A16", put(f"{UP}.weight_scale", lambda s: s[:, :2]), r"_scale in .* has shape \[96, 2\].*\[96, 4\]"),
    "wrong packing": ("gptq", put(f"{UP}.qweight", lambda w: w.T), rf"{UP}\.qweight in .* has shape \[96, 8\].*\[8, 96\]"),
    "other packing": ("awq", put(f"{UP}.qweight", lambda w: w.reshape(8, 96)), rf"{UP}\.qweight in .* has shape \[8, 96\].*\[64, 12\]"),
    "wrong dtype": ("gptq", put(f"{UP}.qweight", lambda w: w.long()), rf"{UP}\.qweight has dtype I64, expected one of I32"),
    "wrong shape said": ("compressed W4A16", put(f"{UP}.weight_shape", lambda s: s + 1), rf"{UP}\.weight_shape: it is \[97, 65\]"),
    "uneven groups": ("gptq", put(f"{UP}.g_idx", lambda g: g * 0), rf"{UP}\.g_idx: it does not put 16 columns into each group"),
    "zero points of version 2": (
        "gptq, asymmetric", put(f"{UP}.qzeros", lambda z: z * 0 - 0x77777778), rf"{UP}\.qzeros: all zero points are 8.*version 2",
    ),
    "missing zero points": (
        "compressed W4A16, asymmetric", lambda t: t.pop(f"{UP}.weight_zero_point"), rf"lacks the tensor {UP}\.weight_zero_point",
    ),
    "groups of another length": (
        "gptq", put(f"{UP}.g_idx", lambda g: g[:32]), rf"{UP}\.g_idx in model.safetensors has shape \[32\], .* \[64\]",
    ),
    "missing codes": ("gptq", lambda t: t.pop(f"{UP}.qweight"), rf"lacks the tensor {UP}\.qweight"),
    "a tensor too many": ("awq", lambda t: t.update({f"{UP}.extra": torch.ones(1)}), rf"{UP}\.extra"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_tensor_is_refused_by_name(tmp_path: Path, fault: str) -> None:
    name, change, message = FAULTS[fault]
    quantised, _ = folders(tmp_path, ENCODERS[name], tiny_config(**SIZES))
    edit(quantised, change)
    with pytest.raises(CheckpointError, match=message):
        load(quantised)


@pytest.mark.parametrize("name", ["compressed W4A16", "gptq", "awq", "compressed W8A16"])
def test_another_group_size_in_the_config_is_named(tmp_path: Path, name: str) -> None:
    quantised, _ = folders(tmp_path, ENCODERS[name], tiny_config(**SIZES))
    text = json.dumps(ENCODERS[name].config)
    wrong = text.replace('"group_size": 16', '"group_size": 32').replace('"channel", "group_size": null', '"group", "group_size": 32')
    set_config(quantised, quantization_config=json.loads(wrong))
    scale = "scales" if name in ("gptq", "awq") else "weight_scale"
    right = "-1, or at least 64" if name == "compressed W8A16" else 16
    with pytest.raises(CheckpointError) as found:
        load(quantised)
    said = str(found.value)
    assert said.startswith(f"{quantised}: model.layers.0.") and f"{scale} in model.safetensors has shape" in said
    assert f"which fits group_size={right}, but config.json has group_size=32" in said
    assert ("run `nanovllm quantize` again" in said) == name.startswith("compressed")


@pytest.mark.parametrize("size", [0, None, -2, True, "128", 1.5])
def test_a_wrong_group_size_of_compressed_tensors_is_refused(tmp_path: Path, size: object) -> None:
    encoder = ENCODERS["compressed W4A16"]
    quantised, _ = folders(tmp_path, encoder, tiny_config(**SIZES))
    config = json.loads(json.dumps(encoder.config))
    config["config_groups"]["group_0"]["weights"]["group_size"] = size
    set_config(quantised, quantization_config=config)
    with pytest.raises(CheckpointError, match=f"config.json: .*group_size={size!r}, expected a positive integer or -1"):
        load(quantised)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_tensor_is_refused_with_its_folder_and_a_remedy(tmp_path: Path, fault: str) -> None:
    name, change, _ = FAULTS[fault]
    quantised, _ = folders(tmp_path, ENCODERS[name], tiny_config(**SIZES))
    edit(quantised, change)
    with pytest.raises(CheckpointError) as found:
        load(quantised)
    assert str(found.value).startswith(str(quantised)) and "copy or download the folder again, config.json included" in str(found.value)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_config_that_lost_its_quantisation_is_named(tmp_path: Path, name: str) -> None:
    quantised, _ = folders(tmp_path, ENCODERS[name], tiny_config(**SIZES))
    set_config(quantised, quantization_config=None)
    for call in (load, lambda folder: write_quantised(folder, tmp_path / "copy", "fp8")):
        with pytest.raises(CheckpointError, match=r"looks quantised, but config\.json has no quantization_config") as found:
            call(quantised)
        assert str(found.value).startswith(f"{quantised}: model.layers.0.")


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ENCODERS)
def test_a_wrong_scale_is_refused_with_its_file_and_tensor(tmp_path: Path, name: str, value: float) -> None:
    quantised, _ = folders(tmp_path, ENCODERS[name], tiny_config(**SIZES))
    file = quantised / "model.safetensors"
    (scale,) = (tensor for tensor in load_file(file) if tensor.startswith(f"{UP}.") and "scale" in tensor and "input" not in tensor)
    edit(quantised, put(scale, one(value)))
    with pytest.raises(CheckpointError) as found:
        load(quantised)
    assert str(found.value).startswith(f"{file}: {scale}: a scale is {f'{value:g}' if value else '0 for weights that are not'}")


def test_a_scale_that_kernels_cannot_multiply_is_refused(tmp_path: Path) -> None:
    quantised, _ = folders(tmp_path, ENCODERS["fp8 in blocks"], tiny_config(**SIZES))
    (scale,) = (tensor for tensor in load_file(quantised / "model.safetensors") if tensor.startswith(f"{UP}.") and "scale" in tensor)
    edit(quantised, put(scale, one(2.0**67)))
    load(quantised)
    edit(quantised, put(scale, one(2.0**68)))
    with pytest.raises(CheckpointError, match=r"a scale is 2\.95\S*: the file is damaged"):
        load(quantised)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_scale_whose_weights_are_not_finite_is_refused(tmp_path: Path, name: str) -> None:
    quantised, _ = folders(tmp_path, ENCODERS[name], tiny_config(**SIZES))
    file = quantised / "model.safetensors"
    (scale,) = (tensor for tensor in load_file(file) if tensor.startswith(f"{UP}.") and "scale" in tensor and "input" not in tensor)
    half = load_file(file)[scale].dtype == torch.float16
    edit(quantised, put(scale, one(6e4 if half else 3e38)))
    if half:  # in float32 this is a weight like others
        load(quantised)
    with pytest.raises(CheckpointError) as found:
        nv.load_model(quantised, "cpu", "float16" if half else "float32", tokenizer=False)
    told = str(found.value)
    assert told.startswith(f"{file}: {scale}: a scale is ") and f" is not finite in float{16 if half else 32}: the file is damaged" in told


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_weights_that_have_no_codes_are_refused_by_name(tmp_path: Path, kind: str, value: float) -> None:
    for name, config, how in (
        ("model.layers.1.self_attn.k_proj.weight", tiny_config(**SIZES), {}),
        ("model.layers.1.mlp.experts.2.down_proj.weight", tiny_config("Qwen3MoeForCausalLM", **SIZES), {}),
        ("lm_head.weight", tiny_config(**SIZES), {"quantize_head": True}),
        ("model.embed_tokens.weight", tiny_config(**SIZES, tie_word_embeddings=True), {"quantize_head": True}),
    ):
        folder = save_hf_folder(tmp_path / name, config)
        edit(folder, put(name, one(value)))
        load(folder)
        with pytest.raises(CheckpointError) as found:
            load(folder, quantization=kind, **how)
        what = "weights that are infinite or NaN in float32, which have no codes"
        assert str(found.value) == f"{folder / 'model.safetensors'}: {name} has {what}"


def test_scales_may_be_negative(tmp_path: Path) -> None:
    """AutoRound's symmetric codes have such scales."""
    quantised, plain = folders(tmp_path, ENCODERS["gptq"], tiny_config(**SIZES))
    edit(quantised, put(f"{UP}.scales", torch.neg))
    edit(plain, put(f"{UP}.weight", torch.neg))
    require_equal(load(quantised), load(plain), {"int4"})


REFUSED = {
    "unknown": ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' is not supported.*gptq.*quantization='fp8'"),
    "mxfp4": ({"quant_method": "mxfp4"}, "quant_method='mxfp4'"),
    "none": ({"bits": 4}, "quant_method=None"),
    "not an object": (4, "quantization_config=4"),
    "3 bits": ({**ENCODERS["gptq"].config, "bits": 3}, "bits=3"),
    "marlin": ({**ENCODERS["gptq"].config, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
    "no bits": ({"quant_method": "gptq", "group_size": 16}, "bits=None"),
    "group": ({**ENCODERS["gptq"].config, "group_size": 0}, "group_size=0"),
    "label of sym": ({**ENCODERS["gptq"].config, "sym": "yes"}, "sym='yes'"),
    "gemv": ({**ENCODERS["awq"].config, "version": "gemv"}, "version='gemv'"),
    "e5m2": ({**ENCODERS["fp8 in blocks"].config, "fmt": "e5m2"}, "fmt='e5m2'"),
    "block": ({**ENCODERS["fp8 in blocks"].config, "weight_block_size": [16]}, r"weight_block_size=\[16\]"),
    "fp4 experts": ({**ENCODERS["fp8 in blocks"].config, "expert_dtype": "fp4"}, "expert_dtype='fp4'"),
    "nvfp4": (
        {**ENCODERS["compressed W4A16"].config, "format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized' with num_bits=4",
    ),
    "rotations": (
        {**ENCODERS["compressed W4A16"].config, "transform_config": {"config_groups": {"R": {"type": "hadamard"}}}},
        "/config.json: quantization_config has a transform_config: rotations .* are not supported; load a checkpoint without transforms",
    ),
    "no groups": ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups=None"),
    "hostile pattern": ({**ENCODERS["gptq"].config, "dynamic": {"+:(a+)+$": {}}}, "pattern"),
    "broken pattern": ({**ENCODERS["gptq"].config, "dynamic": {"+:(": {}}}, "not a regular expression"),
    "not covered": ({**ENCODERS["gptq"].config, "dynamic": {"-:.*": {}}}, r"lacks the tensor .*q_proj\.weight"),
}  # fmt: skip


@pytest.mark.parametrize("none", [None, {}, {"config_groups": {}}])
def test_a_config_without_rotations_may_say_so(tmp_path: Path, none: object) -> None:
    encoder = ENCODERS["compressed W4A16"]
    quantised, plain = folders(tmp_path, encoder, tiny_config(**SIZES))
    set_config(quantised, quantization_config={**encoder.config, "transform_config": none})
    require_equal(load(quantised), load(plain), {"int4"})


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_cannot_be_loaded_is_refused_by_name(tmp_path: Path, case: str) -> None:
    config, message = REFUSED[case]
    quantised, _ = folders(tmp_path, ENCODERS["gptq"], tiny_config(**SIZES))
    set_config(quantised, quantization_config=config)
    with pytest.raises(CheckpointError, match=message):
        load(quantised)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GPT2LMHeadModel"])
def test_matrices_are_rounded_while_they_are_loaded(tmp_path: Path, kind: str, head: bool, architecture: str) -> None:
    config = tiny_config(architecture) if architecture == "GPT2LMHeadModel" else tiny_config(architecture, **SIZES)
    folder = save_hf_folder(tmp_path / "model", config)
    plain, rounded = load(folder), load(folder, quantization=kind, quantize_head=head)
    matrix, whole = rounded.params.layers[0].qkv, plain.params.layers[0].qkv
    assert isinstance(matrix, QuantisedMatrix) and matrix.kind == kind and matrix.shape == whole.shape
    error = (matrix.dequantised(torch.float32) - whole).norm() / whole.norm()
    assert error < {"fp8": 0.04, "int8": 0.01, "int4": 0.15}[kind]
    assert isinstance(rounded.params.head, QuantisedMatrix) == head and isinstance(rounded.params.embed, torch.Tensor)
    assert len({plain.fingerprint, rounded.fingerprint, load(folder, quantization="int8" if kind == "fp8" else "fp8").fingerprint}) == 3
    params = nv.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    assert len(nv.LLM(rounded).generate([[1, 2, 3]], params)[0].token_ids) == 4
    assert kind in repr(rounded)


@pytest.mark.usefixtures("untyped")
def test_wrong_options(tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path / "model", tiny_config())
    for how, message in (
        ({"quantization": "int2"}, "quantization='int2' must be one of fp8, int8, int4"),
        ({"quantization": True}, "quantization=True"),
        ({"quantization": "w4a16"}, "must be one of fp8, int8, int4, or None; w4a16 is called int4 here"),
        ({"quantize_head": True}, "quantize_head=True needs"),
        ({"quantization": "fp8", "quantize_head": 1}, "quantize_head=1 must be True or False"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            load(folder, **how)
    quantised, _ = folders(tmp_path, ENCODERS["awq"], tiny_config(**SIZES))
    with pytest.raises(InvalidRequestError, match=r"quantised already \(awq\): leave it out$"):
        load(quantised, quantization="fp8")
    with pytest.raises(InvalidRequestError, match="leave it out, and quantize_head too: the head stays as it is"):
        load(quantised, quantization="fp8", quantize_head=True)
    with pytest.raises(InvalidRequestError, match="in a checkpoint that is quantised already, the head stays as it is"):
        load(quantised, quantize_head=True)
