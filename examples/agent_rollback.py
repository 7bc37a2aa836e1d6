"""An agent that takes a step, checks it, and goes back if the check fails. From a dead end it goes back further.

The steps are sentences of a story in which no long word may occur twice. A checkpoint is a chunk, so going back costs nothing: no token
runs again, and the pages of an abandoned step become free.
"""

import re

import nanovllm as nv

OPENING = "Once upon a time, there lived a fisherman by the sea."
SENTENCES, TRIES, LETTERS = 5, 3, 4  # steps of the task, tries from a checkpoint before it is given up, letters of a long word at least


def fault(story: str, sentence: str) -> str | None:
    """Return the reason why a sentence does not fit the story before it; None if it fits."""
    if "\n" in sentence or not sentence.endswith("."):
        return "breaks off"
    words = [word for word in re.findall(r"\w+", f"{story} {sentence}".lower()) if len(word) >= LETTERS]
    return next((f"says {word!r} again" for i, word in enumerate(words) if word in words[:i]), None)


def main() -> None:
    """Tell a story step by step, and print each step and the total cost."""
    model = nv.load_model("tiny")
    assert model.tokenizer is not None
    state = nv.init_state(model, num_pages=128)
    state, start = nv.prefill(model, state, OPENING)
    path, tried, tries, naive, most = [start], [0], 0, 0, 0
    while len(path) <= SENTENCES:
        depth = len(path)
        if tried[-1] >= TRIES and depth > 1:  # a dead end: take back the step that led here
            state = nv.release(state, path.pop())
            tried.pop()
            print(f"{depth}  a dead end: {depth - 1} is taken back")
            continue
        params = nv.SamplingParams(temperature=1.0, max_tokens=32, stop=".", seed=tries)
        tries, tried[-1] = tries + 1, tried[-1] + 1
        state, gen = nv.generate(model, state, path[-1], params)
        naive += len(gen.chunk)
        most = max(most, nv.memory(state).num_held)
        story, sentence = model.tokenizer.decode(path[-1].token_ids.tolist()), gen.text.strip() + "." * (gen.finish_reason == "stop")
        wrong = fault(story, sentence)
        print(f"{depth}  {'ok  ' if wrong is None else 'NO  '}{sentence!r}{'' if wrong is None else ' ' + wrong}")
        if wrong is None:
            path.append(gen.chunk)
            tried.append(0)
        else:
            state = nv.release(state, gen.chunk)
    print(model.tokenizer.decode(path[-1].token_ids.tolist()))
    report = nv.memory(state)
    print(f"{len(path)} checkpoints in {report.num_held} pages; {report.num_references} without sharing; at most {most} were in use")
    print(f"{state.stats.prefill_tokens + state.stats.decode_tokens} tokens ran; {naive} if every try ran the whole story again")
    for chunk in path:
        state = nv.release(state, chunk)
    nv.check(state)
    assert nv.memory(state).num_held == 0


if __name__ == "__main__":
    main()
