"""Beam search on the device: find the most probable continuations of a text, with every step one function of the carry.

The beams are the rows of one batch. A step runs all of them, chooses the best continuations of all rows, and lets each row go on from the
row that it chose. Rows share full pages of KV, and nothing waits for the host: on a GPU the step is one CUDA graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import nanovllm as nv

WIDTH, STEPS = 8, 20
PROMPT = "Once upon a time, in a small village by the sea, there lived a fisherman who had lost his boat in a storm."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Beam:
    """A continuation `token_ids` and its log-probability. `chunk` contains the prompt and the continuation."""

    chunk: nv.Chunk
    token_ids: tuple[int, ...]
    score: float


def search(model: nv.Model, state: nv.EngineState, prompt: nv.Chunk, width: int, steps: int) -> tuple[nv.EngineState, list[Beam]]:
    """Return the next state and the `width` best continuations, best first. The vocabulary has at least `width` tokens.

    A continuation has `steps` tokens, or fewer if it ends with an end token.
    """
    ends, vocab_size = model.config.eos_token_ids, model.config.vocab_size
    greedy = nv.SamplingParams(temperature=0)  # `commit` cuts each reply after its first end token
    state, carry = nv.begin(model, state, [prompt] * width, greedy, room=steps, branching=True)
    is_end = torch.zeros(vocab_size, dtype=torch.bool, device=model.device)
    is_end[list(ends)] = True
    after_end = torch.full((vocab_size,), -torch.inf, device=model.device)
    after_end[list(ends[:1])] = 0.0  # a beam that has ended competes unchanged: its one continuation is a further end token, for free

    def step(carry: nv.DecodeCarry, scores: Tensor, ended: Tensor) -> tuple[nv.DecodeCarry, Tensor, Tensor]:
        carry, out = nv.decode_step(model.params, carry, model.config)
        logprobs = torch.where(ended.unsqueeze(1), after_end, out.logits.float().log_softmax(1))
        totals, tokens = (scores.unsqueeze(1) + logprobs).topk(width, 1)
        scores, chosen = totals.flatten().topk(width)
        token_ids = tokens.flatten()[chosen]
        return nv.split_rows(carry, chosen // width, token_ids.int()), scores, is_end[token_ids]

    scores = torch.full((width,), -torch.inf, device=model.device)
    scores[0] = 0.0  # all rows begin with the same text, so only the continuations of the first one count
    ended = torch.zeros(width, dtype=torch.bool, device=model.device)
    captured = nv.capture(step, carry, scores, ended)
    for _ in range(steps):
        carry, scores, ended = captured(carry, scores, ended)
    state, replies = nv.commit(model, state, carry)
    found = zip(replies, scores.tolist(), strict=True)
    return state, [Beam(chunk=reply.chunk, token_ids=tuple(reply.token_ids), score=score) for reply, score in found]


def main() -> None:
    """Print the beams and their cost."""
    model = nv.load_model("tiny")
    assert model.tokenizer is not None
    state = nv.init_state(model, num_pages=256)
    state, prompt = nv.prefill(model, state, PROMPT)
    state, beams = search(model, state, prompt, WIDTH, STEPS)
    for beam in beams:
        print(f"{beam.score:8.3f} {model.tokenizer.decode(list(beam.token_ids))!r}")
    report = nv.memory(state)
    print(f"{report.num_held} pages are in use; {report.num_references} without sharing")
    alone = WIDTH * sum(len(prompt) + step for step in range(STEPS))
    print(f"{state.stats.prefill_tokens + state.stats.decode_tokens} tokens ran; {alone} if each step ran every beam from its beginning")
    for chunk in (prompt, *(beam.chunk for beam in beams)):
        state = nv.release(state, chunk)
    nv.check(state)
    assert nv.memory(state).num_held == 0


if __name__ == "__main__":
    main()
