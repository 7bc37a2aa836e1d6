"""Qwen2 and Qwen2.5 (Yang et al., 2024): a Llama whose queries, keys and values have biases; its upper layers may have sliding windows."""

from nanovllm.config import ModelConfig
from nanovllm.models.common import tables
from nanovllm.models.common.hf_config import FULL, HF, SLIDING, read_bool, read_int, read_sizes, read_windows
from nanovllm.models.common.params import Layer, ParamInfo, Params


def config_from_hf(hf: HF) -> ModelConfig:
    """The config of a `Qwen2ForCausalLM` checkpoint. Raises `CheckpointError` for a setting that this file does not implement."""
    return read_sizes(hf, "Qwen2ForCausalLM", max_positions=32768, attention_bias=True, windows=qwen_windows(hf))


def qwen_windows(hf: HF) -> tuple[int, ...]:
    """The windows of Qwen2 and Qwen3. If they are switched on, the layers from `max_window_layers` on have one."""
    if not read_bool(hf, "use_sliding_window", False):
        hf = {**hf, "sliding_window": None}
    first = read_int(hf, "max_window_layers", 28)
    return read_windows(hf, {i: SLIDING if i >= first else FULL for i in range(read_int(hf, "num_hidden_layers"))}, 4096)


def param_table(c: ModelConfig) -> Params[ParamInfo]:
    """Every parameter's shape and its tensors in the checkpoint."""

    def layer_table(prefix: str, _: int) -> Layer[ParamInfo]:
        return Layer(
            input_norm=tables.gain(f"{prefix}.input_layernorm", c.hidden_size),
            **tables.attention(c, f"{prefix}.self_attn", qkv_bias=True),
            q_norm=None,
            k_norm=None,
            post_norm=tables.gain(f"{prefix}.post_attention_layernorm", c.hidden_size),
            **tables.gated_mlp(c, f"{prefix}.mlp", c.intermediate_size),
        )

    return tables.decoder(c, layer_table)
