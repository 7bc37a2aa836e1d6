"""Qwen3 (Yang et al., 2025): grouped-query attention with an RMS norm on every query and key head, rotary positions, a gated MLP."""

from typing import Any

from nanovllm.config import ModelConfig
from nanovllm.models.common import tables
from nanovllm.models.common.hf_config import HF, read_bool, read_sizes
from nanovllm.models.common.params import Layer, ParamInfo, Params
from nanovllm.models.qwen2 import qwen_windows


def config_from_hf(hf: HF) -> ModelConfig:
    """The config of a `Qwen3ForCausalLM` checkpoint. Raises `CheckpointError` for a setting that this file does not implement."""
    bias = read_bool(hf, "attention_bias", False)
    return read_sizes(hf, "Qwen3ForCausalLM", head_dim=128, max_positions=32768, attention_bias=bias, windows=qwen_windows(hf))


def qwen3_attention(c: ModelConfig, prefix: str) -> dict[str, Any]:
    """The descriptions of the attention weights of a Qwen3 layer. Qwen3-MoE has the same."""
    return {
        **tables.attention(c, prefix, qkv_bias=c.attention_bias, o_bias=c.attention_bias),
        "q_norm": tables.gain(f"{prefix}.q_norm", c.head_dim),
        "k_norm": tables.gain(f"{prefix}.k_norm", c.head_dim),
    }


def param_table(c: ModelConfig) -> Params[ParamInfo]:
    """Every parameter's shape and its tensors in the checkpoint."""

    def layer_table(prefix: str, _: int) -> Layer[ParamInfo]:
        return Layer(
            input_norm=tables.gain(f"{prefix}.input_layernorm", c.hidden_size),
            **qwen3_attention(c, f"{prefix}.self_attn"),
            post_norm=tables.gain(f"{prefix}.post_attention_layernorm", c.hidden_size),
            **tables.gated_mlp(c, f"{prefix}.mlp", c.intermediate_size),
        )

    return tables.decoder(c, layer_table)
