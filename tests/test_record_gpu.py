"""`benchmarks/record_gpu.py` runs commands that exist, and goes on after one that fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import record_gpu
from nanovllm.entrypoints.cli.bench.command import find_workloads
from nanovllm.entrypoints.cli.main import build_parser

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", record_gpu.PARTS)
def test_each_part_can_be_run(name: str) -> None:
    _, *words = record_gpu.PARTS[name]
    if words[:3] == ["-m", "nanovllm", "bench"]:
        options = build_parser().parse_args(words[2:])
        assert find_workloads(options.which, options.model or "qwen3-0.6b", cuda=True)[1] == []
    elif words[0] != "-m":
        assert (ROOT / words[0]).is_file()


def test_parts_run_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def says(code: str) -> tuple[str, ...]:
        return sys.executable, "-c", code

    parts = {"bad": says("raise SystemExit(3)"), "good": says("print('OUT')"), "slow": says("import time; time.sleep(60)")}
    monkeypatch.setattr(record_gpu, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["record_gpu", "--parts", "bad,good,slow", "--out", str(tmp_path / "out"), "--limit", "0.05"])
    assert record_gpu.main() == 1
    told = capsys.readouterr().out
    assert "bad: exit code 3" in told and "good: done" in told and "slow: reached the limit" in told
    assert (tmp_path / "out" / "gpu-good.log").read_text() == f"{tmp_path / 'out'}\n"


def test_an_unknown_part_is_named() -> None:
    command = [sys.executable, "-m", "benchmarks.record_gpu", "--parts", "nothing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 2 and "unknown part nothing; choose from tests" in done.stderr
