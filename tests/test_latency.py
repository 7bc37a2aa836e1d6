"""`benchmarks/latency.py` measures gaps between tokens by the bound on a step, and `benchmarks/churn.py` what preemption costs."""

import argparse
import json
import re
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
    lengths = ["--rows", "3", "--prompt", "8", "--reply", "12", "--long", "200", "--every", "0.05", "--seconds", "1.5"]
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


def test_the_page_tells_what_was_measured() -> None:
    page = (ROOT / "docs/how-to/keep-latency-steady.md").read_text(encoding="utf-8")
    told = json.loads((ROOT / "benchmarks/results/h200-latency.json").read_text())
    assert f"```\n{told['command']}\n```" in page and told["commit"] in page and told["gpu"].removeprefix("NVIDIA ") in page
    rows = {line.split(" | ")[0].strip("| ").split()[0]: line for line in page.splitlines() if re.match(r"\| (infinity|\d+) ", line)}
    for name, figures in told["knobs"].items():
        gaps, speeds = figures["gap_ms"], figures["tokens_per_second"]
        cells = [cell.strip() for cell in rows["infinity" if name == "inf" else name].strip("|").split("|")][2:]
        shown = [float(cell.replace(",", "")) for cell in cells]
        measured = [gaps["p50"], gaps["p99"], gaps["max"], figures["first_token_ms"], speeds["replies"], speeds["all"]]
        assert shown == pytest.approx(measured, rel=0.01)
    free, bound = (told["knobs"][name]["tokens_per_second"] for name in ("inf", "35"))
    falls = {name: 100 * (1 - bound[name] / free[name]) for name in ("all", "replies")}
    assert f"{falls['all']:.1f}%" in page and f"{falls['replies']:.0f}%" in page
    assert f"from {free['replies']:,} to {bound['replies']:,} per second" in page


@pytest.mark.parametrize("text", ["0", "-3", "nan", "t", "2.5t", "0t", "fast"])
def test_a_bad_knob_is_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text!r} must be milliseconds, inf, or tokens"):
        latency.knob(text)


def test_under_pressure_few_tokens_run_twice(tmp_path: Path) -> None:
    """The goal is a tenth; without a rule it is a third of the tokens of short prompts with long replies."""
    output = tmp_path / "churn.json"
    command = [sys.executable, "benchmarks/churn.py", "--requests", "64", "--rows", "12", "--commit", "abc", "--output", str(output)]
    command += ["--workloads", "uniform,long,longer,early,mixed,unseen"]  # others trade tokens for time: see the page on latency
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=900)
    told = json.loads(output.read_text())
    shares = {name: figures["rerun_percent"] for name, figures in told.items() if name.endswith("_x12")}
    assert len(shares) == 6 and all(share < 10 for share in shares.values()), shares
