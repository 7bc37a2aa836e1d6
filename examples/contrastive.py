"""Contrastive decoding: prefer the tokens that an expert finds much more probable than an amateur does (Li et al., 2022).

The expert is the model with the whole prompt. In the paper the amateur is a smaller model, whose context may be cut as well. Here it is
the same model with a cut context, because only one model is at hand: it sees the last tokens of the prompt, and the reply. So the text
stays with the start of the prompt, and avoids phrases that are probable after any prompt. Only tokens that the expert finds plausible take
part.

Source: https://arxiv.org/abs/2210.15097, section 3.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

import nanovllm as nv

PROMPTS = (
    "A blue whale named Otto lived near the harbour. He had a golden key. One day,",
    "Kate the fox lost her red umbrella in the forest. She was sad. The next day, Kate",
)
ALPHA, SEEN = 0.1, 4  # how plausible a token must be, and how many tokens of the prompt the amateur sees


def contrast(alpha: float) -> Callable[[Tensor], Tensor]:
    """Return a `process_logits`. The first half of its rows are experts, and the second half are their amateurs.

    A token takes part if the expert's probability for it is at least `alpha` times that of the expert's most probable token.
    """

    def prefer(logits: Tensor) -> Tensor:
        expert, amateur = logits.float().log_softmax(1).chunk(2)
        plausible = expert >= expert.amax(1, keepdim=True) + math.log(alpha)
        return torch.where(plausible, expert - amateur, -torch.inf).repeat(2, 1)

    return prefer


def main() -> None:
    """Continue texts greedily and by contrast."""
    model = nv.load_model("tiny")
    assert model.tokenizer is not None
    state = nv.init_state(model, num_pages=256)
    greedy = nv.SamplingParams(temperature=0, max_tokens=40)
    experts = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
    amateurs = [prompt[-SEEN:] for prompt in experts]
    state, plain = nv.generate_many(model, state, experts, greedy)
    state, replies = nv.generate_many(model, state, experts + amateurs, greedy, process_logits=contrast(ALPHA))
    for prompt, before, after in zip(PROMPTS, plain, replies, strict=False):
        print(prompt)
        for name, reply in (("greedy", before), ("contrastive", after)):
            print(f"  {name}, {len(set(reply.token_ids))} different tokens of {len(reply.token_ids)}: {reply.text!r}")


if __name__ == "__main__":
    main()
