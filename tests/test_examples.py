"""The examples run as they stand. Those that compile run on a model of one layer here: eight take minutes to compile on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm.testing.models import save_hf_folder, tiny_config

EXAMPLES = Path(__file__).parents[1] / "examples"
COMPILED = ("compiled_mix.py", "compiled_score.py")


def run(name: str, *arguments: str) -> str:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    if name in COMPILED:
        del environment["PYTHONWARNINGS"]  # the compiler's own
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert name in COMPILED or result.stderr == ""
    return result.stdout


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory) -> str:
    return str(save_hf_folder(tmp_path_factory.mktemp("model"), tiny_config(num_layers=1)))


def test_every_example_is_tested():
    assert sorted(p.name for p in EXAMPLES.glob("*.py")) == sorted(["hello.py", "stream.py", "branches.py", *COMPILED])


def test_hello():
    out = run("hello.py")
    assert out.splitlines()[0].startswith("1: ")
    assert "reused_tokens=24" in out


def test_stream():
    out = run("stream.py")
    assert "Velmora" in out
    assert "[left early: 0 requests run, 256 of 256 pages are available]" in out


def test_branches():
    out = run("branches.py")
    assert out.startswith("trunk: Chunk(")
    assert "128 reply tokens run" in out


@pytest.mark.compile
def test_compiled_mix(one_layer):
    assert "both: " in run("compiled_mix.py", one_layer)


@pytest.mark.compile
def test_compiled_score(one_layer):
    scores = [float(line.split()[0]) for line in run("compiled_score.py", one_layer).splitlines()]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 4
