"""`split_rows`: rows go on from other rows, and every reply and every chunk is that of a plain run over its tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nanovllm as nv
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.worlds import ModelWorld

MODEL = random_model(tiny_config(vocab_size=50), 0)
WINDOWED = random_model(tiny_config(vocab_size=50, windows=(8, 0)), 0)
ALL_WINDOWED = random_model(tiny_config(vocab_size=50, windows=(8, 8)), 0)
GREEDY = nv.SamplingParams(temperature=0, ignore_eos=True)
CONTEXTS = [[1, 2, 3, 4, 5, 6, 7], [9], [8, 7, 6, 5]]


def engine(model: nv.Model = MODEL, **limits) -> nv.EngineState:
    return nv.init_state(model, **{"num_pages": 64, "page_size": 4, "max_num_seqs": 8, **limits})


def run(
    model: nv.Model, state: nv.EngineState, contexts: list, splits: list, params=GREEDY
) -> tuple[nv.EngineState, list, list[list[int]]]:
    """Steps with a split after each. Returns the state, the replies, and the texts that a list of tokens per row predicts."""
    state, carry = nv.begin(model, state, contexts, params, room=len(splits), branching=True)
    texts = [list(context) for context in contexts]
    for parents in splits:
        carry, out = nv.decode_step(model.params, carry, model.config)
        texts = [[*text, token] for text, token in zip(texts, out.token_ids.tolist(), strict=True)]
        if parents is not None:
            carry = nv.split_rows(carry, torch.tensor(parents))
            texts = [list(texts[parent]) for parent in parents]
    state, replies = nv.commit(model, state, carry)
    return state, replies, texts


@pytest.mark.parametrize("model", [MODEL, WINDOWED, ALL_WINDOWED], ids=["plain", "windowed", "all windowed"])
@given(data=st.data())
def test_any_splits_give_the_texts_and_chunks_of_plain_runs(model: nv.Model, data):
    rows = data.draw(st.integers(1, 4))
    contexts = data.draw(st.lists(st.sampled_from(CONTEXTS), min_size=rows, max_size=rows))
    row = st.integers(0, rows - 1)
    splits = data.draw(st.lists(st.none() | st.lists(row, min_size=rows, max_size=rows), min_size=1, max_size=9))
    params = [nv.SamplingParams(temperature=1.5, seed=seed, ignore_eos=True) for seed in range(rows)]
    state = engine(model, page_size=data.draw(st.sampled_from([1, 2, 3, 4])), num_pages=128)
    state, replies, texts = run(model, state, contexts, splits, params)
    nv.check(state)
    for reply, text in zip(replies, texts, strict=True):
        assert reply.chunk.token_ids.tolist() == text
        ModelWorld(model).require_kv(state.kv, list(reply.chunk.pages), text) if not model.config.windows else None
        state, more = nv.generate(model, state, reply.chunk, nv.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        _, plain = nv.generate(model, engine(model), text, nv.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        assert more.token_ids == plain.token_ids
        state = nv.release(nv.release(state, more.chunk), reply.chunk)
    nv.check(state)
    assert nv.memory(state).num_held == 0
    stats = state.stats
    assert stats.prefill_tokens + stats.decode_tokens + stats.reused_tokens >= stats.discarded_tokens


def test_children_share_full_pages():
    state, replies, _ = run(MODEL, engine(), [CONTEXTS[0]] * 4, [None] * 8 + [[2, 2, 2, 2]] + [None] * 3)
    pages = [list(reply.chunk.pages) for reply in replies]
    assert all(p[:3] == pages[0][:3] for p in pages) and len({p[3] for p in pages}) == 4
    nv.check(state)


def test_tokens_may_be_given():
    state, carry = nv.begin(MODEL, engine(), CONTEXTS[:2], nv.SamplingParams(temperature=0, logprobs=0), room=4, branching=True)
    carry, _ = nv.decode_step(MODEL.params, carry, MODEL.config)
    carry = nv.split_rows(carry, torch.tensor([1, 1]), torch.tensor([11, 12], dtype=torch.int32), torch.tensor([-1.5, -2.5]))
    carry, _ = nv.decode_step(MODEL.params, carry, MODEL.config)
    state, replies = nv.commit(MODEL, state, carry)
    for reply, token, logprob in zip(replies, (11, 12), (-1.5, -2.5), strict=True):
        assert reply.token_ids[0] == token and reply.logprobs is not None and reply.logprobs[0].logprob == logprob
        _, plain = nv.generate(MODEL, engine(), [*CONTEXTS[1], token], nv.SamplingParams(temperature=0, max_tokens=1, logprobs=0))
        assert reply.token_ids[1:] == plain.token_ids
        assert reply.logprobs[1].logprob == pytest.approx(plain.logprobs[0].logprob, abs=1e-5)
    nv.check(state)


def test_the_penalties_of_a_row_follow_its_text():
    params = nv.SamplingParams(temperature=0, frequency_penalty=2.0, repetition_penalty=1.3, ignore_eos=True)
    state, carry = nv.begin(MODEL, engine(), CONTEXTS[:2], params, room=6, branching=True)
    for _ in range(2):
        carry, _ = nv.decode_step(MODEL.params, carry, MODEL.config)
    given = torch.tensor([5, 9], dtype=torch.int32)
    carry = nv.split_rows(carry, torch.tensor([0, 0]), given)
    assert carry.sampling.penalties is not None
    first = carry.log.token_ids[0, 0].item()
    for row, token in enumerate((5, 9)):
        counts = torch.zeros(50, dtype=torch.int32)
        counts[first] += 1
        counts[token] += 1
        assert torch.equal(carry.sampling.penalties.counts[row], counts)
        assert carry.sampling.penalties.prompt_mask[row].nonzero().flatten().tolist() == sorted(CONTEXTS[0])
    state, _ = nv.commit(MODEL, state, carry)
    nv.check(state)


def test_a_stop_before_a_split_ends_each_childs_reply():
    _, plain = nv.generate(MODEL, engine(), CONTEXTS[0], nv.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    stop = next(t for i, t in enumerate(plain.token_ids) if t not in plain.token_ids[:i] and i >= 1)
    params = nv.SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=[stop])
    state, replies, _ = run(MODEL, engine(), [CONTEXTS[0]] * 2, [[1, 0], [0, 0], None, [1, 1], None, [0, 0]], params)
    want = plain.token_ids[: plain.token_ids.index(stop) + 1]
    assert [reply.token_ids for reply in replies] == [want, want]
    assert {reply.finish_reason for reply in replies} == {"stop"}
    nv.check(state)


def test_a_carry_that_was_split_is_donated():
    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=4, branching=True)
    later = nv.split_rows(carry, torch.tensor([0, 0, 1]))
    for use in (
        lambda: nv.decode_step(MODEL.params, carry, MODEL.config),
        lambda: nv.split_rows(carry, torch.tensor([0, 1, 2])),
        lambda: nv.commit(MODEL, state, carry),
    ):
        with pytest.raises(nv.DonatedStateError, match="were split: use the carry that split_rows returned"):
            use()
    state, _ = nv.commit(MODEL, state, later)
    nv.check(state)


def test_bad_parents_are_refused():
    state, plain = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=2)
    with pytest.raises(nv.InvalidRequestError, match=r"call begin\(..., branching=True\)"):
        nv.split_rows(plain, torch.tensor([0, 0, 1]))
    state, carry = nv.begin(MODEL, state, CONTEXTS, GREEDY, room=2, branching=True)
    for parents in (torch.tensor([0, 1]), [0, 1, 2], torch.tensor([0, 1, 2.0]), torch.tensor([0, 1, 3]), torch.tensor([-1, 0, 0])):
        with pytest.raises(nv.InvalidRequestError, match="parents"):
            nv.split_rows(carry, parents)
    with pytest.raises(nv.InvalidRequestError, match="token_ids"):
        nv.split_rows(carry, torch.tensor([0, 1, 2]), torch.tensor([1]))
    state, _ = nv.commit(MODEL, state, carry)
    nv.check(state)


def test_pages_for_branches_are_reserved_or_refused():
    state = engine(num_pages=6)
    with pytest.raises(nv.OutOfPagesError):
        nv.begin(MODEL, state, [CONTEXTS[0], CONTEXTS[0]], GREEDY, room=5, branching=True)
    state, carry = nv.begin(MODEL, state, [CONTEXTS[0], CONTEXTS[0]], GREEDY, room=1, branching=True)
    state, _ = nv.commit(MODEL, state, carry)
    nv.check(state)
