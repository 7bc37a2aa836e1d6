"""Models to measure: the sizes of published ones with random weights, which run as fast as trained ones."""

import torch

from ..config import ModelConfig, RopeConfig
from ..model import Model, resolve_device, resolve_dtype
from ..models import REGISTRY
from ..weights import drawn_by, random_fingerprint, random_params

SHAPES: dict[str, ModelConfig] = {
    "qwen3-0.6b": ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16,
        num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e6), tie_word_embeddings=True,
        max_position_embeddings=40960, dtype="bfloat16",
    ),
    "qwen3-8b": ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32,
        num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e6), tie_word_embeddings=False,
        max_position_embeddings=40960, dtype="bfloat16",
    ),
    "tinyllama-1.1b": ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_layers=22, num_heads=32,
        num_kv_heads=4, head_dim=64, rms_norm_eps=1e-5, rope=RopeConfig(theta=1e4), tie_word_embeddings=False,
        max_position_embeddings=2048, dtype="bfloat16",
    ),
}  # fmt: skip


def random_weights(name: str, *, device: torch.device | str | None = None, dtype: torch.dtype | str | None = None, seed: int = 0) -> Model:
    """A model of one of `SHAPES` with random weights and no tokenizer."""
    return random_model(f"{name} (random weights)", SHAPES[name], device=device, dtype=dtype, seed=seed)


def random_model(
    name: str, config: ModelConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | str | None = None, seed: int = 0
) -> Model:
    """A model of any config with no tokenizer and random weights, drawn where they will lie: of values, only speed is asked."""
    target = resolve_device(device)
    chosen = resolve_dtype(dtype, config, target)
    return Model(
        name=name,
        config=config,
        params=random_params(config, seed=seed, device=target, dtype=chosen, drawn_on=target),
        tokenizer=None,
        spec=REGISTRY[config.architecture],
        generation_config={},
        fingerprint=random_fingerprint(config, seed, by=drawn_by(target)),
        device=target,
        dtype=chosen,
    )
