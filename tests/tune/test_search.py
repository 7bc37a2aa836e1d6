"""Which cut is taken, with a clock made up: margins, wrong results, failures, noise."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map

from nanovllm.bench import SHAPES
from nanovllm.models.cuts import StepCuts
from nanovllm.ops.cuts import Cut
from nanovllm.tune.candidates import default_cut
from nanovllm.tune.report import table, verdict
from nanovllm.tune.run import Result, chosen, plan, run
from nanovllm.tune.search import Found, Times, Unfit, search
from nanovllm.tune.work import Machine

H200 = Machine(processors=132, memory=200_000)
DEFAULT = (8,)


def line(cut: Cut) -> tuple[Cut, ...]:
    """Cuts in a row: each has the one before and the one behind."""
    return ((cut[0] - 1,), (cut[0] + 1,))


class Clock:
    """A `Measure` out of a table; cuts that it does not have are slow. Counts what was asked for."""

    def __init__(self, times: dict[int, float | Times | Exception], default: float | Times = 10.0):
        self.times, self.default, self.asked = times, default, list[Cut]()

    def __call__(self, cut: Cut) -> Times:
        self.asked.append(cut)
        settings = len(self.default) if isinstance(self.default, tuple) else 1
        found = self.times.get(cut[0], 99.0) if cut else self.default
        if isinstance(found, Exception):
            raise found
        return found if isinstance(found, tuple) else (found,) * settings


def test_the_default_stays_where_nothing_is_faster() -> None:
    clock = Clock({7: 11.0, 9: 10.0})
    found = search(DEFAULT, (), line, clock)
    assert found == Found(cut=(), default_us=10.0, chosen_us=10.0, measured=3, skipped=())
    assert DEFAULT not in clock.asked  # as the default alone


@pytest.mark.parametrize(("us", "taken"), [(9.8, False), (9.71, False), (9.69, True), (5.0, True)])
def test_a_margin_is_asked_for(us: float, taken: bool) -> None:
    found = search(DEFAULT, (), line, Clock({9: us}), margin=0.03)
    assert (found.cut, found.chosen_us) == (((9,), us) if taken else ((), 10.0))
    assert found.default_us == 10.0


def test_steps_are_taken_as_long_as_they_pay() -> None:
    found = search(DEFAULT, (), line, Clock({9: 9.0, 10: 8.0, 11: 7.0, 12: 7.2, 13: 1.0}))
    assert found.cut == (11,) and found.chosen_us == 7.0  # (13,) is behind a hill


def test_a_start_may_be_far_away() -> None:
    found = search(DEFAULT, ((20,), (30,)), line, Clock({20: 12.0, 30: 9.5, 31: 6.0, 19: 1.0}))
    assert found.cut == (31,)


def test_a_cut_that_is_wrong_or_cannot_be_made_is_left_out_and_said() -> None:
    clock = Clock({9: Unfit("wrong by 0.5"), 7: Unfit("no kernel: out of shared memory"), 20: Unfit("wrong by nan"), 21: 1.0})
    found = search(DEFAULT, ((20,),), line, clock)
    assert found.cut == () and found.measured == 1
    assert dict(found.skipped) == {(20,): "wrong by nan", (7,): "no kernel: out of shared memory", (9,): "wrong by 0.5"}
    assert len(clock.asked) == len(set(clock.asked))  # none is tried twice


def test_other_errors_go_through() -> None:
    with pytest.raises(ZeroDivisionError):
        search(DEFAULT, (), line, Clock({9: ZeroDivisionError()}))


def test_a_default_that_cannot_be_measured_is_no_result() -> None:
    def refused(cut: Cut) -> Times:
        raise Unfit("no kernel")

    with pytest.raises(Unfit):
        search(DEFAULT, (), line, refused)


def test_what_wins_once_by_luck_does_not_win() -> None:
    """The default was slow for a moment: at the end both are measured again."""
    times = iter([(20.0,), (10.0,), (10.0,)])

    def measure(cut: Cut) -> Times:
        return next(times) if not cut else (10.0,)

    found = search(DEFAULT, (), line, measure)
    assert found.cut == () and found.default_us == found.chosen_us == 10.0


@pytest.mark.parametrize(("times", "taken"), [((5.0, 10.2), True), ((5.0, 10.4), False), ((9.6, 9.6), True), ((9.8, 9.8), False)])
def test_what_loses_in_one_setting_is_not_taken(times: Times, taken: bool) -> None:
    found = search(DEFAULT, (), line, Clock({9: times}, default=(10.0, 10.0)))
    assert found.cut == ((9,) if taken else ())


@given(st.dictionaries(st.integers(0, 16), st.one_of(st.floats(1, 20), st.just(None)), max_size=17))
def test_a_choice_is_never_slower_and_never_one_that_was_left_out(times: dict[int, float | None]) -> None:
    clock = Clock({n: Unfit("no") if us is None else us for n, us in times.items()})
    found = search(DEFAULT, ((0,), (16,)), line, clock)
    if found.cut:
        assert times.get(found.cut[0]) == found.chosen_us <= 9.7 and found.cut not in dict(found.skipped)
    else:
        assert found.chosen_us == 10.0


# A whole run


def always(measure: Callable[[Any, Cut], Times]) -> Callable[[Any], Any]:
    return lambda work: nullcontext(lambda cut: measure(work, cut))


def test_a_run_goes_through_all_kernels_and_keeps_what_won() -> None:
    planned = plan(SHAPES["qwen3-0.6b"], (64, 1, 64), H200)
    assert [work.rows for work in planned] == [1] * 6 + [64] * 5

    def measure(work: Any, cut: Cut) -> Times:
        if work.part == "down":
            raise Unfit("wrong by 1") if cut else AssertionError("never")
        return (5.0,) if work.part == "qkv" and cut else (10.0,)

    def faulty(work: Any, cut: Cut) -> Times:
        return (10.0,) if work.part == "down" and not cut else measure(work, cut)

    results = list(run(planned, H200, always(faulty)))
    assert [result.work for result in results] == list(planned)
    steps = chosen(results)
    assert set(steps) == {1, 64} and all(step == StepCuts(qkv=step.qkv) and step.qkv for step in steps.values())
    for result in results:
        assert result.found is not None
        assert (result.found.cut != ()) == (result.work.part == "qkv")
        assert bool(result.found.skipped) == (result.work.part == "down")
    told = table(results)
    assert "wrong by 1" in told and "more candidates that could not be used" in told and "50%" in told
    assert len({len(line) for line in told.splitlines()[:12]}) == 1
    assert verdict(results) == "2 of 11 kernels are faster by another cut than the default."
    assert results[0].as_json() == {
        "part": "attend", "rows": 1, "default_us": 10.0, "chosen_us": 10.0, "cut": [], "measured": results[0].found.measured, "skipped": 0,
    }  # fmt: skip


def test_what_won_for_fewer_rows_is_tried_for_more() -> None:
    planned = [work for work in plan(SHAPES["qwen3-0.6b"], (64, 72), H200) if work.part == "o"]
    best = (16, 32, 64, 2, 4, 8)
    asked: list[tuple[int, Cut]] = []

    def measure(work: Any, cut: Cut) -> Times:
        asked.append((work.rows, cut))
        return (1.0 + sum(abs(a - b) for a, b in zip(cut, best, strict=False)) / 1000 if len(cut) == 6 else 10.0,)

    results = list(run(planned, H200, always(measure)))
    assert results[0].found is not None and results[0].found.cut not in ((), default_cut(planned[0], H200))
    assert (72, results[0].found.cut) in asked
    assert all(before <= after for (before, _), (after, _) in pairwise(asked))


def test_a_kernel_that_cannot_be_measured_is_said() -> None:
    planned = plan(SHAPES["qwen3-0.6b"], (8,), H200)

    def refused(work: Any) -> Any:
        if work.part == "attend":
            raise Unfit("no memory for it")
        return nullcontext(lambda cut: (1.0,))

    results = list(run(planned, H200, refused))
    assert results[0] == Result(work=planned[0], found=None, why="no memory for it") and len(results) == 5
    assert "attend, 8 rows: not measured: no memory for it" in table(results)
    assert results[0].as_json() == {"part": "attend", "rows": 8, "why": "no memory for it"}
    assert chosen(results) == Map()
