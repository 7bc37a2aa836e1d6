"""What is fixed: the sizes of a model and the limits of an engine. Both are hashable, so that compiled code may specialise on them."""

import math
from dataclasses import dataclass, replace

from nanovllm.errors import CheckpointError, InvalidRequestError

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) and its static scalings: `default`, `linear`, `llama3`, `yarn` (Peng et al., 2023),
    `longrope` (Ding et al., 2024)."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # YaRN's and LongRoPE's magnitude factor on cos and sin
    truncate: bool = True
    partial: float = 1.0  # the share of a head's channels that turn
    factors: tuple[float, ...] = ()  # LongRoPE's, by which each pair's speed is divided


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Mixture-of-experts feed-forward layers (Shazeer et al., 2017; Fedus et al., 2021): each token goes through `top_k` of `num_experts`.

    `layers` are the layers that have experts. `normalise`: the weights of the chosen add up to 1, their sum taken as `least_sum` at least.
    `wide_router`: routed in float32, whatever the model's dtype. `shared_size`: what every token goes through besides, 0: nothing.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    layers: tuple[int, ...]
    normalise: bool = True
    least_sum: float = 0.0
    wide_router: bool = False
    shared_size: int = 0

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "intermediate_size"):
            if getattr(self, name) < 1:
                raise CheckpointError(f"config: {name}={getattr(self, name)!r} of the experts must be at least 1")
        if self.shared_size < 0 or not 0 <= self.least_sum < math.inf:
            raise CheckpointError(f"config: shared_size={self.shared_size} and least_sum={self.least_sum} of experts must be at least 0")
        if self.top_k > self.num_experts:
            raise CheckpointError(f"config: {self.top_k} experts a token are more than the {self.num_experts} that there are")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of one model, made from a Hugging Face `config.json` by its architecture's own function.

    `head_dim` is what is kept of a head; where a checkpoint's heads are narrower, `stored_head_dim`, the rest is zero (`tables.heads`).
    `windows`: for each layer how many tokens a token attends to, itself included, 0 meaning all; empty: all, in every layer. Layers with a
    window turn by `local_rope` where there is one. A soft cap c turns x into c tanh(x / c); 0: none.
    """

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
    windows: tuple[int, ...] = ()
    local_rope: RopeConfig | None = None
    long_rope: RopeConfig | None = None  # by which positions turn where more than those of `rope` are wanted; see `for_length`
    stored_head_dim: int = 0  # 0: `head_dim`
    attention_scale: float = 0.0  # of a query's products with keys; 0: 1 / sqrt(head_dim)
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embed_scale: float = 1.0
    moe: MoEConfig | None = None
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
        if self.windows and len(self.windows) != self.num_layers:
            raise CheckpointError(f"config: {len(self.windows)} windows are given for {self.num_layers} layers")
        if any(window < 0 for window in self.windows):
            raise CheckpointError(f"config: a window of {min(self.windows)} tokens; 0 means all, others must be positive")
        for name in ("rms_norm_eps", "attention_scale", "attention_softcap", "logit_softcap", "embed_scale"):
            value = getattr(self, name)
            if isinstance(value, complex) or not 0 <= value < math.inf:
                raise CheckpointError(f"config: {name}={value!r} must be a finite number of at least 0")
        if self.hidden_act not in ACTIVATIONS:
            raise CheckpointError(f"config: hidden_act={self.hidden_act!r} is not one of {', '.join(ACTIVATIONS)}")

    @property
    def keys_turn(self) -> bool:
        """Whether positions enter by a rotation of keys, which moves them to other positions."""
        return self.rope.kind in ("default", "linear", "llama3", "yarn", "longrope")

    @property
    def scale(self) -> float:
        """What a query's products with keys are multiplied by."""
        return self.attention_scale or self.head_dim**-0.5

    def window(self, layer: int) -> int:
        """How many tokens a token attends to in a layer, itself included; 0: all."""
        return self.windows[layer] if self.windows else 0

    @property
    def widest_window(self) -> int:
        """The most tokens that a layer with a window attends to; 0: no layer has one."""
        return max(self.windows, default=0)

    @property
    def all_windowed(self) -> bool:
        """Whether every layer has a window."""
        return bool(self.windows) and all(self.windows)

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """How many layers each KV pool holds: those without a window, then those with one; a group without layers has no pool."""
        windowed = sum(map(bool, self.windows))
        return tuple(count for count in (self.num_layers - windowed, windowed) if count)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each layer its KV pool and its index there."""
        if len(self.pool_sizes) == 1:
            return tuple((0, index) for index in range(self.num_layers))
        found, counts = list[tuple[int, int]](), [0, 0]
        for window in self.windows:
            pool = 1 if window else 0
            found.append((pool, counts[pool]))
            counts[pool] += 1
        return tuple(found)

    def layer_at(self, window: int, index: int) -> int:
        """The layer that stands at this index of the KV pool for layers with a window, or without one (0)."""
        return index if len(self.pool_sizes) == 1 else self.places.index((1 if window else 0, index))


def for_length(config: ModelConfig, max_model_len: int | None) -> ModelConfig:
    """The config for requests of so many tokens. Where a model turns long ones otherwise (LongRoPE), None means those that it was first
    trained on, and more can be had only by asking: the KV of short and long requests cannot be shared."""
    long = config.long_rope
    if long is None:
        return config
    usual = min(long.original_max_position_embeddings, config.max_position_embeddings)
    if max_model_len is None or max_model_len <= usual:
        return replace(config, long_rope=None, max_position_embeddings=usual)
    return replace(config, rope=long, long_rope=None)


def loaded_for_short(config: ModelConfig) -> bool:
    """Whether `for_length` has kept a model to its first context, although it knows a longer one."""
    return config.rope.kind == "longrope" and config.max_position_embeddings == config.rope.original_max_position_embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The limits of one engine. `num_pages` and `num_frames` exclude the dummies; lengths are in tokens.

    `num_frames`: for how many pages there is KV memory in the layers with a window (`state/window_frames.py`); 0: no layer has one.
    """

    num_pages: int
    page_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    seed: int
    num_frames: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.num_frames, bool) or not isinstance(self.num_frames, int) or self.num_frames < 0:
            raise InvalidRequestError(f"num_frames={self.num_frames!r} must be an integer of at least 1, or 0 where no layer has a window")
        for name in ("num_pages", "page_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidRequestError(f"{name}={value!r} must be an integer of at least 1")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise InvalidRequestError(f"seed={self.seed!r} must be an integer in [0, 2**63)")
