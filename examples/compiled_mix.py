"""A compiled loop that mixes the logits of two prompts: several decode steps in one `torch.compile(fullgraph=True)` region.

Both rows use the mean of the two rows' logits, so they write one text that continues both prompts. The compiled region updates the KV
memory in place and copies none of it.
"""

import sys
from typing import Any

import torch

import nanovllm as nv

STEPS = 2  # decode steps in one call of the compiled function
CALLS = 12


def mix(logits: torch.Tensor) -> torch.Tensor:
    """Give every row the mean of all rows."""
    return logits.mean(0, keepdim=True).expand_as(logits).contiguous()


def main(name: str = "tiny") -> None:
    """Continue two prompts with one text, and compare it with a reply to each prompt."""
    model = nv.load_model(name, device="cpu")
    prompts = ["Once upon a time, there was a girl who", "Once upon a time, there was a fisherman who"]

    @torch.compile(fullgraph=True)
    def several_steps(params: Any, carry: nv.DecodeCarry) -> nv.DecodeCarry:
        for _ in range(STEPS):
            carry, _ = nv.decode_step(params, carry, model.config, process_logits=mix)
        return carry

    greedy = nv.SamplingParams(temperature=0, max_tokens=STEPS * CALLS, ignore_eos=True)
    state = nv.init_state(model, num_pages=64)
    state, carry = nv.begin(model, state, prompts, greedy, room=STEPS * CALLS)
    address = carry.kv.pools[0].data_ptr()
    for _ in range(CALLS):
        carry = several_steps(model.params, carry)
    assert carry.kv.pools[0].data_ptr() == address
    state, mixed = nv.commit(model, state, carry)
    assert mixed[0].token_ids == mixed[1].token_ids

    state, alone = nv.generate_many(model, state, prompts, greedy)
    for prompt, gen in zip(prompts, alone, strict=True):
        print(f"{prompt} ...{gen.text!r}")
    print(f"both: {mixed[0].text!r}")
    nv.check(state)


if __name__ == "__main__":
    main(*sys.argv[1:])
