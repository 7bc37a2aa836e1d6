"""The sizes of a model and the limits of an engine. Both are hashable, so that compiled code can specialise on them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from nanovllm.errors import CheckpointError, InvalidRequestError

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
KV_DTYPES = ("fp8",)  # of `kv_dtype`, besides None
# The largest sizes, far above those of any model. With them every table of weights is small and every shape is one that torch has.
LIMITS: Mapping[str, int] = MappingProxyType(
    {
        "vocab_size": 2**31 - 1, "hidden_size": 2**20, "intermediate_size": 2**22, "num_layers": 1024, "num_heads": 2**16,
        "num_kv_heads": 2**16, "head_dim": 2**11, "max_position_embeddings": 2**31 - 1, "num_experts": 2**14,
    }
)  # fmt: skip
MAX_EXPERTS = 2**17  # of all layers


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) and its static scalings.

    The kinds are `default`, `linear`, `llama3`, `yarn` (Peng et al., 2023) and `longrope` (Ding et al., 2024).

    Attributes:
        theta: The base of the frequencies.
        kind: The name of the scaling.
        factor: The factor by which the context is extended.
        low_freq_factor: Of `llama3`: wavelengths above the original context divided by it are scaled fully.
        high_freq_factor: Of `llama3`: wavelengths below the original context divided by it are not scaled.
        original_max_position_embeddings: The context before scaling, in tokens.
        beta_fast: Of `yarn`: channels with more rotations than this over the original context are not scaled.
        beta_slow: Of `yarn`: channels with fewer rotations than this are scaled fully.
        attention_factor: Of `yarn` and `longrope`: the factor on cos and sin.
        truncate: Of `yarn`: whether the bounds between channels are rounded to integers.
        partial: The fraction of a head's channels that are rotated.
        factors: Of `longrope`: the divisor of each channel pair's frequency.

    Examples:
        >>> model.config.rope.kind, model.config.rope.theta
        ('default', 10000.0)
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    partial: float = 1.0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Mixture-of-experts feed-forward layers (Shazeer et al., 2017; Fedus et al., 2021).

    Each token is processed by `top_k` of `num_experts` experts.

    Attributes:
        num_experts: Experts per layer.
        top_k: Experts per token.
        intermediate_size: Channels inside one expert.
        layers: The indices of the layers that have experts.
        normalise: Whether the weights of the chosen experts are divided by their sum.
        least_sum: The lower bound of that sum.
        wide_router: Whether routing is computed in float32, whatever the model's dtype.
        shared_size: Channels inside the shared expert that processes every token; 0: none.
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
                raise CheckpointError(f"config: {name}={getattr(self, name)!r} of the experts must be an integer of at least 1")
            if name in LIMITS and getattr(self, name) > LIMITS[name]:
                raise CheckpointError(f"config: {name}={getattr(self, name)} of the experts must be at most {LIMITS[name]}")
        if self.num_experts * len(self.layers) > MAX_EXPERTS:
            count = f"num_experts={self.num_experts} in each of {len(self.layers)} layers"
            raise CheckpointError(f"config: {count} must be at most {MAX_EXPERTS} experts in all")
        if self.shared_size > 2**26:
            raise CheckpointError(f"config: shared_size={self.shared_size} of the experts must be at most {2**26}")
        if self.shared_size < 0 or not 0 <= self.least_sum < math.inf:
            raise CheckpointError(f"config: shared_size={self.shared_size} and least_sum={self.least_sum} of experts must be at least 0")
        if self.top_k > self.num_experts:
            raise CheckpointError(f"config: top_k={self.top_k} experts per token exceed num_experts={self.num_experts}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The ranks that run one model together, and which of them this one is. `nanovllm.make_mesh` makes it.

    Attributes:
        size: The number of ranks.
        rank: The number of this rank, from 0.
        group: The handle of the ranks' collective operations; see `ops/distributed/group.py`.
        owner: What keeps the group alive.
        gathers: Whether the model's function gives every rank the logits of all tokens. Otherwise each has those of its part of the head,
            and `ops/sampling/draw_parts.py` samples from them.
        led: Whether the other ranks only repeat calls with one engine's states. Other calls with the model would wait for them in vain.

    Examples:
        >>> nv.Mesh(size=2, rank=0, group=7)
        Mesh(size=2, rank=0)
    """

    size: int
    rank: int
    group: int = field(repr=False)
    gathers: bool = field(default=True, repr=False)
    owner: object = field(default=None, repr=False, compare=False)
    led: bool = field(default=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of one model, made from a Hugging Face `config.json` by its architecture's module.

    Attributes:
        architecture: The architecture's name in the registry of models.
        vocab_size: The number of token ids.
        hidden_size: Channels between layers.
        intermediate_size: Channels inside a feed-forward layer.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; `num_heads` is a multiple of it.
        head_dim: Channels of a head in memory. If the checkpoint's heads are narrower, the rest is zero.
        rms_norm_eps: The epsilon of the norms.
        rope: The rotary position embedding.
        tie_word_embeddings: Whether the output layer is the embedding matrix.
        attention_bias: Whether the attention projections have biases.
        mlp_bias: Whether the feed-forward projections have biases.
        hidden_act: The activation: "silu", "gelu" or "gelu_tanh".
        windows: For each layer the number of tokens that a token attends to, itself included; 0: all. Empty: all, in every layer.
        local_rope: The rotary position embedding of sliding-window layers, if it differs.
        long_rope: The one for requests beyond the original context of `rope`; see `for_length`.
        stored_head_dim: Channels of a head in the checkpoint; 0: `head_dim`.
        attention_scale: The factor on products of queries and keys; 0: `1 / sqrt(head_dim)`.
        attention_softcap: C of the soft cap `c * tanh(x / c)` on attention scores; 0: none.
        logit_softcap: C of the soft cap on logits; 0: none.
        embed_scale: The factor on embeddings.
        moe: The experts, if the model has some.
        max_position_embeddings: The maximum length of a sequence, in tokens.
        dtype: The dtype in which the checkpoint was saved.
        bos_token_id: The start token, if the model has one.
        eos_token_ids: The tokens that end a reply.
        mesh: The ranks that run the model together. The numbers of heads and intermediate channels are then those of this rank alone.
            None: one rank runs the model.
        kv_copies: How many ranks have the same KV head.

    Raises:
        CheckpointError: A size is invalid.

    Examples:
        >>> config = model.config
        >>> config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim
        (8, 4, 2, 64)
    """

    architecture: str  # a key of `models.REGISTRY`
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
    long_rope: RopeConfig | None = None
    stored_head_dim: int = 0
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embed_scale: float = 1.0
    moe: MoEConfig | None = None
    max_position_embeddings: int = 2048
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    mesh: Mesh | None = None
    kv_copies: int = 1

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "max_position_embeddings"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CheckpointError(f"config: {name}={value!r} must be an integer of at least 1")
            if value > LIMITS[name]:
                raise CheckpointError(f"config: {name}={value} must be at most {LIMITS[name]}")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(f"config: num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise CheckpointError(f"config: head_dim={self.head_dim} must be even for rotary position embedding")
        if self.windows and len(self.windows) != self.num_layers:
            raise CheckpointError(f"config: {len(self.windows)} windows for {self.num_layers} layers; give one per layer, or none")
        if any(window < 0 for window in self.windows):
            raise CheckpointError(f"config: a window of {min(self.windows)} tokens must be at least 0; 0 means all tokens")
        for name in ("rms_norm_eps", "attention_scale", "attention_softcap", "logit_softcap", "embed_scale"):
            value = getattr(self, name)
            if isinstance(value, complex) or not 0 <= value < math.inf:
                raise CheckpointError(f"config: {name}={value!r} must be a finite number of at least 0")
        if self.hidden_act not in ACTIVATIONS:
            raise CheckpointError(f"config: hidden_act={self.hidden_act!r} is not one of {', '.join(ACTIVATIONS)}")

    @property
    def keys_turn(self) -> bool:
        """Whether keys are rotated by position, so that they can be moved to other positions."""
        return self.rope.kind in ("default", "linear", "llama3", "yarn", "longrope")

    @property
    def all_kv_heads(self) -> int:
        """The KV heads of all ranks, each counted once."""
        return self.num_kv_heads if self.mesh is None else self.num_kv_heads * self.mesh.size // self.kv_copies

    @property
    def scale(self) -> float:
        """The factor on products of queries and keys."""
        return self.attention_scale or self.head_dim**-0.5

    def window(self, layer: int) -> int:
        """The window of a layer.

        Args:
            layer: The index of the layer.

        Returns:
            The number of tokens that a token attends to, itself included; 0: all.

        Examples:
            >>> model.config.window(0)
            0
        """
        return self.windows[layer] if self.windows else 0

    @property
    def widest_window(self) -> int:
        """The largest window of all layers, in tokens; 0 if no layer has a window."""
        return max(self.windows, default=0)

    @property
    def all_windowed(self) -> bool:
        """Whether every layer has a window."""
        return bool(self.windows) and all(self.windows)

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """Layers per KV pool: those without a window, then those with one. A group without layers has no pool."""
        windowed = sum(map(bool, self.windows))
        return tuple(count for count in (self.num_layers - windowed, windowed) if count)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each layer the index of its KV pool, and its index in that pool."""
        return places_of(self.num_layers, self.windows)

    def layer_at(self, window: int, index: int) -> int:
        """The layer at an index of a KV pool.

        Args:
            window: Any positive number for the pool of sliding-window layers, 0 for the other pool.
            index: The index in that pool.

        Returns:
            The index of the layer in the model.

        Examples:
            >>> model.config.layer_at(0, 3)
            3
        """
        return index if len(self.pool_sizes) == 1 else self.places.index((1 if window else 0, index))


def places_of(num_layers: int, windows: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """For each layer the index of its KV pool, and its index in that pool: `ModelConfig.places`."""
    if not any(windows) or all(windows):
        return tuple((0, index) for index in range(num_layers))
    places: list[tuple[int, int]] = []
    counts = [0, 0]
    for window in windows:
        pool = 1 if window else 0
        places.append((pool, counts[pool]))
        counts[pool] += 1
    return tuple(places)


def for_length(config: ModelConfig, max_model_len: int | None) -> ModelConfig:
    """The config for requests of up to `max_model_len` tokens.

    Models with LongRoPE rotate long requests by other factors than short ones, so their KV cannot be shared. None selects the context
    of the original training; a longer one must be requested.
    """
    long = config.long_rope
    if long is None:
        return config
    usual = min(long.original_max_position_embeddings, config.max_position_embeddings)
    if max_model_len is None or max_model_len <= usual:
        return replace(config, long_rope=None, max_position_embeddings=usual)
    return replace(config, rope=long, long_rope=None)


def loaded_for_short(config: ModelConfig) -> bool:
    """Whether `for_length` limited a model to its original context although it supports a longer one."""
    return config.rope.kind == "longrope" and config.max_position_embeddings == config.rope.original_max_position_embeddings


def require_known_kv_dtype(kv_dtype: object) -> None:
    """Require a value that the option `kv_dtype` may have.

    Raises:
        InvalidRequestError: It is neither None nor one of `KV_DTYPES`.
    """
    if kv_dtype is not None and kv_dtype not in KV_DTYPES:
        raise InvalidRequestError(f"kv_dtype={kv_dtype!r} must be {' or '.join(map(repr, KV_DTYPES))}, or None for the model's dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The limits of one engine, as `init_state` resolved them.

    Attributes:
        num_pages: Pages of the KV pool, without the dummy page.
        page_size: Tokens per page.
        max_model_len: The maximum length of a sequence, in tokens.
        max_num_seqs: The maximum number of running sequences.
        max_num_batched_tokens: The maximum number of tokens per step.
        seed: The seed of requests that give none.
        num_frames: Frames, without the dummy frame; 0 if no layer has a window. A frame is the KV memory of a sliding-window page.
        max_prefill_tokens: The maximum number of prompt tokens in a step in which replies go on; None: no other limit than that of a step.
        context_doubling: Tokens of context with which a prompt token counts twice against `max_prefill_tokens`; 0: context does not count.
        kv_dtype: "fp8": keys and values in e4m3, with a scale for each token and head. None: the model's dtype.

    Raises:
        InvalidRequestError: A limit is invalid.

    Examples:
        >>> state.config.num_pages, state.config.page_size, state.config.max_model_len
        (64, 16, 2048)
    """

    num_pages: int
    page_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    seed: int
    num_frames: int = 0
    max_prefill_tokens: int | None = None
    context_doubling: int = 0
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.num_frames, bool) or not isinstance(self.num_frames, int) or self.num_frames < 0:
            raise InvalidRequestError(f"num_frames={self.num_frames!r} must be an integer of at least 1, or 0 if no layer has a window")
        for name in ("num_pages", "page_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidRequestError(f"{name}={value!r} must be an integer of at least 1")
        if (most := self.max_prefill_tokens) is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise InvalidRequestError(f"max_prefill_tokens={most!r} must be an integer of at least 1, or None")
        if isinstance(self.context_doubling, bool) or not isinstance(self.context_doubling, int) or self.context_doubling < 0:
            raise InvalidRequestError(f"context_doubling={self.context_doubling!r} must be an integer of at least 0")
        require_known_kv_dtype(self.kv_dtype)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise InvalidRequestError(f"seed={self.seed!r} must be an integer in [0, 2**63)")
