"""FlashInfer's kernels beside a running engine: built if they are missing, taken when they are there, done without if that fails."""

from collections.abc import Callable
from contextlib import nullcontext
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
from nanovllm.ops.attention.plan_table import lookup
from nanovllm.ops.attention.prompt_tiles import TilePlan
from nanovllm.testing.models import random_model, tiny_config

LIMITS = EngineConfig(num_pages=8, page_size=4, max_model_len=32, max_num_seqs=4, max_num_batched_tokens=32, seed=0)
MODEL = random_model(tiny_config(), seed=0)
(PROMPTS,) = sample_prompts(LIMITS, [(2, 5)], MODEL.config)


class Plan:
    """Stands for a plan of FlashInfer."""

    handle, windowed = 4711, None

    def update(self, *_: Any, **__: Any) -> None:
        self.updated = True


class Machine:
    """Stands for what the disk and the compiler do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.absent, self.error, self.may_end, self.built = list[str](), None, Event(), list[list[str]]()
        self.may_end.set()
        monkeypatch.setattr(flashinfer_loading, "missing", lambda wanted: self.absent)
        monkeypatch.setattr(flashinfer_loading, "build_apart", self.build)
        monkeypatch.setattr(attention_plans, "shared_plans", self.load)
        monkeypatch.setattr(flashinfer_loading, "shared_plans", self.load)
        monkeypatch.setattr(attention_plans, "attention_backend", lambda *_: "flashinfer")
        monkeypatch.setattr(attention_plans, "workspace_of", lambda *_: SimpleNamespace(buffer=torch.zeros(0)))
        monkeypatch.setattr(flashinfer_loading.PlanShape, "kernels", lambda self: [])
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def build(self, wanted: list[str]) -> bool:
        assert self.may_end.wait(20)
        self.built.append(wanted)
        return True

    def load(self, shape: Any, max_rows: int) -> Any:
        if self.error is not None:
            raise self.error
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
    machine.absent = ["fa2", "fa3"]
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
    assert loading is not None and loading.plans.result(20) and not loading.builds()
    assert attention.plan_prompt(PROMPTS, together=False) == (4711, 0) and machine.built == [["fa2", "fa3"]]
    assert lookup(kept.first.handle) is kept.first  # a session's own plan lives on


@pytest.mark.parametrize("absent", [[], ["fa2"]])
def test_an_engine_goes_on_without_kernels_that_cannot_be_built(
    machine: Machine, start: Callable[..., Attention], absent: list[str]
) -> None:
    machine.absent, machine.error = absent, RuntimeError("Ninja build failed")
    attention = start()
    loading = attention._loading
    assert loading is not None
    with pytest.raises(RuntimeError):
        loading.plans.result(20)
    with pytest.warns(UserWarning, match=r"Ninja build failed; long prompts run on nanovllm's own kernels"):
        assert not attention.ready()
    assert not attention.ready()  # and does not warn again
    lookup(attention.plan_prompt(PROMPTS, together=False)[0], TilePlan)
    with pytest.raises(AttentionUnavailableError, match="Ninja"):
        start(beside=False)


def test_whatever_ends_the_thread_ends_the_wait(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(wanted: object) -> list[str]:
        raise SystemExit

    monkeypatch.setattr(flashinfer_loading, "missing", broken)
    shape = flashinfer_loading.PlanShape(workspace=SimpleNamespace(), sizes=(), groups=(), softcap=0.0)  # pyright: ignore[reportArgumentType]
    loading = Loading(shape, 1)
    assert not loading.builds() and isinstance(loading.plans.exception(20), SystemExit)


def test_rows_of_prompts_get_one_plan_for_both_pools(machine: Machine, start: Callable[..., Attention]) -> None:
    plans = attention_plans.own_plans(MODEL, PROMPTS)
    assert isinstance(plans.first, TilePlan) and plans.windowed is None
    assert PROMPTS.cu_seqlens is not None and plans.first.max_tokens == int(np.diff(PROMPTS.cu_seqlens).sum())
