"""Ranks find modules where rank 0 finds them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MAKER = """
from nanovllm.testing.models import random_model, tiny_config
def make(name, *, device, mesh):
    return random_model(tiny_config(), mesh=mesh)
"""
PROGRAM = """
import nanovllm as nv
from nanovllm.entrypoints.ranks.leader import start
from nanovllm.entrypoints.ranks.settings import settings_by
from nanovllm.executor.executor import runtime_of
from nanovllm.testing.models import tiny_config
limits = {"num_pages": 8, "page_size": 4, "max_num_seqs": 2, "max_model_len": 32, "max_num_batched_tokens": 32}
model, state = start(settings_by("maker_of_this_test:make", "mine", tiny_config(), ("cpu", "cpu"), {}, limits))
state, reply = nv.generate(model, state, [1, 2, 3], nv.SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
print(len(reply.token_ids))
runtime_of(state).mirror.close()
"""


@pytest.mark.parametrize("here", [True, False], ids=["in the current folder", "not in the current folder"])
def test_ranks_find_modules_where_rank_0_does(here: bool, tmp_path: Path) -> None:
    """A program run by `-c`, like an interpreter, looks into the current folder, which has no name in `sys.path`; with `-P` it does not."""
    folder, other = tmp_path / "one", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    (folder / "maker_of_this_test.py").write_text(MAKER)
    (other / "traceback.py").write_text("raise ZeroDivisionError")
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(folder))))
    command, environment = [sys.executable, "-c", PROGRAM], dict(os.environ)
    if not here:
        command, environment = [sys.executable, "-P", "-c", PROGRAM], {**environment, "PYTHONPATH": paths}
    where = folder if here else other
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.returncode) == ("2\n", 0), done.stderr
