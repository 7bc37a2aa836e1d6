"""The command from its options to its file, for models with and without quantised weights, with a clock made up; and on a CPU."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanovllm.entrypoints.cli.main import main as command_line
from nanovllm.entrypoints.cli.tune import command
from nanovllm.entrypoints.cli.tune.kernel_search import Times
from nanovllm.entrypoints.cli.tune.layer_search import Bench
from nanovllm.loading.quantisation.rounding import Rounding, rounded_params
from nanovllm.models.fast.cuts import StepCuts
from nanovllm.models.tuning.file import read_run
from nanovllm.models.tuning.launches import PRODUCTS, Machine, codes_of
from nanovllm.ops.linear.quantise import KINDS, Kind
from nanovllm.testing.models import random_model, tiny_config

H100 = Machine(processors=132, memory=200_000)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU as far as the command asks for one."""
    monkeypatch.setattr(command, "resolve_device", lambda _: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(command, "machine_of", lambda _: H100)
    monkeypatch.setattr(command, "Recorder", lambda _: None)
    monkeypatch.setattr(command, "freeze", lambda: None)
    monkeypatch.setattr(command.fused, "serves", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")


@pytest.mark.parametrize("head", [False, True], ids=["plain head", "rounded head"])
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_a_run_ends_with_a_file_that_can_be_read(
    kind: Kind | None, head: bool, gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_model(tiny_config(hidden_size=256, head_dim=64, intermediate_size=512), dtype="bfloat16")
    if kind is not None:
        model = replace(model, params=rounded_params(model.params, Rounding(kind=kind, head=head)))
    monkeypatch.setattr(command, "find_model", lambda _: (model, "tiny"))

    def measure(cuts: StepCuts) -> Times:
        return (9.0 if cuts.o else 10.0,)

    monkeypatch.setattr(command, "measuring", lambda *_: nullcontext(Bench(measure=measure)))
    file = tmp_path / "cuts.json"
    assert command_line(["tune", "--batches", "1,8,64", "--output", str(file), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    cuts, lines = read_run(file, model, H100)
    assert set(cuts.steps) == {1, 8, 64} and all(step == StepCuts(o=step.o) and step.o for step in cuts.steps.values())
    assert shown["measured"] == lines and {line["part"] for line in lines} == {"layer", "attend", *PRODUCTS, "head"}
    quantised = set(shown["key"]["shapes"].get("quantised", ()))
    assert quantised == set(codes_of(model.params)) == (set() if kind is None else {*PRODUCTS, *(["head"] if head else [])})


@pytest.mark.parametrize("rounded", [[], ["--quantization", "int8"]], ids=["plain", "int8"])
def test_a_cpu_has_nothing_to_tune(rounded: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["tune", "--model", "tiny", "--device", "cpu", *rounded]) == 2
    assert "the kernels of a CPU, those of quantised weights too, have no tile configurations to choose" in capsys.readouterr().err
