"""Beginnings that requests share run once, also if the requests arrive together and nobody has run them yet."""

from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.chunks.generate import generate_many
from nanovllm.engine.init_state import init_state
from nanovllm.engine.requests import cancel, submit
from nanovllm.engine.step import step
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.invariants import check
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.worlds import FlakyExecutor, PlantedError, SymbolicWorld, drain
from nanovllm.testing.strategies import Limits

SYMBOLIC = SymbolicWorld(vocab_size=512)
MODEL = SYMBOLIC.model


def limits(**others):
    usual = {"num_pages": 500, "page_size": 16, "max_model_len": 512, "max_num_seqs": 64, "max_num_batched_tokens": 512}
    return Limits(**{**usual, **others})


def greedy(count):
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def served(state, prompts, count=1):
    """The state after these requests, which arrive together, and their outputs in order."""
    asked = []
    for prompt in prompts:
        state, rid = submit(MODEL, state, prompt, greedy(count))
        asked.append((rid, prompt, state.waiting.items[rid].request))
    state, ended = drain(MODEL, state)
    for rid, prompt, request in asked:
        SYMBOLIC.require_reply(prompt, ended[rid].token_ids, request)
    check(state)
    return state, [ended[rid] for rid, *_ in asked]


def questions(num=8, beginning=160, own=16):
    return [[*range(beginning), *range(300 + own * i, 300 + own * (i + 1))] for i in range(num)]


@pytest.mark.parametrize("budget", [512, 200, 100, 33])
def test_one_beginning_of_many_requests_runs_once(budget):
    """Whatever the step's token budget: where it ends within the beginning, the others wait for the step that ends it."""
    state = SYMBOLIC.init_state(limits(max_num_batched_tokens=budget))
    state, outputs = served(state, questions())
    assert state.stats.prefill_tokens == 160 + 8 * 16
    assert [out.num_cached_tokens for out in outputs] == [0, *[160] * 7]


@pytest.mark.parametrize("together", [True, False])
def test_second_turns_run_only_what_is_new(together):
    """Each conversation goes on after its own first turn, although the beginning of its pages was another's."""
    state, prompts = SYMBOLIC.init_state(limits()), questions()
    state, outputs = served(state, prompts, count=17)
    before = state.stats.prefill_tokens
    turns = [[*p, *out.token_ids[:16], *range(200, 208)] for p, out in zip(prompts, outputs, strict=True)]
    for group in [turns] if together else [[turn] for turn in turns]:
        state, _ = served(state, group)
    assert state.stats.prefill_tokens - before == 8 * 8


@pytest.mark.parametrize(("length", "again"), [(160, 0), (161, 0), (167, 7)])
def test_many_replies_to_one_prompt_cost_one_prefill(length, again):
    """The others share all whole pages; their last token runs in the decode step if nothing else is left."""
    state = SYMBOLIC.init_state(limits())
    state, replies = generate_many(MODEL, state, [[*range(length)]] * 5, greedy(4))
    assert state.stats.prefill_tokens == length + 4 * max(1, again)
    assert len({tuple(reply.token_ids) for reply in replies}) == 1
    check(state)


def test_a_beginning_in_two_pieces_of_two_requests():
    """B branches off in the middle of what A fills in this step, C in the middle of what B fills."""
    a = [*range(64)]
    b = [*a[:40], *range(100, 140)]
    c = [*b[:70], *range(200, 240)]
    state = SYMBOLIC.init_state(limits(page_size=4))
    state, outputs = served(state, [a, b, c, a[:20], b[:72]])
    assert [out.num_cached_tokens for out in outputs] == [0, 40, 68, 19, 71]  # of a prompt that is filled, the last token runs again


def test_a_request_without_the_beginning_is_not_held_up():
    """While a long beginning runs in pieces, the budget is used up, so no step has room for others; they come in order of arrival."""
    state = SYMBOLIC.init_state(limits(max_num_batched_tokens=100))
    for prompt in ([*range(160)], [*range(160), 7], [300, 301, 302]):
        state, _ = submit(MODEL, state, prompt, greedy(3))
    state, _ = step(MODEL, state)
    assert [s.request.request_id for s in state.running] == [0]
    state, _ = step(MODEL, state)
    assert [s.request.request_id for s in state.running] == [0, 1, 2]
    assert state.stats.prefill_tokens == 160 + 1 + 3


def test_a_cancelled_filler_leaves_what_it_filled():
    state = SYMBOLIC.init_state(limits(max_num_batched_tokens=100))
    state, first = submit(MODEL, state, [*range(160)], greedy(3))
    state, _ = submit(MODEL, state, [*range(170)], greedy(3))
    state, _ = step(MODEL, state)
    state, _ = drain(MODEL, cancel(state, first))
    assert state.stats.prefill_tokens == 100 + 170 - 96  # six whole pages of the first were filled


def test_a_failed_step_leaves_no_page_in_the_index_that_was_not_filled():
    state = SYMBOLIC.init_state(limits())
    for prompt in questions(3):
        state, _ = submit(MODEL, state, prompt, greedy(3))
    executor = cast(FlakyExecutor, state.runtime.executor)
    executor.arm(0, False)
    with pytest.raises(PlantedError):
        step(MODEL, state)
    executor.disarm()
    assert not state.prefix.pages() and not state.running
    state, _ = drain(MODEL, state)
    assert state.stats.prefill_tokens == 160 + 3 * 16


@pytest.mark.parametrize("windows", [(0, 3), (3, 3)])
def test_windows(windows):
    """The frames of the pages that a window sees are shared in the same step too."""
    world = SymbolicWorld(vocab_size=512, windows=windows)
    state = world.init_state(limits(page_size=4, num_frames=400))
    asked = []
    for prompt in questions(5, 20, 6):
        state, rid = submit(world.model, state, prompt, greedy(4))
        asked.append((rid, prompt, state.waiting.items[rid].request))
    state, ended = drain(world.model, state)
    assert state.stats.prefill_tokens == 20 + 5 * 6
    for rid, prompt, request in asked:
        world.require_reply(prompt, ended[rid].token_ids, request)


def test_a_model_reads_the_pages_that_the_same_step_fills():
    """Layer by layer on a CPU: the reply of a request that shares a beginning in its step is the one of the request alone."""
    model = random_model(tiny_config(vocab_size=512))
    prompts = questions(4, 40, 5)
    alone = []
    for prompt in prompts:
        _, (reply,) = generate_many(model, init_state(model, num_pages=40, page_size=16), [prompt], greedy(8))
        alone.append(reply.token_ids)
    state, replies = generate_many(model, init_state(model, num_pages=40, page_size=16), prompts, greedy(8))
    assert [reply.token_ids for reply in replies] == alone
    assert state.stats.prefill_tokens == 45 + 3 * (8 + 5)


# A bound, proved by a trie of whole pages


@dataclass
class Trie:
    """What runs if there is always memory: each whole page of tokens that prompts begin with once, and the rest of each prompt.

    The rest is what a request fills of a page that it does not fill as a whole: the end of its prompt, or where it was cancelled. A request
    that finds all its tokens filled runs the last one again, for its logits.
    """

    size: int
    pages: set[tuple[int, ...]] = field(default_factory=set)
    rest: int = 0

    def run(self, prompt, filled):
        """Note a request of which `filled` tokens were filled when it ended or was cancelled."""
        keys = [tuple(prompt[:end]) for end in range(self.size, filled + 1, self.size)]
        new = [key for key in keys if key not in self.pages]
        self.pages.update(new)
        self.rest += filled % self.size or (filled > 0 and filled == len(prompt) and not new)

    @property
    def bound(self):
        return len(self.pages) * self.size + self.rest


@st.composite
def histories(draw):
    """Prompts that branch off one another, and what happens in which order: an arrival (its prompt), a cancellation or a step."""
    size, length = draw(st.integers(2, 4)), st.integers(1, 9)
    stems = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=3))
    prompt = st.builds(lambda stem, cut, tail: stem[:cut] + tail, st.sampled_from(stems), st.integers(1, 14), st.lists(length, max_size=6))
    event = st.one_of(prompt, prompt, prompt, st.integers(-4, -1), st.just(0), st.just(0))
    return size, draw(st.integers(3, 20)), draw(st.integers(1, 6)), draw(st.lists(event, min_size=1, max_size=14))


@settings(deadline=None, max_examples=120)
@given(histories())
def test_as_many_tokens_run_as_a_trie_of_whole_pages_has(history):
    """In any order of arrivals, steps and cancellations, where memory suffices; nor do fewer run."""
    size, budget, most, events = history
    state = SYMBOLIC.init_state(limits(page_size=size, max_num_batched_tokens=max(budget, most), max_num_seqs=most))
    trie, prompts = Trie(size), {}
    for event in [*events, *[0] * 40]:
        if isinstance(event, list):
            state, rid = submit(MODEL, state, event, greedy(1))
            prompts[rid] = event
        elif event < 0 and prompts:
            rid = [*prompts][event % len(prompts)]
            trie.run(prompts.pop(rid), next((s.num_filled for s in state.running if s.request.request_id == rid), 0))
            state = cancel(state, rid)
        elif event == 0:
            state, outputs = step(MODEL, state)
            for out in outputs:
                trie.run(prompts[out.request_id], len(prompts.pop(out.request_id)))
    assert not prompts, "forty steps are enough for all"
    assert state.stats.prefill_tokens == trie.bound
    assert state.stats.rerun_tokens == state.stats.preemptions == 0
