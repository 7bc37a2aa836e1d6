"""What is fixed: the sizes of a model and the limits of an engine. Both are hashable, so that compiled code may specialise on them."""

from dataclasses import dataclass

from .errors import InvalidRequestError


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
