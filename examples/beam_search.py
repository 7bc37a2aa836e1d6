"""Beam search: the likeliest continuations of a text, a token at a time, on branches that share the KV of what they have in common.

A beam is a chunk and one token that has not run yet. Branching is a handle on pages that are there, and a beam that drops out gives the
pages back that no other needs.
"""

from dataclasses import dataclass

import nanovllm as nv

WIDTH, STEPS = 4, 20
PROMPT = "Once upon a time, in a small village by the sea, there lived a fisherman who had lost his boat in a storm."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Beam:
    """A continuation `token_ids` and its log-probability; `chunk` holds the prompt and all of it but the newest token."""

    chunk: nv.Chunk
    token_ids: tuple[int, ...] = ()
    score: float = 0.0


def search(model: nv.Model, state: nv.EngineState, prompt: nv.Chunk, width: int, steps: int) -> tuple[nv.EngineState, list[Beam], int]:
    """The `width` best continuations of `steps` tokens, or up to an end token, best first; last the tokens of all contexts looked at."""
    look = nv.SamplingParams(temperature=0, max_tokens=1, logprobs=width)
    state, root = nv.fork(state, prompt)
    beams, looked_at = [Beam(chunk=root)], 0
    for _ in range(steps):
        going = [beam for beam in beams if not set(beam.token_ids[-1:]) & set(model.config.eos_token_ids)]
        state, gens = nv.generate_many(model, state, [[beam.chunk, list(beam.token_ids[-1:])] for beam in going], look)
        looked_at += sum(len(gen.chunk) - 1 for gen in gens)
        ways = [(beam.score, beam, None, -1) for beam in beams if beam not in going]  # those that have ended compete as they are
        for beam, gen in zip(going, gens, strict=True):
            assert gen.logprobs is not None
            ways += [(beam.score + logprob, beam, gen.chunk, token) for token, logprob in gen.logprobs[0].top]
        chosen = []
        for score, beam, looked, token in sorted(ways, key=lambda way: way[0], reverse=True)[:width]:
            # `looked` ends with the token that was drawn: the branch stands before it, and takes another one
            state, branch = nv.fork(state, beam.chunk) if looked is None else nv.truncate(state, looked, len(looked) - 1)
            more = () if looked is None else (token,)
            chosen.append(Beam(chunk=branch, token_ids=beam.token_ids + more, score=score))
        for dead in (*(gen.chunk for gen in gens), *(beam.chunk for beam in beams)):
            state = nv.release(state, dead)
        beams = chosen
    return state, beams, looked_at


def main() -> None:
    """Print the beams, and what they cost."""
    model = nv.load_model("tiny")
    assert model.tokenizer is not None
    state = nv.init_state(model, num_pages=256)
    state, prompt = nv.prefill(model, state, PROMPT)
    state, beams, looked_at = search(model, state, prompt, WIDTH, STEPS)
    for beam in beams:
        print(f"{beam.score:8.3f} {model.tokenizer.decode(list(beam.token_ids))!r}")
    report = nv.memory(state)
    print(f"{report.num_held} pages are held; {report.num_references} if each beam had its own")
    print(f"{state.stats.prefill_tokens + state.stats.decode_tokens} tokens were run; {looked_at} without reuse")
    for chunk in (prompt, *(beam.chunk for beam in beams)):
        state = nv.release(state, chunk)
    nv.check(state)
    assert nv.memory(state).num_held == 0


if __name__ == "__main__":
    main()
