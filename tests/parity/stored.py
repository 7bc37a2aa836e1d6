"""Checkpoints in the form of older programs, made by rewriting a folder that transformers saved."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import load_file, save_file

from nanovllm.types import Tensor


def rewrite(folder: Path, how: str) -> None:
    """Rewrite the tensors and the config of a folder with an entry of `REWRITES`."""
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors, settings = REWRITES[how](load_file(file), json.loads(config.read_text()))
    save_file(tensors, file, metadata={"format": "pt"})
    config.write_text(json.dumps(settings))


def _bare(tensors: dict[str, Tensor], config: dict) -> tuple[dict[str, Tensor], dict]:
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}, config


def _buffers(tensors: dict[str, Tensor], config: dict) -> tuple[dict[str, Tensor], dict]:
    size = config["n_positions"]
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(size, size).tril()[None, None] for i in range(config["n_layer"])}
    return {**tensors, **masks, "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}, config


def _su(tensors: dict[str, Tensor], config: dict) -> tuple[dict[str, Tensor], dict]:
    rope = config.pop("rope_parameters")
    config["rope_theta"], config["partial_rotary_factor"] = rope.pop("rope_theta"), rope.pop("partial_rotary_factor")
    config["rope_scaling"] = {"type": "su", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    return tensors, config


def _flat(tensors: dict[str, Tensor], config: dict) -> tuple[dict[str, Tensor], dict]:
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["full_attention"].pop("rope_theta")
    config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    config["rope_scaling"] = rope["full_attention"]
    del config["layer_types"]
    config["sliding_window_pattern"] = 2
    return tensors, config


def _language_model(tensors: dict[str, Tensor], config: dict) -> tuple[dict[str, Tensor], dict]:
    renamed = {name.replace("model.language_model.", "language_model.model."): tensor for name, tensor in tensors.items()}
    return {name.removeprefix("model.") if "language" not in name else name: t for name, t in renamed.items()}, config


REWRITES: Mapping[str, Callable[[dict[str, Tensor], dict], tuple[dict[str, Tensor], dict]]] = MappingProxyType(
    {"bare": _bare, "buffers": _buffers, "su": _su, "flat": _flat, "language_model": _language_model}
)
