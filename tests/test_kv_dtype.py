"""`benchmarks/kv_dtype.py`: its points, its table, and a run on the packaged model."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import kv_dtype


def test_points_are_pairs() -> None:
    assert kv_dtype.sizes_of("1x256,8x64") == [(1, 256), (8, 64)]
    for wrong in ("1", "1x2x3", "0x5", "ax3", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            kv_dtype.sizes_of(wrong)


def test_rows_are_those_that_both_engines_ran() -> None:
    plain = [{"rows": rows, "context": 64, "step_us": 90.0, "limit_us": 30.0, "roofline_percent": 33.3} for rows in (1, 8)]
    fp8 = [{"rows": 8, "context": 64, "step_us": 60.0, "limit_us": 15.0, "roofline_percent": 25.0}]
    (row,) = kv_dtype.table(plain, fp8)
    assert row == {
        "rows": 8, "context": 64, "plain_us": 90.0, "fp8_us": 60.0, "gain": 1.5, "limit": 2.0, "fp8_roofline_percent": 25.0,
    }  # fmt: skip


def test_a_run_on_a_cpu(tmp_path: Path) -> None:
    """The same pool holds fewer bytes in FP8; a point without room is left out."""
    to = tmp_path / "kv.json"
    model = ["--model", "tiny", "--device", "cpu"]
    kv_dtype.main([*model, "--points", "1x64,2x1900", "--num-pages", "64", "--commit", "x", "--output", str(to)])
    found = json.loads(to.read_text())
    assert [(row["rows"], row["context"]) for row in found["kv_dtype"]["points"]] == [(1, 64)]
    assert found["kv_dtype"]["tokens"] == {"plain": 1024, "fp8": 1024} and found["commit"] == "x"
