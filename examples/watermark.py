"""A watermark: sampled text in which a program that knows the key, and no reader, sees that it was generated (Kirchenbauer et al., 2023).

A hash of the newest token chooses about a share `GAMMA` of the vocabulary, the green list of the next token, and the logits of green tokens
get a bonus. The detector counts green tokens. It needs the token ids and the key, but no model. The surer the model is of its next tokens,
the weaker the mark.

Source: https://arxiv.org/abs/2301.10226, algorithm 2. There a green list has exactly that share of the tokens. Here each token is green
with that probability, by a hash of integers that is the same on every device.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

import nanovllm as nv

KEY, GAMMA, DELTA = 15_485_863, 0.25, 4.0
PROMPTS = ("Dear friend,", "The lighthouse keeper", "In spring, a traveller came to Aistonia and")


def scrambled(numbers: Tensor) -> Tensor:
    """Return a hash of 32 bits of each number, int64. The multiplier has 27 bits, so no product leaves int64."""
    for _ in range(2):
        numbers = ((numbers >> 16) ^ numbers) * 0x45D9F3B & 0xFFFFFFFF
    return (numbers >> 16) ^ numbers


def is_green(before: Tensor, token_ids: Tensor, key: int, gamma: float) -> Tensor:
    """Return which tokens are green after the tokens `before`. Both are int64, and their shapes broadcast."""
    return scrambled((scrambled(before + key) + token_ids) & 0xFFFFFFFF) < int(gamma * 2**32)


def watermark(key: int, gamma: float, delta: float) -> Callable[[Tensor, nv.TokensSoFar], Tensor]:
    """Return a `process_logits` that adds `delta` to the logits of green tokens."""

    def bias(logits: Tensor, tokens: nv.TokensSoFar) -> Tensor:
        vocabulary = torch.arange(logits.shape[1], device=logits.device)
        return logits.float() + delta * is_green(tokens.last().long().unsqueeze(1), vocabulary, key, gamma)

    return bias


def z_score(token_ids: Sequence[int], key: int, gamma: float) -> float:
    """Return by how many standard deviations a text has more green tokens than a text that does not know the key.

    A pair of neighbours counts once, because a pair that is repeated says nothing new.
    """
    before, after = torch.tensor(sorted(set(pairwise(token_ids)))).T
    count, green = len(before), int(is_green(before, after, key, gamma).sum())
    return (green - gamma * count) / math.sqrt(count * gamma * (1 - gamma))


def main() -> None:
    """Sample texts with and without the watermark, and let the detector judge them."""
    model = nv.load_model("tiny")
    state = nv.init_state(model, num_pages=256)
    params = nv.SamplingParams(temperature=1.0, max_tokens=200, seed=0, ignore_eos=True)
    for name, process_logits in (("plain", None), ("watermarked", watermark(KEY, GAMMA, DELTA))):
        state, replies = nv.generate_many(model, state, PROMPTS, params, process_logits=process_logits)
        for prompt, reply in zip(PROMPTS, replies, strict=True):
            score = z_score(reply.token_ids, KEY, GAMMA)
            print(f"{name}, z = {score:.1f}: {prompt}{reply.text[:90]!r}")


if __name__ == "__main__":
    main()
