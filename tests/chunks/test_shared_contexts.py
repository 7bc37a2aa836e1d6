"""Contexts of one call share the full pages of equal beginnings: `begin`, `score`, and `generate_many` with a processor."""

from contextlib import nullcontext
from typing import cast

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanovllm.chunks import prefill as filling
from nanovllm.chunks import session_rows
from nanovllm.chunks.generate import generate_many
from nanovllm.chunks.handles import release
from nanovllm.chunks.prefill import prefill
from nanovllm.chunks.score import score
from nanovllm.chunks.session import abandon, begin, commit
from nanovllm.errors import InvalidRequestError, OutOfPagesError
from nanovllm.executor import scoring
from nanovllm.executor.branches import split_rows
from nanovllm.executor.executor import executor_of
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.invariants import check
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.memory import ShadowMismatchError
from nanovllm.testing.shadows.worlds import FlakyExecutor, ModelWorld, PlantedError, SymbolicWorld, World
from nanovllm.testing.strategies import Limits

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
SYMBOLIC = SymbolicWorld(vocab_size=512)
MODEL = SYMBOLIC.model
BINARY = SymbolicWorld()
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2)
ROOMY = 200  # pages that suffice for everything
CALLS = ("begin", "begin unfilled", "begin branching", "process_logits", "score")


def fresh(world: World = SYMBOLIC, **others):
    usual = {"num_pages": 500, "page_size": 16, "max_model_len": 512, "max_num_seqs": 64, "max_num_batched_tokens": 512}
    return world.init_state(Limits(**{**usual, **others}))


def questions(num=8, beginning=160, own=10):
    return [[*range(beginning), *range(300 + own * i, 300 + own * (i + 1))] for i in range(num)]


def unchanged(logits):
    return logits


def called(how, world, state, contexts):
    """The state after one call, without the chunks that it made, and what it found out about each context."""
    model = world.model
    if how == "score":
        state, scores = score(model, state, contexts, [[1, 0]] * len(contexts))
        return state, [one.logprobs.tolist() for one in scores]
    if how == "process_logits":
        state, made = generate_many(model, state, contexts, GREEDY, process_logits=unchanged)
    else:
        options = {"fill": how != "begin unfilled", "branching": how == "begin branching"}
        state, carry = begin(model, state, contexts, GREEDY, room=2, **options)
        check(state)
        for _ in range(2):
            carry, _ = world.decode(carry)
        state, made = commit(model, state, carry)
    check(state)
    for context, one in zip(contexts, made, strict=True):
        world.require_kv(state.kv, list(one.chunk.pages), [*map(int, context), *one.token_ids], state.pool.frames)
    for one in made:
        state = release(state, one.chunk)
    return state, [one.token_ids for one in made]


def bound(how, contexts, size):
    """The tokens that a call runs of its contexts, where nothing was indexed before.

    KV is shared by pages. So the distinct full pages run once each, and what lies after the full pages of each context. A context that is
    filled by others runs its last token again, for its logits. `begin` leaves the last token of a context to the first step, so the page
    with it is full too late, unless this step runs all tokens.
    """
    last = 0 if how in ("score", "begin unfilled") else 1
    seen, run = set(), 0
    for context in {tuple(c): c for c in contexts}.values() if how == "score" else contexts:
        keys = [tuple(context[:end]) for end in range(size, len(context) - last + 1, size)]
        new = [key for key in keys if key not in seen]
        seen.update(new)
        run += len(new) * size + max(len(context) - len(keys) * size, 0 if new else 1)
    return run


def num_run(how, state, num_contexts):
    """The prompt tokens that ran. A second token of each context is run as a reply or a continuation."""
    return state.stats.prefill_tokens - (num_contexts if how == "score" else 0)


@pytest.mark.parametrize("budget", [512, 200, 33])
@pytest.mark.parametrize("how", CALLS)
def test_one_beginning_of_many_contexts_runs_once(how, budget):
    """Whatever the step's token budget; `stats` tells how many were reused."""
    budget = 512 if how == "begin unfilled" else budget
    state, contexts = fresh(max_num_batched_tokens=budget), questions()
    state, _ = called(how, SYMBOLIC, state, contexts)
    assert num_run(how, state, 8) == 160 + 8 * 10
    assert state.stats.reused_tokens == 7 * 160 and state.stats.rerun_tokens == 0


@pytest.mark.parametrize("how", CALLS)
def test_a_beginning_in_two_pieces_of_two_contexts(how):
    """B branches off in the middle of what A fills, C in the middle of what B fills; D is a beginning of A, and E is A again."""
    a = [*range(64)]
    b = [*a[:40], *range(100, 140)]
    c = [*b[:70], *range(200, 240)]
    state, contexts = fresh(page_size=4), [a, b, c, a[:20], a]
    state, _ = called(how, SYMBOLIC, state, contexts)
    own = {"score": 64 + 40 + 42 + 1, "begin unfilled": 64 + 40 + 42 + 1 + 1}.get(how, 64 + 40 + 42 + 4 + 4)
    assert num_run(how, state, 5) == own == bound(how, contexts, 4)


def test_pages_that_are_shared_count_once():
    """Eight contexts of 170 tokens take 10 pages together and one each; a pool of so many pages suffices, one less does not."""
    contexts = questions(8, 160, 10)
    state, carry = begin(MODEL, fresh(num_pages=18), contexts, GREEDY, room=6)
    check(state)
    assert state.pool.num_available == 0
    before = fresh(num_pages=17)
    with pytest.raises(OutOfPagesError, match="a context of 176 tokens needs 1 more pages; 0 of 17"):
        begin(MODEL, before, contexts, GREEDY, room=6)
    assert not before.runtime.lease.lost
    called("begin", SYMBOLIC, before, contexts[:7])
    state = abandon(state, carry)
    check(state)
    assert state.pool.num_available == 18


def test_the_pages_of_later_contexts_are_not_evicted_for_earlier_ones():
    """All contexts own what the index has of them before the first one takes a page."""
    state, chunk = prefill(MODEL, fresh(num_pages=8, page_size=4), [9] * 16)
    state = release(state, chunk)
    state, _ = called("begin", SYMBOLIC, state, [[7] * 10, [9] * 17])
    assert state.stats.prefill_tokens == 16 + 10 + 1


def test_without_fill_nothing_is_indexed_before_the_first_step():
    """Calls between `begin` and its first step must not read the pages, which this step fills."""
    contexts = questions(3, 40, 5)
    state, carry = begin(MODEL, fresh(), contexts, GREEDY, room=4, fill=False)
    assert not state.prefix.pages()
    state, chunk = prefill(MODEL, state, contexts[0])
    SYMBOLIC.require_kv(state.kv, list(chunk.pages), contexts[0])
    carry, _ = SYMBOLIC.decode(carry)
    state, made = commit(MODEL, state, carry)
    check(state)
    for context, one in zip(contexts, made, strict=True):
        SYMBOLIC.require_kv(state.kv, list(one.chunk.pages), [*context, *one.token_ids])


def test_contexts_of_a_session_without_steps_are_filled_at_its_end():
    contexts = [*questions(3, 40, 5), [*range(32)]]
    state, carry = begin(MODEL, fresh(), contexts, GREEDY, room=4, fill=False)
    state, made = commit(MODEL, state, carry)
    check(state)
    assert state.stats.prefill_tokens == 32 + 3 * 13
    for context, one in zip(contexts, made, strict=True):
        SYMBOLIC.require_kv(state.kv, list(one.chunk.pages), context)


def test_without_fill_the_first_step_has_room_for_what_is_new():
    contexts = questions(8, 160, 10)
    state = fresh(max_num_batched_tokens=239)
    with pytest.raises(InvalidRequestError, match="fill=False leaves 240 tokens to the first step, more than max_num_batched_tokens=239"):
        begin(MODEL, state, contexts, GREEDY, room=4, fill=False)
    assert not state.runtime.lease.lost
    begin(MODEL, state, [context[:-1] for context in contexts], GREEDY, room=4, fill=False)


@pytest.mark.parametrize("fill", [True, False])
def test_rows_that_split_leave_shared_pages_alone(fill):
    """The page of a row's newest token is its own, even where the others' contexts have it as a whole."""
    contexts = [[*range(8)], [*range(16)], [*range(12)], [*range(8)]]
    state, carry = begin(MODEL, fresh(page_size=4), contexts, GREEDY, room=4, branching=True, fill=fill)
    for origins in ([1, 1, 2, 3], [0, 0, 0, 3], [3, 2, 1, 0]):
        carry, _ = SYMBOLIC.decode(carry)
        carry = split_rows(carry, torch.tensor(origins))
    carry, _ = SYMBOLIC.decode(carry)
    state, made = commit(MODEL, state, carry)
    check(state)
    for one in made:
        SYMBOLIC.require_kv(state.kv, list(one.chunk.pages), one.chunk.token_ids.tolist())
    assert sorted(len(one.chunk) for one in made) == [12, 20, 20, 20]


def test_few_logits_at_a_time_leave_no_gap(monkeypatch):
    """The second context's last token waits for the next pass, because its logits do not fit; the third must not run before it."""
    monkeypatch.setattr(scoring, "LOGIT_BYTES", 4 * 512)
    contexts = [[9], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
    state, together = score(MODEL, fresh(page_size=4), contexts, [[5, 6]] * 3)
    for context, one in zip(contexts, together, strict=True):
        _, (alone,) = score(MODEL, fresh(page_size=4), [context], [[5, 6]])
        assert one.logprobs.tolist() == alone.logprobs.tolist()
    assert state.stats.prefill_tokens == 1 + 4 + 2 + 3


@pytest.mark.parametrize("windows", [(0, 3), (3, 3)])
@pytest.mark.parametrize("how", CALLS)
def test_windows(how, windows):
    """The frames of shared pages are shared too."""
    world = SymbolicWorld(vocab_size=512, windows=windows)
    state, contexts = fresh(world, page_size=4, num_frames=400), questions(5, 20, 6)
    state, together = called(how, world, state, contexts)
    assert num_run(how, state, 5) == 20 + 5 * 6
    assert together == [called(how, world, fresh(world, page_size=4, num_frames=400), [context])[1][0] for context in contexts]


@pytest.mark.parametrize("how", CALLS[:4])
def test_a_model_reads_the_pages_that_the_same_pass_fills(how):
    """Layer by layer on a CPU: a session's replies are those of its contexts alone."""
    world, contexts = ModelWorld(random_model(tiny_config(vocab_size=512))), questions(3, 40, 5)
    usual = {"num_pages": 40, "max_num_seqs": 4, "max_num_batched_tokens": 64 if how != "begin unfilled" else 71}
    state, together = called(how, world, fresh(world, **usual), contexts)
    assert together == [called(how, world, fresh(world, **usual), [context])[1][0] for context in contexts]
    assert state.stats.prefill_tokens == 45 + 2 * (8 + 5)


@st.composite
def calls(draw):
    """Contexts that branch off one another, and a small engine."""
    size = draw(st.integers(1, 4))
    stems = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=3))
    tail = st.lists(st.integers(0, 1), max_size=4)
    context = st.builds(lambda stem, cut, tail: (stem[:cut] + tail) or stem, st.sampled_from(stems), st.integers(0, 14), tail)
    contexts = draw(st.lists(context, min_size=1, max_size=6))
    return (
        draw(st.sampled_from(CALLS)),
        size,
        draw(st.one_of(st.integers(4, 40), st.just(ROOMY))),
        draw(st.integers(1, 24)),
        contexts,
        draw(st.booleans()),
    )


@settings(deadline=None, max_examples=60)
@given(calls())
@example(("score", 2, 40, 3, [[0, 1, 0], [0, 1, 0, 1], [0, 1]], False))
@example(("begin", 2, 9, 24, [[0, 1, 0, 1, 1], [0, 1, 0, 1, 0], [0, 1, 0, 0]], True))
def test_together_as_one_by_one(call):
    """Results are those of calls one by one, as many tokens run as are distinct, and a call that fails leaves the state as it was."""
    how, size, num_pages, budget, contexts, fails = call
    limits = {"page_size": size, "num_pages": num_pages, "max_num_batched_tokens": budget, "max_num_seqs": 6, "max_model_len": 64}
    state = fresh(BINARY, **limits)
    flaky = cast(FlakyExecutor, executor_of(state))
    if fails:
        flaky.arm(1, False)
    try:
        after, together = called(how, BINARY, state, contexts)
    except (OutOfPagesError, InvalidRequestError, PlantedError):
        flaky.disarm()
        if state.epoch == state.runtime.lease.epoch:  # the call that failed was the first
            check(state)
            assert state.pool.num_available == num_pages and not state.sessions and not state.prefix.pages()
        return
    roomy = {**limits, "num_pages": ROOMY, "max_num_batched_tokens": 64}
    alone = [called(how, BINARY, fresh(BINARY, **roomy), [context])[1][0] for context in contexts]
    assert together == alone
    assert after.pool.num_available == num_pages
    run = num_run(how, after, len(contexts))
    if how == "score" and num_pages < ROOMY:  # contexts that do not fit at once come later, and may find the first ones evicted
        assert run <= sum(map(len, contexts))
    else:
        assert run == bound(how, contexts, size)


def _offers_tokens_that_run_later():
    whole = filling.offered
    return filling, "offered", lambda pool, sequence, count, size: whole(pool, sequence, sequence.todo, size)


def _fills_the_last_context_first():
    def reversed_fill(model, state, sequences, **options):
        state, done = filling.fill(model, state, sequences[::-1], **options)
        return state, done[::-1]

    return session_rows, "fill", reversed_fill


@pytest.mark.parametrize("fault", [None, _offers_tokens_that_run_later, _fills_the_last_context_first])
def test_a_page_that_is_read_before_it_is_filled_is_found(fault, monkeypatch):
    """Planted faults: the page with a token that only the first step runs is shared, or contexts run out of order."""
    if fault is not None:
        monkeypatch.setattr(*fault())
    with nullcontext() if fault is None else pytest.raises(ShadowMismatchError, match="slot"):
        called("begin", SYMBOLIC, fresh(page_size=4, max_num_batched_tokens=5), [[*range(8)], [*range(12)]])
