"""Classifier-free guidance: make a text follow a condition more closely than the model does by itself (Sanchez et al., 2023).

Each text is two rows of a batch: one prompt states the condition, the other does not. What the condition adds to the logarithms of the
probabilities counts `scale` times. At scale 0 the condition has no effect, and at scale 1 it has the effect that it has in any prompt.

Source: https://arxiv.org/abs/2306.17806.
"""

from collections.abc import Callable

from torch import Tensor

import nanovllm as nv

CONDITIONS = ("The lighthouse keeper was afraid of the storm. ", "This is a story about a dragon. ")
START = "Once upon a time,"
SCALES = (0.0, 1.0, 2.0)


def guidance(scale: float) -> Callable[[Tensor], Tensor]:
    """Return a `process_logits`. The first half of its rows have a condition, and the second half are the same texts without it.

    Both rows of a text get the same result, so they sample the same token if they sample at temperature 0.
    """

    def guide(logits: Tensor) -> Tensor:
        conditional, unconditional = logits.float().log_softmax(1).chunk(2)
        return (unconditional + scale * (conditional - unconditional)).repeat(2, 1)

    return guide


def main() -> None:
    """Begin a story under two conditions, each followed more and more closely."""
    model = nv.load_model("tiny")
    state = nv.init_state(model, num_pages=256)
    greedy = nv.SamplingParams(temperature=0, max_tokens=40)
    prompts = [*(condition + START for condition in CONDITIONS), *[START] * len(CONDITIONS)]
    for scale in SCALES:
        state, replies = nv.generate_many(model, state, prompts, greedy, process_logits=guidance(scale))
        for prompt, reply, unconditional in zip(CONDITIONS, replies, replies[len(CONDITIONS) :], strict=False):
            assert reply.token_ids == unconditional.token_ids
            print(f"scale {scale}: {prompt}{START}{reply.text}")


if __name__ == "__main__":
    main()
