"""Random weights for transformers' models, ordinary and numerically hard.

bfloat16 represents every value exactly, so all dtypes have the same weights.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from nanovllm.testing.models import BYTE_VOCAB
from nanovllm.types import Tensor

ZEROED = (0, 3, 17)  # tokens whose embedding is zero
LOUD = (1, 6, 13)  # channels of the residual stream with large values


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int, hard: str = "") -> None:
    """Set random weights: norm weights near one, and other weights so large that the most probable tokens are clearly apart."""
    generator = torch.Generator().manual_seed(seed)
    less_one = "gemma" in type(model).__name__.lower()  # Gemma stores norm weights minus one
    for name, weight in model.named_parameters():
        gain = is_gain(name)
        drawn = torch.empty(weight.shape).normal_(1.0 - less_one if gain else 0.0, 0.25 if gain else 0.15, generator=generator)
        weight.copy_(drawn.bfloat16())
    weights = {name: weight for name, weight in model.named_parameters() if "vision" not in name and "projector" not in name}
    if hard:
        HARD[hard](weights, model.config, float(less_one))
    assert all(torch.equal(weight, weight.bfloat16().to(weight.dtype)) for weight in weights.values())


def is_gain(name: str) -> bool:
    """Return whether the name is that of a norm weight."""
    return name.endswith(".weight") and any(part in name for part in ("norm", ".ln_"))


def _gains(weights: Mapping[str, Tensor], config: object, less: float) -> None:
    """Set norm weights of key heads from 0.1 to 96.5, as in some real models, so that attention scores are in the hundreds."""
    for name, weight in weights.items():
        if name.endswith("k_norm.weight"):
            spread = torch.linspace(0.1, 96.5, len(weight))[torch.randperm(len(weight), generator=torch.Generator().manual_seed(1))]
            spread[0] = 96.5
            weight.copy_((spread - less).bfloat16())


def _large(weights: Mapping[str, Tensor], config: object, less: float) -> None:
    """Make a few channels of the residual stream a thousand times as large as the others; the norm weights compensate for this."""
    for name, weight in weights.items():
        if is_gain(name) and "q_norm" not in name and "k_norm" not in name:
            gain = (weight + less) * 64
            gain[list(LOUD)] /= 4096
            weight.copy_((gain - less).bfloat16())
        elif name.endswith(("embed_tokens.weight", "wte.weight")):
            weight[:, list(LOUD)] *= 1024
        elif name.endswith("o_proj.weight"):
            weight[list(LOUD)] *= 256
        elif name.endswith("attn.c_proj.weight"):
            weight[:, list(LOUD)] *= 256


def _zeros(weights: Mapping[str, Tensor], config: object, less: float) -> None:
    """Set some embeddings, a head, an expert and rows of a projection to zero."""
    for name, weight in weights.items():
        if name.endswith(("embed_tokens.weight", "wte.weight", "lm_head.weight")):
            weight[list(ZEROED)] = 0
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "qkv_proj.weight")):
            weight[:10] = 0
        elif name.endswith("c_attn.weight"):
            weight[:, :16] = 0
        elif "experts." in name and "shared" not in name:
            weight[0] = 0
        elif name.endswith(("down_proj.weight", "mlp.c_proj.weight")):
            weight[5] = 0


def _padded(weights: Mapping[str, Tensor], config: object, less: float) -> None:
    """Set rows of the vocabulary without a token in the tokenizer to zero."""
    for name, weight in weights.items():
        if name.endswith(("embed_tokens.weight", "wte.weight", "lm_head.weight")):
            weight[BYTE_VOCAB:] = 0


HARD: Mapping[str, Callable[[Mapping[str, Tensor], object, float], None]] = MappingProxyType(
    {"gains": _gains, "large": _large, "zeros": _zeros, "padded": _padded}
)
