"""`benchmarks/step_watch.py` keeps the longest steps in a fixed size, and tells what the thread did in them."""

import gc
import time
from types import SimpleNamespace

import pytest

from benchmarks import step_watch
from benchmarks.step_watch import COUNTERS, STEP, Longest, Watch, device_waits

pytestmark = pytest.mark.unhooked  # it measures

NOTHING = (0.0,) * len(COUNTERS)


def busy(seconds: float) -> None:
    """Take some time."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_the_longest_steps_are_kept_in_a_fixed_size() -> None:
    longest = Longest(3)
    size = longest.rows.nbytes
    for number in (5, 1, 4, 2, 8, 3, 8):
        longest.add((number / 1e3, 1.0, number / 1e2, 7, 2), NOTHING)
    assert [step["ms_beyond_prompts"] for step in longest.told()] == [8.0, 8.0, 5.0] and longest.rows.nbytes == size
    assert longest.least == 0.005 and longest.told()[2]["ms"] == 50.0
    assert (longest.told()[0]["prompt_tokens"], longest.told()[0]["decode_rows"]) == (7, 2)


def test_a_table_that_is_not_full_has_the_steps_that_there_are() -> None:
    longest = Longest()
    assert longest.told() == []
    longest.add((-0.5, 1.0, 0.1, 1, 0), NOTHING)
    assert [step["ms_beyond_prompts"] for step in longest.told()] == [-500.0]


def did(watch: Watch, what: str, device: SimpleNamespace) -> dict[str, object]:
    """What is told of a step in which the thread does one thing."""
    before, start = watch.now(), time.perf_counter()
    if what == "engine":
        busy(0.05)
    elif what == "device":
        device.wait(0.05)
    else:
        time.sleep(0.05)
    seconds = time.perf_counter() - start
    longest = Longest()
    longest.add((seconds, 0.0, seconds, 0, 1), [late - early for early, late in zip(before, watch.now(), strict=True)])
    return longest.told()[0]


@pytest.mark.parametrize("what", ["engine", "device", "no processor"])
def test_what_took_the_time_is_told(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, device, clock = Watch(), SimpleNamespace(wait=busy), time.perf_counter
    if what != "no processor":  # as if nobody else wanted this machine's processors
        monkeypatch.setattr(step_watch, "time", SimpleNamespace(thread_time=clock, perf_counter=clock))
    with watch.installed([(device, "wait")]):
        step = did(watch, what, device)
    assert step["mostly"] == what
    assert device.wait is busy and watch.collected not in gc.callbacks
    assert (float(str(step["device_wait_ms"])) >= 50) is (what == "device")


def test_collections_are_counted() -> None:
    watch = Watch()
    with watch.installed():
        gc.collect()
        gc.collect()
    gc.collect()
    before = dict(zip(COUNTERS, watch.now(), strict=True))
    assert before["collections"] == 2 and before["collection"] > 0


def test_a_wait_that_fails_is_counted_and_its_error_goes_on() -> None:
    def broken() -> None:
        busy(0.01)
        raise RuntimeError("device lost")

    watch, device = Watch(), SimpleNamespace(wait=broken)
    with watch.installed([(device, "wait")]), pytest.raises(RuntimeError, match="device lost"):
        device.wait()
    assert watch.device_wait >= 0.01 and device.wait is broken


def test_the_places_where_an_engine_waits_are_there() -> None:
    assert all(callable(getattr(owner, name)) for owner, name in device_waits())
    assert len(STEP) == 5 and len(COUNTERS) == len(Watch().now())


def test_the_counters_cost_little() -> None:
    watch = Watch()
    times = []
    for _ in range(5):
        start = time.thread_time()
        for _ in range(1000):
            watch.now()
        times.append(time.thread_time() - start)
    assert min(times) / 1000 < 50e-6  # about two microseconds
