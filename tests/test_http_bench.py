"""The programs that load and hurt a server: what they send is answered, and what they tell is what happened."""

import argparse
from collections.abc import Iterator

import pytest

from benchmarks import http_load
from benchmarks.http_bench import merged
from benchmarks.http_faults import BOMBS, CONTROL, PATH, RIGHT
from tests.entrypoints.server.live import Live

pytestmark = pytest.mark.unhooked


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Live() as server:
        yield server


def test_streams_are_counted(live: Live):
    options = argparse.Namespace(processes=2, prompt=16, ids=(300, 4000), rounds=2)
    row = http_load.load(f"http://127.0.0.1:{live.port}", "tiny", 16, 5, options)
    assert row["streams"] == 16 and row["busy_tok_s"] >= row["tok_s"] > 0 and row["client_us"] > 0
    assert 0 < row["ttft_ms"] <= row["ttft_p99"] and 0 <= row["gap_ms"] <= row["gap_p99"]
    live.wait_until_idle()


def test_repeats_are_medians_with_their_ratios():
    rows = [{"streams": 8, "tok_s": rate, "front_end_us": [us, 1.0], "of_library": ratio} for rate, us, ratio in
            ((10.0, 3.0, 0.9), (30.0, 1.0, 0.7), (20.0, 2.0, 1.1))]  # fmt: skip
    wanted = {"streams": 8, "tok_s": 20.0, "front_end_us": [2.0, 1.0], "of_library": 0.9, "of_library_each": [0.9, 0.7, 1.1]}
    assert merged(rows) == wanted and merged(rows[:1]) == rows[0]


@pytest.mark.parametrize("place", range(len(BOMBS)))
def test_what_would_take_long_is_refused(live: Live, place: int):
    answer = live.post(PATH, CONTROL | BOMBS[place])
    assert answer.status == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert live.post(PATH, CONTROL).json()["choices"][0]["text"] == RIGHT
