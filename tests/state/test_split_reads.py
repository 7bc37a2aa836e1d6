"""Which pages of a prompt are read while it runs: never later than running alone or reading alone, and where both meet."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map

from nanovllm.state import offload
from nanovllm.state.disk_pages import READ_LATENCY, read_ahead
from nanovllm.state.disk_reads import DiskReads, Wait
from nanovllm.state.offload import LATENCY, HostPages, Rates, init_host
from nanovllm.state.split_reads import GAIN, Paces, least_tokens, pages_to_load, tokens_to_meeting

SECONDS = st.sampled_from([1e-6, 1e-4, 1e-3, 5e-3, 2e-2, 1.0])
PACES = st.builds(Paces, run=SECONDS, read=SECONDS, copy=SECONDS, before_run=st.just(0.0) | SECONDS, before_read=SECONDS)
KEYS = [bytes([number]) * 32 for number in range(40)]


def finished(paces: Paces, absent: list[bool], start: int, stop: int) -> float:
    """When the pages of a prompt are filled, counted from the rates alone."""
    count, num_read = len(absent), sum(absent[start:stop])
    if not stop:
        return paces.before_run + count * paces.run
    copies, ended = LATENCY + (stop - start) * paces.copy, paces.before_read + num_read * paces.read
    return max(paces.before_run + start * paces.run, ended) + copies + (count - stop) * paces.run


@given(paces=PACES, absent=st.lists(st.booleans(), max_size=14), room=st.integers(0, 14))
def test_the_choice_is_the_best_of_all_but_for_small_gains(paces: Paces, absent: list[bool], room: int) -> None:
    count = len(absent)
    start, stop = pages_to_load(paces, absent, room)
    assert (start, stop) == (0, 0) or (0 == start < stop <= count) or (0 < start < stop == count)
    assert sum(absent[start:stop]) <= room
    most = max(end for end in range(count + 1) if sum(absent[:end]) <= room)
    alone = min(finished(paces, absent, 0, 0), finished(paces, absent, 0, most))
    splits = [finished(paces, absent, first, count) for first in range(1, count) if sum(absent[first:]) <= room]
    best, found = min(splits, default=float("inf")), finished(paces, absent, start, stop)
    assert found <= alone * (1 + 1e-9), "it is later than running or reading alone"
    if start:
        assert found == pytest.approx(best) and found < (1 - 1 / GAIN) * alone
    else:
        assert best >= (1 - 1 / GAIN) * alone * (1 - 1e-9), "a split would have been better"


@given(run=st.floats(1e-4, 1e-2), ratio=st.floats(0.3, 3.0), count=st.integers(30, 600))
def test_the_front_and_the_reads_end_at_the_same_time(run: float, ratio: float, count: int) -> None:
    paces = Paces(run=run, read=ratio * run, copy=run / 20, before_read=READ_LATENCY)
    start, stop = pages_to_load(paces, [True] * count, count)
    assert 0 < start < stop == count
    assert abs(start * paces.run - READ_LATENCY - (count - start) * paces.read) <= paces.run + paces.read


def test_a_device_that_is_busy_leaves_all_to_the_disk() -> None:
    """An 8B prompt of 16,384 tokens at 7 GB/s: half of it is read where nothing else runs, and all where others run meanwhile."""
    rates = {"run": 16 / 35_000, "read": 16 * 147456 / 7e9, "copy": 16 * 147456 / 48.6e9, "before_read": READ_LATENCY}
    absent = [True] * 1024
    start, stop = pages_to_load(Paces(**rates), absent, 1024)
    assert start == pytest.approx(434, abs=3) and stop == 1024
    assert finished(Paces(**rates), absent, start, stop) == pytest.approx(0.227, abs=0.003)
    assert pages_to_load(Paces(**rates, before_run=0.4), absent, 1024) == (0, 1024)
    assert pages_to_load(Paces(**{**rates, "read": 1.0}), absent, 1024) == (0, 0)


def host_reading(num_pages: int = 80, read: float = 1.0) -> HostPages:
    """Host memory of an engine that runs a page of four tokens in a second, and reads it in another time."""
    host = init_host(num_pages, 64, Rates(tokens_per_second=4.0, bytes_per_second=1e15))
    return replace(host, disk=DiskReads(bytes_per_second=64 / read))


def test_the_last_pages_are_reserved_and_nobody_waits() -> None:
    host, pairs = read_ahead(host_reading(), 1, KEYS[:8], 40, 4, start=3)
    assert [key for _, key in pairs] == KEYS[4:8]
    assert host.disk is not None and not host.disk.holds(1)
    wait = host.disk.waits[1]
    assert (wait.start, wait.stop) == (7, 11) and wait.pages == tuple(at for at, _ in pairs)


@pytest.mark.parametrize(("place", "ran"), [(0, 4), (16, 2), (64, 0)])
def test_pages_with_context_take_longer_to_run_so_fewer_of_them_do(place, ran) -> None:
    """A page takes two seconds after 64 tokens. On average, each of the eight takes 1.25 seconds, 2.25, or 5.25; then all are read."""
    host = host_reading()
    host = replace(host, rates=replace(host.rates, context_doubling=64.0))
    host, pairs = read_ahead(host, 1, KEYS[:8], 40, 4, start=place)
    assert host.disk is not None and len(pairs) == 8 - ran
    assert host.disk.waits[1].start == (place + ran if ran else 0)


def test_pages_that_host_memory_has_are_context_of_those_that_are_read() -> None:
    """Eight pages come after four that are there. On average each takes 2.6 seconds, so two run; if they came first, three would."""
    host = host_reading()
    host = replace(host, rates=replace(host.rates, context_doubling=20.0))
    host, _ = offload.settled(offload.keep(offload.planning(host), np.arange(4, dtype=np.int32), KEYS[3::-1]))
    host, pairs = read_ahead(host, 1, KEYS[:12], 60, 4)
    assert host.disk is not None and host.disk.waits[1].start == 4 + 2 and [key for _, key in pairs] == KEYS[6:12]


def test_half_of_host_memory_bounds_what_is_read_behind_the_front() -> None:
    host, pairs = read_ahead(host_reading(num_pages=6), 1, KEYS[:8], 40, 4)
    assert [key for _, key in pairs] == KEYS[5:8]
    assert host.disk is not None and host.disk.waits[1].start == 5


def test_the_front_runs_until_it_meets_the_reads() -> None:
    host, _ = read_ahead(host_reading(), 1, KEYS[:16], 70, 4)
    assert host.disk is not None
    wait = host.disk.waits[1]
    assert (wait.start, wait.stop) == (8, 16)
    assert tokens_to_meeting(host, wait, 0, 4) == 8 * 4
    assert tokens_to_meeting(host, wait, 13, 4) == 7 * 4 - 1, "none has come meanwhile, so they meet two pages later"
    assert tokens_to_meeting(host, wait, 8 * 4, 4) == 4 * 4, "none has come: they meet in the middle of the others"
    half = replace(host, disk=replace(host.disk, reading=Map({at: key for at, key in host.disk.reading.items() if at in wait.pages[:4]})))
    assert tokens_to_meeting(half, wait, 8 * 4, 4) == 2 * 4
    assert tokens_to_meeting(half, wait, 11 * 4, 4) == 4
    assert tokens_to_meeting(half, wait, 12 * 4, 4) is None, "what is being read is behind it"
    slow = replace(host, rates=replace(host.rates, context_doubling=16.0))
    assert tokens_to_meeting(slow, wait, 8 * 4, 4) == 2 * 4, "a page takes 3.1 seconds after the others, so two of the eight run"
    late = replace(host, disk=replace(host.disk, now=wait.until))
    assert tokens_to_meeting(late, wait, 0, 4) is None, "running all would have ended by now"


def test_a_pass_runs_at_least_some_tokens() -> None:
    host = replace(host_reading(), rates=Rates(tokens_per_second=4_000.0, bytes_per_second=1e15))
    wait = Wait(until=1.0, pages=(5,), start=1, stop=3)
    assert host.disk is not None
    host = replace(host, disk=replace(host.disk, reading=Map({5: KEYS[0]}), bytes_per_second=1e15))
    assert tokens_to_meeting(host, wait, 0, 4) == 20
    assert tokens_to_meeting(host, wait, 2, 4) == 22, "up to the end of a page, where models with windows go on"
    slow = replace(host, rates=replace(host.rates, context_doubling=100.0))
    assert least_tokens(host, 200, 4) == 20 and least_tokens(slow, 200, 4) == 8, "after 200 others a token takes three times as long"
