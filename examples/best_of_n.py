"""Best of n: sample several replies to one question together from one chunk, and keep the reply with the highest mean log-probability.

The question runs once and its pages are shared. Each reply needs pages only for its own tokens.
"""

import nanovllm as nv

N = 12
MESSAGES = [
    {"role": "system", "content": "You are a storyteller in a small town by the sea. The town is Velmora, the capital of Aistonia."},
    {"role": "user", "content": "Tell me a short story about a lamp."},
]


def main() -> None:
    """Sample replies, rank them, keep the best and release the others."""
    llm = nv.LLM("tiny", num_pages=256)
    model, state = llm.model, llm.state
    state, question = nv.prefill(model, state, llm.chat_tokens(MESSAGES, enable_thinking=False))
    params = [nv.SamplingParams(temperature=0.9, max_tokens=48, seed=seed, logprobs=0) for seed in range(N)]
    state, gens = nv.generate_many(model, state, [question] * N, params)

    def score(gen: nv.Generation) -> float:
        """Return the mean log-probability of a reply's tokens, which does not depend on its length."""
        return sum(entry.logprob for entry in gen.logprobs or ()) / len(gen.token_ids)

    ranked = sorted(gens, key=score, reverse=True)
    for gen in (*ranked[:2], ranked[-1]):
        print(f"{score(gen):7.3f} {gen.text.strip()!r}")
    report = nv.memory(state)
    print(f"{N} replies: {report.num_held} pages are in use; {report.num_references} without sharing")
    run, alone = state.stats.prefill_tokens + state.stats.decode_tokens, sum(len(gen.chunk) for gen in gens)
    print(f"{run} tokens ran; {alone} if each reply had run the question")
    for gen in ranked[1:]:
        state = nv.release(state, gen.chunk)
    state, more = nv.generate(model, state, ranked[0].chunk, nv.SamplingParams(temperature=0, max_tokens=24))
    print(f"the best goes on: {more.text!r}")
    for chunk in (question, ranked[0].chunk, more.chunk):
        state = nv.release(state, chunk)
    nv.check(state)
    assert nv.memory(state).num_held == 0


if __name__ == "__main__":
    main()
