"""`benchmarks/restart.py` kills a server with named chunks, and measures the next start."""

import json
from pathlib import Path

import pytest

from benchmarks import restart

pytestmark = pytest.mark.unhooked  # it measures


def test_the_figures(tmp_path: Path) -> None:
    output = tmp_path / "restart.json"
    options = ["--device", "cpu", "--chunks", "3", "--tokens", "40", "--repeats", "1", "--host-kv-gib", "0.1"]
    restart.main([*options, "--commit", "abc", "--output", str(output)])
    told = json.loads(output.read_text())
    assert told["commit"] == "abc" and "--chunks 3 --tokens 40" in told["command"]
    figures = told["restart"]
    assert figures["cached"] == figures["of"] == 120 and figures["bytes"] > 0
    assert all(figures[name] > 0 for name in ("start_s", "bare_start_s", "saving_s", "use_ms"))
