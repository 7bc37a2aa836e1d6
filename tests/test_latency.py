"""`benchmarks/latency.py` measures gaps between tokens by the bound on a step, and `benchmarks/churn.py` what preemption costs."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import latency
from nanovllm.testing.models import save_hf_folder, tiny_config

pytestmark = pytest.mark.unhooked  # it measures

ROOT = Path(__file__).parents[1]


def test_the_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_hf_folder(tmp_path / "model", tiny_config(max_position_embeddings=512)))
    lengths = ["--rows", "3", "--prompt", "8", "--reply", "12", "--long", "200", "--every", "0.05", "--seconds", "0.3"]
    output = tmp_path / "latency.json"
    latency.main(["--model", model, "--device", "cpu", *lengths, "--knobs", "inf,32t,50", "--commit", "abc", "--output", str(output)])
    told = json.loads(output.read_text())
    assert told["commit"] == "abc" and list(told["knobs"]) == ["inf", "32t", "50"]
    for figures in told["knobs"].values():
        gaps = figures["gap_ms"]
        assert 0 < gaps["p50"] <= gaps["p90"] <= gaps["p99"] <= gaps["max"]
        assert figures["first_token_ms"] > 0 and figures["num_first_tokens"] > 0
        speeds = figures["tokens_per_second"]
        assert speeds["all"] == pytest.approx(speeds["prompts"] + speeds["replies"], abs=0.2) and speeds["replies"] > 0
    bounds = [figures["max_prefill_tokens"] for figures in told["knobs"].values()]
    assert bounds[:2] == [None, 32] and bounds[2] % 256 == 0 and bounds[2] >= 256
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["inf", "32t", "50"]


@pytest.mark.parametrize("text", ["0", "-3", "nan", "t", "2.5t", "0t", "fast"])
def test_a_bad_knob_is_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text!r} must be milliseconds, inf, or tokens"):
        latency.knob(text)


def test_under_pressure_few_tokens_run_twice(tmp_path: Path) -> None:
    """The goal is a tenth; without a rule it is a third of the tokens of short prompts with long replies."""
    output = tmp_path / "churn.json"
    command = [sys.executable, "benchmarks/churn.py", "--requests", "96", "--rows", "12", "--commit", "abc", "--output", str(output)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    told = json.loads(output.read_text())
    shares = {name: figures["rerun_percent"] for name, figures in told.items() if name.endswith("_x12")}
    assert len(shares) == 15 and all(share < 10 for share in shares.values()), shares
