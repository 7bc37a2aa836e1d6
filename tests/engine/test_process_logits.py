"""`process_logits` of submitted requests: any mix of functions in one step, with and without tensors of their own, through preemption."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nanovllm as nv
from nanovllm.sampling.process_logits import as_processor
from nanovllm.testing.models import random_model, tiny_config

MODEL = random_model(tiny_config(vocab_size=40), 0)


def shifted(logits: torch.Tensor, tokens: nv.TokensSoFar) -> torch.Tensor:
    """Make the token after the newest one likelier."""
    return logits.scatter_add(1, (tokens.last().long() + 1).remainder(40).unsqueeze(1), torch.full((len(logits), 1), 3.0))


def counting(logits: torch.Tensor, tokens: nv.TokensSoFar, carried: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
    """Add a number to one logit that depends on all logits so far."""
    seen = carried["seen"] + logits.amax(1)
    place = carried["steps"].remainder(40).unsqueeze(1)
    return logits.scatter_add(1, place, seen.unsqueeze(1)), {"seen": seen * 0.5, "steps": carried["steps"] + 1}


class Unhashable:
    """A function of the logits without a hash."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def __eq__(self, other: object) -> bool:
        return self is other


SHIFTED = nv.LogitsProcessor(shifted)
COUNTING = nv.LogitsProcessor(counting, lambda tokens: {"seen": torch.zeros(len(tokens.lengths)), "steps": tokens.lengths.long()})
CHOICES = [None, SHIFTED, COUNTING, nv.LogitsProcessor(lambda logits: -logits)]


def by_hand(prompt: list[int], params: nv.SamplingParams, processor: nv.LogitsProcessor | None) -> list[int]:
    """The tokens of a reply by single steps in an engine of its own."""
    state = nv.init_state(MODEL, num_pages=32, page_size=4)
    state, carry = nv.begin(MODEL, state, [prompt], params, room=params.max_tokens, process_logits=processor)
    for _ in range(params.max_tokens):
        carry, _ = nv.decode_step(MODEL.params, carry, MODEL.config)
    state, (gen,) = nv.commit(MODEL, state, carry)
    nv.check(state)
    return gen.token_ids


@pytest.mark.unhooked
@given(data=st.data())
def test_any_mix_of_requests_gives_what_each_gives_alone(data: st.DataObject):
    page_size = data.draw(st.sampled_from([1, 2, 4]))
    pool, budget = data.draw(st.integers(12, 40)), data.draw(st.integers(1, 12))
    limits = {"num_pages": -(-pool // page_size) + 6, "page_size": page_size, "max_num_batched_tokens": budget, "max_num_seqs": 3}
    state = nv.init_state(MODEL, **limits)
    wanted, got = {}, {}
    for _ in range(data.draw(st.integers(1, 5))):
        prompt = data.draw(st.lists(st.integers(0, 39), min_size=1, max_size=6))
        temperature = data.draw(st.sampled_from([0.0, 1.0]))
        params = nv.SamplingParams(temperature=temperature, seed=3, max_tokens=data.draw(st.integers(1, 6)), ignore_eos=True)
        processor = data.draw(st.sampled_from(CHOICES))
        state, rid = nv.submit(MODEL, state, prompt, params, process_logits=processor)
        wanted[rid] = by_hand(prompt, params, processor)
        for _ in range(data.draw(st.integers(0, 3))):
            state, outs = nv.step(MODEL, state)
            got.update({out.request_id: out.output.token_ids for out in outs if out.output})
            nv.check(state)
    while state.running or state.waiting:
        state, outs = nv.step(MODEL, state)
        got.update({out.request_id: out.output.token_ids for out in outs if out.output})
    nv.check(state)
    assert got == wanted


def test_preemption_keeps_what_a_function_carries():
    params = nv.SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8]]
    state = nv.init_state(MODEL, num_pages=9, page_size=4, max_num_seqs=3, max_num_batched_tokens=8)
    ids, got = [], {}
    for prompt in prompts:
        state, rid = nv.submit(MODEL, state, prompt, params, process_logits=COUNTING)
        ids.append(rid)
    while state.running or state.waiting:
        state, outs = nv.step(MODEL, state)
        got.update({out.request_id: out.output.token_ids for out in outs if out.output})
    assert state.stats.preemptions > 0
    assert [got[rid] for rid in ids] == [by_hand(prompt, params, COUNTING) for prompt in prompts]


def test_the_llm_takes_a_function():
    llm = nv.LLM(MODEL, num_pages=32, page_size=4)
    params = nv.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    prompts = [[1, 2, 3], [9]]
    want = [by_hand(prompt, params, COUNTING) for prompt in prompts]
    assert [out.token_ids for out in llm.generate(prompts, params, process_logits=COUNTING)] == want
    pieces = list(llm.stream(prompts[0], params, process_logits=COUNTING))
    assert pieces[-1].output.token_ids == want[0]


def test_what_is_no_function_is_refused():
    with pytest.raises(nv.InvalidRequestError, match="process_logits=3 must be a function of the logits, or a LogitsProcessor"):
        as_processor(3)


@pytest.mark.compile
def test_a_compiled_function_serves():
    params = nv.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    compiled = nv.LogitsProcessor(torch.compile(counting, fullgraph=True, backend="eager"), COUNTING.init)
    prompts = [[1, 2, 3], [9], [4, 5]]
    want = [by_hand(prompt, params, COUNTING) for prompt in prompts]
    assert [by_hand(prompt, params, compiled) for prompt in prompts] == want
    llm = nv.LLM(MODEL, num_pages=32, page_size=4)
    assert [out.token_ids for out in llm.generate(prompts, params, process_logits=compiled)] == want
    alone = torch.compile(lambda logits: -logits, fullgraph=True, backend="eager")
    assert by_hand([1, 2], params, nv.LogitsProcessor(alone)) == by_hand([1, 2], params, CHOICES[3])


def test_a_function_that_changes_logits_in_place_is_refused_before_it_reaches_other_rows():
    def spoils(logits: torch.Tensor) -> torch.Tensor:
        logits[:, :20] = -torch.inf
        return logits

    params = nv.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    state = nv.init_state(MODEL, num_pages=32, page_size=4)
    state, spoiled = nv.submit(MODEL, state, [1, 2, 3], params, process_logits=spoils)
    state, _ = nv.submit(MODEL, state, [9], params)
    tokens: list[int] = []
    while state.running or state.waiting:
        state, outs = nv.step(MODEL, state)
        if (out := outs[0]).request_id == spoiled:
            assert re.search(r"process_logits spoils \(.*line \d+\) changed the logits in place", str(out.error))
        tokens += [token for out in outs for token in out.token_ids]
    assert tokens == by_hand([9], params, None)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(("function", "init"), [(3, None), (shifted, 4), (Unhashable(), None)])
def test_what_cannot_be_a_processor_is_refused(function: Any, init: Any):
    with pytest.raises(nv.InvalidRequestError, match="must be"):
        as_processor(nv.LogitsProcessor(function, init))


def test_the_table_of_tokens_is_as_wide_in_init_as_in_every_step():
    widths = set()

    def seen(tokens: nv.TokensSoFar) -> torch.Tensor:
        widths.add(tokens.token_ids.shape[1])
        return tokens.valid()

    def quoting(logits: torch.Tensor, tokens: nv.TokensSoFar, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Only tokens of the prompt."""
        widths.add(tokens.token_ids.shape[1])
        prompt = torch.zeros_like(logits, dtype=torch.int32).scatter_add(1, tokens.token_ids.long(), first.int())
        return logits.masked_fill(prompt == 0, -torch.inf), first

    processor, prompts = nv.LogitsProcessor(quoting, seen), [[3, 9, 12], [7], [1, 2, 3, 4, 5]]
    state, texts = nv.init_state(MODEL, num_pages=32, page_size=4, max_model_len=24), {}
    for prompt in prompts:  # the later ones join a step that is running
        params = nv.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        state, rid = nv.submit(MODEL, state, prompt, params, process_logits=processor)
        texts[rid] = prompt
        state, _ = nv.step(MODEL, state)
    done = {}
    while state.running or state.waiting:
        state, outputs = nv.step(MODEL, state)
        done |= {out.request_id: out.output.token_ids for out in outputs if out.output is not None}
    assert widths == {25} and done.keys() == texts.keys()
    assert all(set(done[rid]) <= set(prompt) for rid, prompt in texts.items())


def test_rows_of_other_shapes_are_told():
    """The shape of what `init` returns depends on the prompt: the error says so, and the first request goes on without the other."""
    processor = nv.LogitsProcessor(lambda logits, tokens, c: (logits, c), lambda tokens: torch.zeros(1, int(tokens.lengths[0])))
    state = nv.init_state(MODEL, num_pages=32, page_size=4)
    params = nv.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    state, first = nv.submit(MODEL, state, [1, 2], params, process_logits=processor)
    state, _ = nv.step(MODEL, state)
    state, other = nv.submit(MODEL, state, [1, 2, 3], params, process_logits=processor)
    errors: dict[int, nv.NanoVLLMError | None] = {}
    while state.running or state.waiting:
        state, outs = nv.step(MODEL, state)
        errors.update({out.request_id: out.error for out in outs if out.output})
        nv.check(state)
    assert errors[first] is None and "must not depend on the prompt" in str(errors[other])
