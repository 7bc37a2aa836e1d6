"""`split_rows`: rows go on from other rows, and every reply and every chunk is that of a plain run over its tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
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


@pytest.mark.unhooked
@pytest.mark.parametrize("model", [MODEL, WINDOWED, ALL_WINDOWED], ids=["plain", "windowed", "all windowed"])
@settings(max_examples=40)
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


@pytest.mark.usefixtures("untyped")
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


def test_a_row_that_has_stopped_keeps_its_token():
    """A step runs the newest token of a stopped row again, so another one would overwrite its KV."""
    params = nv.SamplingParams(temperature=0, ignore_eos=True, logprobs=0)
    state, carry = nv.begin(MODEL, engine(), CONTEXTS[:2], params, room=8, branching=True)
    carry, first = nv.decode_loop(MODEL, state, carry, 1, until=lambda tokens: torch.tensor([True, False]))
    for row in ([0, 1], [1, 0], [0, 1]):
        carry, _ = nv.decode_step(MODEL.params, carry, MODEL.config)
        carry = nv.split_rows(carry, torch.tensor(row), torch.tensor([11, 12], dtype=torch.int32), torch.tensor([-1.0, -2.0]))
    carry, _ = nv.decode_step(MODEL.params, carry, MODEL.config)
    state, (going, stopped) = nv.commit(MODEL, state, carry)  # the rows were exchanged once
    assert stopped.token_ids == first[:1, 0].tolist() and stopped.finish_reason == "stop"
    assert stopped.logprobs is not None and stopped.logprobs[0].logprob not in (-1.0, -2.0)
    assert going.token_ids[:1] == first[:, 1].tolist() and going.token_ids[1:4] == [12, 11, 11]
    for one in (going, stopped):
        scored = nv.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)
        state, more = nv.generate(MODEL, state, one.chunk, scored)
        _, want = nv.generate(MODEL, engine(), one.chunk.token_ids.tolist(), scored)
        assert more.logprobs is not None and want.logprobs is not None
        assert [each.logprob for each in more.logprobs] == pytest.approx([each.logprob for each in want.logprobs], abs=1e-5)
    nv.check(state)


@pytest.mark.unhooked
@pytest.mark.parametrize("model", [MODEL, WINDOWED, ALL_WINDOWED], ids=["plain", "windowed", "all windowed"])
@settings(max_examples=30)
@given(data=st.data())
def test_splits_of_traced_code_beyond_the_room_change_nothing(model: nv.Model, data):
    """What these steps sample is dropped. Its pages must not be taken for those of the texts, nor be shared with them."""
    contexts = data.draw(st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=5), min_size=1, max_size=3))
    room, over, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    row = st.integers(0, len(contexts) - 1)
    state, carry = nv.begin(model, engine(model, page_size=size), contexts, GREEDY, room=room, branching=True)
    texts = [list(context) for context in contexts]
    for count in range(room + over):
        lease = replace(carry.log.lease, checked=False)  # as in traced code
        carry, out = nv.decode_step(model.params, replace(carry, log=replace(carry.log, lease=lease)), model.config)
        parents = data.draw(st.lists(row, min_size=len(contexts), max_size=len(contexts)))
        carry = nv.split_rows(carry, torch.tensor(parents))
        if count < room:
            texts = [[*text, token] for text, token in zip(texts, out.token_ids.tolist(), strict=True)]
            texts = [list(texts[parent]) for parent in parents]
    state, replies = nv.commit(model, state, carry)
    nv.check(state)
    for reply, text in zip(replies, texts, strict=True):
        assert reply.chunk.token_ids.tolist() == text and reply.num_dropped == over
        state, more = nv.generate(model, state, reply.chunk, nv.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        _, plain = nv.generate(model, engine(model), text, nv.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        assert more.token_ids == plain.token_ids
        state = nv.release(nv.release(state, more.chunk), reply.chunk)
    assert nv.memory(state).num_held == 0


@pytest.mark.parametrize("model", [MODEL, WINDOWED, ALL_WINDOWED], ids=["plain", "windowed", "all windowed"])
def test_a_committed_carry_cannot_be_split_in_traced_code(model: nv.Model):
    state, carry = nv.begin(model, engine(model), CONTEXTS, GREEDY, room=3, branching=True)
    carry, _ = nv.decode_step(model.params, carry, model.config)
    state, replies = nv.commit(model, state, carry)
    state, chunk = nv.prefill(model, state, [3] * 40)  # which takes pages that the session had
    before = [pool.clone() for pool in state.kv.pools]
    lease = replace(carry.log.lease, checked=False, committed=False)
    nv.split_rows(replace(carry, log=replace(carry.log, lease=lease)), torch.tensor([0, 0, 1]))
    for pool, old in zip(state.kv.pools, before, strict=True):
        assert torch.equal(pool[:, :-1], old[:, :-1])  # the dummy page may change
    for one in (*(reply.chunk for reply in replies), chunk):
        state = nv.release(state, one)
    nv.check(state)


def test_prompts_run_before_a_split():
    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=3, branching=True, fill=False)
    with pytest.raises(nv.InvalidRequestError, match="the prompts of this carry have not run"):
        nv.split_rows(carry, torch.tensor([0, 1, 2]))
    state, _ = nv.commit(MODEL, state, nv.decode_step(MODEL.params, carry, MODEL.config)[0])
    nv.check(state)


def test_the_host_sees_a_split_of_traced_code():
    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=3, branching=True)
    carry, _ = nv.decode_step(MODEL.params, carry, MODEL.config)
    lease = replace(carry.log.lease, checked=False)  # traced code tells the host nothing
    later = nv.split_rows(replace(carry, log=replace(carry.log, lease=lease)), torch.tensor([0, 0, 1]))
    for use in (lambda: nv.decode_step(MODEL.params, carry, MODEL.config), lambda: nv.commit(MODEL, state, carry)):
        with pytest.raises(nv.DonatedStateError, match="were split"):
            use()
    state, _ = nv.commit(MODEL, state, later)
    nv.check(state)


SHARED = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7, 6]]  # they fill their pages, so their last page can be another owner's


@pytest.mark.unhooked
@settings(max_examples=40)
@given(
    data=st.data(),
    model=st.sampled_from([MODEL, WINDOWED, ALL_WINDOWED]),
    fill=st.booleans(),
    captured=st.booleans(),
    splits=st.lists(st.integers(0, 3), min_size=1, max_size=4),
)
def test_rows_over_full_shared_pages_may_be_split_at_any_time(
    data: st.DataObject, model: nv.Model, fill: bool, captured: bool, splits: list[int]
):
    """Splits before any step, and of rows that have stopped before the first, leave the pages of other owners as they are."""
    state = engine(model, page_size=data.draw(st.sampled_from([1, 2, 4])), num_pages=128)
    chunks = []
    for ids in SHARED:
        state, chunk = nv.prefill(model, state, ids)
        chunks.append(chunk)
    contexts = [data.draw(st.sampled_from([*chunks, *SHARED])) for _ in range(2)]
    state, carry = nv.begin(model, state, contexts, GREEDY, room=4, branching=True, fill=fill)
    if data.draw(st.booleans()):
        carry = replace(carry, active=torch.tensor(data.draw(st.sampled_from([[0, 1], [1, 0], [0, 0]])), dtype=torch.int32))
    run = nv.capture(lambda carry: step(model, carry), carry) if captured and fill else lambda carry: step(model, carry)
    ran = not fill
    carry = run(carry) if ran else carry
    for count in splits:
        carry = nv.split_rows(carry, torch.tensor(data.draw(st.sampled_from([[0, 0], [1, 1], [1, 0], [0, 1]]))))
        if count == 0 and carry.log is not None and int(carry.log.num_steps) < 4:
            carry = run(carry)
    state, made = nv.commit(model, state, carry)
    nv.check(state)
    for one in [*chunks, *(reply.chunk for reply in made)]:
        text = one.token_ids.tolist()
        ModelWorld(model).require_kv(state.kv, list(one.pages), text) if not model.config.windows else None
        state, (more,) = nv.score(model, state, [one], [[5, 6]])
        _, (plain,) = nv.score(model, engine(model), [text], [[5, 6]])
        assert more.logprobs == pytest.approx(plain.logprobs, abs=1e-4)


def step(model: nv.Model, carry: nv.DecodeCarry) -> nv.DecodeCarry:
    return nv.decode_step(model.params, carry, model.config)[0]


@pytest.mark.compile
def test_tokens_replace_sampled_tokens_only():
    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=3, branching=True)
    tokens = torch.tensor([30, 31, 32])
    with pytest.raises(nv.InvalidRequestError, match="no step has sampled"):
        nv.split_rows(carry, torch.tensor([0, 1, 2]), tokens)
    again = torch.compile(lambda carry: nv.split_rows(carry, torch.tensor([0, 1, 2]), tokens), backend="eager")(carry)
    assert again.batch.input_ids.tolist() == [7, 9, 5]
    state, made = nv.commit(MODEL, state, step(MODEL, again))
    for reply in made:
        ModelWorld(MODEL).require_kv(state.kv, list(reply.chunk.pages), reply.chunk.token_ids.tolist())


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([1, 2, 50]), "from 0 to 49"),
        (torch.tensor([1, -1, 5]), "from 0 to 49"),
        (torch.tensor([1.7, 2, 5]), "int32 or int64"),
        (torch.tensor([True, False, True]), "int32 or int64"),
        (torch.tensor([1, 2]), r"shape \[3\]"),
        ([1, 2, 3], r"shape \[3\]"),
    ],
)
@pytest.mark.usefixtures("untyped")
def test_tokens_that_are_none_are_refused(tokens: Any, message: str):
    """By a split and by a step. The carry stays usable."""
    split: Any = nv.split_rows
    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=3, branching=True)
    carry = step(MODEL, carry)
    with pytest.raises(nv.InvalidRequestError, match=message):
        split(carry, torch.tensor([0, 1, 2]), tokens)
    with pytest.raises(nv.InvalidRequestError, match=message):
        nv.decode_step(MODEL.params, carry, MODEL.config, token_ids=tokens)
    with pytest.raises(nv.InvalidRequestError, match="parents=None"):
        split(carry, None)
    with pytest.raises(nv.InvalidRequestError, match="floating-point"):
        split(carry, torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3]))
    state, made = nv.commit(MODEL, state, carry)
    assert [len(reply.token_ids) for reply in made] == [1, 1, 1]


@pytest.mark.compile
def test_tokens_beyond_the_vocabulary_become_the_nearest_in_traced_code():
    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=3, branching=True)

    @torch.compile(backend="eager", fullgraph=True)
    def run(params, carry: nv.DecodeCarry, tokens: torch.Tensor) -> nv.DecodeCarry:
        carry, _ = nv.decode_step(params, carry, MODEL.config, token_ids=tokens)
        return nv.split_rows(carry, torch.tensor([0, 1, 2]), tokens + 2)

    carry = run(MODEL.params, carry, torch.tensor([-5, 49, 70]))
    assert carry.batch.input_ids.tolist() == [0, 49, 49]
    state, _ = nv.commit(MODEL, state, step(MODEL, carry))
    nv.check(state)
