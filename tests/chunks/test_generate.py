"""`generate` and `generate_many`: whole replies as values."""

import numpy as np
import pytest

from nanovllm.chunks.generate import generate, generate_many
from nanovllm.chunks.handles import release
from nanovllm.chunks.prefill import prefill
from nanovllm.engine.init_state import init_state
from nanovllm.engine.requests import submit
from nanovllm.errors import InvalidRequestError, OutOfPagesError
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.invariants import check
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.worlds import ModelWorld, drain

MODEL = random_model(tiny_config(vocab_size=50, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=8))
WORLD = ModelWorld(MODEL)
IDS = [1, 2, 3, 4, 5, 6, 7]


def engine(**limits):
    return init_state(MODEL, **{"num_pages": 32, "page_size": 4, **limits})


def greedy(count, **options):
    return SamplingParams(temperature=0.0, max_tokens=count, **options)


def right(state, *chunks):
    check(state)
    for chunk in chunks:
        WORLD.require_kv(state.kv, list(chunk.pages), chunk.token_ids.tolist())


REPLY = generate(MODEL, engine(), IDS, greedy(10))[1].token_ids


def test_generate_is_submit_and_step():
    state, rid = submit(MODEL, engine(), IDS, greedy(10))
    assert drain(MODEL, state)[1][rid].token_ids == REPLY


def test_the_chunk_holds_context_and_reply_all_filled():
    state, made = generate(MODEL, engine(), IDS, greedy(10))
    assert made.chunk.token_ids.tolist() == IDS + REPLY
    assert state.stats.decode_tokens == 10  # the last one for its KV alone
    right(state, made.chunk)


@pytest.mark.parametrize("split", [1, 3, 4, 5, 7])
def test_a_filled_context_runs_at_most_one_prompt_token(split):
    state, base = prefill(MODEL, engine(), IDS[:split])
    state, base = prefill(MODEL, state, IDS[split:], after=base)
    before = state.stats
    state, made = generate(MODEL, state, base, greedy(10))
    assert made.token_ids == REPLY
    assert state.stats.prefill_tokens - before.prefill_tokens == 1
    assert state.stats.reused_tokens - before.reused_tokens == 6
    right(state, base, made.chunk)


def test_the_next_turn_runs_only_what_is_new():
    state, made = generate(MODEL, engine(), IDS, greedy(10))
    before = state.stats
    state, second = generate(MODEL, state, [made.chunk, [30, 31]], greedy(3))
    assert state.stats.prefill_tokens - before.prefill_tokens == 2
    assert second.token_ids == generate(MODEL, engine(), [*IDS, *REPLY, 30, 31], greedy(3))[1].token_ids
    right(state, made.chunk, second.chunk)


def test_contexts_that_share_a_chunk():
    state, base = prefill(MODEL, engine(), IDS[:5])
    contexts = [base, [base, [9]], [base, [9, 9]], IDS, base]
    state, made = generate_many(MODEL, state, contexts, greedy(6))
    expected = [generate(MODEL, engine(), ids, greedy(6))[1].token_ids for ids in (IDS[:5], [*IDS[:5], 9], [*IDS[:5], 9, 9], IDS, IDS[:5])]
    assert [generation.token_ids for generation in made] == expected
    right(state, base, *(generation.chunk for generation in made))


def test_options_for_each():
    state, made = generate_many(MODEL, engine(), [IDS, IDS, [7]], [greedy(2), greedy(4, stop_token_ids=[REPLY[2]]), greedy(1)])
    assert [len(generation.token_ids) for generation in made] == [2, REPLY.index(REPLY[2]) + 1, 1]
    assert [generation.finish_reason for generation in made] == ["length", "stop", "length"]
    right(state, *(generation.chunk for generation in made))


def test_options_of_another_number_are_refused():
    with pytest.raises(InvalidRequestError, match="2 contexts and 1 sampling_params"):
        generate_many(MODEL, engine(), [IDS, IDS], [greedy(1)])


@pytest.mark.parametrize("contexts", ["abc", np.array([1, 2])])
def test_one_context_is_no_list_of_contexts(contexts):
    with pytest.raises(Exception) as caught:
        generate_many(MODEL, engine(), contexts, greedy(1))
    assert "contexts" in str(caught.value)


def test_no_contexts():
    state, made = generate_many(MODEL, engine(), [], greedy(1))
    assert made == []
    right(state)


def test_logprobs_come_along():
    _, made = generate(MODEL, engine(), IDS, greedy(3, logprobs=1))
    assert made.logprobs is not None
    assert [entry.token_id for entry in made.logprobs] == REPLY[:3]
    assert [entry.top[0][0] for entry in made.logprobs] == REPLY[:3]


@pytest.mark.parametrize("budget", [1, 2, 100])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
def test_limits_do_not_change_replies(budget, max_num_seqs):
    state = engine(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    state, made = generate_many(MODEL, state, [IDS, IDS[:2], IDS[:3], IDS], greedy(10))
    assert made[0].token_ids == made[3].token_ids == REPLY
    right(state, *(generation.chunk for generation in made))


# Pages


def test_a_reply_ends_where_the_pages_end():
    state, made = generate(MODEL, engine(num_pages=3), IDS, greedy(10))
    assert (made.token_ids, made.finish_reason) == (REPLY[:5], "length")
    right(state, made.chunk)


def test_live_chunks_count_and_shared_pages_do_not():
    state, other = prefill(MODEL, engine(num_pages=5), [9] * 4)
    state, base = prefill(MODEL, state, IDS)
    state, made = generate(MODEL, state, base, greedy(10))  # one whole page is shared, two are left
    assert (made.token_ids, made.finish_reason) == (REPLY[:5], "length")
    right(state, other, base, made.chunk)


def test_no_page_for_a_reply():
    state, base = prefill(MODEL, engine(num_pages=2), IDS)
    with pytest.raises(OutOfPagesError, match="7 tokens and leaves no page for a reply; 0 of 2 pages are available: release chunks"):
        generate(MODEL, state, base, greedy(10))
    right(state, base)
    state, made = generate(MODEL, release(state, base), IDS, greedy(1))
    assert made.token_ids == REPLY[:1]


def test_many_replies_are_reserved_at_their_longest():
    state = engine(num_pages=6)
    with pytest.raises(OutOfPagesError, match="2 replies need 8 pages at their maximum length; 6 of 6 pages are available: release"):
        generate_many(MODEL, state, [IDS, IDS], greedy(9))
    state, made = generate_many(MODEL, state, [IDS, IDS], greedy(5))
    assert [generation.token_ids for generation in made] == [REPLY[:5]] * 2
    right(state, *(generation.chunk for generation in made))


def test_pages_reserved_for_more_tokens_come_back():
    """The third token of the reply takes pages for many more, and a later one ends it."""
    stop = next(token for token in REPLY if REPLY.index(token) >= 3)
    state, made = generate(MODEL, engine(), IDS, greedy(60, stop_token_ids=[stop]))
    assert made.token_ids == REPLY[: REPLY.index(stop) + 1]
    assert state.pages.num_free == state.config.num_pages - len(made.chunk.pages) == state.config.num_pages - -(-len(made.chunk) // 4)
    right(state, made.chunk)


def test_everything_comes_back():
    state, base = prefill(MODEL, engine(), IDS)
    state, made = generate_many(MODEL, state, [base, [base, [1]], [2]], greedy(7))
    for chunk in (base, *(generation.chunk for generation in made)):
        state = release(state, chunk)
    right(state)
    assert state.pool.num_available == state.config.num_pages
