"""Constrained copying: the reply may only quote its source, so it cannot state what the source does not say.

The reply consists of spans of the source. A span may begin anywhere. Each further token must continue the span at one of the places where
it occurs in the source, up to a break token of the source, such as a full stop, or to the source's end. Then another span may begin, or
the reply ends. Which places of the source may come next is a tensor that the processor carries from step to step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

import nanovllm as nv

SOURCE = "The harbour of Brenna was built by Olga Steen in 1911. It has two lamps. The smaller lamp was a gift from Tilo."
QUESTIONS = ("Who built the harbour?", "Who gave the lamp?")


def copying(model: nv.Model, source_lens: Sequence[int], breaks: Sequence[int]) -> nv.LogitsProcessor:
    """Return a processor of rows whose sources are the first `source_lens` tokens of their prompts."""
    is_break, is_end = torch.zeros(2, model.config.vocab_size, dtype=torch.bool, device=model.device)
    is_break[list(breaks)] = True
    is_end[list(model.config.eos_token_ids)] = True

    def start(tokens: nv.TokensSoFar) -> tuple[Tensor, Tensor]:
        places = torch.arange(tokens.token_ids.shape[1], device=tokens.lengths.device)
        in_source = places < torch.tensor(source_lens, device=tokens.lengths.device).unsqueeze(1)
        return in_source, torch.zeros_like(in_source)

    def only_copies(logits: Tensor, tokens: nv.TokensSoFar, carried: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        in_source, coming = carried
        newest = tokens.last().long().unsqueeze(1)
        going_on = (coming & (tokens.token_ids == newest)).roll(1, 1) & in_source
        begins = is_break[newest] | ~going_on.any(1, keepdim=True)
        coming = torch.where(begins, in_source, going_on)
        counts = torch.zeros_like(logits).scatter_add(1, tokens.token_ids.long(), coming.to(logits.dtype))
        return logits.masked_fill((counts == 0) & ~(begins & is_end), -torch.inf), (in_source, coming)

    return nv.LogitsProcessor(only_copies, start)


def main() -> None:
    """Answer questions about a text freely, and by quotation."""
    model = nv.load_model("tiny")
    assert model.tokenizer is not None
    state = nv.init_state(model, num_pages=256)
    greedy = nv.SamplingParams(temperature=0, max_tokens=24)
    source, (full_stop,) = model.tokenizer.encode(SOURCE), model.tokenizer.encode(".")
    prompts = [[*source, *model.tokenizer.encode(f"\n\nQuestion: {question}\nAnswer:")] for question in QUESTIONS]
    state, free = nv.generate_many(model, state, prompts, greedy)
    processor = copying(model, [len(source)] * len(prompts), [full_stop])
    state, copies = nv.generate_many(model, state, prompts, greedy, process_logits=processor)
    print(SOURCE)
    for question, before, after in zip(QUESTIONS, free, copies, strict=True):
        print(f"{question}\n  free:  {before.text!r}\n  quote: {after.text!r}")


if __name__ == "__main__":
    main()
