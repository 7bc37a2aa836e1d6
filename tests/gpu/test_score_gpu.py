"""`score` on a GPU: the kernels of prompts give the log-probabilities of a plain forward pass on a CPU."""

import numpy as np
import pytest
import torch

import nanovllm as nv
from nanovllm.executor import scoring
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.worlds import ModelWorld
from tests.gpu.small import SMALL, random_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # FlashInfer and its needs may warn

CONFIGS = {
    "plain": tiny_config(**SMALL),
    "windows": tiny_config("Gemma3ForCausalLM", windows=(24, 0, 24, 0), **SMALL),
}


@pytest.mark.parametrize(("dtype", "compile", "tolerance"), [("float32", False, 5e-3), ("bfloat16", False, 0.2), ("bfloat16", True, 0.2)])
@pytest.mark.parametrize("most", [20, 100_000])
@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_those_of_a_forward_pass(
    name: str, most: int, dtype: str, compile: bool, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a chunk, a text's prefix and equal contexts; more tokens than a step has, and than one batch has logits."""
    config = CONFIGS[name]
    monkeypatch.setattr(scoring, "LOGIT_BYTES", 4 * config.vocab_size * most)
    monkeypatch.setattr(scoring, "PIECE_BYTES", 4 * config.vocab_size * 7)
    world = ModelWorld(random_model(config, std=0.05))
    model = random_model(config, 0, dtype, device="cuda", std=0.05)
    head, other, *given = random_prompts(model, 70, 33, 1, 5, 16, 40, 2, 90, 17, 1)
    state = nv.init_state(model, num_pages=128, page_size=16, max_model_len=256, max_num_seqs=6, max_num_batched_tokens=64, compile=compile)
    state, chunk = nv.prefill(model, state, head)
    contexts = [chunk, chunk, other, [chunk, other], chunk, other, [*head[:40], 5], other]
    tokens = [head, head, other, [*head, *other], head, other, [*head[:40], 5], other]
    state, scores = nv.score(model, state, contexts, given, top_logprobs=3)
    nv.check(state)
    for context, ids, one in zip(tokens, given, scores, strict=True):
        logits, _ = world.uncached([*context, *ids])
        every = logits[len(context) - 1 : -1].log_softmax(1)
        wanted = every.gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()
        assert one.logprobs.dtype == np.float32
        np.testing.assert_allclose(one.logprobs, wanted, rtol=0, atol=tolerance)
        np.testing.assert_allclose(one.top_logprobs, every.topk(3).values, rtol=0, atol=tolerance)
        np.testing.assert_allclose(one.top_logprobs, np.take_along_axis(every.numpy(), one.top_ids, 1), rtol=0, atol=2 * tolerance)
