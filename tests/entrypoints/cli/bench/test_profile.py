"""`nanovllm profile`: names that can be read, a table that adds up, a trace that can be opened."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cli.bench.kernel_table import NAME, NO_OP, kernels, short, table
from nanovllm.entrypoints.cli.bench.profile import profile_decode
from nanovllm.entrypoints.cli.bench.stopwatch import Engine
from nanovllm.testing.models import random_model, tiny_config

RUN = ["profile", "--model", "tiny", "--device", "cpu"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("attend_kernel", "attend_kernel"),
        ("aten::mm", "mm"),
        ("nanovllm::kv_write", "nanovllm::kv_write"),
        ("void flashinfer::BatchDecodeKernel<128, (int)1>(flashinfer::Params)", "BatchDecodeKernel<128, (int)1>"),
        ("void at::native::(anonymous namespace)::fill<int>(int*, long)", "fill<int>"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH"),
    ],
)
def test_names_are_short(name: str, expected: str) -> None:
    assert short(name) == expected


def test_long_names_are_cut() -> None:
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<long>, std::array<char*, 1ul> >(int, T)"
    assert len(short(name)) == NAME and short(name).startswith("vectorized_elementwise_kernel<4, FillFunctor<long>")


def event(name: str, us: float, device: str) -> Any:
    elapsed = SimpleNamespace(elapsed_us=lambda: us)
    return SimpleNamespace(name=name, device_type=SimpleNamespace(name=device), time_range=elapsed, self_cpu_time_total=us)


def test_kernels_of_a_step_by_hand() -> None:
    events = [event("a(int)", 3.0, "CUDA"), event("a(long)", 5.0, "CUDA"), event("b", 2.0, "CUDA"), event("aten::mm", 9.0, "CPU")]
    a, b = kernels(events, 2, cuda=True, seconds=1.0)
    assert (a.name, a.launches, a.us, a.share) == ("a", 1.0, 4.0, 0.8)
    assert (b.name, b.launches, b.us, b.share) == ("b", 0.5, 1.0, 0.2)
    rest, op = kernels(events, 2, cuda=False, seconds=30e-6)
    assert (rest.name, rest.us, op.name, op.us) == (NO_OP, pytest.approx(10.5), "mm", 4.5)
    lines = table((a, b), 1, cuda=True)
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split() == ["a", "1.0", "4.00", "4.0", "80.0%"] and lines[2].split()[:2] == ["1", "others"]


def test_profile_prints_a_table_and_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "new" / "trace.json"
    assert cli.main([*RUN, "--batch", "2", "--context", "20", "--steps", "3", "--top", "5", "--trace", str(trace)]) == 0
    head, took, made, _, columns, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("tiny, float32") and head.endswith("2 x 20 tokens of context")
    assert "us per step" in took and "host" in took and made.startswith("ops")
    assert columns.split()[0] == "op" and len(rows) == 6 and rows[-1].split()[1] == "others"
    assert json.loads(trace.read_text())["traceEvents"]


def test_profile_of_prompts_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*RUN, "--prefill", "40", "--steps", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["command"] == "nanovllm profile --model tiny --device cpu --prefill 40 --steps 2 --json"
    assert result["what"] == "1 x 40 tokens of prompt" and 0 < result["host_us"] < result["step_us"]
    named = {kernel["name"]: kernel for kernel in result["kernels"]}
    assert named["mm"]["launches"] == int(named["mm"]["launches"]) > 0
    assert sum(kernel["share"] for kernel in result["kernels"]) == pytest.approx(1, abs=0.01)


def test_all_rows_decode_although_prompts_come_in_chunks() -> None:
    engine = Engine(random_model(tiny_config()), num_pages=64, max_num_batched_tokens=16)
    found = profile_decode(engine, 3, 40, 5)
    assert len(engine.state.running) == 3 and 0 < found.host_us < found.step_us
    assert min(s.num_generated for s in engine.state.running) > 2 * 5


def test_too_much_context_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*RUN, "--context", "2030"]) == 2
    assert "but the model has 2048 positions" in capsys.readouterr().err
