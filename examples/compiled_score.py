"""A compiled loop that scores candidates: decode steps take given tokens instead of sampling, and return their log-probabilities.

The candidates are rows of one batch over one chunk, so the prompt's KV is computed once and shared.
"""

import sys
from typing import Any

import torch

import nanovllm as nv

PROMPT = "The capital of Aistonia is Velmora. Aistonia is a land by the sea. The capital of Aistonia is"
CANDIDATES = (" Velmora.", " Karvik.", " the sea.", " a cat.")
STEPS = 2  # decode steps in one call of the compiled function


def main(name: str = "tiny") -> None:
    """Rank the candidates by their log-probability after the prompt."""
    model = nv.load_model(name, device="cpu")
    assert model.tokenizer is not None
    rows = [model.tokenizer.encode(text, add_special_tokens=False) for text in CANDIDATES]
    longest = -(-max(map(len, rows)) // STEPS) * STEPS
    token_ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=torch.int32)
    counts = torch.tensor([[float(i < len(row)) for i in range(longest)] for row in rows])

    @torch.compile(fullgraph=True)
    def score(params: Any, carry: nv.DecodeCarry, token_ids: torch.Tensor, counts: torch.Tensor) -> tuple[nv.DecodeCarry, torch.Tensor]:
        total = torch.zeros(len(token_ids))
        for i in range(STEPS):
            carry, out = nv.decode_step(params, carry, model.config, token_ids=token_ids[:, i])
            assert out.logprobs is not None
            total = total + out.logprobs * counts[:, i]
        return carry, total

    state = nv.init_state(model, num_pages=64)
    state, prompt = nv.prefill(model, state, PROMPT)
    options = nv.SamplingParams(temperature=0, ignore_eos=True)
    state, carry = nv.begin(model, state, [prompt] * len(rows), options, room=longest)
    scores = torch.zeros(len(rows))
    for part, count in zip(token_ids.split(STEPS, 1), counts.split(STEPS, 1), strict=True):
        carry, more = score(model.params, carry, part.contiguous(), count.contiguous())
        scores += more
    state, gens = nv.commit(model, state, carry)
    for i in scores.argsort(descending=True).tolist():
        print(f"{scores[i]:8.3f} {CANDIDATES[i]}")
    for chunk in (prompt, *(gen.chunk for gen in gens)):
        state = nv.release(state, chunk)
    nv.check(state)


if __name__ == "__main__":
    main(*sys.argv[1:])
