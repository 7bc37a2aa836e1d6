"""Beam search: find the most probable continuations of a text, one token at a time, on branches that share KV.

A beam is a chunk and one token that has not run yet. A branch is a new handle on existing pages. When a beam is dropped, pages that no
other beam needs become free.
"""

from dataclasses import dataclass

import nanovllm as nv

WIDTH, STEPS = 4, 20
PROMPT = "Once upon a time, in a small village by the sea, there lived a fisherman who had lost his boat in a storm."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Beam:
    """A continuation `token_ids` and its log-probability. `chunk` contains the prompt and all of the continuation except its last token."""

    chunk: nv.Chunk
    token_ids: tuple[int, ...] = ()
    score: float = 0.0


def search(model: nv.Model, state: nv.EngineState, prompt: nv.Chunk, width: int, steps: int) -> tuple[nv.EngineState, list[Beam], int]:
    """Return the next state, the `width` best continuations, best first, and the number of tokens in all evaluated contexts.

    A continuation has `steps` tokens, or fewer if it ends with an end token.
    """
    look = nv.SamplingParams(temperature=0, max_tokens=1, logprobs=width)
    state, root = nv.fork(state, prompt)
    beams, looked_at = [Beam(chunk=root)], 0
    for _ in range(steps):
        going = [beam for beam in beams if not set(beam.token_ids[-1:]) & set(model.config.eos_token_ids)]
        state, gens = nv.generate_many(model, state, [[beam.chunk, list(beam.token_ids[-1:])] for beam in going], look)
        looked_at += sum(len(gen.chunk) - 1 for gen in gens)
        ways = [(beam.score, beam, None, -1) for beam in beams if beam not in going]  # beams that have ended compete unchanged
        for beam, gen in zip(going, gens, strict=True):
            assert gen.logprobs is not None
            ways += [(beam.score + logprob, beam, gen.chunk, token) for token, logprob in gen.logprobs[0].top]
        chosen = []
        for score, beam, looked, token in sorted(ways, key=lambda way: way[0], reverse=True)[:width]:
            # `looked` ends with the sampled token. The branch ends before it, and continues with another token.
            state, branch = nv.fork(state, beam.chunk) if looked is None else nv.truncate(state, looked, len(looked) - 1)
            more = () if looked is None else (token,)
            chosen.append(Beam(chunk=branch, token_ids=beam.token_ids + more, score=score))
        for dead in (*(gen.chunk for gen in gens), *(beam.chunk for beam in beams)):
            state = nv.release(state, dead)
        beams = chosen
    return state, beams, looked_at


def main() -> None:
    """Print the beams and their cost."""
    model = nv.load_model("tiny")
    assert model.tokenizer is not None
    state = nv.init_state(model, num_pages=256)
    state, prompt = nv.prefill(model, state, PROMPT)
    state, beams, looked_at = search(model, state, prompt, WIDTH, STEPS)
    for beam in beams:
        print(f"{beam.score:8.3f} {model.tokenizer.decode(list(beam.token_ids))!r}")
    report = nv.memory(state)
    print(f"{report.num_held} pages are in use; {report.num_references} without sharing")
    print(f"{state.stats.prefill_tokens + state.stats.decode_tokens} tokens ran; {looked_at} without reuse")
    for chunk in (prompt, *(beam.chunk for beam in beams)):
        state = nv.release(state, chunk)
    nv.check(state)
    assert nv.memory(state).num_held == 0


if __name__ == "__main__":
    main()
