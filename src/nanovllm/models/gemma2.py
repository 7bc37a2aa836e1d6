"""Gemma 2 (Gemma Team, 2024): Gemma with norms before and after attention and MLP, soft caps, and sliding windows in every other layer."""

from typing import Any

from nanovllm.config import ModelConfig
from nanovllm.errors import CheckpointError
from nanovllm.models.common import tables
from nanovllm.models.common.hf_config import FULL, HF, SLIDING, read_float, read_int, read_windows
from nanovllm.models.common.params import Layer, ParamInfo, Params
from nanovllm.models.gemma import GAINS, gemma_sizes


def config_from_hf(hf: HF) -> ModelConfig:
    """The config of a `Gemma2ForCausalLM` checkpoint. Raises `CheckpointError` for a setting that this file does not implement."""
    alternating = {i: FULL if i % 2 else SLIDING for i in range(read_int(hf, "num_hidden_layers"))}
    windows = read_windows(hf, alternating, 4096)
    return gemma_sizes(hf, "Gemma2ForCausalLM", max_positions=8192, windows=windows, **scores(hf, 50.0, 30.0))


def scores(hf: HF, attention_cap: float, logit_cap: float) -> dict[str, Any]:
    """Scale and soft caps of scores and logits. The arguments are the defaults of missing keys; a null key means no soft cap."""
    caps = {"attention_softcap": ("attn_logit_softcapping", attention_cap), "logit_softcap": ("final_logit_softcapping", logit_cap)}
    read = {name: read_float({key: hf.get(key, cap)}, key, 0.0) for name, (key, cap) in caps.items()}
    scalar = read_float(hf, "query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        raise CheckpointError(f"config.json: query_pre_attn_scalar={scalar!r} must be positive")
    return {"attention_scale": scalar**-0.5, **read}


def sandwich(c: ModelConfig, prefix: str) -> dict[str, Any]:
    """The four norms of a layer: before and after attention, before and after the MLP."""
    names = {"input_norm": "input", "o_norm": "post_attention", "post_norm": "pre_feedforward", "down_norm": "post_feedforward"}
    return {field: tables.gain(f"{prefix}.{name}_layernorm", c.hidden_size, **GAINS) for field, name in names.items()}


def param_table(c: ModelConfig) -> Params[ParamInfo]:
    """Every parameter's shape and its tensors in the checkpoint."""

    def layer_table(prefix: str, _: int) -> Layer[ParamInfo]:
        return Layer(
            **sandwich(c, prefix),
            **tables.attention(c, f"{prefix}.self_attn", qkv_bias=c.attention_bias, o_bias=c.attention_bias),
            q_norm=None,
            k_norm=None,
            **tables.gated_mlp(c, f"{prefix}.mlp", c.intermediate_size),
        )

    return tables.decoder(c, layer_table, **GAINS)
