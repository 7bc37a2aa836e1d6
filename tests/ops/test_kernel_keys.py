"""Triton finds a compiled kernel again whichever kernel a process launches first."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from nanovllm.config import EngineConfig
from nanovllm.executor import build_executor
from nanovllm.ops import kernel_keys
from nanovllm.ops.kernel_keys import kernel_files
from nanovllm.testing.models import random_model, tiny_config

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
PROGRAM = """
import json, random, sys
from nanovllm.ops import kernel_keys
kernel_keys.hash_kernels()
import triton
modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("nanovllm.ops.")]
found = [each for module in modules for each in vars(module).values() if isinstance(each, triton.JITFunction)]
functions = {f"{each.module}.{each.fn.__qualname__}": each for each in found}
names = sorted(functions)
random.Random(int(sys.argv[1])).shuffle(names)
print(json.dumps({name: functions[name].cache_key for name in names}, sort_keys=True))
"""
LIMITS = EngineConfig(num_pages=8, page_size=16, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, seed=0)


def test_the_keys_of_kernels_do_not_depend_on_which_is_launched_first() -> None:
    command = [sys.executable, "-c", PROGRAM]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    running = [subprocess.Popen([*command, str(seed)], env=environment, stdout=subprocess.PIPE, text=True) for seed in range(3)]
    told = [one.communicate(timeout=600)[0] for one in running]
    assert told[0] == told[1] == told[2]
    keys = json.loads(told[0])
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in keys} == {file.stem for file in kernel_files()}
    assert len(set(keys.values())) == len(keys) > 100


class Function:
    """Stands for a Triton function, which keeps the beginning of a key that it could not make."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.hash = fails, None

    @property
    def cache_key(self) -> str:
        """The key."""
        self.hash = "recursion"
        if self.fails:
            raise RuntimeError("Unsupported function referenced")
        self.hash = "key"
        return self.hash


def test_what_has_no_key_keeps_none_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a Triton that lacks what only kernels of another model use."""
    files, bad, good = kernel_files()[:2], Function(fails=True), Function()

    def imported(name: str) -> SimpleNamespace:
        if name.endswith(files[0].stem):
            raise ImportError(name)
        return SimpleNamespace(first=bad, constant=1, second=good)

    monkeypatch.setattr("triton.JITFunction", Function)
    monkeypatch.setattr(kernel_keys, "kernel_files", lambda: files)
    monkeypatch.setattr(kernel_keys, "import_module", imported)
    kernel_keys.hash_kernels()
    assert (bad.hash, good.hash) == (None, "key")


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_a_start_on_a_gpu_makes_the_keys_before_it_launches(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a model whose kernels are not compiled ahead, or that runs plain layers."""
    model, done = random_model(tiny_config(architecture)), list[str]()
    monkeypatch.setattr(build_executor, "wait_for_triton", lambda: done.append("waited"))
    monkeypatch.setattr(build_executor, "hash_kernels", lambda: done.append("keys"))
    for device, want in (("cpu", []), ("cuda", ["waited", "keys"])):
        there = replace(model, device=torch.device(device))
        build_executor.first_start(there, LIMITS, False, None, None, checked=False, sized=False)
        assert done == want
