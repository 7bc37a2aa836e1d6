"""What is fixed: the sizes of a model and the limits of an engine. Both are hashable, so that compiled code may specialise on them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import CheckpointError, InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) and its static scalings: `default`, `linear`, `llama3`, `yarn` (Peng et al., 2023)."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # YaRN's magnitude factor on cos and sin
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of one model, made from a Hugging Face `config.json` by its architecture's own function."""

    architecture: str  # the key of `models.REGISTRY`
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    dtype: str = "float32"  # what the checkpoint was saved in
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "max_position_embeddings"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CheckpointError(f"config: {name}={value!r} must be an integer of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(f"config: num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise CheckpointError(f"config: head_dim={self.head_dim} must be even for rotary position embedding")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The limits of one engine. `num_pages` excludes the dummy page; lengths are in tokens."""

    num_pages: int
    page_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidRequestError(f"{name}={value!r} must be an integer of at least 1")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise InvalidRequestError(f"seed={self.seed!r} must be an integer in [0, 2**63)")


# Reading and writing a Hugging Face `config.json`. An absent key and a null one mean the same there, except for token ids, where null
# means none.

HF = Mapping[str, Any]


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` that the architecture's `config_from_hf` reads back as `config`."""
    rope: dict[str, Any] = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta}
    if config.rope.kind != "default":
        rope["factor"] = config.rope.factor
    if config.rope.kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = config.rope.original_max_position_embeddings
    extra = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate")}
    rope.update({name: getattr(config.rope, name) for name in extra.get(config.rope.kind, ())})
    same = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps", "tie_word_embeddings", "attention_bias")
    more = ("mlp_bias", "hidden_act", "max_position_embeddings", "dtype", "bos_token_id")
    return {
        **{name: getattr(config, name) for name in (*same, *more)},
        "architectures": [config.architecture],
        "model_type": config.architecture.removesuffix("ForCausalLM").lower(),
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "rope_parameters": rope,
        "eos_token_id": list(config.eos_token_ids),
    }


def read_int(hf: HF, name: str, default: int | None = None) -> int:
    """An integer of the config; without a default the key is required. Raises `CheckpointError`."""
    value = default if hf.get(name) is None else hf[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"config.json: {name}={value!r} must be an integer")
    return value


def read_float(hf: HF, name: str, default: float | None = None) -> float:
    """A finite number of the config; without a default the key is required. Raises `CheckpointError`."""
    value = default if hf.get(name) is None else hf[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"config.json: {name}={value!r} must be a finite number")
    return float(value)


def read_bool(hf: HF, name: str, default: bool) -> bool:
    """A truth value of the config. Raises `CheckpointError`."""
    value = default if hf.get(name) is None else hf[name]
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name}={value!r} must be true or false")
    return value


def read_ids(hf: HF, name: str, default: int | None = None) -> tuple[int, ...]:
    """Token ids written as null, one integer or a list of integers. Raises `CheckpointError`."""
    value = hf.get(name, default)
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise CheckpointError(f"config.json: {name}={value!r} must be a token id or a list of token ids")
    return ids


def read_dtype(hf: HF) -> str:
    """The dtype that the checkpoint was saved in, by name; `float32` where the config is silent. Raises `CheckpointError`."""
    value = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in ("float32", "bfloat16", "float16", "float64"):
        raise CheckpointError(f"config.json: dtype={value!r} is not one of float32, bfloat16, float16, float64")
    return name


def read_rope(hf: HF) -> RopeConfig:
    """The rotary embedding from `rope_parameters`, `rope_scaling` and `rope_theta`; whichever of them there are, merged.

    Raises `CheckpointError` for what is not supported, and where two of them disagree.
    YaRN's attention factor is resolved here: the value given, or the ratio of `mscale` to `mscale_all_dim`, or `0.1 ln(factor) + 1`.
    """
    rope: dict[str, Any] = {}
    for source in ({"rope_theta": hf.get("rope_theta")}, hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}):
        if not isinstance(source, Mapping) or any(isinstance(value, Mapping) for value in source.values()):
            raise CheckpointError(
                f"config.json: rope_parameters must be one flat object; those by layer type are not supported: {source!r}"
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
        raise CheckpointError(f"config.json: partial_rotary_factor={partial!r} is not supported; only 1.0 is")
    theta = read_float(rope, "rope_theta", 10000.0)
    if theta <= 1.0:
        raise CheckpointError(f"config.json: rope_theta={theta!r} must be above 1")
    if kind == "default":
        return RopeConfig(theta=theta)
    max_len = read_int(hf, "max_position_embeddings", 2048)
    original = read_int(hf, "original_max_position_embeddings", read_int(rope, "original_max_position_embeddings", max_len))
    factor = read_float(rope, "factor", max_len / original if kind == "yarn" else None)
    if factor <= 0 or original < 1:
        raise CheckpointError(f"config.json: rope factor={factor!r} and original_max_position_embeddings={original!r} must be positive")
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
                beta_fast=read_float(rope, "beta_fast", 32.0) or 32.0,
                beta_slow=read_float(rope, "beta_slow", 1.0) or 1.0,
                attention_factor=_yarn_attention_factor(rope, factor),
                truncate=read_bool(rope, "truncate", True),
            )


def _yarn_attention_factor(rope: HF, factor: float) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return read_float(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(read_float(rope, "mscale")) / magnitude(read_float(rope, "mscale_all_dim"))
    return magnitude(1.0)
