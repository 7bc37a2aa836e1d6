"""Search with plain function calls: fork a story, continue it in several ways, go back, and continue the best way.

Branches neither copy nor run again the KV that they share. The numbers at the end count every token that ran.
"""

import nanovllm as nv

BRANCHES, TOKENS = 4, 24


def main() -> None:
    """Continue a story in several ways and keep the most probable one."""
    model = nv.load_model("tiny")
    state = nv.init_state(model, num_pages=256)
    state, trunk = nv.prefill(model, state, "Once upon a time, there was a little fox who lived in the forest.")
    print(f"trunk: {trunk}")

    # Several continuations, decoded together from one chunk.
    params = [nv.SamplingParams(temperature=1.0, max_tokens=TOKENS, seed=seed, logprobs=0) for seed in range(BRANCHES)]
    state, gens = nv.generate_many(model, state, [trunk] * BRANCHES, params)
    scores = [sum(entry.logprob for entry in gen.logprobs or ()) / len(gen.token_ids) for gen in gens]
    for gen, score in zip(gens, scores, strict=True):
        print(f"{score:6.2f}  {gen.text.strip()!r}")
    best = gens[scores.index(max(scores))]

    # Go back to the middle of the best continuation: a shorter handle on the same pages.
    state, middle = nv.truncate(state, best.chunk, len(trunk) + TOKENS // 2)
    state, again = nv.generate(model, state, middle, nv.SamplingParams(temperature=0, max_tokens=TOKENS))
    assert model.tokenizer is not None
    print(f"  best  {model.tokenizer.decode(middle.token_ids.tolist())!r} ...{again.text!r}")

    # A second handle keeps the KV alive when the first is released.
    state, twin = nv.fork(state, trunk)
    state = nv.release(state, trunk)
    state, last = nv.generate(model, state, twin, nv.SamplingParams(temperature=0, max_tokens=8))
    print(f"  twin  {last.text.strip()!r}")
    nv.check(state)
    stats = state.stats
    print(f"{stats.prefill_tokens} prompt tokens run, {stats.reused_tokens} reused, {stats.decode_tokens} reply tokens run")


if __name__ == "__main__":
    main()
