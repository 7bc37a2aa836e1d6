"""Gemma 3's text model (Gemma Team, 2025): Gemma 2's layers with norms of query and key heads in place of soft caps. Five of six layers
have a sliding window and a rotary embedding of their own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm.config import ModelConfig
from nanovllm.errors import CheckpointError
from nanovllm.models.common import tables
from nanovllm.models.common.hf_config import FULL, HF, SLIDING, config_to_hf, read_int, read_rope, read_windows
from nanovllm.models.common.params import Layer, ParamInfo, Params
from nanovllm.models.gemma import GAINS, gemma_sizes
from nanovllm.models.gemma2 import sandwich, scores

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208}  # defaults: the 4B model's


def config_from_hf(hf: HF) -> ModelConfig:
    """The config of a `Gemma3ForCausalLM` checkpoint. Raises `CheckpointError` for a setting that this file does not implement."""
    if read_int(hf, "sliding_window_pattern", 6) < 1:
        raise CheckpointError(f"config.json: sliding_window_pattern={hf['sliding_window_pattern']!r} must be at least 1")
    every, most = read_int(hf, "sliding_window_pattern", 6), read_int(hf, "max_position_embeddings", 131072)
    usual = {i: SLIDING if (i + 1) % every else FULL for i in range(read_int(hf, "num_hidden_layers"))}
    # Without a window the layer types still tell which layers use the local rotary embedding.
    hides = hf.get("sliding_window", 4096) is not None
    windows = read_windows({**hf, **({} if hides else {"sliding_window": most})}, usual, 4096)
    ropes = {"rope": _rope(hf, FULL, "rope_theta", 1e6), "local_rope": _rope(hf, SLIDING, "rope_local_base_freq", 1e4)}
    return gemma_sizes(hf, "Gemma3ForCausalLM", max_positions=131072, windows=windows, **ropes, **scores(hf, 0.0, 0.0))


def config_from_hf_with_vision(hf: HF) -> ModelConfig:
    """The config of a `Gemma3ForConditionalGeneration` checkpoint. Only its text model is used.

    Raises `CheckpointError` for a setting that this file does not implement.
    """
    text = hf.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: text_config={text!r} must be an object")
    shared = ("eos_token_id", "bos_token_id", "dtype", "torch_dtype", "tie_word_embeddings")
    outer = {name: hf[name] for name in shared if hf.get(name) is not None}
    return replace(config_from_hf({**SIZES, **text, **outer}), architecture="Gemma3ForConditionalGeneration")


def config_to_hf_with_vision(config: ModelConfig) -> HF:
    """The `config.json` that `config_from_hf_with_vision` reads back as `config`."""
    text = config_to_hf(config)
    return {"architectures": text["architectures"], "model_type": "gemma3", "eos_token_id": text["eos_token_id"], "text_config": text}


def checkpoint_name(name: str) -> str | None:
    """The name in the table of a tensor of a checkpoint with vision; None for tensors outside of the text model."""
    for prefix in ("model.language_model.", "language_model.model."):
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
    if name.startswith(("model.vision_tower.", "vision_tower.", "model.multi_modal_projector.", "multi_modal_projector.")):
        return None
    return name.removeprefix("language_model.")


def _rope(hf: HF, kind: str, theta_key: str, theta: float) -> Any:
    """The rotary embedding of one type of layer, from `rope_parameters` by type, or from the flat keys of older configs."""
    given = hf.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or any(
        name not in (FULL, SLIDING) or not isinstance(value, Mapping | None) for name, value in given.items()
    ):
        raise CheckpointError(f"config.json: rope_parameters={given!r} must be an object with the keys {FULL} and {SLIDING}")
    scaling = hf.get("rope_scaling") if kind == FULL else None
    plain = {"rope_theta", "rope_scaling", "rope_parameters"}
    flat = {name: value for name, value in hf.items() if name not in plain}
    of_kind = given.get(kind) or {}
    if of_kind.get("rope_theta") is None and hf.get(theta_key) is not None:
        of_kind = {**of_kind, "rope_theta": hf[theta_key]}
    return read_rope({**flat, "rope_parameters": of_kind, "rope_scaling": scaling}, theta, 131072)


def param_table(c: ModelConfig) -> Params[ParamInfo]:
    """Every parameter's shape and its tensors in the checkpoint."""

    def layer_table(prefix: str, _: int) -> Layer[ParamInfo]:
        return Layer(
            **sandwich(c, prefix),
            **tables.attention(c, f"{prefix}.self_attn", qkv_bias=c.attention_bias, o_bias=c.attention_bias),
            q_norm=tables.gain(f"{prefix}.self_attn.q_norm", c.head_dim, **GAINS),
            k_norm=tables.gain(f"{prefix}.self_attn.k_norm", c.head_dim, **GAINS),
            **tables.gated_mlp(c, f"{prefix}.mlp", c.intermediate_size),
        )

    return tables.decoder(c, layer_table, **GAINS)
