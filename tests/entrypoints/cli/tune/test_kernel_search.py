"""Which cut of one kernel is taken, with a clock made up: margins, wrong results, failures, noise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.entrypoints.cli.tune.kernel_search import Found, Times, Unfit, search
from nanovllm.ops.cuts import Cut

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


@pytest.mark.parametrize(("us", "taken"), [(9.95, False), (9.91, False), (9.89, True), (5.0, True)])
def test_a_margin_is_asked_for(us: float, taken: bool) -> None:
    found = search(DEFAULT, (), line, Clock({9: us}))
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


def test_what_cannot_be_measured_again_is_not_taken() -> None:
    asked: list[Cut] = []

    def measure(cut: Cut) -> Times:
        asked.append(cut)
        if asked.count((9,)) == 2:
            raise Unfit("no kernel: out of memory")
        return (5.0,) if cut == (9,) else (10.0,)

    found = search(DEFAULT, (), line, measure)
    assert found == Found(cut=(), default_us=10.0, chosen_us=10.0, measured=found.measured, skipped=(((9,), "no kernel: out of memory"),))


@pytest.mark.parametrize(("times", "taken"), [((5.0, 10.05), True), ((5.0, 10.2), False), ((9.8, 9.8), True), ((9.95, 9.95), False)])
def test_what_loses_in_one_setting_is_not_taken(times: Times, taken: bool) -> None:
    found = search(DEFAULT, (), line, Clock({9: times}, default=(10.0, 10.0)))
    assert found.cut == ((9,) if taken else ())


@given(st.dictionaries(st.integers(0, 16), st.one_of(st.floats(1, 20), st.just(None)), max_size=17))
def test_a_choice_is_never_slower_and_never_one_that_was_left_out(times: dict[int, float | None]) -> None:
    clock = Clock({n: Unfit("no") if us is None else us for n, us in times.items()})
    found = search(DEFAULT, ((0,), (16,)), line, clock)
    if found.cut:
        assert times.get(found.cut[0]) == found.chosen_us <= 9.9 and found.cut not in dict(found.skipped)
    else:
        assert found.chosen_us == 10.0
