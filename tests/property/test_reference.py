"""The decoder in numpy that chunks are compared with says what the models say."""

from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.chunks import ChunkShadow
from nanovllm.testing.shadows.worlds import ModelWorld

TOKENS = [1, 3, 2, 0, 1, 1, 3, 2]
SMALL: dict[str, Any] = {"vocab_size": 4, "hidden_size": 16, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Qwen3ForCausalLM", {"attention_bias": True}),
        ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_the_reference_is_the_model(architecture: str, changes: dict[str, Any]) -> None:
    model = random_model(tiny_config(architecture, **SMALL, **changes), dtype=torch.float64)
    world = ModelWorld(model, tolerance=1e-6)  # the model's angles are float32
    logits, kv = world.uncached(TOKENS)
    cells = ChunkShadow(world).exact(TOKENS).cells
    for count in range(1, len(TOKENS) + 1):
        assert np.abs(np.array(world.logits_after(cells[:count])) - logits[count - 1].numpy()).max() < 1e-6
    world.require_cells(kv, [0], cells)


def test_other_rotations_are_refused() -> None:
    rope = tiny_config().rope
    model = random_model(tiny_config(rope=type(rope)(theta=rope.theta, kind="linear", factor=2.0)))
    with pytest.raises(ValueError, match="linear"):
        ModelWorld(model).kv_of((), 0, 0)
