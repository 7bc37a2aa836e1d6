"""Phi-3, Phi-3.5 and Phi-4-mini (Abdin et al., 2024): a Llama whose projections are stored fused. Only a part of a head may be rotated.
LongRoPE (Ding et al., 2024) has other rotation speeds for long requests than for short ones.

The checkpoint rotates the first R channels in pairs i and i + R/2. They are reordered to pairs i and i + D/2, as in all architectures.
The other channels fill the rest, with speed 0.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm.config import ModelConfig, RopeConfig
from nanovllm.errors import CheckpointError
from nanovllm.models.common import tables
from nanovllm.models.common.hf_config import HF, SLIDING, read_float, read_int, read_rope, read_sizes, read_windows
from nanovllm.models.common.params import Layer, ParamInfo, Params, loaded


def config_from_hf(hf: HF) -> ModelConfig:
    """The config of a `Phi3ForCausalLM` checkpoint. Raises `CheckpointError` for a setting that this file does not implement."""
    rope, long = _ropes(hf)
    windows = read_windows(hf, SLIDING)
    return read_sizes(hf, "Phi3ForCausalLM", eps=1e-5, max_positions=4096, bos=1, eos=32000, rope=rope, long_rope=long, windows=windows)


def _ropes(hf: HF) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary embedding of requests of up to `original_max_position_embeddings` tokens, and that of longer requests if it differs."""
    sources = [hf.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    if not all(isinstance(source, Mapping) for source in sources):
        raise CheckpointError(f"config.json: rope_parameters and rope_scaling must be objects, not {sources!r}")
    given: dict[str, Any] = {**sources[0], **sources[1]}
    kind = given.get("rope_type") or given.get("type") or "default"
    partial = read_float(given, "partial_rotary_factor", read_float(hf, "partial_rotary_factor", 1.0))
    theta = read_float(given, "rope_theta", read_float(hf, "rope_theta", 10000.0))
    if theta <= 1.0:
        raise CheckpointError(f"config.json: rope_theta={theta!r} must be above 1")
    num_heads, hidden = read_int(hf, "num_attention_heads"), read_int(hf, "hidden_size")
    head_dim = read_int(hf, "head_dim", hidden // max(1, num_heads))
    turning = int(head_dim * partial) if 0 < partial < 1 else head_dim
    if not 0 < partial <= 1 or (partial != 1 and turning % 2):
        even = f"in (0, 1] and rotate an even number of channels, not {turning} of head_dim={head_dim}"
        raise CheckpointError(f"config.json: partial_rotary_factor={partial!r} must be {even}")
    if kind not in ("su", "yarn", "longrope"):
        flat = {"rope_type": kind, "rope_theta": theta, "factor": given.get("factor")}
        return replace(read_rope({"rope_parameters": flat}), partial=partial), None
    most = read_int(hf, "max_position_embeddings", 4096)
    original = read_int(hf, "original_max_position_embeddings", 4096)
    if original < 2:
        raise CheckpointError(f"config.json: original_max_position_embeddings={original} must be at least 2")
    factor = read_float(given, "factor", most / max(1, original))
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    same: dict[str, Any] = {
        "theta": theta,
        "kind": "longrope",
        "partial": partial,
        "original_max_position_embeddings": original,
        "attention_factor": read_float(given, "attention_factor", usual),
    }
    short, long = (_factors(given, name, turning // 2) for name in ("short_factor", "long_factor"))
    return RopeConfig(**same, factors=short), RopeConfig(**same, factors=long) if most > original else None


def _factors(given: HF, name: str, pairs: int) -> tuple[float, ...]:
    value = given.get(name)
    if not isinstance(value, list) or len(value) != pairs or not all(isinstance(x, int | float) and 1e-6 <= x <= 1e6 for x in value):
        raise CheckpointError(
            f"config.json: {name}={value!r} must be {pairs} numbers in [1e-6, 1e6], one for each rotated pair of channels"
        )
    return tuple(float(x) for x in value)


def param_table(c: ModelConfig) -> Params[ParamInfo]:
    """Every parameter's shape and its tensors in the checkpoint."""
    width, kept, out_fields = tables.heads(c)
    q, rows, kept_rows = c.num_heads * width, c.num_heads + 2 * c.num_kv_heads, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim

    def layer_table(prefix: str, _: int) -> Layer[ParamInfo]:
        attn = f"{prefix}.self_attn"
        return Layer(
            input_norm=tables.gain(f"{prefix}.input_layernorm", c.hidden_size),
            qkv=loaded("matrix", (f"{attn}.qkv_proj.weight", (rows * width, c.hidden_size)), shape=(kept_rows, c.hidden_size), **kept),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            o=loaded("matrix", (f"{attn}.o_proj.weight", (c.hidden_size, q)), **out_fields),
            o_bias=None,
            post_norm=tables.gain(f"{prefix}.post_attention_layernorm", c.hidden_size),
            gate_up=loaded("matrix", (f"{prefix}.mlp.gate_up_proj.weight", (2 * c.intermediate_size, c.hidden_size))),
            gate_up_bias=None,
            down=loaded("matrix", (f"{prefix}.mlp.down_proj.weight", (c.hidden_size, c.intermediate_size))),
            down_bias=None,
        )

    return tables.decoder(c, layer_table)
