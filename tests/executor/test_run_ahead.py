"""Decode steps that run before they are asked for: all that runs is counted."""

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest

import nanovllm as nv
from nanovllm.executor.decode_carry import DecodeCarry
from nanovllm.executor.eager import EagerExecutor
from nanovllm.executor.executor import Drawn, Masks, Runtime
from nanovllm.executor.run_ahead import RunAhead, longest_first, placed, steps_ahead
from nanovllm.models.model import Model
from nanovllm.state.kv_cache import KVState
from nanovllm.state.request import Request, Sequence
from nanovllm.state.vector import IntVector
from nanovllm.state.window_frames import Frames
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.run_ahead_executor import AheadExecutor

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10], [11]]


class Counting(EagerExecutor):
    """Counts the tokens that decode steps run, and the rows that were padding."""

    rows = padding = loads = 0

    def load(self, model: Model, kv: KVState, rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        self.loads += 1
        return super().load(model, kv, rows, frames=frames)

    def decode(self, model: Model, carry: DecodeCarry, masks: Masks | None = None) -> tuple[DecodeCarry, Drawn]:
        self.rows += carry.active.shape[0]
        self.padding += int((carry.active == 0).sum())
        return super().decode(model, carry, masks)


def run(ahead: bool, params: nv.SamplingParams) -> tuple[list[list[int]], nv.EngineState, Counting]:
    model = random_model(tiny_config())
    state = nv.init_state(model, num_pages=40, page_size=4, max_num_seqs=3)
    counting = Counting(state.config)
    state = replace(state, runtime=Runtime(state.runtime.lease, AheadExecutor.over(counting, 4) if ahead else counting))
    state, gens = nv.generate_many(model, state, PROMPTS, [replace(params, max_tokens=6 + 3 * i) for i in range(3)])
    return [gen.token_ids for gen in gens], state, counting


def test_all_that_runs_is_counted_and_draws_the_same() -> None:
    # The fifth token of a reply ends it: not known before it is drawn, so the step behind it was run in vain.
    for params in (
        nv.SamplingParams(temperature=0, ignore_eos=True),
        nv.SamplingParams(temperature=0.9, seed=5, logprobs=2, ignore_eos=True),
        nv.SamplingParams(temperature=0.9, seed=5, frequency_penalty=0.5, ignore_eos=True),
    ):
        plain, before, _ = run(False, params)
        stop = (plain[1][4],)
        stopping = replace(params, stop_token_ids=stop)
        plain, before, counted = run(False, stopping)
        ahead, after, counting = run(True, stopping)
        assert ahead == plain
        executor = after.runtime.executor
        assert isinstance(executor, AheadExecutor)
        waiting = len(executor.ahead.places) if executor.ahead.launched else 0
        padding = counting.padding
        assert counting.rows - padding - counted.rows == after.stats.discarded_tokens + waiting + executor.ahead.unused
        assert before.stats.decode_tokens == after.stats.decode_tokens - after.stats.discarded_tokens
        if not params.frequency_penalty:
            assert after.stats.discarded_tokens > 0


def test_a_row_that_ends_leaves_and_the_others_keep_their_step() -> None:
    """Known ends or not: one token is run in vain for a reply that ends, and nothing is loaded anew for the others."""
    model, prompts = random_model(tiny_config()), [[3, 4, 5], [6, 7, 8, 9, 10], [11, 12]]

    def replies(params: nv.SamplingParams | list[nv.SamplingParams]) -> tuple[list[list[int]], int, int]:
        state = nv.init_state(model, num_pages=400, page_size=4, max_num_seqs=3)
        counting = Counting(state.config)
        state = replace(state, runtime=Runtime(state.runtime.lease, AheadExecutor.over(counting, 4)))
        state, gens = nv.generate_many(model, state, prompts, params)
        return [gen.token_ids for gen in gens], counting.loads, state.stats.discarded_tokens

    plain = nv.SamplingParams(temperature=0.9, seed=5, max_tokens=30, ignore_eos=True)
    whole, loads, discarded = replies(plain)
    assert discarded == 0
    at = next(i for i, token in enumerate(whole[1]) if token not in whole[1][:i] and i > 8)
    for ends in (replace(plain, stop_token_ids=(whole[1][at],)), replace(plain, max_tokens=at + 1)):
        assert replies([plain, ends, plain]) == ([whole[0], whole[1][: at + 1], whole[2]], loads, 1)


def rows_of(*wanted: tuple[int, int, int, int]) -> list[Sequence]:
    """Sequences by (tokens, filled, pages, max_len)."""

    def request(most: int) -> Request:
        return Request(request_id=0, num_prompt=1, sampling=nv.SamplingParams(), seed=0, max_len=most, stop_ids=frozenset(), arrival=0.0)

    return [
        Sequence(request=request(most), tokens=IntVector.of(range(tokens)), pages=IntVector.of(range(pages)), num_filled=filled)
        for tokens, filled, pages, most in wanted
    ]


@pytest.mark.parametrize(
    ("rows", "steps"),
    [
        ([], 0),
        ([(5, 4, 2, 100)], 3),  # 5 tokens, the last runs in the step that is asked for; 3 places are left in two pages of 4
        ([(5, 4, 10, 9)], 3),  # the ninth token is drawn and never run
        ([(5, 4, 10, 6)], 0),  # ends with the step that is asked for
        ([(5, 4, 10, 6), (5, 4, 10, 20)], 14),  # the first ends and is left behind
        ([(5, 4, 10, 6), (5, 4, 2, 20)], 3),
        ([(5, 4, 2, 6), (5, 4, 4, 20)], 11),  # the first has no room either, and needs none
        ([(5, 4, 2, 9), (5, 4, 10, 20)], 14),  # the first has room for all that it will ever run
        ([(5, 5, 10, 20), (5, 4, 10, 20)], 0),  # a row that only reads
        ([(8, 7, 2, 20)], 0),
    ],
)
def test_how_far_steps_may_go(rows: list[tuple[int, int, int, int]], steps: int) -> None:
    assert steps_ahead(rows_of(*rows), 4) == steps


def test_what_is_known_of_steps_ahead() -> None:
    ahead = RunAhead(4)
    rows = rows_of((5, 4, 10, 20), (5, 4, 10, 20), (5, 4, 10, 20))
    ahead.restart(rows, np.array([2, 0, 1]), allowed=True)
    assert not ahead.take() and ahead.next() and ahead.take() and ahead.next()
    assert ahead.narrow([0, 2], [rows[0], rows[2]]).tolist() == [0]
    assert ahead.narrow([1], [rows[2]]).tolist() == [2]
    assert ahead.places.tolist() == [1] and ahead.take_discarded_count() == 2 and ahead.take_discarded_count() == 0
    ahead.restart(rows, np.arange(3), allowed=False)
    assert ahead.take_discarded_count() == 1 and not ahead.take() and not ahead.next()


def test_the_longest_rows_come_first_and_stay_there() -> None:
    rows = rows_of((5, 4, 10, 20), (9, 8, 10, 20), (5, 4, 10, 20), (7, 6, 10, 20))
    places = longest_first(rows)
    assert places.tolist() == [2, 0, 3, 1]
    assert placed(rows, places) == [rows[1], rows[3], rows[0], rows[2]]
    later = [row.drew(np.array([1, 2], np.int32)) for row in rows]
    assert longest_first(later).tolist() == places.tolist()
    assert longest_first([]).tolist() == []


def test_a_step_that_runs_ahead_outlives_growth() -> None:
    """It does if the old pages have a place for the token after its own, because the step itself moves on to that place."""
    ahead, long = RunAhead(4), rows_of((7, 6, 10, 40))
    ahead.restart(rows_of((7, 6, 2, 40)), np.arange(1), allowed=True)  # two pages of 4 have places for two more steps, and no third
    assert not ahead.outlives_growth() and ahead.next() and not ahead.outlives_growth()
    ahead.restart(rows_of((6, 5, 2, 40)), np.arange(1), allowed=True)
    assert ahead.next() and ahead.outlives_growth()
    ahead.grow(long)
    assert ahead.launched and ahead.left == 32 and ahead.take_discarded_count() == 1  # the first one was discarded


def test_rows_that_must_not_run_ahead_do_not_after_an_end() -> None:
    ahead, rows = RunAhead(4), rows_of((5, 4, 10, 20), (5, 4, 10, 20))
    ahead.restart(rows, np.arange(2), allowed=False)
    ahead.narrow([1], rows[1:])
    assert not ahead.next()
