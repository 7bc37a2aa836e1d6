"""What tests on a GPU share: a small model that all kernels serve, prompts for it, and replies compared where kernels round otherwise."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from nanovllm.chunks.generate import generate
from nanovllm.engine.init_state import init_state
from nanovllm.models.model import Model
from nanovllm.sampling.params import SamplingParams
from nanovllm.testing.models import random_model, tiny_config

TIE = 0.15  # less than this between two logits and kernels in bfloat16 may draw either
SMALL: Mapping[str, int] = {
    "hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "intermediate_size": 512, "num_layers": 4,
}  # fmt: skip


def small_model(architecture: str = "Qwen3ForCausalLM", seed: int = 0, dtype: str = "bfloat16") -> Model:
    """Four layers of 256 channels on the GPU, of random weights."""
    return random_model(tiny_config(architecture, **SMALL), seed, dtype, device="cuda", std=0.05)


def random_prompts(model: Model, *lengths: int) -> list[list[int]]:
    """Prompts of these lengths, the same every time."""
    draw = np.random.default_rng(0)
    return [draw.integers(0, model.config.vocab_size, size=length).tolist() for length in lengths]


def lead(model: Model, tokens: list[int], limits: Mapping[str, Any]) -> float:
    """By how much the likeliest next token leads, by an eager forward in an engine of these limits."""
    state = init_state(model, compile=False, **limits)
    _, generation = generate(model, state, tokens, SamplingParams(temperature=0.0, max_tokens=1, logprobs=2))
    assert generation.logprobs is not None
    first, second = generation.logprobs[0].top
    return first[1] - second[1]


def require_same(model: Model, prompt: list[int], got: list[int], want: list[int], limits: Mapping[str, Any]) -> None:
    """Replies that are equal, or first differ where two tokens were as good as tied."""
    if got != want:
        at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
        assert lead(model, prompt + want[:at], limits) < TIE, (at, got, want)
