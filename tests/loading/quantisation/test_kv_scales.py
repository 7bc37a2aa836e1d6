"""Checkpoints with scales for quantised KV: they are loaded, and the scales are left out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import nanovllm as nv
from nanovllm.testing.models import save_hf_folder, tiny_config

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def with_kv_scales(folder: Path, config: dict[str, Any]) -> None:
    """Add the scales of both layers, and `config` as the `quantization_config`."""
    (path,) = folder.glob("*.safetensors")
    scales = {f"model.layers.{layer}.self_attn.{name}": torch.tensor([0.5]) for layer in (0, 1) for name in ("k_scale", "v_scale")}
    save_file({**load_file(path), **scales}, path)
    hf = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**hf, "quantization_config": config}))


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_scales_of_a_checkpoint_whose_weights_are_plain_are_left_out(kv_dtype: Any, tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path / "model", tiny_config())
    plain = nv.load_model(folder, device="cpu")
    with_kv_scales(folder, {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME})
    model, prompt, greedy = nv.load_model(folder, device="cpu"), [5, 6, 7, 8], nv.SamplingParams(temperature=0.0, max_tokens=8)
    replies = []
    for each in (plain, model):
        _, gen = nv.generate(each, nv.init_state(each, num_pages=8, kv_dtype=kv_dtype), prompt, greedy)
        replies.append(gen.token_ids)
    assert replies[0] == replies[1]


def test_a_config_without_groups_and_without_quantised_kv_is_refused(tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path / "model", tiny_config())
    with_kv_scales(folder, {"quant_method": "compressed-tensors", "config_groups": {}})
    with pytest.raises(nv.CheckpointError, match="has no groups"):
        nv.load_model(folder, device="cpu")
