"""`benchmarks/break_even.py`: its figures are those of a calculation by hand, and its file is new."""

import json

import pytest

from benchmarks import break_even
from benchmarks.break_even import MODELS, RESULTS


def test_the_file_is_new() -> None:
    assert json.loads((RESULTS / "break-even.json").read_text()) == break_even.derived(), "run benchmarks/break_even.py"


def test_the_bytes_and_rates_are_those_of_the_models() -> None:
    assert [break_even.kv_bytes(shape) / 1024 for shape in MODELS] == [112, 144, 256, 320]
    assert break_even.tokens_per_second("qwen3-8b") == pytest.approx(16384 / 0.46454)
    flops = break_even.flops("qwen3-32b")
    weights = 64 * (2 * 5120 * 64 * 128 + 2 * 5120 * 8 * 128 + 3 * 5120 * 25600)
    assert weights == pytest.approx(31.2e9, rel=0.01) and flops == pytest.approx(2 * weights + 64 * 2 * 16384 * 64 * 128)
    assert break_even.tokens_per_second("qwen3-32b") * flops < 894e12, "no card does more"


def test_one_split_by_hand() -> None:
    """8B at 7 GB/s: the pages before the meeting run as long as those after it are read, then 585 pages are copied."""
    row = next(one for one in break_even.derived()["rows"] if one["model"] == "Qwen3-8B")
    split = next(disk for disk in row["disks"] if disk["gb_s"] == 7.0)
    run, page = 0.46454 / 1024, 16 * 147456
    front = split["run_tokens"] // 16
    assert front == pytest.approx((1e-3 + 1024 * page / 7e9) / (run + page / 7e9), abs=1)
    assert split["ms"] == pytest.approx(1e3 * (front * run + 1e-4 + (1024 - front) * page / 48.6e9), abs=0.5)
    assert row["break_even_gb_s"] == pytest.approx(147456 * 16384 / 0.46454 / 1e9, abs=0.05)
    ways = {one["model"]: [disk["way"] for disk in one["disks"]] for one in break_even.derived()["rows"]}
    assert ways["Qwen3-0.6B"] == ["run", "run", "split"] and ways["Llama-3.3-70B"] == ["split", "split", "read"]
