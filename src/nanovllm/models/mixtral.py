"""Mixtral (Jiang et al., 2024): Mistral's attention, and experts in place of every MLP, two per token."""

from nanovllm.config import ModelConfig, MoEConfig
from nanovllm.models.common import tables
from nanovllm.models.common.hf_config import HF, SLIDING, read_int, read_sizes, read_windows
from nanovllm.models.common.params import Layer, ParamInfo, Params


def config_from_hf(hf: HF) -> ModelConfig:
    """The config of a `MixtralForCausalLM` checkpoint. Raises `CheckpointError` for a setting that this file does not implement."""
    moe = MoEConfig(
        num_experts=read_int(hf, "num_local_experts", 8),
        top_k=read_int(hf, "num_experts_per_tok", 2),
        intermediate_size=read_int(hf, "intermediate_size", 14336),
        layers=tuple(range(read_int(hf, "num_hidden_layers"))),
    )
    windows = read_windows(hf, SLIDING)
    return read_sizes(hf, "MixtralForCausalLM", eps=1e-5, theta=1e6, max_positions=131072, bos=1, eos=2, windows=windows, moe=moe)


def param_table(c: ModelConfig) -> Params[ParamInfo]:
    """Every parameter's shape and its tensors in the checkpoint."""

    def layer_table(prefix: str, _: int) -> Layer[ParamInfo]:
        return Layer(
            input_norm=tables.gain(f"{prefix}.input_layernorm", c.hidden_size),
            **tables.attention(c, f"{prefix}.self_attn"),
            q_norm=None,
            k_norm=None,
            post_norm=tables.gain(f"{prefix}.post_attention_layernorm", c.hidden_size),
            **tables.no_mlp(),
            experts=tables.mixture(c, f"{prefix}.block_sparse_moe", parts=("w1", "w3", "w2")),
        )

    return tables.decoder(c, layer_table)
