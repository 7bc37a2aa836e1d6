"""Qwen3-MoE (Yang et al., 2025): Qwen3's attention, and experts in place of the MLP in most or all layers."""

from nanovllm.config import ModelConfig, MoEConfig
from nanovllm.errors import CheckpointError
from nanovllm.models.common import tables
from nanovllm.models.common.hf_config import HF, SLIDING, read_bool, read_int, read_sizes, read_windows
from nanovllm.models.common.params import Layer, ParamInfo, Params
from nanovllm.models.qwen3 import qwen3_attention


def config_from_hf(hf: HF) -> ModelConfig:
    """The config of a `Qwen3MoeForCausalLM` checkpoint. Raises `CheckpointError` for a setting that this file does not implement."""
    num_layers, every, dense = read_int(hf, "num_hidden_layers"), read_int(hf, "decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if every < 1 or not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise CheckpointError(
            f"config.json: decoder_sparse_step={every!r} must be at least 1, and mlp_only_layers={dense!r} a list of layers"
        )
    dense = set(dense)
    moe = MoEConfig(
        num_experts=read_int(hf, "num_experts", read_int(hf, "num_local_experts", 128)),
        top_k=read_int(hf, "num_experts_per_tok", 8),
        intermediate_size=read_int(hf, "moe_intermediate_size", 768),
        layers=tuple(i for i in range(num_layers) if i not in dense and (i + 1) % every == 0),
        normalise=read_bool(hf, "norm_topk_prob", False),
    )
    windows = read_windows(hf, SLIDING, 4096) if read_bool(hf, "use_sliding_window", False) else ()
    bias = read_bool(hf, "attention_bias", False)
    return read_sizes(hf, "Qwen3MoeForCausalLM", max_positions=32768, attention_bias=bias, windows=windows, moe=moe)


def param_table(c: ModelConfig) -> Params[ParamInfo]:
    """Every parameter's shape and its tensors in the checkpoint."""

    def layer_table(prefix: str, index: int) -> Layer[ParamInfo]:
        routed = c.moe is not None and index in c.moe.layers
        return Layer(
            input_norm=tables.gain(f"{prefix}.input_layernorm", c.hidden_size),
            **qwen3_attention(c, f"{prefix}.self_attn"),
            post_norm=tables.gain(f"{prefix}.post_attention_layernorm", c.hidden_size),
            **(tables.no_mlp() if routed else tables.gated_mlp(c, f"{prefix}.mlp", c.intermediate_size)),
            experts=tables.mixture(c, f"{prefix}.mlp") if routed else None,
        )

    return tables.decoder(c, layer_table)
