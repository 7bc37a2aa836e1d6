"""Llama (Touvron et al., 2023; Grattafiori et al., 2024) and TinyLlama: grouped-query attention, rotary positions, a gated MLP."""

from typing import Any

from nanovllm.config import ModelConfig
from nanovllm.models.common import tables
from nanovllm.models.common.hf_config import HF, read_bool, read_sizes
from nanovllm.models.common.params import Layer, ParamInfo, Params


def config_from_hf(hf: HF) -> ModelConfig:
    """The config of a `LlamaForCausalLM` checkpoint. Raises `CheckpointError` for a setting that this file does not implement."""
    biases: dict[str, Any] = {name: read_bool(hf, name, False) for name in ("attention_bias", "mlp_bias")}
    return read_sizes(hf, "LlamaForCausalLM", bos=1, eos=2, **biases)


def param_table(c: ModelConfig) -> Params[ParamInfo]:
    """Every parameter's shape and its tensors in the checkpoint."""

    def layer_table(prefix: str, _: int) -> Layer[ParamInfo]:
        return Layer(
            input_norm=tables.gain(f"{prefix}.input_layernorm", c.hidden_size),
            **tables.attention(c, f"{prefix}.self_attn", qkv_bias=c.attention_bias, o_bias=c.attention_bias),
            q_norm=None,
            k_norm=None,
            post_norm=tables.gain(f"{prefix}.post_attention_layernorm", c.hidden_size),
            **tables.gated_mlp(c, f"{prefix}.mlp", c.intermediate_size, bias=c.mlp_bias),
        )

    return tables.decoder(c, layer_table)
