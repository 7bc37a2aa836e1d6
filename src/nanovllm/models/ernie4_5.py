"""ERNIE 4.5 (Baidu, 2025), dense and with experts.

Its rotary embedding rotates the pairs of channels 2i and 2i + 1; the other architectures rotate i and i + D/2. Attention uses only
products of queries and keys, so both may have their channels in any common order. The even channels are stored before the odd ones. So
all code that rotates or moves keys works for this architecture too.
"""

from typing import Any

from nanovllm.config import ModelConfig, MoEConfig
from nanovllm.errors import CheckpointError
from nanovllm.models.common import tables
from nanovllm.models.common.hf_config import HF, read_bool, read_float, read_int, read_sizes
from nanovllm.models.common.params import Layer, ParamInfo, Params


def config_from_hf(hf: HF) -> ModelConfig:
    """The config of an `Ernie4_5ForCausalLM` checkpoint. Raises `CheckpointError` for a setting that this file does not implement."""
    return _config(hf, "Ernie4_5ForCausalLM", head_dim=128)


def config_from_hf_moe(hf: HF) -> ModelConfig:
    """The config of an `Ernie4_5_MoeForCausalLM` checkpoint: float32 routing, a learned correction of the choice, shared experts.

    Raises `CheckpointError` for a setting that this file does not implement.
    """
    if read_bool(hf, "use_bias", False):
        raise CheckpointError("config.json: use_bias=true is not supported with experts: the head would have a bias")
    num_layers, size = read_int(hf, "num_hidden_layers"), read_int(hf, "moe_intermediate_size", 1536)
    first, last = read_int(hf, "moe_layer_start_index", 1), read_int(hf, "moe_layer_end_index", -1)
    every = max(1, read_int(hf, "moe_layer_interval", 1))
    moe = MoEConfig(
        num_experts=read_int(hf, "moe_num_experts", 64),
        top_k=read_int(hf, "moe_k", 6),
        intermediate_size=size,
        layers=tuple(i for i in range(num_layers) if (i + 1) % every == 0 and first <= i <= (num_layers - 1 if last == -1 else last)),
        least_sum=read_float(hf, "moe_norm_min", 1e-12),
        wide_router=True,
        shared_size=size * read_int(hf, "moe_num_shared_experts", 2),
    )
    return _config(hf, "Ernie4_5_MoeForCausalLM", moe=moe)


def _config(hf: HF, architecture: str, **fields) -> ModelConfig:
    bias = read_bool(hf, "use_bias", False)
    more: dict[str, Any] = {"attention_bias": bias, "mlp_bias": bias, **fields}
    return read_sizes(hf, architecture, eps=1e-5, theta=500000.0, tied=True, max_positions=131072, bos=1, eos=2, **more)


def checkpoint_name(name: str) -> str | None:
    """The name in the table of a checkpoint tensor; None for the multi-token prediction layers, which are not used."""
    return None if name.startswith("model.mtp_") else name


def param_table(c: ModelConfig) -> Params[ParamInfo]:
    """Every parameter's shape and its tensors in the checkpoint."""
    bias = {"qkv_bias": c.attention_bias, "o_bias": c.attention_bias}

    def layer_table(prefix: str, index: int) -> Layer[ParamInfo]:
        routed, mlp = c.moe is not None and index in c.moe.layers, f"{prefix}.mlp"
        size = c.moe.shared_size if c.moe is not None and routed else c.intermediate_size
        dense = tables.gated_mlp(c, f"{mlp}.shared_experts" if routed else mlp, size, bias=c.mlp_bias) if size else tables.no_mlp()
        return Layer(
            input_norm=tables.gain(f"{prefix}.input_layernorm", c.hidden_size),
            **tables.attention(c, f"{prefix}.self_attn", **bias, interleaved=True),
            q_norm=None,
            k_norm=None,
            post_norm=tables.gain(f"{prefix}.post_attention_layernorm", c.hidden_size),
            **dense,
            experts=tables.mixture(c, mlp, bias=f"{mlp}.moe_statics.e_score_correction_bias") if routed else None,
        )

    return tables.decoder(c, layer_table)
