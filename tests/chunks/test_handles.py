"""`prefill`, `fork`, `truncate`, `release`: which tokens run, which pages are shared, and that old handles stay readable."""

import numpy as np
import pytest
import torch

from nanovllm.chunks.generate import generate, generate_many
from nanovllm.chunks.handles import fork, release, truncate
from nanovllm.chunks.prefill import prefill
from nanovllm.chunks.session import begin
from nanovllm.engine.init_state import init_state
from nanovllm.engine.requests import submit
from nanovllm.errors import DonatedStateError, ForeignChunkError, InvalidRequestError, OutOfPagesError, ReleasedChunkError
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.invariants import check
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.memory import freeze
from nanovllm.testing.shadows.worlds import ModelWorld, drain

MODEL = random_model(tiny_config(vocab_size=50, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=8))
WORLD = ModelWorld(MODEL)
IDS = [1, 2, 3, 4, 5, 6, 7]


def engine(**limits):
    return init_state(MODEL, **{"num_pages": 16, "page_size": 4, **limits})


def greedy(count):
    return SamplingParams(temperature=0.0, max_tokens=count)


def kv_of(state, chunk):
    """The KV bytes of a chunk's tokens."""
    pages, size = state.kv.pools[0][:, list(chunk.pages)], state.config.page_size
    return pages.permute(0, 2, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : len(chunk)].clone(), size


def right(state, *chunks):
    """Every invariant, and the KV of the chunks against an uncached forward."""
    check(state)
    for chunk in chunks:
        WORLD.require_kv(state.kv, list(chunk.pages), chunk.token_ids.tolist())


def test_prefill_fills_and_counts():
    state, chunk = prefill(MODEL, engine(), IDS)
    right(state, chunk)
    assert chunk.token_ids.tolist() == IDS
    assert chunk.positions.tolist() == list(range(7))
    assert len(chunk) == 7 and len(chunk.pages) == 2
    assert str(chunk.provenance) == "exact"
    assert state.stats.prefill_tokens == 7
    assert "7 tokens, 2 pages, exact" in repr(chunk)
    assert "1 token, 1 page, exact" in repr(prefill(MODEL, state, IDS[:1])[1])


@pytest.mark.parametrize("budget", [1, 3, 7])
def test_prefill_in_chunks_is_the_same(budget):
    state, chunk = prefill(MODEL, engine(max_num_batched_tokens=budget), IDS)
    right(state, chunk)


@pytest.mark.parametrize(("length", "copied"), [(3, 1), (4, 0), (5, 1), (8, 0)])
def test_a_partial_last_page_is_copied_and_nothing_runs_again(length, copied):
    base = list(range(length))
    state, first = prefill(MODEL, engine(), base)
    before, (bytes_before, _) = state, kv_of(state, first)
    state, whole = prefill(MODEL, state, [40, 41], after=first)
    right(state, first, whole)
    assert whole.token_ids.tolist() == [*base, 40, 41]
    assert state.stats.prefill_tokens - before.stats.prefill_tokens == 2
    assert state.stats.reused_tokens == length
    shared = set(first.pages) & set(whole.pages)
    assert len(shared) == length // 4
    assert len(set(first.pages) - shared) == copied
    assert torch.equal(kv_of(state, first)[0], bytes_before)


def test_two_continuations_of_one_chunk():
    state, base = prefill(MODEL, engine(), IDS)
    state, left = prefill(MODEL, state, [10, 11], after=base)
    state, right_ = prefill(MODEL, state, [20, 21], after=base)
    right(state, base, left, right_)
    state = release(state, base)
    right(state, left, right_)


def test_prefill_after_with_nothing_is_a_second_handle():
    state, base = prefill(MODEL, engine(), IDS)
    state, twin = prefill(MODEL, state, [], after=base)
    assert list(twin.pages)[:1] == list(base.pages)[:1]
    assert state.stats.prefill_tokens == 7
    right(state, base, twin)


def test_fork_and_truncate_share_pages():
    state, base = prefill(MODEL, engine(), IDS)
    free = state.pages.num_free
    state, twin = fork(state, base)
    state, head = truncate(state, base, 5)
    state, shorter = truncate(state, base, np.int64(4))
    assert state.pages.num_free == free
    assert (len(twin), len(head), len(shorter)) == (7, 5, 4)
    assert (len(head.pages), len(shorter.pages)) == (2, 1)
    state = release(state, base)
    right(state, twin, head, shorter)
    state, longer = prefill(MODEL, state, [30, 31, 32], after=head)
    right(state, twin, head, shorter, longer)


def test_a_truncated_chunk_continues_differently():
    state, base = prefill(MODEL, engine(), IDS)
    state, head = truncate(state, base, 6)
    state, other = prefill(MODEL, state, [9], after=head)
    right(state, base, head, other)
    assert other.token_ids.tolist() == [*IDS[:6], 9]


@pytest.mark.parametrize("length", [0, -1, 8, 2.0, "3", True, None])
def test_bad_lengths(length):
    state, base = prefill(MODEL, engine(), IDS)
    with pytest.raises(Exception) as caught:  # where types are checked at run time, some of these do not get as far
        truncate(state, base, length)
    assert isinstance(caught.value, InvalidRequestError) or "parameter" in str(caught.value)
    state, _ = fork(state, base)
    check(state)


def test_released_pages_stay_reusable_until_they_are_needed():
    state, base = prefill(MODEL, engine(), IDS)
    state = release(state, base)
    assert state.pool.num_available == 16
    state, again = prefill(MODEL, state, IDS)
    assert state.stats.reused_tokens == 4
    right(state, again)


def test_the_pages_of_a_reply_are_reusable_too():
    state, made = generate(MODEL, engine(), IDS, greedy(9))
    tokens = made.chunk.token_ids.tolist()
    state = release(state, made.chunk)
    before = state.stats
    state, again = prefill(MODEL, state, tokens)
    assert state.stats.reused_tokens - before.reused_tokens == 16
    right(state, again)


def test_an_old_chunk_is_readable_after_any_pressure():
    state, base = prefill(MODEL, engine(num_pages=6), IDS)
    before, _ = kv_of(state, base)
    for turn in range(6):
        state, rid = submit(MODEL, state, [turn + 10] * 9, greedy(6))
        state, ended = drain(MODEL, state)
        assert ended[rid].finish_reason == "length"
        assert torch.equal(kv_of(state, base)[0], before)
    right(state, base)
    state, made = generate(MODEL, state, base, greedy(3))
    _, expected = generate(MODEL, engine(), IDS, greedy(3))
    assert made.token_ids == expected.token_ids


def test_old_handles_are_values():
    state, base = prefill(MODEL, engine(), IDS)
    seen = freeze(base)
    state, _ = prefill(MODEL, state, [1], after=base)
    state, _ = generate_many(MODEL, state, [base, [base, [2]]], greedy(4))
    assert freeze(base) == seen


# Refusals


def test_a_released_chunk_is_refused_everywhere():
    state, base = prefill(MODEL, engine(), IDS)
    state = release(state, base)
    for call in (
        lambda: release(state, base),
        lambda: fork(state, base),
        lambda: truncate(state, base, 1),
        lambda: prefill(MODEL, state, [1], after=base),
        lambda: submit(MODEL, state, base, greedy(1)),
        lambda: generate(MODEL, state, [base, [1]], greedy(1)),
    ):
        with pytest.raises(ReleasedChunkError, match=f"liveness={base.liveness}"):
            call()
    check(state)


def test_a_chunk_of_another_engine_is_refused_even_if_its_number_lives_here():
    _, foreign = prefill(MODEL, engine(), IDS)
    state, mine = prefill(MODEL, engine(), IDS)
    assert foreign.liveness == mine.liveness
    for call in (lambda: release(state, foreign), lambda: fork(state, foreign), lambda: prefill(MODEL, state, [1], after=foreign)):
        with pytest.raises(ForeignChunkError, match="another engine"):
            call()
    right(state, mine)


def test_what_does_not_fit_now_changes_nothing():
    state, base = prefill(MODEL, engine(num_pages=4), IDS)
    state, idle = prefill(MODEL, state, [9] * 8)
    state = release(state, idle)
    seen = freeze(state.pool)
    with pytest.raises(OutOfPagesError, match="16 tokens needs 4 more pages; 2 of 4 pages are available"):
        prefill(MODEL, state, [8] * 16)
    with pytest.raises(OutOfPagesError):
        generate_many(MODEL, state, [[8] * 4, [7] * 4], greedy(4))
    with pytest.raises(OutOfPagesError):
        begin(MODEL, state, [[8] * 4, [7] * 4], greedy(1), room=4)
    assert freeze(state.pool) == seen
    state, again = prefill(MODEL, state, [9] * 8)
    assert state.stats.reused_tokens == 8  # what the refused calls would have evicted is still there
    right(state, base, again)


def test_what_can_never_fit_is_refused():
    with pytest.raises(InvalidRequestError, match="65 tokens; this engine holds at most 64"):
        prefill(MODEL, engine(), [1] * 65)
    with pytest.raises(InvalidRequestError, match="at most 9"):
        prefill(MODEL, engine(max_model_len=9), [1] * 10)
    state, chunk = prefill(MODEL, engine(), [1] * 64)
    right(state, chunk)


def test_a_donated_state_is_refused():
    old = engine()
    state, base = prefill(MODEL, old, IDS)
    for call in (lambda: prefill(MODEL, old, [1]), lambda: fork(old, base), lambda: release(old, base)):
        with pytest.raises(DonatedStateError, match="this state is 1 call old, "):
            call()
    state = release(state, base)
    with pytest.raises(DonatedStateError, match="this state is 2 calls old, "):
        fork(old, base)
    right(state)


def test_second_copies_keep_their_place_in_a_tight_pool():
    """A live chunk holds a second copy of an idle run: taking the idle pages instead would cost pages that were counted on."""
    state, made = generate_many(MODEL, engine(num_pages=8, page_size=1), [[1, 2], [1, 2]], [greedy(2), greedy(1)])
    longer, copy = (generation.chunk for generation in made)
    state = release(state, longer)
    token = made[0].token_ids[1]
    state, chunk = prefill(MODEL, state, [token, 1, 1, 1, 1], after=copy)
    right(state, chunk, copy)
    state = release(state, chunk)
    state, reply = generate(MODEL, state, [copy, [token]], greedy(4))
    assert (len(reply.token_ids), reply.finish_reason) == (4, "length")
    right(state, reply.chunk, copy)
