"""The program of a rank: what it begins before it imports the package, and which modules it finds."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nanovllm.entrypoints.ranks import leader, process
from nanovllm.entrypoints.ranks.settings import settings_by
from nanovllm.testing.models import tiny_config

LIBRARY = """
class CDLL:
    def __init__(self, name):
        self.name = name
        {missing}
    def {function}(self):
        print(self.name, flush=True)
"""
FOLLOWER = """
import sys, threading
assert "torch" not in sys.modules
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
def run(*given):
    print(given)
"""


@pytest.mark.parametrize(
    ("cuda", "function", "missing", "initialised"),
    [
        (1, "nvmlInit_v2", "", True),
        (1, "nvmlInit_v2", "raise OSError(name)", False),
        (1, "something", "", False),
        (0, "nvmlInit_v2", "", False),
    ],
)
def test_a_rank_on_a_gpu_initialises_the_library_while_it_imports(
    tmp_path: Path, cuda: int, function: str, missing: str, initialised: bool
) -> None:
    """A stand-in for `ctypes` tells which library is initialised. One that is not there, or is another one, leaves no trace."""
    package = tmp_path / "nanovllm" / "entrypoints" / "ranks"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").touch()
    (package / "follower.py").write_text(FOLLOWER)
    (tmp_path / "ctypes.py").write_text(LIBRARY.format(missing=missing, function=function))
    command, paths = [sys.executable, "-P", process.__file__, str(cuda), "3", "4"], {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=paths, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == (f"{process.NVML}\n" if initialised else "") + "(3, 4)\n"
    assert done.stderr == ""


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_rank_0_begins_the_same_before_it_starts_the_others(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[str]()

    def no_processes(settings: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(leader, "begin_nvml", lambda: begun.append("NVML"))
    monkeypatch.setattr(leader, "Followers", no_processes)
    settings = settings_by("nothing:make", "mine", tiny_config(), ("cpu", "cpu"), {}, {})
    with pytest.raises(ZeroDivisionError):
        leader.start(replace(settings, devices=(device, device)))
    assert begun == ([] if device == "cpu" else ["NVML"])


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
model, state = start(settings_by("channel:make", "mine", tiny_config(), ("cpu", "cpu"), {}, limits))
state, reply = nv.generate(model, state, [1, 2, 3], nv.SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
print(len(reply.token_ids))
runtime_of(state).mirror.close()
"""


def test_ranks_find_modules_of_the_current_folder(tmp_path: Path) -> None:
    """Where a program runs by `-c`, as in an interpreter, the folder has no name in `sys.path`. No file of the ranks hides its module."""
    (tmp_path / "channel.py").write_text(MAKER)
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.returncode) == ("2\n", 0), done.stderr
