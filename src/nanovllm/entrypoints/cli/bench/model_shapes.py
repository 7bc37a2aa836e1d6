"""Models with random weights and the shapes of published models. They run as fast as the trained models."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from nanovllm.config import Mesh, ModelConfig, MoEConfig, RopeConfig
from nanovllm.errors import InvalidRequestError
from nanovllm.loading.load_model import resolve_device, resolve_dtype
from nanovllm.loading.quantisation.activations import require_fp8_products, with_fp8_activations
from nanovllm.loading.quantisation.rounding import require_rounding, rounded_head
from nanovllm.models.common.sharding import sharded_config
from nanovllm.models.init_params import drawn_by, random_fingerprint, random_params
from nanovllm.models.model import Model
from nanovllm.models.registry import REGISTRY, fitted
from nanovllm.ops.linear.quantise import Kind, quantise
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.types import Tensor

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
    "qwen3-32b": ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_layers=64, num_heads=64,
        num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e6), tie_word_embeddings=False,
        max_position_embeddings=40960, dtype="bfloat16",
    ),
    "llama-3.3-70b": ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64,
        num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5, tie_word_embeddings=False, max_position_embeddings=131072, dtype="bfloat16",
        rope=RopeConfig(
            theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192,
        ),
    ),
    "tinyllama-1.1b": ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_layers=22, num_heads=32,
        num_kv_heads=4, head_dim=64, rms_norm_eps=1e-5, rope=RopeConfig(theta=1e4), tie_word_embeddings=False,
        max_position_embeddings=2048, dtype="bfloat16",
    ),
    "llama-3.1-8b": ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
        num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5, tie_word_embeddings=False, max_position_embeddings=131072, dtype="bfloat16",
        rope=RopeConfig(
            theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192,
        ),
    ),
    "qwen2.5-7b": ModelConfig(
        architecture="Qwen2ForCausalLM", vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28,
        num_kv_heads=4, head_dim=128, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e6), tie_word_embeddings=False, attention_bias=True,
        max_position_embeddings=32768, dtype="bfloat16",
    ),
    "qwen3-30b-a3b": ModelConfig(
        architecture="Qwen3MoeForCausalLM", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_layers=48, num_heads=32,
        num_kv_heads=4, head_dim=128, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e6), tie_word_embeddings=False,
        max_position_embeddings=40960, dtype="bfloat16",
        moe=MoEConfig(num_experts=128, top_k=8, intermediate_size=768, layers=tuple(range(48))),
    ),
    "qwen3-235b-a22b": ModelConfig(
        architecture="Qwen3MoeForCausalLM", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=94, num_heads=64,
        num_kv_heads=4, head_dim=128, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e6), tie_word_embeddings=False,
        max_position_embeddings=40960, dtype="bfloat16",
        moe=MoEConfig(num_experts=128, top_k=8, intermediate_size=1536, layers=tuple(range(94))),
    ),
    "mistral-7b-v0.1": ModelConfig(
        architecture="MistralForCausalLM", vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
        num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5, rope=RopeConfig(theta=1e4), tie_word_embeddings=False, windows=(4096,) * 32,
        max_position_embeddings=32768, dtype="bfloat16",
    ),
    "mixtral-8x7b": ModelConfig(
        architecture="MixtralForCausalLM", vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
        num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5, rope=RopeConfig(theta=1e6), tie_word_embeddings=False,
        max_position_embeddings=32768, dtype="bfloat16",
        moe=MoEConfig(num_experts=8, top_k=2, intermediate_size=14336, layers=tuple(range(32))),
    ),
    "gpt2-xl": ModelConfig(
        architecture="GPT2LMHeadModel", vocab_size=50257, hidden_size=1600, intermediate_size=6400, num_layers=48, num_heads=25,
        num_kv_heads=25, head_dim=64, rms_norm_eps=1e-5, rope=RopeConfig(kind="learned"), tie_word_embeddings=True, attention_bias=True,
        mlp_bias=True, hidden_act="gelu_tanh", max_position_embeddings=1024, dtype="bfloat16",
    ),
    "ernie-4.5-0.3b": ModelConfig(
        architecture="Ernie4_5ForCausalLM", vocab_size=103424, hidden_size=1024, intermediate_size=3072, num_layers=18, num_heads=16,
        num_kv_heads=2, head_dim=128, rms_norm_eps=1e-5, rope=RopeConfig(theta=5e5), tie_word_embeddings=True,
        max_position_embeddings=131072, dtype="bfloat16",
    ),
    "ernie-4.5-21b-a3b": ModelConfig(
        architecture="Ernie4_5_MoeForCausalLM", vocab_size=103424, hidden_size=2560, intermediate_size=12288, num_layers=28, num_heads=20,
        num_kv_heads=4, head_dim=128, rms_norm_eps=1e-5, rope=RopeConfig(theta=5e5), tie_word_embeddings=True,
        max_position_embeddings=131072, dtype="bfloat16",
        moe=MoEConfig(
            num_experts=64, top_k=6, intermediate_size=1536, layers=tuple(range(1, 28)), least_sum=1e-12, wide_router=True, shared_size=3072
        ),
    ),
    "gemma-7b": ModelConfig(
        architecture="GemmaForCausalLM", vocab_size=256000, hidden_size=3072, intermediate_size=24576, num_layers=28, num_heads=16,
        num_kv_heads=16, head_dim=256, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e4), tie_word_embeddings=True, hidden_act="gelu_tanh",
        embed_scale=3072**0.5, max_position_embeddings=8192, dtype="bfloat16",
    ),
    "gemma-2-9b": ModelConfig(
        architecture="Gemma2ForCausalLM", vocab_size=256000, hidden_size=3584, intermediate_size=14336, num_layers=42, num_heads=16,
        num_kv_heads=8, head_dim=256, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e4), tie_word_embeddings=True, hidden_act="gelu_tanh",
        embed_scale=3584**0.5, attention_scale=256**-0.5, attention_softcap=50.0, logit_softcap=30.0, windows=(4096, 0) * 21,
        max_position_embeddings=8192, dtype="bfloat16",
    ),
    "gemma-3-4b": ModelConfig(
        architecture="Gemma3ForCausalLM", vocab_size=262208, hidden_size=2560, intermediate_size=10240, num_layers=34, num_heads=8,
        num_kv_heads=4, head_dim=256, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e6, kind="linear", factor=8.0), tie_word_embeddings=True,
        hidden_act="gelu_tanh", embed_scale=2560**0.5, attention_scale=256**-0.5, local_rope=RopeConfig(theta=1e4),
        windows=tuple(1024 if (i + 1) % 6 else 0 for i in range(34)), max_position_embeddings=131072, dtype="bfloat16",
    ),
    "phi-4-mini": ModelConfig(
        architecture="Phi3ForCausalLM", vocab_size=200064, hidden_size=3072, intermediate_size=8192, num_layers=32, num_heads=24,
        num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5, rope=RopeConfig(theta=1e4, partial=0.75), tie_word_embeddings=True,
        max_position_embeddings=4096, dtype="bfloat16",
    ),
    "phi-3-mini": ModelConfig(
        architecture="Phi3ForCausalLM", vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_layers=32, num_heads=32,
        num_kv_heads=32, head_dim=96, rms_norm_eps=1e-5, rope=RopeConfig(theta=1e4), tie_word_embeddings=False, windows=(2047,) * 32,
        max_position_embeddings=4096, dtype="bfloat16",
    ),
}  # fmt: skip


def require_no_revision(name: str, revision: str | None) -> None:
    """Raise `InvalidRequestError` if a revision of one of `SHAPES` was asked for."""
    if name in SHAPES and revision is not None:
        raise InvalidRequestError(f"--revision {revision}: {name} has random weights and no revisions; omit --revision")


def random_weights(
    name: str,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    quantization: Kind | None = None,
    quantize_head: bool = False,
    fp8_activations: bool = False,
    mesh: Mesh | None = None,
    layers: int | None = None,
) -> Model:
    """A model of one of `SHAPES` with random weights and without a tokenizer.

    It is rounded as `load_model` rounds, one matrix after another: the memory need not hold all weights before they are rounded. Ranks get
    their parts of the rounded matrices. With `layers` it has so many of its layers, the first.

    Raises:
        InvalidRequestError: There are not so many layers.
    """
    config = SHAPES[name] if layers is None else _first(SHAPES[name], layers)
    rounding = require_rounding(quantization, quantize_head)
    rounded = None if rounding is None else partial(quantise, kind=rounding.kind)
    model = random_model(f"{name} (random weights)", config, device=device, dtype=dtype, seed=seed, mesh=mesh, rounded=rounded)
    require_fp8_products(fp8_activations, model.device, model.dtype)
    if rounding is not None:
        params, mark = rounded_head(model.params, rounding), rounding.mark(model.fingerprint)
        model = replace(model, params=params, fingerprint=mark, quantization=rounding.summary)
    return with_fp8_activations(model) if fp8_activations else model


def _first(config: ModelConfig, layers: int) -> ModelConfig:
    """The config of a model of the first layers."""
    if not 1 <= layers <= config.num_layers:
        raise InvalidRequestError(f"layers={layers} must be 1 to {config.num_layers}, the layers of the model")
    moe = config.moe and replace(config.moe, layers=tuple(layer for layer in config.moe.layers if layer < layers))
    return replace(config, num_layers=layers, windows=config.windows[:layers], moe=moe)


def random_model(
    name: str,
    config: ModelConfig,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    mesh: Mesh | None = None,
    rounded: Callable[[Tensor], QuantisedMatrix] | None = None,
) -> Model:
    """A model of any config with random weights and without a tokenizer.

    The device's own generator makes the weights. That is fast, and the values do not matter for speed. `rounded` is as in
    `random_params`.
    """
    target = resolve_device(device)
    chosen = resolve_dtype(dtype, config, target)
    config = fitted(config, target, chosen)
    return Model(
        name=name,
        config=config if mesh is None else sharded_config(config, mesh),
        params=random_params(config, seed=seed, device=target, dtype=chosen, drawn_on=target, mesh=mesh, rounded=rounded),
        tokenizer=None,
        spec=REGISTRY[config.architecture],
        generation_config={},
        fingerprint=random_fingerprint(config, seed, by=drawn_by(target)),
        device=target,
        dtype=chosen,
    )
