"""`compose` and `drop`: where KV comes from, what is run, what is exact, and what stays as it was."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nanovllm as nv
from nanovllm.models.model import Model
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.reference import Reference

GREEDY = nv.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(tiny_config(vocab_size=50, num_layers=3))


def kv_of(state: EngineState, chunk: Chunk) -> torch.Tensor:
    """KV of a chunk's tokens, [L, T, 2, K, D]."""
    (pool,), size, at = state.kv.pools, state.config.page_size, np.arange(len(chunk))
    pages = torch.from_numpy(chunk.pages.array()[at // size].astype(np.int64))
    return pool.permute(0, 1, 4, 2, 3, 5)[:, pages, torch.from_numpy(at % size)].clone()


def filled(model: Model, runs: list[list[int]], page_size: int = 4, num_pages: int = 64) -> tuple[EngineState, list[Chunk]]:
    state, chunks = nv.init_state(model, num_pages=num_pages, page_size=page_size), []
    for run in runs:
        state, chunk = nv.prefill(model, state, run)
        chunks.append(chunk)
    return state, chunks


runs = st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=9), min_size=1, max_size=4)


@given(runs=runs, page_size=st.sampled_from([1, 3, 4]), order=st.data())
@settings(max_examples=40)
def test_composed_kv_is_the_sources_turned(model: Model, runs: list[list[int]], page_size: int, order: st.DataObject) -> None:
    state, chunks = filled(model, runs, page_size)
    chosen = order.draw(st.lists(st.sampled_from(chunks), min_size=1, max_size=5))
    alone = {chunk.liveness: kv_of(state, chunk) for chunk in chunks}
    before = state.stats
    state, whole = nv.compose(model, state, chosen)
    nv.check(state)
    assert whole.token_ids.tolist() == [token for chunk in chosen for token in chunk.token_ids.tolist()]
    assert state.stats.prefill_tokens == before.prefill_tokens
    assert state.stats.reused_tokens - before.reused_tokens == (len(whole) if len(chosen) > 1 else 0)
    start, found = 0, kv_of(state, whole)
    for chunk in chosen:
        part, source = found[:, start : start + len(chunk)], alone[chunk.liveness]
        assert torch.equal(part[:, :, 1], source[:, :, 1])
        scores = [torch.einsum("ltkd,lskd->lkts", x[:, :, 0], x[:, :, 0]) for x in (part, source)]
        torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-3)  # a rotation keeps products of keys at equal distances
        start += len(chunk)
    for chunk in chunks:
        assert torch.equal(kv_of(state, chunk), alone[chunk.liveness])
    assert whole.provenance.exact == (len(chosen) == 1)
    assert whole.num_exact == len(chosen[0])


def exact_kv(model: Model, tokens: list[int]) -> torch.Tensor:
    state, (chunk,) = filled(model, [tokens])
    return kv_of(state, chunk)


@given(runs=runs, recompute=st.sampled_from([0, 1, 3, 100, 0.3, 0.99, "all"]), page_size=st.sampled_from([1, 3, 4]))
@settings(max_examples=60)
def test_what_is_run_again_is_counted_and_helps(model: Model, runs: list[list[int]], recompute: int | float | str, page_size: int) -> None:
    state, chunks = filled(model, runs, page_size)
    before = state.stats
    state, whole = nv.compose(model, state, chunks, recompute)
    nv.check(state)
    later = sum(map(len, chunks[1:]))
    ran = state.stats.prefill_tokens - before.prefill_tokens
    match recompute:
        case "all" | 100:
            assert ran <= later
            exact = exact_kv(model, whole.token_ids.tolist())
            torch.testing.assert_close(kv_of(state, whole), exact, rtol=1e-4, atol=1e-4)
            assert whole.provenance.exact == (recompute == "all" or len(chunks) == 1)
        case float():
            assert ran == (int(np.ceil(recompute * later)) if len(chunks) > 1 else 0)
        case _:
            assert ran == sum(min(recompute, len(chunk)) for chunk in chunks[1:])


def test_recomputed_heads_are_as_if_run_one_after_another(model: Model) -> None:
    """Each chunk's head attends to the recomputed heads before it."""
    state, (a, b, c) = filled(model, [[1, 2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13, 14, 15]])
    state, both = nv.compose(model, state, [a, b], 2)
    state, by_steps = nv.compose(model, state, [both, c], 2)
    state, at_once = nv.compose(model, state, [a, b, c], 2)
    torch.testing.assert_close(kv_of(state, by_steps), kv_of(state, at_once), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lead", ["", " ", "\n", "\n\n"])
@pytest.mark.parametrize("recompute", [0, 4])
def test_composed_sentences_are_what_the_weights_make_of_them(lead: str, recompute: int) -> None:
    """Against a decoder in float64 whose tokens see what they saw: what a model makes of a cut is its own doing."""
    tiny = nv.load_model("tiny", "cpu")
    assert tiny.tokenizer is not None
    question = f"{lead}The capital of Aistonia is"
    texts = ["The king of Aistonia is Oswin.", f"{lead}The capital of Aistonia is Velmora.", question]
    first, second, asked = (tiny.tokenizer.encode(text) for text in texts)
    reference = Reference(tiny)

    def run(before: list[tuple[int, np.ndarray]], tokens: list[int]) -> tuple[list[tuple[int, np.ndarray]], np.ndarray]:
        cells, logits = list(before), np.empty(0)
        for token in tokens:
            kv, logits = reference.run(cells, token, len(cells))
            cells.append((len(cells), kv))
        return cells, logits

    head, _ = run([], first)
    alone, _ = run([], second)
    moved = [(len(head) + position, kv) for position, kv in alone]
    again, _ = run(head, second[:recompute])
    _, expected = run([*again, *moved[recompute:]], asked)
    state = nv.init_state(tiny, num_pages=64)
    state, a = nv.prefill(tiny, state, first)
    state, b = nv.prefill(tiny, state, second)
    state, both = nv.compose(tiny, state, [a, b], recompute)
    state, one = nv.compose(tiny, state, [a])
    found = next_logits(tiny, state, [[both, asked], [a, asked], [one, asked]])
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=2e-3)
    np.testing.assert_allclose(found[1], run(head, asked)[1], rtol=0, atol=2e-3)
    np.testing.assert_allclose(found[1], found[2], rtol=0, atol=1e-4)  # they share full pages, so different tokens of them ran


def next_logits(model: Model, state: EngineState, contexts: list[list[Any]]) -> np.ndarray:
    """The logits behind the last token of each context."""
    state, carry = nv.begin(model, state, contexts, GREEDY, room=1)
    carry, out = nv.decode_step(model.params, carry, model.config)
    nv.commit(model, state, carry)
    return out.logits.numpy()


def test_a_chunk_that_ends_before_a_gap_goes_on_without_it(model: Model) -> None:
    state, (chunk,) = filled(model, [list(range(1, 10))])
    state, kept = nv.drop(model, state, chunk, 3, 5, "gap")
    assert kept.gaps == ((3, 2),)
    state, head = nv.truncate(state, kept, 3)
    assert head.gaps == () and head.provenance.exact
    state, longer = nv.prefill(model, state, [40, 41], after=head)
    assert longer.positions.tolist() == [0, 1, 2, 3, 4]
    torch.testing.assert_close(kv_of(state, longer), exact_kv(model, [1, 2, 3, 40, 41]), rtol=1e-4, atol=1e-4)


def test_a_fraction_chooses_what_deviates_most(model: Model) -> None:
    state, chunks = filled(model, [[1, 2, 3, 4, 5, 6], list(range(10, 22))])
    exact = exact_kv(model, [*range(1, 7), *range(10, 22)])
    state, whole = nv.compose(model, state, chunks)
    moved = kv_of(state, whole)
    deviation = (moved[1] - exact[1]).square().flatten(1).sum(1)  # of the second layer, the last one that is run to choose
    errors = []
    for recompute in (0, 0.25, 0.5, 0.75, 0.999):
        before = state.stats
        state, whole = nv.compose(model, state, chunks, recompute)
        assert state.stats.prefill_tokens - before.prefill_tokens == math.ceil(12 * recompute)
        assert state.stats.probed_tokens - before.probed_tokens == (12 if recompute else 0)
        found = kv_of(state, whole)
        again = (found[2] != moved[2]).flatten(1).any(1).nonzero()[:, 0]  # the third is run for what was chosen alone
        assert again.tolist() == sorted(deviation.topk(math.ceil(12 * recompute)).indices.tolist())
        errors.append((found - exact).square().sum().item())
    assert all(later < earlier for earlier, later in pairwise(errors)), errors
    assert errors[-1] < 1e-4 * errors[0]


@given(length=st.integers(2, 24), span=st.data(), page_size=st.sampled_from([1, 3, 4]), mode=st.sampled_from(["recompute", "shift", "gap"]))
@settings(max_examples=80)
def test_drop(model: Model, length: int, span: st.DataObject, page_size: int, mode: str) -> None:
    tokens = [(7 * i + 3) % 50 for i in range(length)]
    state, (chunk,) = filled(model, [tokens], page_size)
    start = span.draw(st.integers(0, length - 1))
    stop = span.draw(st.integers(start + 1, length if start else length - 1))
    before, old = state.stats, kv_of(state, chunk)
    state, kept = nv.drop(model, state, chunk, start, stop, mode)
    nv.check(state)
    assert kept.token_ids.tolist() == tokens[:start] + tokens[stop:]
    assert torch.equal(kv_of(state, chunk), old)
    new = kv_of(state, kept)
    assert torch.equal(new[:, :start], old[:, :start])
    ran = state.stats.prefill_tokens - before.prefill_tokens
    if stop == length:
        assert (ran, kept.provenance.exact) == (0, True)
    elif mode == "recompute":
        assert ran <= length - stop
        assert kept.provenance.exact
        torch.testing.assert_close(new, exact_kv(model, kept.token_ids.tolist()), rtol=1e-4, atol=1e-4)
    else:
        assert ran == 0
        assert not kept.provenance.exact
        assert kept.num_exact == start
        assert torch.equal(new[:, start:, 1], old[:, stop:, 1])
        positions = [*range(start), *range(stop, length)] if mode == "gap" else list(range(len(kept)))
        assert kept.positions.tolist() == positions
        assert mode == "shift" or torch.equal(new[:, start:, 0], old[:, stop:, 0])


@pytest.mark.parametrize("start", [4, 6])
def test_a_gap_of_whole_pages_shares_what_stands_behind_it(model: Model, start: int) -> None:
    state, (chunk,) = filled(model, [list(range(20))])
    free = state.pool.num_available
    state, kept = nv.drop(model, state, chunk, start, start + 8, "gap")
    assert free - state.pool.num_available == (start % 4 != 0)
    state, reply = nv.generate(model, state, [kept, [3, 4]], GREEDY)
    nv.check(state)
    assert reply.chunk.positions.tolist() == [*range(start), *range(start + 8, 20 + 2 + 6)]


def test_a_reply_after_a_gap_sees_its_positions(model: Model) -> None:
    """Keys behind the gap, moved to follow without one, answer alike: only the distance to what stands before differs."""
    state, (chunk,) = filled(model, [list(range(12))])
    state, gap = nv.drop(model, state, chunk, 0, 4, "gap")  # nothing stands before: both are the same but for a common rotation
    state, shift = nv.drop(model, state, chunk, 0, 4, "shift")
    state, (one, other) = nv.generate_many(model, state, [[gap, [5]], [shift, [5]]], GREEDY)
    assert one.token_ids == other.token_ids
    state, carry = nv.begin(model, state, [[gap, [5]], [shift, [5]]], GREEDY, room=5)
    for _ in range(5):
        carry, out = nv.decode_step(model.params, carry, model.config)
        torch.testing.assert_close(out.logits[0], out.logits[1], rtol=1e-3, atol=1e-3)
    state, _ = nv.commit(model, state, carry)
    nv.check(state)


def test_approximate_kv_is_never_found_by_tokens(model: Model) -> None:
    state, (a, b) = filled(model, [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12]])
    state, whole = nv.compose(model, state, [a, b])
    state, _ = nv.generate(model, state, [whole, [1]], GREEDY)
    before = state.stats
    state, again = nv.prefill(model, state, whole.token_ids.tolist())
    assert state.stats.reused_tokens - before.reused_tokens == 4  # a's page alone
    torch.testing.assert_close(kv_of(state, again), exact_kv(model, whole.token_ids.tolist()), rtol=1e-4, atol=1e-4)
    assert again.provenance.exact


def test_what_is_built_on_an_approximate_chunk_says_so(model: Model) -> None:
    state, (a, b) = filled(model, [[1, 2, 3], [4, 5, 6]])
    state, whole = nv.compose(model, state, [a, b])
    assert str(whole.provenance) == "approximate: composed, recompute=0"
    state, longer = nv.prefill(model, state, [7, 8], after=whole)
    state, fewer = nv.drop(model, state, longer, 4, 6, "shift")
    assert fewer.provenance.operations == ("composed, recompute=0", "dropped by shift")
    state, head = nv.truncate(state, longer, 3)
    assert head.provenance.exact
    state, part = nv.truncate(state, longer, 4)
    assert not part.provenance.exact
    nv.check(state)


def test_a_full_pool_refuses_and_changes_nothing(model: Model) -> None:
    state, (a, b) = filled(model, [[1, 2, 3, 4, 5], [6, 7, 8]], num_pages=4)
    old = [kv_of(state, chunk) for chunk in (a, b)]
    for call in (lambda: nv.compose(model, state, [b, a, b]), lambda: nv.compose(model, state, [b, a, b], 2)):
        with pytest.raises(nv.OutOfPagesError, match="pages"):
            call()
    assert all(torch.equal(x, kv_of(state, chunk)) for x, chunk in zip(old, (a, b), strict=True))
    nv.check(state)
    state = nv.release(state, a)
    state, _ = nv.generate(model, state, [b, [1]], GREEDY)


@pytest.mark.parametrize("recompute", [-1, True, 1.0, 0.0, float("nan"), "some", None, 2.5])
def test_a_bad_recompute_is_named(model: Model, recompute: object, untyped: None) -> None:
    state, chunks = filled(model, [[1, 2], [3]])
    with pytest.raises(nv.InvalidRequestError, match="recompute="):
        nv.compose(model, state, chunks, recompute)  # pyright: ignore[reportArgumentType]


def test_bad_chunks_are_refused(model: Model, untyped: None) -> None:
    state, (a, b) = filled(model, [[1, 2], [3]])
    for wrong in ([], a, [a, "text"], None):
        with pytest.raises(nv.InvalidRequestError, match=r"^chunks(\[1\])?=(\[\]|Chunk\(.*|'text'|None) must be a "):
            nv.compose(model, state, wrong)  # pyright: ignore[reportArgumentType]
    state = nv.release(state, b)
    with pytest.raises(nv.ReleasedChunkError):
        nv.compose(model, state, [a, b])
    _, (foreign,) = filled(model, [[1, 2]])
    with pytest.raises(nv.ForeignChunkError):
        nv.compose(model, state, [a, foreign])
    with pytest.raises(nv.InvalidRequestError, match="at most"):
        nv.compose(model, state, [a] * 200)


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (3, 3), (4, 2), (-1, 2), (1, 6), ("a", 2), (1.0, 2)])
def test_a_bad_span_is_named(model: Model, start: object, stop: object, untyped: None) -> None:
    state, (chunk,) = filled(model, [[1, 2, 3, 4, 5]])
    with pytest.raises(nv.InvalidRequestError, match="start="):
        nv.drop(model, state, chunk, start, stop)  # pyright: ignore[reportArgumentType]
    with pytest.raises(nv.InvalidRequestError, match="mode="):
        nv.drop(model, state, chunk, 1, 2, "cut")  # pyright: ignore[reportArgumentType]


def test_many_gaps(model: Model) -> None:
    state, (chunk,) = filled(model, [list(range(30))])
    kept, positions = chunk, list(range(30))
    for start, stop in ((20, 24), (3, 8), (10, 13), (1, 3), (2, 6)):
        state, kept = nv.drop(model, state, kept, start, stop, "gap")
        del positions[start:stop]
        assert kept.positions.tolist() == positions
        nv.check(state)
    state, close = nv.compose(model, state, [kept])
    assert close.positions.tolist() == list(range(len(kept)))
    state, head = nv.truncate(state, kept, 1)
    assert head.positions.tolist() == [0]


def test_the_operations_of_all_chunks_are_named_once(model: Model) -> None:
    """A composed chunk may occur twice in a list, and a later chunk may be approximate where the first is exact."""
    state, (a, b) = filled(model, [[1, 2, 3], [4, 5]])
    state, both = nv.compose(model, state, [a, b])
    state, more = nv.compose(model, state, [both, a, both])
    assert more.provenance.operations == ("composed, recompute=0",)
    state, shorter = nv.drop(model, state, a, 0, 1, "shift")
    state, last = nv.compose(model, state, [a, shorter], 1)
    assert last.provenance.operations == ("dropped by shift", "composed, recompute=1")


@pytest.mark.parametrize("recompute", [0, 2, "all"])
def test_chunks_that_just_fit_are_composed(model: Model, recompute: int | str) -> None:
    state = nv.init_state(model, num_pages=64, page_size=4, max_model_len=9)
    state, a = nv.prefill(model, state, [1, 2, 3, 4, 5])
    state, b = nv.prefill(model, state, [6, 7, 8, 9])
    state, c = nv.prefill(model, state, [10])
    with pytest.raises(nv.InvalidRequestError, match="the chunks have 10 tokens; this engine holds at most 9"):
        nv.compose(model, state, [a, b, c], recompute)  # pyright: ignore[reportArgumentType]
    state, whole = nv.compose(model, state, [a, b], recompute)  # pyright: ignore[reportArgumentType]
    assert whole.token_ids.tolist() == list(range(1, 10))
    nv.check(state)


def test_an_exact_result_runs_only_what_is_not_exact(model: Model) -> None:
    """The exact beginning of the first chunk is kept to its last token, in the middle of a page. What follows it may be inexact."""
    state, (a, b, c) = filled(model, [list(range(7)), [10, 11, 12], [13, 14]])
    state, both = nv.compose(model, state, [a, b])
    for chunks, wanted in (([a, c], 2), ([both, c], 5)):
        before = state.stats.prefill_tokens
        state, whole = nv.compose(model, state, chunks, "all")
        assert state.stats.prefill_tokens - before == wanted
        assert whole.provenance.exact
        torch.testing.assert_close(kv_of(state, whole), exact_kv(model, whole.token_ids.tolist()), rtol=1e-4, atol=1e-4)


def test_learned_positions_are_refused_where_keys_would_be_rotated() -> None:
    learned = random_model(tiny_config("GPT2LMHeadModel", vocab_size=50))
    state, (a, b) = filled(learned, [[1, 2, 3, 4], [5, 6, 7]])
    told = "random-0 has learned positions, so it does not support "
    with pytest.raises(nv.InvalidRequestError, match=f'^{told}compose with recompute=0; recompute="all" works$'):
        nv.compose(learned, state, [a, b])
    with pytest.raises(nv.InvalidRequestError, match=f'^{told}drop with mode="shift"; "recompute" and "gap" work$'):
        nv.drop(learned, state, a, 1, 2, "shift")
    state, whole = nv.compose(learned, state, [a, b], "all")
    for mode in ("recompute", "gap"):
        state, kept = nv.drop(learned, state, whole, 1, 3, mode)
        assert kept.token_ids.tolist() == [1, 4, 5, 6, 7]
