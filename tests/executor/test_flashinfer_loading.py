"""FlashInfer's kernels beside a running engine: built if they are missing, taken when they are there, done without if that fails."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.config import EngineConfig
from nanovllm.executor import attention_plans, flashinfer_loading
from nanovllm.executor.attention_plans import Attention, AttentionUnavailableError
from nanovllm.executor.batch import sample_prompts
from nanovllm.executor.flashinfer_loading import Loading
from nanovllm.ops.attention.flashinfer_build import MARK, Kernels, build_apart, missing
from nanovllm.ops.attention.plan_table import lookup
from nanovllm.ops.attention.prompt_tiles import TilePlan
from nanovllm.testing.models import random_model, tiny_config

pytestmark = pytest.mark.unhooked  # objects stand for plans and workspaces

LIMITS = EngineConfig(num_pages=8, page_size=4, max_model_len=32, max_num_seqs=4, max_num_batched_tokens=32, seed=0)
MODEL = random_model(tiny_config(), seed=0)
(PROMPTS,) = sample_prompts(LIMITS, [(2, 5)], MODEL.config)


KERNELS = [Kernels(backend, torch.bfloat16, 128, False, False) for backend in ("fa2", "fa3")]


class Plan:
    """Stands for a plan of FlashInfer."""

    handle, windowed = 4711, None

    def update(self, *_: Any, **__: Any) -> None:
        self.updated = True


class Machine:
    """Stands for what the disk and the compiler do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.absent, self.errors, self.may_end, self.built = list[Kernels](), dict[str, BaseException](), Event(), list[list[Kernels]]()
        self.backends = list[str]()
        self.may_end.set()
        monkeypatch.setattr(flashinfer_loading, "missing", lambda wanted: self.absent)
        monkeypatch.setattr(flashinfer_loading, "build_apart", self.build)
        monkeypatch.setattr(flashinfer_loading, "load", self.load)
        monkeypatch.setattr(attention_plans, "shared_plans", self.plans)
        monkeypatch.setattr(attention_plans, "attention_backend", lambda *_: "flashinfer")
        monkeypatch.setattr(attention_plans, "workspace_of", lambda *_: SimpleNamespace(buffer=torch.zeros(0)))
        monkeypatch.setattr(flashinfer_loading.PlanShape, "kernels", lambda self: KERNELS)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def build(self, wanted: list[Kernels]) -> bool:
        assert self.may_end.wait(120)
        self.built.append(wanted)
        return True

    def load(self, kernels: Kernels) -> None:
        if kernels.backend in self.errors:
            raise self.errors[kernels.backend]

    def plans(self, shape: Any, max_rows: int) -> Any:
        self.load(KERNELS[0])
        self.backends.append(shape.backend)
        return flashinfer_loading.SharedPlans(prompt=Plan(), windowed=None, cascade=Plan())  # pyright: ignore[reportArgumentType]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.fixture
def start() -> Callable[..., Attention]:
    def started(beside: bool = True) -> Attention:
        attention = Attention(MODEL, LIMITS, None, beside=beside)
        assert attention.ready() != beside
        attention.load()
        return attention

    return started


def test_kernels_on_disk_are_waited_for(machine: Machine, start: Callable[..., Attention], capfd: pytest.CaptureFixture[str]) -> None:
    for beside in (False, True):
        attention = start(beside)
        attention.settle()
        assert attention.ready() and attention.plan_prompt(PROMPTS, together=False) == (4711, 0)
    assert not machine.built and not capfd.readouterr().err


def test_own_kernels_run_while_others_are_built(
    machine: Machine, start: Callable[..., Attention], capfd: pytest.CaptureFixture[str]
) -> None:
    machine.absent = KERNELS
    machine.may_end.clear()
    attention = start()
    attention.settle(quiet=True)
    assert not capfd.readouterr().err
    attention.settle()
    assert "kernels are being built" in capfd.readouterr().err
    assert not attention.ready()
    handle, windowed = attention.plan_prompt(PROMPTS, together=False)
    assert not windowed and lookup(handle, TilePlan).table.shape[0] >= len(PROMPTS.seq_lens)
    kept = attention.prompt_plans(PROMPTS, together=False)
    assert isinstance(kept.first, TilePlan) and kept.handles != (handle, 0)
    machine.may_end.set()
    loading = attention._loading
    assert loading is not None and loading.backend.result(120) == "auto"
    assert attention.plan_prompt(PROMPTS, together=False) == (4711, 0) and machine.built == [KERNELS] and machine.backends == ["auto"]
    assert lookup(kept.first.handle) is kept.first  # a session's own plan lives on


def test_kernels_that_take_long_to_load_are_not_waited_for(
    machine: Machine, start: Callable[..., Attention], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Such as kernels that exist, but have to be built again because they are old."""
    monkeypatch.setattr(attention_plans, "PATIENCE", 0.05)
    monkeypatch.setattr(flashinfer_loading, "load", lambda kernels: machine.may_end.wait(120))
    machine.may_end.clear()
    attention = start()
    attention.settle()
    assert not attention.ready() and "being built" in capfd.readouterr().err
    machine.may_end.set()
    assert attention._loading is not None and attention._loading.backend.result(120)
    assert attention.ready()


@pytest.mark.parametrize("error", [RuntimeError("Ninja build failed"), TypeError("another FlashInfer"), SystemExit()], ids=repr)
@pytest.mark.parametrize("absent", [[], KERNELS[:1]])
def test_an_engine_goes_on_without_kernels_that_cannot_be_built(
    machine: Machine, start: Callable[..., Attention], absent: list[Kernels], error: BaseException
) -> None:
    machine.absent, machine.errors = absent, {"fa2": error}
    attention = start()
    loading = attention._loading
    assert loading is not None and loading.backend.exception(120) is error
    with pytest.warns(UserWarning, match=rf"long prompts run on nanovllm's own kernels.*{type(error).__name__}"):
        assert not attention.ready()
    assert not attention.ready()  # and does not warn again
    lookup(attention.plan_prompt(PROMPTS, together=False)[0], TilePlan)


def test_kernels_for_hopper_may_be_missing(machine: Machine, start: Callable[..., Attention]) -> None:
    machine.errors = {"fa3": RuntimeError("no nvcc for it")}
    attention = start()
    attention.settle()
    assert attention.ready() and machine.backends == ["fa2"]  # nobody tries to build the others again


def test_an_engine_that_needs_the_kernels_says_why_they_are_missing(machine: Machine, start: Callable[..., Attention]) -> None:
    machine.errors = {"fa2": RuntimeError("Ninja build failed")}
    with pytest.raises(AttentionUnavailableError, match="Ninja"):
        start(beside=False)


def test_whatever_ends_the_thread_ends_the_wait(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(wanted: object) -> list[str]:
        raise SystemExit

    monkeypatch.setattr(flashinfer_loading, "missing", broken)
    loading = Loading(KERNELS, torch.device("cpu"))
    assert not loading.builds.result(120) and isinstance(loading.backend.exception(120), SystemExit)


# A FlashInfer that writes one file for each of its kernels
STUB = {
    "__init__.py": "",
    "jit/__init__.py": "",
    "jit/env.py": "from pathlib import Path\nFLASHINFER_JIT_DIR = Path(__file__).parents[2] / 'built'\n",
    "prefill.py": """
from flashinfer.jit.env import FLASHINFER_JIT_DIR
class Files:
    def __init__(self, *given):
        assert len(given) == 11, given
        self.path = FLASHINFER_JIT_DIR / f"{given[0]}-{given[1]}-{given[5]}.so"
        self.is_compiled = self.path.exists()
    def build(self, verbose):
        if (FLASHINFER_JIT_DIR / "broken").exists():
            raise RuntimeError("Ninja build failed")
        self.path.touch()
def gen_batch_prefill_module(*given):
    return Files(*given)
""",
}


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in STUB.items():
        file = tmp_path / "flashinfer" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path / "built"


def test_a_process_of_its_own_builds(stub: Path) -> None:
    assert missing(KERNELS) == KERNELS
    assert build_apart(KERNELS) and sorted(file.name for file in stub.glob("*.so")) == [
        f"{name}-torch.bfloat16-128.so" for name in ("fa2", "fa3")
    ]
    assert missing(KERNELS) == []
    for file in stub.glob("*.so"):
        file.unlink()
    (stub / "broken").touch()
    assert not build_apart(KERNELS) and missing(KERNELS) == KERNELS


@pytest.mark.parametrize("executable", ["", None, "/no/such/python"])
def test_a_program_that_cannot_start_another_builds_by_itself(executable: str | None, stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", executable)
        assert not build_apart(KERNELS)
    monkeypatch.setenv(MARK, "1")  # a builder starts no other one
    assert not build_apart(KERNELS)
    monkeypatch.delenv(MARK)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert not build_apart(KERNELS) and not [*stub.glob("*.so")]


def test_one_plan_serves_both_pools(machine: Machine) -> None:
    for windows in ((), (5, 0)):
        model = random_model(replace(tiny_config(), windows=windows))
        plans = attention_plans.own_plans(model, PROMPTS)
        assert isinstance(plans.first, TilePlan) and plans.windowed is (plans.first if windows else None)
        assert PROMPTS.cu_seqlens is not None and plans.first.max_tokens == int(np.diff(PROMPTS.cu_seqlens).sum())
