"""Reading and writing a Hugging Face `config.json`.

A missing key and a null value mean the same, except for token ids and windows, where null means none.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm.config import LIMITS, ModelConfig, MoEConfig, RopeConfig
from nanovllm.errors import CheckpointError

HF = Mapping[str, Any]
ACTS: Mapping[str, str] = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
# The largest value of each size that a config.json may name. All other integers must fit into 32 bits.
MOST: Mapping[str, int] = {
    **{name: most for name, most in LIMITS.items() if name != "num_layers"},
    **dict.fromkeys(("num_hidden_layers", "n_layer"), LIMITS["num_layers"]),
    **dict.fromkeys(("num_attention_heads", "n_head"), LIMITS["num_heads"]),
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts", "moe_num_shared_experts"), LIMITS["num_experts"]),
    **dict.fromkeys(("moe_intermediate_size", "n_inner"), LIMITS["intermediate_size"]),
    "num_key_value_heads": LIMITS["num_kv_heads"],
    "n_embd": LIMITS["hidden_size"],
}
FULL, SLIDING = "full_attention", "sliding_attention"  # the values of `layer_types`


def read_sizes(
    hf: HF,
    architecture: str,
    *,
    head_dim: int | None = None,
    eps: float = 1e-6,
    theta: float = 10000.0,
    tied: bool = False,
    max_positions: int = 2048,
    bos: int | None = None,
    eos: int | None = None,
    act: str = "silu",
    **fields: Any,
) -> ModelConfig:
    """Read the config of a decoder that uses the common keys. The keyword arguments are the architecture's defaults for missing keys.

    Args:
        hf: The content of `config.json`.
        architecture: The name of the architecture.
        head_dim: None means the hidden size divided by the number of heads.
        eps: Default of `rms_norm_eps`.
        theta: Default of `rope_theta`.
        tied: Default of `tie_word_embeddings`.
        max_positions: Default of `max_position_embeddings`.
        bos: Default of `bos_token_id`.
        eos: Default of `eos_token_id`.
        act: Default of `hidden_act`.
        **fields: Fields of the config that the architecture reads itself.

    Raises:
        CheckpointError: A key is missing, has a wrong type, or has a value that is not supported.
    """
    num_heads, hidden_size = read_int(hf, "num_attention_heads"), read_int(hf, "hidden_size")
    name = hf.get("hidden_activation") or hf.get("hidden_act") or act
    if not isinstance(name, str) or name not in ACTS:
        raise CheckpointError(f"config.json: hidden_act={name!r} is not supported; supported are {', '.join(ACTS)}")
    read: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": read_int(hf, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": read_int(hf, "intermediate_size"),
        "num_layers": read_int(hf, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": read_int(hf, "num_key_value_heads", num_heads),
        "head_dim": read_int(hf, "head_dim", hidden_size // max(1, num_heads) if head_dim is None else head_dim),
        "rms_norm_eps": read_float(hf, "rms_norm_eps", eps),
        "tie_word_embeddings": read_bool(hf, "tie_word_embeddings", tied),
        "hidden_act": ACTS[name],
        "max_position_embeddings": read_int(hf, "max_position_embeddings", max_positions),
        "dtype": read_dtype(hf),
        "bos_token_id": next(iter(read_ids(hf, "bos_token_id", bos)), None),
        "eos_token_ids": read_ids(hf, "eos_token_id", eos),
    }
    rope = fields["rope"] if "rope" in fields else read_rope(hf, theta, max_positions)
    read["max_position_embeddings"] = stretched(read["max_position_embeddings"], rope)
    config = ModelConfig(**{**read, "rope": rope, **fields})
    # With a rotary embedding of their own, windows of any length tell which layers use it.
    useless = config.local_rope is None and config.widest_window >= config.max_position_embeddings
    return replace(config, windows=()) if useless else config


def stretched(max_position_embeddings: int, rope: RopeConfig) -> int:
    """The number of positions of a model: what its config states, or with YaRN the stretched original context if that is more."""
    if rope.kind != "yarn":
        return max_position_embeddings
    reach = rope.factor * rope.original_max_position_embeddings
    if reach > LIMITS["max_position_embeddings"]:
        raise CheckpointError(
            f"config.json: rope factor={rope.factor!r} times original_max_position_embeddings={rope.original_max_position_embeddings} "
            f"exceeds {LIMITS['max_position_embeddings']} positions"
        )
    return max(max_position_embeddings, int(reach))


def read_windows(hf: HF, usual: str | Mapping[int, str], default: int | None = None) -> tuple[int, ...]:
    """Read the window of each layer. Empty if no layer has one.

    Args:
        hf: The content of `config.json`.
        usual: The type of each layer if `layer_types` is missing. A single type applies to all layers, and `layer_types` is ignored.
        default: The window if `sliding_window` is missing. A null `sliding_window` means no window.

    Raises:
        CheckpointError: `layer_types` or `sliding_window` is invalid.
    """
    num_layers = read_int(hf, "num_hidden_layers")
    types = [usual] * num_layers if isinstance(usual, str) else hf.get("layer_types") or [usual[i] for i in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in (FULL, SLIDING) for kind in types):
        raise CheckpointError(f"config.json: layer_types={types!r} must name {FULL} or {SLIDING} for each of {num_layers} layers")
    window = hf.get("sliding_window", default)
    if window is None or SLIDING not in types:
        return ()
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise CheckpointError(f"config.json: sliding_window={window!r} must be an integer of at least 1, or null")
    read_int(hf, "sliding_window", default)
    return tuple(window if kind == SLIDING else 0 for kind in types)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` that the architecture's `config_from_hf` reads back as `config`. `config` must not have been changed by `fitted`.

    A LongRoPE config that `for_length` has reduced to the factors for long requests is written with these factors for all lengths.
    """
    same = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps", "tie_word_embeddings", "attention_bias")
    more = ("mlp_bias", "max_position_embeddings", "dtype", "bos_token_id")
    scaled = bool(config.attention_scale)
    rope, long = rope_to_hf(config.rope), config.rope if config.long_rope is None else config.long_rope
    if long.factors:
        rope["long_factor"] = list(long.factors)
    original = {"original_max_position_embeddings": config.rope.original_max_position_embeddings} if long.factors else {}
    return {
        **original,
        **{name: getattr(config, name) for name in (*same, *more)},
        **({} if config.moe is None else _moe_to_hf(config.moe, config.num_layers)),
        "architectures": [config.architecture],
        "model_type": re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", config.architecture.removesuffix("ForCausalLM")).lower(),
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "use_bias": config.attention_bias,
        "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.hidden_act, config.hidden_act),
        "rope_parameters": rope if config.local_rope is None else {FULL: rope, SLIDING: rope_to_hf(config.local_rope)},
        "use_sliding_window": bool(config.windows),
        "sliding_window": max(config.windows) if config.windows else None,
        "layer_types": [SLIDING if config.window(i) else FULL for i in range(config.num_layers)],
        "query_pre_attn_scalar": config.scale**-2 if scaled else None,
        "attn_logit_softcapping": config.attention_softcap or None,
        "final_logit_softcapping": config.logit_softcap or None,
        "eos_token_id": list(config.eos_token_ids),
    }


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """The rotary embedding in the form that `read_rope` reads."""
    written: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind not in ("default", "longrope"):
        written["factor"] = rope.factor
    if rope.partial != 1.0:
        written["partial_rotary_factor"] = rope.partial
    own: dict[str, tuple[str, ...]] = {
        "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate", "original_max_position_embeddings"),
        "longrope": ("attention_factor", "original_max_position_embeddings"),
    }
    factors = {"short_factor": list(rope.factors)} if rope.factors else {}
    return written | {name: getattr(rope, name) for name in own.get(rope.kind, ())} | factors


def _moe_to_hf(moe: MoEConfig, num_layers: int) -> dict[str, Any]:
    """The experts under the keys of all architectures. The layers with experts must be evenly spaced."""
    first, last = min(moe.layers, default=0), max(moe.layers, default=0)
    every = (last - first) // (len(moe.layers) - 1) if len(moe.layers) > 1 else 1
    counts = dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts"), moe.num_experts)
    return counts | {
        **dict.fromkeys(("num_experts_per_tok", "moe_k"), moe.top_k),
        "moe_intermediate_size": moe.intermediate_size,
        "mlp_only_layers": [i for i in range(num_layers) if i not in moe.layers],
        "norm_topk_prob": moe.normalise,
        "moe_norm_min": moe.least_sum,
        "moe_num_shared_experts": moe.shared_size // moe.intermediate_size,
        "moe_layer_start_index": first,
        "moe_layer_end_index": last,
        "moe_layer_interval": every,
    }


def read_int(hf: HF, name: str, default: int | None = None) -> int:
    """An integer of the config. Raises `CheckpointError` for another type, a value out of bounds, or a missing key without a default."""
    value = default if hf.get(name) is None else hf[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"config.json: {name}={value!r} must be an integer")
    most = MOST.get(name, 2**31 - 1)
    if not -most <= value <= most:
        raise CheckpointError(f"config.json: {name}={_digits(value)} must not exceed {most} in magnitude")
    return value


def _digits(value: int) -> str:
    """An integer as text, or its length if that is long."""
    return str(value) if abs(value) < 10**40 else f"an integer of {value.bit_length()} bits"


def require_sizes(hf: HF) -> None:
    """Raise `CheckpointError` if a size of the config, or of an object in it, is out of bounds. Other values are not checked."""
    for name, value in hf.items():
        if isinstance(value, Mapping):
            require_sizes(value)
        elif name in MOST and isinstance(value, int) and not isinstance(value, bool):
            read_int(hf, name)


def read_float(hf: HF, name: str, default: float | None = None) -> float:
    """A finite number of the config. Raises `CheckpointError` for another value, or for a missing key without a default."""
    value = default if hf.get(name) is None else hf[name]
    if isinstance(value, int) and abs(value) > 2**1000:  # more than a float holds
        raise CheckpointError(f"config.json: {name}={_digits(value)} must be a finite number")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"config.json: {name}={value!r} must be a finite number")
    return float(value)


def read_bool(hf: HF, name: str, default: bool) -> bool:
    """A truth value of the config. Raises `CheckpointError` for another type."""
    value = default if hf.get(name) is None else hf[name]
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name}={value!r} must be true or false")
    return value


def read_ids(hf: HF, name: str, default: int | None = None) -> tuple[int, ...]:
    """Token ids written as null, one integer or a list of integers. Raises `CheckpointError` for another value."""
    value = hf.get(name, default)
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**31 for i in ids):
        raise CheckpointError(f"config.json: {name}={value!r} must be a token id or a list of token ids")
    return ids


def read_dtype(hf: HF) -> str:
    """The name of the dtype that the checkpoint was saved in; `float32` if missing. Raises `CheckpointError` for another dtype."""
    value = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in ("float32", "bfloat16", "float16", "float64"):
        raise CheckpointError(f"config.json: dtype={value!r} is not one of float32, bfloat16, float16, float64")
    return name


def read_rope(hf: HF, theta: float = 10000.0, max_positions: int = 2048) -> RopeConfig:
    """Read the rotary embedding from `rope_parameters`, `rope_scaling` and `rope_theta`, merged.

    `theta` and `max_positions` are the defaults of `rope_theta` and `max_position_embeddings`. To `rope_parameters` of type `default`,
    `rope_scaling` may add a scaling. YaRN's attention factor is resolved here: the given value, or the ratio of `mscale` to
    `mscale_all_dim`, or `0.1 ln(factor) + 1`. Raises `CheckpointError` for values that are not supported, and if two of the keys disagree.
    """
    rope: dict[str, Any] = {}
    given, scaling = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    if isinstance(given, Mapping) and scaling and (given.get("rope_type") or given.get("type")) == "default":
        given = {key: value for key, value in given.items() if key not in ("rope_type", "type")}
    for source in ({"rope_theta": hf.get("rope_theta")}, given, scaling):
        if not isinstance(source, Mapping) or any(isinstance(value, Mapping) for value in source.values()):
            raise CheckpointError(
                f"config.json: rope_parameters must be one flat object; parameters by layer type are not supported: {source!r}"
            )
        for key, value in source.items():
            name = "rope_type" if key == "type" else key
            if value is not None and rope.setdefault(name, value) != value:
                raise CheckpointError(
                    f"config.json: rope_scaling, rope_parameters and rope_theta disagree: {name} is {rope[name]!r} and {value!r}"
                )
    kind = rope.get("rope_type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise CheckpointError(f"config.json: rope type {kind!r} is not supported; supported are default, linear, llama3, yarn")
    partial = rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise CheckpointError(f"config.json: partial_rotary_factor={partial!r} is not supported by this architecture; only 1.0 is")
    theta = read_float(rope, "rope_theta", theta)
    if theta <= 1.0:
        raise CheckpointError(f"config.json: rope_theta={theta!r} must be above 1")
    if kind == "default":
        return RopeConfig(theta=theta)
    max_len = read_int(hf, "max_position_embeddings", max_positions)
    original = read_int(hf, "original_max_position_embeddings", read_int(rope, "original_max_position_embeddings", max_len))
    factor = read_float(rope, "factor", max_len / max(1, original) if kind == "yarn" else None)
    if not 1e-6 <= factor <= 1e6 or original < 1:
        raise CheckpointError(
            f"config.json: rope factor={factor!r} must be in [1e-6, 1e6], and original_max_position_embeddings={original!r} positive"
        )
    match kind:
        case "linear":
            return RopeConfig(theta=theta, kind=kind, factor=factor)
        case "llama3":
            low, high = read_float(rope, "low_freq_factor"), read_float(rope, "high_freq_factor")
            if not 0 < low < high:
                raise CheckpointError(f"config.json: rope needs 0 < low_freq_factor < high_freq_factor, not {low!r} and {high!r}")
            return RopeConfig(
                theta=theta,
                kind=kind,
                factor=factor,
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_position_embeddings=original,
            )
        case _:
            return RopeConfig(
                theta=theta,
                kind=kind,
                factor=factor,
                original_max_position_embeddings=original,
                beta_fast=_turns(rope, "beta_fast", 32.0),
                beta_slow=_turns(rope, "beta_slow", 1.0),
                attention_factor=_yarn_attention_factor(rope, factor),
                truncate=read_bool(rope, "truncate", True),
            )


def _turns(rope: HF, name: str, default: float) -> float:
    turns = read_float(rope, name, default) or default
    if not 1e-6 <= turns <= 1e6:
        raise CheckpointError(f"config.json: rope {name}={turns!r} must be in [1e-6, 1e6]")
    return turns


def _yarn_attention_factor(rope: HF, factor: float) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return read_float(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(read_float(rope, "mscale")) / magnitude(read_float(rope, "mscale_all_dim"))
    return magnitude(1.0)
