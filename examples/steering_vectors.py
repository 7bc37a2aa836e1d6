"""Steering vectors and token saliency: the forward pass under `torch.func.vmap` and `torch.func.grad`, without an engine.

A text states two facts. The difference of the hidden states of two questions about it is a vector. Added to the residual stream of the
first question, it makes the model answer the second. All strengths run as one batch. The gradient with respect to the embeddings shows
which tokens decide between the two answers.
"""

import torch
from torch import Tensor

import nanovllm as nv

FACTS = "The king of Aistonia is Oswin. The capital of Aistonia is Velmora."
ASKED, OTHER = f"{FACTS} The capital of Aistonia is", f"{FACTS} The king of Aistonia is"
ANSWERS = (" Velmora", " Oswin")
LAYER = 4  # of 8: vectors from earlier layers of this model do not carry the whole question
STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)


def main() -> None:
    """Steer one question towards the answer of another, then show the tokens on which the answer depends."""
    model = nv.load_model("tiny", device="cpu")
    asked, other = (model.tokenizer.encode(text) for text in (ASKED, OTHER))
    first, second = (model.tokenizer.encode(answer)[0] for answer in ANSWERS)

    # kv=None: no engine and no pages. The output of one layer is asked for, at the last token of each question.
    both = nv.Batch.of_prompts([asked, other])
    with torch.no_grad():
        _, _, (hidden,) = nv.forward(model.params, None, both, model.config, capture_hidden=(LAYER,))
    direction = hidden[-1] - hidden[len(asked) - 1]

    batch = nv.Batch.of_prompts([asked], last_only=True)

    def steered(vector: Tensor) -> Tensor:
        """Return the probabilities of the next token with a vector added to the layer's output, `[V]`."""
        logits, _ = nv.forward(model.params, None, batch, model.config, add_hidden={LAYER: vector})
        return logits[0].softmax(-1)

    with torch.no_grad():
        probabilities = torch.func.vmap(steered)(torch.tensor(STRENGTHS)[:, None] * direction)
    print(f"{ASKED[len(FACTS) :].strip()} ...")
    for strength, row in zip(STRENGTHS, probabilities, strict=True):
        likeliest = model.tokenizer.decode([int(row.argmax())])
        shares = ", ".join(f"{answer.strip()} {row[token]:.3f}" for answer, token in zip(ANSWERS, (first, second), strict=True))
        print(f"strength {strength:.2f}: {shares}, the most probable token is {likeliest!r}")

    def preference(embeddings: Tensor) -> Tensor:
        """Return how much the logit of the first answer exceeds that of the second."""
        logits, _ = nv.forward(model.params, None, batch, model.config, inputs_embeds=embeddings)
        return logits[0, first] - logits[0, second]

    saliency = torch.func.grad(preference)(model.params.embed[batch.input_ids]).norm(dim=-1)
    print("the tokens that decide between the answers:")
    for place in saliency.argsort(descending=True)[:6].tolist():
        print(f"{saliency[place]:7.2f} {model.tokenizer.decode([asked[place]])!r}, token {place}")


if __name__ == "__main__":
    main()
