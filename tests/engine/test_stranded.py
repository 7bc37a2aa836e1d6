"""Requests that cannot run while live chunks exist end with an error soon, whatever runs, and nobody waits for them or loses pages."""

from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nanovllm as nv
from nanovllm.engine import admission, preemption
from nanovllm.engine.admission import HELD
from nanovllm.state.kv_cache import pages_for
from nanovllm.testing.models import random_model, tiny_config

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
MODEL = random_model(tiny_config())
SIZE = 4


def greedy(max_tokens: int) -> nv.SamplingParams:
    return nv.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def ended(state: nv.EngineState, steps: int) -> tuple[nv.EngineState, dict[int, tuple[int, nv.RequestOutput]]]:
    """Run so many steps, or until nothing is left. Returns the outputs with the steps that they came in."""
    outputs = {}
    for number in range(steps):
        if not (state.running or state.waiting):
            break
        state, outs = nv.step(MODEL, state)
        outputs |= {out.request_id: (number, out.output) for out in outs if out.output is not None}
    return state, outputs


def test_others_run_while_a_reply_goes_on() -> None:
    state = nv.init_state(MODEL, num_pages=32, page_size=SIZE, max_model_len=200)
    state, chunk = nv.prefill(MODEL, state, list(range(40)) + [1] * 24)  # 16 pages
    state, long = nv.submit(MODEL, state, [9], greedy(50))
    state, _ = nv.step(MODEL, state)
    state, bad = nv.submit(MODEL, state, [7] * 66, greedy(2))  # 17 pages
    state, good = nv.submit(MODEL, state, [8] * 6, greedy(2))
    state, outputs = ended(state, 3 * HELD)
    step, failed = outputs[bad]
    assert step < HELD and isinstance(failed.error, nv.OutOfPagesError) and failed.error.request_id == bad
    assert outputs[good][1].finish_reason == "length" and outputs[good][0] < 2 * HELD and long not in outputs
    nv.check(state)
    state, outputs = ended(state, 100)
    assert outputs[long][1].finish_reason == "length"
    assert nv.release(state, chunk).pool.num_available == 32


def test_a_prompt_waits_for_pages_that_a_reply_will_give_back() -> None:
    state = nv.init_state(MODEL, num_pages=16, page_size=SIZE, max_model_len=60)
    state, _ = nv.prefill(MODEL, state, list(range(16)))  # 4 pages
    state, first = nv.submit(MODEL, state, [9] * 20, greedy(20))
    state, _ = nv.step(MODEL, state)
    state, second = nv.submit(MODEL, state, [7] * 44, greedy(4))  # 11 pages and one more of the 12
    state, outputs = ended(state, 100)
    assert [outputs[i][1].finish_reason for i in (first, second)] == ["length"] * 2


def test_a_prompt_that_shares_a_chunk_needs_few_pages() -> None:
    state = nv.init_state(MODEL, num_pages=12, page_size=SIZE, max_model_len=60)
    state, chunk = nv.prefill(MODEL, state, list(range(40)))  # 10 pages
    for context in ([chunk, [5, 6]], [*range(40), 5, 6]):
        state, rid = nv.submit(MODEL, state, context, greedy(2))
        state, outputs = ended(state, 50)
        assert outputs[rid][1].error is None


def test_a_reply_that_chunks_cut_short_says_so() -> None:
    """Of three replies one reaches its limit, one its end token, and one the last page that the chunk leaves."""
    state = nv.init_state(MODEL, num_pages=12, page_size=SIZE, max_model_len=48)
    state, chunk = nv.prefill(MODEL, state, list(range(24)))  # 6 pages
    state, limited = nv.submit(MODEL, state, [9] * 8, greedy(4))
    state, ending = nv.submit(
        MODEL, state, [9] * 8, nv.SamplingParams(temperature=0, max_tokens=40, stop_token_ids=range(MODEL.config.vocab_size))
    )
    state, cut = nv.submit(MODEL, state, [8] * 8, greedy(40))
    state, outputs = ended(state, 200)
    assert {rid: (output.finish_reason, output.out_of_pages) for rid, (_, output) in outputs.items()} == {
        limited: ("length", False),
        ending: ("stop", False),
        cut: ("length", True),
    }
    assert outputs[cut][1].error is None and len(outputs[cut][1].token_ids) == 6 * SIZE - 8 + 1
    state = nv.release(state, chunk)
    state, whole = nv.submit(MODEL, state, [8] * 8, greedy(40))  # alone, it fills the context
    state, outputs = ended(state, 200)
    assert outputs[whole][1].finish_reason == "length" and not outputs[whole][1].out_of_pages


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_only_those_fail_that_cannot_run_beside_the_chunks(data: st.DataObject) -> None:
    """Requests over tiny pools with chunks. Each that fails is too long for the pages that no chunk owns."""
    num_pages = data.draw(st.integers(3, 14), "pages")
    limits = {"max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": data.draw(st.sampled_from([4, 16, 64]), "budget")}
    state = nv.init_state(MODEL, num_pages=num_pages, page_size=SIZE, **limits)
    chunks, texts = [], {}
    for number in range(data.draw(st.integers(0, 2), "chunks")):
        length = data.draw(st.integers(1, 4 * SIZE), "length")
        if pages_for(length, SIZE) < state.pool.num_available:
            state, chunk = nv.prefill(MODEL, state, [30 + number] * length)
            chunks.append(chunk)
    for _ in range(data.draw(st.integers(1, 8), "requests")):
        tokens = [data.draw(st.integers(1, 9))] * data.draw(st.integers(1, (num_pages - 1) * SIZE), "prompt")
        on = data.draw(st.sampled_from([None, *chunks]))
        context = tokens if on is None else [on, tokens]
        whole = len(tokens) + (0 if on is None else len(on))
        if whole < min(64, num_pages * SIZE):
            state, rid = nv.submit(MODEL, state, context, greedy(data.draw(st.integers(1, 12))))
            texts[rid] = whole, 0 if on is None else len(on) // SIZE
        if data.draw(st.booleans()):
            state, _ = ended(state, 1)
            nv.check(state)
    pinned = len({page for chunk in chunks for page in chunk.pages})
    failed = {}
    for _ in range(600):
        if not (state.running or state.waiting):
            break
        state, outs = nv.step(MODEL, state)
        failed |= {out.request_id: out.error for out in outs if out.error is not None}
    nv.check(state)
    assert not state.running and not state.waiting
    for rid, error in failed.items():
        assert isinstance(error, nv.OutOfPagesError) and error.request_id == rid
        length, shared = texts[rid]
        assert pages_for(length, SIZE) - shared > num_pages - pinned
    for chunk in chunks:
        state = nv.release(state, chunk)
    assert state.pool.num_available == num_pages


def test_pages_of_waiting_requests_are_taken_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts over a chunk that was released give pages back; the queue is put in order once, not once for each of them."""
    sorts: list[int] = []
    counted = preemption.num_freed
    monkeypatch.setattr(preemption, "num_freed", lambda draft, some: sorts.append(1) or counted(draft, some))
    state = nv.init_state(MODEL, num_pages=20, page_size=SIZE, max_model_len=76, max_num_seqs=1)
    state, first = nv.submit(MODEL, state, [9] * 60, greedy(12))
    ids = []
    for number in range(8):
        state, chunk = nv.prefill(MODEL, state, [30, number])
        state, rid = nv.submit(MODEL, state, [chunk, [5]], greedy(1))
        state, ids = nv.release(state, chunk), [*ids, rid]
    state, outputs = ended(state, 100)
    assert outputs[first][1].finish_reason == "length" and all(outputs[i][1].error is None for i in ids)
    assert 0 < len(sorts) < 8
    nv.check(state)


def test_nothing_is_taken_from_those_that_wait_if_it_would_not_suffice() -> None:
    state = nv.init_state(MODEL, num_pages=16, page_size=SIZE, max_model_len=60)
    state, chunk = nv.prefill(MODEL, state, list(range(32)))
    state, bad = nv.submit(MODEL, state, [9] * 40, greedy(2))
    state, good = nv.submit(MODEL, state, [chunk, [1]], greedy(2))
    state, outputs = ended(state, 50)
    assert isinstance(outputs[bad][1].error, nv.OutOfPagesError)
    assert outputs[good][1].num_cached_tokens == 32


def test_a_reply_that_is_stuck_takes_nothing_from_those_that_wait() -> None:
    """Their pages belong to a chunk, too, so they would not help."""
    state = nv.init_state(MODEL, num_pages=8, page_size=SIZE, max_model_len=32, max_num_seqs=1)
    state, chunk = nv.prefill(MODEL, state, list(range(14)))  # 4 pages, the last with room
    state, long = nv.submit(MODEL, state, [9] * 10, greedy(20))
    state, _ = nv.step(MODEL, state)
    state, waits = nv.submit(MODEL, state, [chunk, [1]], greedy(1))
    state, outputs = ended(state, 60)
    assert outputs[long][1].finish_reason == "length" and len(outputs[long][1].token_ids) < 20
    assert outputs[waits][1].num_cached_tokens == 14


def test_a_planted_fault_is_found() -> None:
    """Pages of running replies that are taken for a chunk's make requests fail that only had to wait."""
    with patch.object(admission, "num_freed", lambda *_: 0), pytest.raises(AssertionError):
        test_a_prompt_waits_for_pages_that_a_reply_will_give_back()


def test_pages_of_a_request_that_ends_count_for_those_that_share_them() -> None:
    state = nv.init_state(MODEL, num_pages=4, page_size=SIZE, max_model_len=60)
    state, both = nv.prefill(MODEL, state, list(range(6)))
    state, bad = nv.submit(MODEL, state, [both, [7] * 8], greedy(2), priority=-1)  # 4 pages, of which it shares one
    state, last = nv.submit(MODEL, state, both, greedy(2), priority=1)
    state = nv.release(state, both)  # the two requests have its pages
    state, one = nv.prefill(MODEL, state, [1, 2])
    state, two = nv.prefill(MODEL, state, [3])
    state, good = nv.submit(MODEL, state, [one, [5] * 3], greedy(3))  # 2 pages, if `last` gives up its own
    state, outputs = ended(state, 100)
    assert isinstance(outputs[bad][1].error, nv.OutOfPagesError)
    assert [outputs[i][1].finish_reason for i in (good, last)] == ["length"] * 2
    assert nv.release(nv.release(state, one), two).pool.num_available == 4
