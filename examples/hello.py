"""Generate two replies to one prompt, whose KV is computed once. The state is a value: every call takes it and returns the next state."""

import nanovllm as nv

model = nv.load_model("tiny")
state = nv.init_state(model, num_pages=128)
state, story = nv.prefill(model, state, "Once upon a time, in a small village by the sea,")
for seed in (1, 2):
    state, gen = nv.generate(model, state, story, nv.SamplingParams(temperature=0.8, max_tokens=32, seed=seed))
    print(f"{seed}:{gen.text}")
print(state.stats)
