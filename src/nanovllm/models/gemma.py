"""Gemma (Gemma Team, 2024): a Llama with scaled embeddings, norm weights stored minus 1, and GeGLU."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from nanovllm.config import ModelConfig
from nanovllm.errors import CheckpointError
from nanovllm.models.common import tables
from nanovllm.models.common.hf_config import HF, read_bool, read_int, read_sizes
from nanovllm.models.common.params import Layer, ParamInfo, Params

GAINS: Mapping[str, Any] = {"offset": 1.0, "dtype": torch.float32}  # norm weights are multiplied in float32, before rounding


def config_from_hf(hf: HF) -> ModelConfig:
    """The config of a `GemmaForCausalLM` checkpoint. Raises `CheckpointError` for a setting that this file does not implement."""
    return gemma_sizes({**hf, "hidden_activation": None}, "GemmaForCausalLM", max_positions=8192)


def gemma_sizes(hf: HF, architecture: str, **fields) -> ModelConfig:
    """The config of all three generations of Gemma; `fields` are their differences.

    Raises `CheckpointError` for a setting that is not implemented, for example bidirectional attention.
    """
    if hf.get("use_bidirectional_attention"):
        raise CheckpointError("config.json: use_bidirectional_attention=true is not supported: tokens would attend to later tokens")
    hidden = read_int(hf, "hidden_size")
    scale, bias = math.sqrt(max(0, hidden)), read_bool(hf, "attention_bias", False)
    more: dict[str, Any] = {"embed_scale": scale, "attention_bias": bias}
    return read_sizes(hf, architecture, head_dim=256, tied=True, bos=2, eos=1, act="gelu_pytorch_tanh", **more, **fields)


def param_table(c: ModelConfig) -> Params[ParamInfo]:
    """Every parameter's shape and its tensors in the checkpoint."""

    def layer_table(prefix: str, _: int) -> Layer[ParamInfo]:
        return Layer(
            input_norm=tables.gain(f"{prefix}.input_layernorm", c.hidden_size, **GAINS),
            **tables.attention(c, f"{prefix}.self_attn", qkv_bias=c.attention_bias, o_bias=c.attention_bias),
            q_norm=None,
            k_norm=None,
            post_norm=tables.gain(f"{prefix}.post_attention_layernorm", c.hidden_size, **GAINS),
            **tables.gated_mlp(c, f"{prefix}.mlp", c.intermediate_size),
        )

    return tables.decoder(c, layer_table, **GAINS)
