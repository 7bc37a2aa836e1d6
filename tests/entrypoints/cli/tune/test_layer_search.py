"""Which cuts of a layer are taken together, with a clock made up in which kernels act on each other; and a whole run of them."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map

from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES
from nanovllm.entrypoints.cli.tune.kernel_search import Times, Unfit
from nanovllm.entrypoints.cli.tune.layer_search import TURNS, Bench, Together, search_together
from nanovllm.entrypoints.cli.tune.report import table, verdict
from nanovllm.entrypoints.cli.tune.sweep import Result, chosen, plan, run
from nanovllm.models.fast.cuts import DEFAULT, StepCuts
from nanovllm.models.tuning.candidates import default_cut, neighbours, starts
from nanovllm.models.tuning.launches import Machine, Work, works
from nanovllm.ops.cuts import Cut

H200 = Machine(processors=132, memory=200_000)
QWEN = SHAPES["qwen3-0.6b"]
LAYER = tuple(work for work in works(QWEN, 8, H200) if work.part != "head")


class Clock:
    """A measure of a layer; keeps what was asked for."""

    def __init__(self, time: Callable[[StepCuts], float | Times]):
        self.time, self.asked = time, list[StepCuts]()

    def __call__(self, cuts: StepCuts) -> Times:
        self.asked.append(cuts)
        found = self.time(cuts)
        return found if isinstance(found, tuple) else (found,)


def step_from(part: str, number: int = 0) -> Cut:
    """A cut that a search tries from the default."""
    work = next(work for work in LAYER if work.part == part)
    return neighbours(work, default_cut(work, H200), H200)[number]


def found_by(clock: Clock, **options: Any) -> Together:
    return search_together(LAYER, H200, Bench(measure=clock), **options)


ATTEND, QKV, DOWN = step_from("attend"), step_from("qkv"), step_from("down")


def overlapping(cuts: StepCuts) -> float:
    """Attention by its cut is slow beside qkv by its default, and fast beside qkv by its cut, which alone gains little."""
    us = 100.0 - 2.0 * (cuts.qkv == QKV)
    return us + (-10.0 if cuts.qkv == QKV else 5.0) * (cuts.attend == ATTEND)


def test_a_cut_that_is_good_beside_another_only_is_found() -> None:
    """Part by part, the others by their defaults, it is not."""
    clock = Clock(overlapping)
    alone = {part: search_together([w for w in LAYER if w.part == part], H200, Bench(measure=clock)).cuts for part in ("attend", "qkv")}
    assert alone == {"attend": DEFAULT, "qkv": StepCuts(qkv=QKV)}
    found = found_by(Clock(overlapping))
    assert found.cuts == StepCuts(attend=ATTEND, qkv=QKV) and (found.default_us, found.chosen_us) == (100.0, 88.0)
    told = {part: (one.cut, one.default_us, one.chosen_us) for part, one in found.parts.items() if one.cut}
    assert told == {"attend": (ATTEND, 98.0, 88.0), "qkv": (QKV, 105.0, 88.0)}  # without each, the others as chosen
    assert {one.default_us for part, one in found.parts.items() if not one.cut} == {88.0}


def test_a_part_is_searched_again_only_where_others_have_changed() -> None:
    def heard(time: Callable[[StepCuts], float | Times]) -> list[str]:
        told: list[str] = []
        found_by(Clock(time), tell=lambda work: told.append(work.part))
        return told

    parts = [work.part for work in LAYER]
    assert heard(lambda cuts: 100.0) == parts
    assert heard(overlapping) == [*parts, *parts]  # then attention changes, and turns are over
    assert heard(lambda cuts: 90.0 if cuts.down == DOWN else 100.0) == [*parts, *parts[:-1]]
    assert heard(lambda cuts: 90.0 if cuts.attend == ATTEND else 100.0) == parts
    assert TURNS == 2


def test_a_second_turn_gives_up_what_no_longer_pays() -> None:
    """Down, searched last, gains more without attention's cut; the part that was cut stands among the candidates, or goes."""

    def time(cuts: StepCuts) -> float:
        gains = {(True, False): 5.0, (False, True): 3.0, (True, True): 12.0, (False, False): 0.0}
        swapped = cuts.down == DOWN and cuts.attend != ATTEND
        return 100.0 - gains[cuts.attend == ATTEND, cuts.qkv == QKV] - 20.0 * (cuts.down == DOWN) - 11.0 * swapped

    assert found_by(Clock(time)).cuts == StepCuts(qkv=QKV, down=DOWN)


def test_what_is_idle_at_the_end_is_left_out() -> None:
    """Two that each gain what the other does: one of them stays."""
    found = found_by(Clock(lambda cuts: 90.0 if cuts.attend == ATTEND or cuts.down == DOWN else 100.0))
    assert found.cuts == StepCuts(attend=ATTEND) and found.chosen_us == 90.0
    assert found.parts["down"].cut == ()


def test_all_together_must_be_faster_than_the_defaults() -> None:
    """The defaults were slow for a moment: at the end they are measured again."""

    def time(cuts: StepCuts) -> float:
        if cuts == DEFAULT:
            return 100.0 if clock.asked.count(DEFAULT) <= 2 else 80.0
        return 100.0 - 5.0 * (cuts.attend == ATTEND) - 5.0 * (cuts.qkv == QKV)

    clock = Clock(time)
    found = found_by(clock)
    assert clock.asked.count(DEFAULT) == 3 and StepCuts(attend=ATTEND, qkv=QKV) in clock.asked
    assert found.cuts == DEFAULT and found.default_us == found.chosen_us == 80.0
    assert all(one.cut == () and one.default_us == one.chosen_us == 80.0 for one in found.parts.values())


def test_a_cut_may_not_lose_in_one_context() -> None:
    assert found_by(Clock(lambda cuts: (80.0, 102.0) if cuts.qkv == QKV else (100.0, 100.0))).cuts == DEFAULT
    assert found_by(Clock(lambda cuts: (80.0, 100.5) if cuts.qkv == QKV else (100.0, 100.0))).cuts == StepCuts(qkv=QKV)


def test_what_is_left_out_is_said_once() -> None:
    def time(cuts: StepCuts) -> float:
        if cuts.attend == ATTEND:
            raise Unfit("wrong by 0.5")
        return 90.0 if cuts.qkv == QKV else 100.0

    found = found_by(Clock(time))
    assert found.cuts == StepCuts(qkv=QKV) and found.parts["attend"].skipped == ((ATTEND, "wrong by 0.5"),)


def test_defaults_that_cannot_be_measured_are_no_result() -> None:
    def refused(cuts: StepCuts) -> float:
        raise Unfit("no memory for it")

    with pytest.raises(Unfit, match="no memory"):
        found_by(Clock(refused))


class Failing(Clock):
    """Fails whenever it is asked for some cuts, from the n-th time on."""

    def __init__(self, time: Callable[[StepCuts], float | Times], fails: StepCuts, after: int):
        super().__init__(time)
        self.fails, self.after = fails, after

    def __call__(self, cuts: StepCuts) -> Times:
        found = super().__call__(cuts)
        if cuts == self.fails and self.asked.count(cuts) >= self.after:
            raise Unfit("no room")
        return found


@pytest.mark.parametrize("after", range(2, 12))
def test_cuts_that_cannot_be_measured_again_do_not_take_the_others_with_them(after: int) -> None:
    """Of two that gain together and each alone, wherever it is that their kernels fail: one stays at least."""

    def time(cuts: StepCuts) -> float:
        return 100.0 - 10.0 * (cuts.attend == ATTEND) - 10.0 * (cuts.qkv == QKV)

    both = StepCuts(attend=ATTEND, qkv=QKV)
    clock = Failing(time, both, after)
    found = found_by(clock)
    assert found.default_us == 100.0 and all(one.cut == getattr(found.cuts, part) for part, one in found.parts.items())
    if clock.asked.count(both) < after:
        assert found.cuts == both and found.chosen_us == 80.0
    else:
        assert found.cuts in (StepCuts(attend=ATTEND), StepCuts(qkv=QKV)) and found.chosen_us == 90.0


@pytest.mark.parametrize("after", [2, *range(5, 12)])
def test_a_part_that_the_others_cannot_be_measured_without_keeps_its_cut(after: int) -> None:
    """Here by its default it fails beside the other's cut."""

    def time(cuts: StepCuts) -> float:
        return 100.0 - 10.0 * (cuts.attend == ATTEND) - 10.0 * (cuts.qkv == QKV)

    found = found_by(Failing(time, StepCuts(attend=ATTEND), after))
    assert found.cuts in (StepCuts(attend=ATTEND, qkv=QKV), StepCuts(qkv=QKV)) and found.chosen_us <= 90.0


PAIRS = st.dictionaries(st.sampled_from(list(product((False, True), repeat=3))), st.floats(1, 200), min_size=8)


@given(PAIRS)
def test_a_choice_is_faster_than_the_defaults_and_needs_all_of_its_cuts(times: dict[tuple[bool, bool, bool], float]) -> None:
    def time(cuts: StepCuts) -> float:
        return times[cuts.attend == ATTEND, cuts.qkv == QKV, cuts.down == DOWN]

    def same(us: float, cuts: StepCuts) -> bool:
        return us == fmean((time(cuts),))

    found = found_by(Clock(time))
    assert same(found.chosen_us, found.cuts) and same(found.default_us, DEFAULT)
    assert found.cuts == DEFAULT or found.chosen_us <= 0.99 * found.default_us
    for part, one in found.parts.items():
        assert one.cut == getattr(found.cuts, part) and one.chosen_us == found.chosen_us
        assert not one.cut or one.default_us > one.chosen_us


# A whole run


def always(measure: Callable[[tuple[Work, ...], StepCuts], Times]) -> Callable[[Any], Any]:
    return lambda group: nullcontext(Bench(measure=lambda cuts: measure(group, cuts)))


def test_a_run_goes_through_all_kernels_and_keeps_what_won() -> None:
    planned = plan(QWEN, (64, 1, 64), H200)
    layer = ["attend", "qkv", "o", "gate_up", "down"]
    assert [[work.part for work in group] for group in planned] == [layer, ["head"], layer]
    assert [[work.rows for work in group] for group in planned] == [[1] * 5, [1], [64] * 5]

    def measure(group: tuple[Work, ...], cuts: StepCuts) -> Times:
        if cuts.down:
            raise Unfit("wrong by 1")
        return (9.85,) if cuts.head else (9.8,) if cuts.qkv else (10.0,)

    heard: list[Work] = []
    results = list(run(planned, H200, always(measure), tell=heard.append))
    assert [result.works for result in results] == list(planned) and set(heard) == {work for group in planned for work in group}
    steps = chosen(results)
    assert set(steps) == {1, 64} and all(step == StepCuts(qkv=step.qkv) and step.qkv for step in steps.values())
    for result in results:
        for part, found in result.lines:
            assert found is not None and (found.cut != ()) == (part == "qkv") and bool(found.skipped) == (part == "down")
    told = table(results)
    assert "wrong by 1" in told and "more candidates that could not be used" in told and "2.0%" in told
    assert len({len(line) for line in told.splitlines()[:14]}) == 1
    assert [line.split()[0] for line in told.splitlines()[1:14]] == ["layer", *layer, "head", "layer", *layer]
    assert verdict(results) == "2 of 11 kernels have a tile configuration other than the default."
    first = results[0].as_json()
    assert first[0] == {"part": "layer", "rows": 1, "default_us": 10.0, "chosen_us": 9.8}
    attend = results[0].found and results[0].found.parts["attend"]
    assert attend and first[1] == {
        "part": "attend", "rows": 1, "default_us": 9.8, "chosen_us": 9.8, "cut": [], "measured": attend.measured, "skipped": 0,
    }  # fmt: skip


def test_the_head_by_itself_must_gain_more() -> None:
    """It is timed alone, where a part of a layer is timed beside others."""
    planned = [group for group in plan(QWEN, (1,), H200) if group[0].part == "head"]
    for us, taken in ((9.75, False), (9.65, True)):
        (result,) = run(planned, H200, always(lambda _, cuts, us=us: (us,) if cuts.head else (10.0,)))
        assert bool(chosen([result])) == taken


def test_cuts_of_the_layer_and_of_the_head_become_one_step() -> None:
    results = list(run(plan(QWEN, (1,), H200), H200, always(lambda _, cuts: (5.0,) if cuts.head or cuts.o else (10.0,))))
    (step,) = chosen(results).values()
    assert step.head and step.o and step == StepCuts(o=step.o, head=step.head)


def test_what_won_for_fewer_rows_is_tried_for_more() -> None:
    planned = plan(QWEN, (64, 72), H200)
    best = (16, 32, 64, 2, 4, 8)
    asked: list[tuple[int, Cut]] = []

    def measure(group: tuple[Work, ...], cuts: StepCuts) -> Times:
        asked.append((group[0].rows, cuts.o))
        return (1.0 + sum(abs(a - b) for a, b in zip(cuts.o, best, strict=False)) / 1000 if len(cuts.o) == 6 else 10.0,)

    results = list(run(planned, H200, always(measure)))
    won = chosen(results)[64].o
    work = next(work for work in planned[1] if work.part == "o")
    assert won and won not in (default_cut(work, H200), *starts(work, H200))
    assert (72, won) in asked and [rows for rows, _ in asked] == sorted(rows for rows, _ in asked)


def test_kernels_that_cannot_be_measured_are_said() -> None:
    planned = plan(QWEN, (1,), H200)

    def refused(group: tuple[Work, ...]) -> Any:
        if group[0].part == "head":
            return nullcontext(Bench(measure=lambda cuts: (1.0,)))
        raise Unfit("no memory for it")

    results = list(run(planned, H200, refused))
    assert results[0] == Result(works=planned[0], found=None, why="no memory for it") and len(results) == 2
    assert "attend, 1 rows: not measured: no memory for it" in table(results)
    assert results[0].as_json()[0] == {"part": "attend", "rows": 1, "why": "no memory for it"}
    assert chosen(results) == Map() and verdict(results).startswith("0 of 6 kernels")
