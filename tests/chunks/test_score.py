"""`score`: given continuations have the log-probabilities that a plain forward pass gives, and each distinct context runs once."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.chunks.compose import compose, drop
from nanovllm.chunks.handles import fork, release, truncate
from nanovllm.chunks.prefill import prefill
from nanovllm.chunks.score import score
from nanovllm.chunks.session import begin, commit
from nanovllm.engine.donation import enter
from nanovllm.engine.init_state import init_state
from nanovllm.engine.requests import submit
from nanovllm.engine.step import step
from nanovllm.errors import DonatedStateError, ForeignChunkError, InvalidRequestError, OutOfPagesError, ReleasedChunkError
from nanovllm.executor import scoring
from nanovllm.executor.decode import decode_step
from nanovllm.executor.executor import Runtime
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.invariants import check
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.symbolic import logits_of, numbers
from nanovllm.testing.shadows.worlds import FlakyExecutor, ModelWorld, PlantedError, SymbolicWorld, drain
from nanovllm.testing.strategies import Limits, limits, token_ids

CONFIG = tiny_config(vocab_size=50, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=8)
MODEL = random_model(CONFIG)
IDS = [1, 2, 3, 4, 5, 6, 7]
ARCHITECTURES = {
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": {},
    "MistralForCausalLM": {"windows": (3, 3)},
    "Gemma2ForCausalLM": {"windows": (3, 0)},
    "Gemma3ForCausalLM": {"windows": (4, 0)},
    "Phi3ForCausalLM": {},
    "GPT2LMHeadModel": {},
}


def engine(model=MODEL, **limits):
    return init_state(model, **{"num_pages": 32, "page_size": 4, "max_num_seqs": 8, **limits})


def plain(tokens, count, model=MODEL):
    """The log-probabilities of the last `count` tokens, by one forward pass over all of them."""
    logits, _ = ModelWorld(model).uncached([int(token) for token in tokens])
    ids = torch.tensor(list(tokens[-count:]))[:, None]
    return logits[-count - 1 : -1].float().log_softmax(1).gather(1, ids)[:, 0].tolist()


def stepped(model, state, context, ids):
    """The log-probabilities of `ids` after a context, by decode steps."""
    state, carry = begin(model, state, [context], SamplingParams(temperature=0.0, ignore_eos=True), room=len(ids))
    found = []
    for token in ids:
        carry, out = decode_step(model.params, carry, model.config, token_ids=torch.tensor([token], dtype=torch.int32))
        found.append(out.logprobs.item())
    state, (made,) = commit(model, state, carry)
    return release(state, made.chunk), found


def close(wanted):
    return pytest.approx(wanted, abs=1e-4)


def listed(scores):
    return [one.logprobs.tolist() for one in scores]


def require_counts(before, after, lengths):
    """Tokens run and reused are those that the continuations need: their contexts, and all of their own tokens but the last."""
    run = after.prefill_tokens + after.decode_tokens - before.prefill_tokens - before.decode_tokens
    assert run + after.reused_tokens - before.reused_tokens == sum(context + own - 1 for context, own in lengths)
    assert after.rerun_tokens == before.rerun_tokens and after.discarded_tokens == before.discarded_tokens


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_same_as_a_forward_pass_and_as_decode_steps(architecture):
    model = random_model(tiny_config(architecture, vocab_size=50, **ARCHITECTURES[architecture]))
    contexts, given = [IDS, [9], IDS, [*IDS, 8], IDS[:4]], [[4, 4, 5], [7], [11, 12, 13, 14, 15, 16], [3, 2], [1]]
    state = engine(model)
    state, scores = score(model, state, contexts, given)
    check(state)
    assert state.pool.num_available == 32
    for context, ids, one in zip(contexts, given, scores, strict=True):
        assert one.token_ids == ids and one.logprobs.dtype == np.float32
        assert one.logprobs.tolist() == close(plain([*context, *ids], len(ids), model))
        state, found = stepped(model, state, context, ids)
        assert one.logprobs.tolist() == close(found)
        assert one.total == pytest.approx(sum(found), abs=1e-3)


def test_frames_of_windows_are_enough_for_the_longest():
    model = random_model(tiny_config("Gemma3ForCausalLM", vocab_size=50, windows=(4, 0)))
    state = engine(model, num_frames=4)
    given = [[5] * 4, [6, 7], [8] * 5]
    state, scores = score(model, state, [IDS] * 3, given)
    check(state)
    assert [*map(close, listed(scores))] == [plain([*IDS, *ids], len(ids), model) for ids in given]
    state, (alone,) = score(model, state, [[3] * 6], [[9] * 10])
    assert alone.logprobs.tolist() == close(plain([3] * 6 + [9] * 10, 10, model))
    with pytest.raises(InvalidRequestError, match="at most 16 together"):
        score(model, state, [[3] * 6], [[9] * 11])


def test_texts_are_encoded_without_special_tokens():
    model = random_model(tiny_config())
    state = engine(model)
    state, (text,) = score(model, state, ["Once upon"], [" a time"])
    ids = model.tokenizer.encode(" a time", add_special_tokens=False)
    state, (given,) = score(model, state, [model.tokenizer.encode("Once upon")], [np.array(ids)])
    assert text.token_ids == given.token_ids == ids
    assert text.logprobs.tolist() == close(given.logprobs.tolist())


@pytest.mark.parametrize("count", [1, 4, 7, 8])
@pytest.mark.parametrize("more", [[], [20], [20, 21, 22]])
def test_a_chunk_is_not_run_again(count, more):
    state, chunk = prefill(MODEL, engine(), [*IDS, 8][:count])
    before, kv = state.stats, state.kv.pools[0].clone()
    state, scores = score(MODEL, state, [[chunk, more]] * 3, [[30, 31], [32], [33, 34, 35]])
    tokens = [*chunk.token_ids, *more]
    for one in scores:
        assert one.logprobs.tolist() == close(plain([*tokens, *one.token_ids], len(one.token_ids)))
    assert state.stats.prefill_tokens - before.prefill_tokens == max(1, len(more)) + 1 + 2
    require_counts(before, state.stats, [(len(tokens), 2), (len(tokens), 1), (len(tokens), 3)])
    check(state)
    held = torch.tensor(list(chunk.pages))
    assert torch.equal(state.kv.pools[0][:, held], kv[:, held])
    assert state.pool.num_available == 32 - len(chunk.pages)


def test_approximate_chunks_are_read_as_they_are():
    state = engine()
    state, one = prefill(MODEL, state, IDS)
    state, two = prefill(MODEL, state, [11, 12, 13, 14, 15, 16])
    state, both = compose(MODEL, state, [one, two])
    state, gap = drop(MODEL, state, one, 1, 4, mode="gap")
    for context in (both, [both, [7, 8]], gap, [gap, [9]]):
        state, (scored,) = score(MODEL, state, [context], [[5, 6, 7]])
        check(state)
        state, found = stepped(MODEL, state, context, [5, 6, 7])
        assert scored.logprobs.tolist() == close(found)
    parts = [*one.token_ids, *two.token_ids]
    assert score(MODEL, state, [both], [[5, 6, 7]])[1][0].logprobs.tolist() != close(plain([*parts, 5, 6, 7], 3))


def test_contexts_of_equal_tokens_are_equal_only_if_they_are_exact():
    state = engine()
    state, one = prefill(MODEL, state, IDS[:3])
    state, two = prefill(MODEL, state, IDS[3:])
    state, both = compose(MODEL, state, [one, two])
    state, twin = fork(state, both)
    state, part = truncate(state, both, 5)
    contexts = [both, IDS, twin, [part, IDS[5:]]]
    before = state.stats
    state, scores = score(MODEL, state, contexts, [[8, 9]] * 4)
    require_counts(before, state.stats, [(7, 2)] * 4)
    assert scores[1].logprobs.tolist() == close(plain([*IDS, 8, 9], 2))
    for context, scored in zip(contexts, scores, strict=True):
        state, found = stepped(MODEL, state, context, [8, 9])
        assert scored.logprobs.tolist() == close(found)
    assert scores[0].logprobs.tolist() != close(scores[1].logprobs.tolist())


def test_equal_contexts_run_once_and_prefixes_are_found():
    state, scores = score(MODEL, engine(), [IDS, IDS, [20, 21], IDS, tuple(IDS)], [[8], [9], [8, 8], [10, 11, 12], [8]])
    stats = state.stats
    assert (stats.prefill_tokens, stats.reused_tokens) == (7 + 2 + 1 + 2, 3 * 7)
    require_counts(engine().stats, stats, [(7, 1), (7, 1), (2, 2), (7, 3), (7, 1)])
    assert scores[0].logprobs.tolist() == scores[4].logprobs.tolist()
    assert state.pool.prefix.num_idle == 1 and state.pool.num_free == 31  # the full page of a context; none of continuations
    state, again = score(MODEL, state, [[*IDS[:4], 30]], [[31]])
    assert again[0].logprobs.tolist() == close(plain([*IDS[:4], 30, 31], 1))
    assert state.stats.prefill_tokens == stats.prefill_tokens + 1
    assert state.stats.reused_tokens == stats.reused_tokens + 4


def test_a_context_whose_pages_are_all_indexed_runs_one_token():
    state, _ = score(MODEL, engine(), [[*IDS, 8]], [[9]])
    before = state.stats
    state, scores = score(MODEL, state, [[*IDS, 8]] * 2, [[9], [9, 10]])
    assert state.stats.prefill_tokens == before.prefill_tokens + 2
    require_counts(before, state.stats, [(8, 1), (8, 2)])
    assert listed(scores) == [close(plain([*IDS, 8, 9], 1)), close(plain([*IDS, 8, 9, 10], 2))]


@pytest.mark.parametrize("budget", [1, 3, 64])
@pytest.mark.parametrize("most", [1, 2, 5])
def test_small_steps_and_few_logits_at_a_time(budget, most, monkeypatch):
    monkeypatch.setattr(scoring, "LOGIT_BYTES", 4 * 50 * most)
    monkeypatch.setattr(scoring, "PIECE_BYTES", 4 * 50 * 2)
    calls = []
    state = engine(max_num_batched_tokens=budget, max_num_seqs=3)
    executor = state.runtime.executor
    whole = executor._forward

    def seen(params, kv, batch, config):
        logits, kv = whole(params, kv, batch, config)
        calls.append((len(batch.input_ids), len(batch.seq_lens), len(logits)))
        return logits, kv

    executor._forward = seen
    contexts, given = [IDS, [9], IDS, [20, 21], IDS], [[4, 4, 5], [7], [11, 12, 13, 14, 15, 16], [3, 2], [5, 6]]
    state, scores = score(MODEL, state, contexts, given)
    check(state)
    for context, ids, one in zip(contexts, given, scores, strict=True):
        assert one.logprobs.tolist() == close(plain([*context, *ids], len(ids)))
    assert all(tokens <= budget and rows <= 3 and logits <= most for tokens, rows, logits in calls)
    assert sum(logits for _, _, logits in calls) == 3 + 2 + 5 + 1 + 1  # of three contexts and of all tokens of continuations but the last


def test_one_step_does_for_contexts_and_one_for_continuations():
    state = engine()
    calls = counted_calls(state)
    state, _ = score(MODEL, state, [IDS, [9, 10], IDS], [[1], [2], [3]])
    assert len(calls) == 1
    state, _ = score(MODEL, state, [[20, 21], [9, 10], [20, 21]], [[1, 2], [2, 3, 4], [3]])
    assert len(calls) == 3
    state, chunk = prefill(MODEL, state, IDS)
    calls.clear()
    score(MODEL, state, [chunk] * 3, [[1, 2], [2], [3, 4, 5]])
    assert len(calls) == 1


def counted_calls(state):
    executor, calls = state.runtime.executor, []
    whole = executor._forward

    def seen(*args):
        calls.append(args)
        return whole(*args)

    executor._forward = seen
    return calls


def test_pools_of_just_enough_pages():
    state = engine(num_pages=2, page_size=4)
    state, (one,) = score(MODEL, state, [[1, 2, 3]], [[4, 5, 6, 7, 8]])  # the only continuation goes on in the context's last page
    assert one.logprobs.tolist() == close(plain([1, 2, 3, 4, 5, 6, 7, 8], 5))
    state, scores = score(MODEL, state, [[1, 2, 3]] * 3, [[4, 5], [6], [7, 8]])  # two in turn, each on a copy of it
    assert [*map(close, listed(scores))] == [plain([1, 2, 3, *ids], len(ids)) for ids in ([4, 5], [6], [7, 8])]
    check(state)
    before = state
    with pytest.raises(OutOfPagesError, match="7 tokens to run, needs 3 more pages; 2 of 2 pages"):
        score(MODEL, state, [[9], [1, 2, 3], [1, 2, 3]], [[9], [4, 5, 6, 7, 8], [4, 5]])
    assert enter(before) is before and not before.runtime.lease.dirty
    state, chunk = prefill(MODEL, state, [1, 2, 3])
    state, (one,) = score(MODEL, state, [chunk], [[4, 5]])  # the chunk keeps its page
    assert one.logprobs.tolist() == close(plain([1, 2, 3, 4, 5], 2))
    state, (one,) = score(MODEL, state, [chunk], [[6]])
    assert state.pool.num_available == 1
    with pytest.raises(OutOfPagesError, match="7 tokens to run, needs 2 more pages; 1 of 2 pages"):
        score(MODEL, state, [chunk], [[4, 5, 6, 7, 8]])
    check(state)


def test_more_contexts_than_fit_at_once():
    state = engine(num_pages=4, page_size=2, max_num_seqs=4)
    contexts = [[i, i + 1, i + 2] for i in range(0, 30, 3)]
    state, scores = score(MODEL, state, contexts, [[40, 41, 42]] * 10)
    for context, one in zip(contexts, scores, strict=True):
        assert one.logprobs.tolist() == close(plain([*context, 40, 41, 42], 3))
    check(state)
    assert state.pool.num_available == 4


def test_requests_and_sessions_go_on():
    world = ModelWorld(MODEL)
    small = Limits(num_pages=32, page_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, ahead=True)
    state = world.init_state(small)
    greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    state, rid = submit(MODEL, state, IDS, greedy)
    state, carry = begin(MODEL, state, [[5, 6, 7]], replace(greedy, logprobs=0), room=4)
    for i in range(4):
        state, _ = step(MODEL, state)
        state, (one,) = score(MODEL, state, [[*IDS, i]], [[8, 9]])
        assert one.logprobs.tolist() == close(plain([*IDS, i, 8, 9], 2))
        carry, _ = decode_step(MODEL.params, carry, MODEL.config)
        check(state)
    state, waiting = submit(MODEL, state, [3, 4], greedy)
    state, _ = score(MODEL, state, [IDS], [[8]])
    state, (made,) = commit(MODEL, state, carry)
    state, ended = drain(MODEL, state)
    alone, _ = submit(MODEL, engine(), IDS, greedy)
    assert ended[rid].token_ids == drain(MODEL, alone)[1][0].token_ids
    assert len(ended[waiting].token_ids) == 9
    assert [e.logprob for e in made.logprobs] == close(plain([5, 6, 7, *made.token_ids], 4))


def test_nothing_to_score():
    state, scores = score(MODEL, engine(), [], [])
    assert scores == [] and state.epoch == 1


def test_a_score_does_not_change():
    _, (one,) = score(MODEL, engine(), [IDS], [[8, 9]])
    with pytest.raises(ValueError):
        one.logprobs[0] = 0
    with pytest.raises(AttributeError):
        one.token_ids = []


REFUSED = [
    ("abc", [[1]], "contexts must be a list, not str: pass one as [context]"),
    ([IDS], [1], "continuation=1 must be a text or token ids, not int"),
    ([IDS], "abc", "continuations must be a list, not str"),
    ([IDS], [[1], [2]], "1 contexts and 2 continuations"),
    ([IDS, IDS], [[1], []], "continuation 1=[] is empty"),
    ([IDS, IDS], [[1], [50]], "continuation 1: token id 50 is outside the vocabulary 0 ... 49"),
    ([IDS], [[1.5]], "continuation: token id 1.5 is of type float"),
    ([IDS], [[[1], [2]]], "repeat their context"),
    ([IDS], [["a", "b"]], "repeat their context"),
    ([IDS], ["a"], "continuation: this model has no tokenizer"),
    ([IDS, []], [[1], [1]], "context 1: the prompt is empty"),
    ([IDS, [99]], [[1], [1]], "context 1: token id 99 is outside"),
    ([IDS], [[1] * 122], "context has 7 tokens and its continuation 122; this engine holds at most 128 together"),
    ([IDS], [None], "continuation=None must be a text or token ids, not NoneType"),
]


@pytest.mark.parametrize(("contexts", "continuations", "message"), REFUSED, ids=[message for *_, message in REFUSED])
@pytest.mark.usefixtures("untyped")
def test_what_is_refused(contexts, continuations, message):
    state = engine()
    with pytest.raises(InvalidRequestError) as caught:
        score(MODEL, state, contexts, continuations)
    assert message in str(caught.value)
    check(state)
    state, (one,) = score(MODEL, state, [IDS], [[8]])
    assert one.logprobs.tolist() == close(plain([*IDS, 8], 1))


def test_chunks_and_states_that_have_ended_are_refused():
    state, chunk = prefill(MODEL, engine(), IDS)
    other, foreign = prefill(MODEL, engine(), IDS)
    old = state
    state = release(state, chunk)
    with pytest.raises(ReleasedChunkError, match="context"):
        score(MODEL, state, [chunk], [[1]])
    with pytest.raises(ForeignChunkError, match="context 1"):
        score(MODEL, state, [IDS, foreign], [[1], [1]])
    with pytest.raises(DonatedStateError):
        score(MODEL, old, [IDS], [[1]])
    state, _ = score(MODEL, state, [IDS], [[1]])
    with pytest.raises(InvalidRequestError, match="is not the model of this state"):
        score(random_model(CONFIG, seed=5), state, [IDS], [[1]])
    check(state)
    check(other)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("countdown", range(4))
def test_a_failed_call_leaves_the_old_state(countdown, late):
    state = engine(num_pages=6, max_num_batched_tokens=4)
    state, chunk = prefill(MODEL, state, IDS)
    state, old = prefill(MODEL, state, [30, 31, 32, 33, 34])
    state = release(state, old)  # the prefix index keeps a page, which the call may take over
    state = replace(state, runtime=Runtime(state.runtime.lease, FlakyExecutor(state.runtime.executor)))
    state.runtime.executor.arm(countdown, late)
    contexts, given = [chunk, [20, 21, 22], chunk, [20, 21, 22]], [[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 11]]
    with pytest.raises(PlantedError):
        score(MODEL, state, contexts, given)
    check(enter(state))
    state, scores = score(MODEL, state, contexts, given)
    check(state)
    assert [*map(close, listed(scores[:2]))] == [plain([*IDS, 1, 2, 3], 3), plain([20, 21, 22, 4, 5, 6, 7, 8], 5)]
    state, (one,) = score(MODEL, state, [[30, 31, 32, 33, 34]], [[35]])
    assert one.logprobs.tolist() == close(plain([30, 31, 32, 33, 34, 35], 1))
    assert state.pool.num_available == 4


@cache
def world(windows):
    return SymbolicWorld(windows=windows) if windows is not None else ModelWorld()


def wanted(of, tokens, count):
    """The log-probabilities of the last `count` tokens in a fresh engine that runs them alone."""
    if isinstance(of, ModelWorld):
        return plain(tokens, count, of.model)
    config = of.model.config
    logits = torch.tensor([logits_of(number, config.vocab_size) for number in numbers(tokens, config)])
    return logits[-count - 1 : -1].log_softmax(1).gather(1, torch.tensor(tokens[-count:])[:, None])[:, 0].tolist()


@pytest.mark.unhooked
@settings(max_examples=150)
@given(
    windows=st.sampled_from([None, (), (0, 3), (2, 2)]),
    options=limits(24, 4, cascade=(None, True), ahead=(False,)),
    calls=st.lists(
        st.lists(st.tuples(st.booleans(), token_ids(max_size=7), token_ids(max_size=5)), min_size=1, max_size=6), min_size=1, max_size=4
    ),
    held=st.one_of(st.none(), token_ids(max_size=6)),
)
def test_any_calls_score_as_a_fresh_engine_does(windows, options, calls, held):
    of = world(windows)
    model, state = of.model, of.init_state(options)
    check(state)
    base, others, num_pages = [], 0, state.pool.num_available  # fewer than there are pages if there are fewer frames
    if held is not None:
        try:
            state, chunk = prefill(model, state, held)
            base, others = [chunk], len(chunk.pages)
        except (InvalidRequestError, OutOfPagesError):
            held = None
    size = options.page_size
    for call in calls:
        tokens = [([*held, *more] if first and held else more) for first, more, _ in call]
        contexts = [([*base, more] if first and held else more) for first, more, _ in call]
        before = state
        try:
            state, scores = score(model, state, contexts, [ids for *_, ids in call])
        except (InvalidRequestError, OutOfPagesError) as error:
            assert before.epoch == before.runtime.lease.epoch and not before.runtime.lease.dirty
            longest = max(len(context) + len(ids) for context, (*_, ids) in zip(tokens, call, strict=True))
            pages, capacity = num_pages, min(options.max_model_len, options.num_pages * size)
            if isinstance(error, InvalidRequestError):
                assert longest > capacity
            else:  # a context and a continuation have a page in part, which is copied; so may have the chunk
                assert 2 + -(-longest // size) + others > pages
            continue
        check(state)
        assert state.pool.num_available == before.pool.num_available == num_pages - others
        assert len(state.chunks) == len(base)
        for context, (*_, ids), one in zip(tokens, call, scores, strict=True):
            assert one.token_ids == ids
            assert one.logprobs.tolist() == pytest.approx(wanted(of, [*context, *ids], len(ids)), abs=1e-4)
        require_counts(before.stats, state.stats, [(len(c), len(ids)) for c, (*_, ids) in zip(tokens, call, strict=True)])
        for chunk in base:
            of.require_kv(state.kv, list(chunk.pages), held, state.pool.frames)
