"""`benchmarks/soak.py` serves every kind of client, finds nothing wrong with the engine, and finds what is planted."""

import json
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import soak, step_watch
from nanovllm.testing.models import save_hf_folder, tiny_config

pytestmark = pytest.mark.unhooked  # it measures

ARGUMENTS = ["--device", "cpu", "--cases", "1", "--max-step-ms", "1e6"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The arguments for a small model of random weights."""
    return ["--model", str(save_hf_folder(tmp_path_factory.mktemp("model"), tiny_config(max_position_embeddings=256)))]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short replies."""
    monkeypatch.setattr(soak, "REPLY", 6)
    monkeypatch.setattr(soak, "GREEDY", soak.replace(soak.GREEDY, max_tokens=6))


def planted(fault: Callable[[soak.Soak], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something wrong after the run, before the report."""
    report = soak.Soak.report

    def later(self: soak.Soak) -> object:
        fault(self)
        return report(self)

    monkeypatch.setattr(soak.Soak, "report", later)


def test_every_kind_is_served(small: list[str], short: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main([*ARGUMENTS, *small, "--minutes", "0.02", "--rate", "100", "--output", str(tmp_path / "soak.json")]) == 0
    told = json.loads((tmp_path / "soak.json").read_text())
    assert told["clients"].keys() == soak.KINDS.keys() and told["violations"] == []
    for kind, counts in told["clients"].items():
        assert counts["started"] - 1 == counts.get("ended", 0) + counts.get("left", 0) + counts.get("refused", 0)  # one warmed up
        assert kind == "sampled" or counts["equal"] > 0
    assert sum(counts.get("left", 0) for counts in told["clients"].values()) > 0
    assert told["stats"]["preemptions"] > 0 and told["preemptions_per_100_clients"] > 0
    longest = told["longest_steps"]
    assert len(longest) == 10 and longest[0]["ms_beyond_prompts"] == told["steps"]["worst_ms_beyond_prompts"]
    assert all(0 <= step["second"] < 60 and step["prompt_tokens"] + step["decode_rows"] > 0 for step in longest)
    out = capsys.readouterr().out
    assert "violations: 0" in out and "the longest steps beside the share of their prompts:" in out


@pytest.mark.parametrize("mostly", ["engine", "no processor"])
def test_a_long_step_tells_what_took_its_time(
    mostly: str, small: list[str], short: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that the engine itself takes is told from one in which the thread did not run. Both are violations."""
    step, steps, clock = soak.nv.LLM._step, count(), time.perf_counter
    if mostly == "engine":  # as if nobody else wanted this machine's processors
        monkeypatch.setattr(step_watch, "time", SimpleNamespace(thread_time=clock, perf_counter=clock))

    def stalled(self: soak.nv.LLM) -> set[int]:
        if isinstance(self, soak.Timed) and self.steps.limit == 4.0 and next(steps) == 3:
            time.sleep(5.5)
        return step(self)

    monkeypatch.setattr(soak.nv.LLM, "_step", stalled)
    monkeypatch.setattr(soak, "KINDS", {"plain": soak.Soak.stream})
    seen: list[dict[str, object]] = []
    planted(lambda run: seen.append(run.llm.steps.longest.told()[0]), monkeypatch)
    assert soak.main([*ARGUMENTS[:-1], "4000", *small, "--minutes", "0.005", "--rate", "100"]) == 1
    assert seen[0]["mostly"] == mostly and 5500 < seen[0]["ms_beyond_prompts"] < 60_000
    assert "violations: 1\n  1 steps were too long" in capsys.readouterr().out


@pytest.mark.long
def test_the_packaged_model_is_served(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(soak, "PREEMPTING", 0.0)
    assert soak.main([*ARGUMENTS, "--model", "tiny", "--minutes", "0.1", "--rate", "5"]) == 0
    assert "violations: 0" in capsys.readouterr().out


def test_what_is_wrong_is_found(small: list[str], short: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(run: soak.Soak) -> None:
        (case,) = run.cases["plain"]
        assert case.want is not None
        least = min(case.tops[3], key=case.tops[3].__getitem__)
        run.compare("plain", case, [*case.want[:3], least, *case.want[4:]])
        run.compare("plain", case, case.want[:-1])
        run.prefill([1, 2, 3])
        run.memory.add((10**6, 2**50))
        run.llm.steps.add(2000.0, 5)

    planted(wrong, monkeypatch)
    monkeypatch.setattr(soak, "KINDS", {"plain": soak.Soak.stream})
    assert soak.main([*ARGUMENTS, *small, "--minutes", "0.001"]) == 1
    out = capsys.readouterr().out
    assert "violations: 6" in out
    for message in (
        "less probable",
        "plain: a prompt of",
        "1 pages are left at the end",
        "1 chunks are left",
        "host memory grew by",
        "1 steps were too long",
    ):
        assert message in out


def test_a_pool_without_preemption_is_found(
    small: list[str], short: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not in a run that is too short to tell."""
    monkeypatch.setattr(soak, "KINDS", {"plain": soak.Soak.stream, "wave": soak.Soak.stream})
    arguments = [*ARGUMENTS, *small, "--minutes", "0.001", "--num-pages", "1000"]
    assert soak.main(arguments) == 0
    monkeypatch.setattr(soak, "PREEMPTING", 0.0)
    assert soak.main(arguments) == 1
    assert "nothing was preempted in 1000 pages" in capsys.readouterr().out
    assert soak.main(arguments[:-2]) == 0


def test_a_leak_in_every_step_is_found(
    small: list[str], short: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is far below what memory may grow by in all. A run without it passes."""
    now, leaked, step = count(0.0, 0.01), list[bytearray](), soak.Timed._step

    def leaking(self: soak.Timed) -> set[int]:
        leaked.append(bytearray(b"x") * 16384)
        return step(self)

    monkeypatch.setattr(soak, "time", SimpleNamespace(monotonic=lambda: next(now), perf_counter=time.perf_counter, sleep=lambda _: None))
    monkeypatch.setattr(soak, "KINDS", {"plain": soak.Soak.stream})
    monkeypatch.setattr(soak, "SLOPE", 40 << 20)  # 1 MiB in the second half
    monkeypatch.setattr(soak, "JUMP", 0)
    arguments = [*ARGUMENTS, *small, "--minutes", "0.05", "--rate", "100"]
    monkeypatch.setattr(soak, "SLOPED", 0.0)
    assert soak.main(arguments) == 0
    monkeypatch.setattr(soak.Timed, "_step", leaking)
    assert soak.main(arguments) == 1
    out = capsys.readouterr().out
    assert "violations: 1\n" in out and "MiB per minute in the second half\n" in out
    assert sum(map(len, leaked)) < soak.ROOM


def test_the_slope_of_memory_is_that_of_the_second_half() -> None:
    memory = soak.Memory(("host", "device"), 128)
    for second in range(0, 601, 6):
        memory.add((second, 2**30 + min(second, 100) * 2**20 + second * 2**15, 7.0))
    assert memory.slope("host", 300, 600) == pytest.approx(60 * 2**15) and memory.slope("device", 300, 600) == pytest.approx(0.0)
    assert memory.slope("host", 590, 600) == 0.0  # too few samples
    assert memory.told()[1] == {"seconds": 6.0, "host": 2**30 + 6 * 2**20 + 6 * 2**15, "device": 7}
    size = memory.rows.nbytes
    for second in range(601, 2000):
        memory.add((second, 0.0, 0.0))
    assert memory.count == 128 and memory.rows.nbytes == size and memory.told()[-1]["seconds"] == 1999


def test_times_of_steps_are_kept_in_a_fixed_size() -> None:
    steps, times = soak.Steps(1e-3, 0.5), [1e-4 * number for number in range(1, 1001)]
    for seconds in times:
        steps.add(seconds, 0)
    for part in (1, 50, 99):
        assert steps.percentile(part) == pytest.approx(1e-4 * 10 * part, rel=0.006)
    assert steps.count == 1000 and steps.seconds == pytest.approx(sum(times)) and steps.excess == pytest.approx(0.1)
    steps.add(0.9, 500)
    assert steps.num_slow == 0 and steps.excess == pytest.approx(0.4)
    steps.add(0.9, 300)
    steps.add(1e9, 0)
    assert steps.num_slow == 2 and steps.slowest == (1e9, 0) and steps.bins.sum() == steps.count == 1003
    assert soak.Steps(0.0, 1.0).percentile(50) == 0.0


def test_penalties_are_part_of_a_margin() -> None:
    tops = [{7: -1.0, 8: -1.5, 9: -2.0}] * 2
    case = soak.Case(prompt=[1], params=soak.GREEDY, want=[7, 7], tops=tops)
    assert [case.margin(1, token) for token in (7, 8, 9, 3)] == [0.0, 0.5, 1.0, 1.0]
    less = soak.replace(case, params=soak.replace(soak.GREEDY, presence_penalty=0.5, frequency_penalty=0.25))
    assert [less.margin(1, token) for token in (7, 8)] == [0.0, -0.25]


def test_biased_tokens_have_a_margin(small: list[str], short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases lift tokens that are improbable without them. Their log-probabilities are known all the same."""
    seen: list[soak.Case] = []
    planted(lambda run: seen.extend(run.cases["bias"]), monkeypatch)
    monkeypatch.setattr(soak, "BIAS", 100.0)
    monkeypatch.setattr(soak, "KINDS", {"plain": soak.Soak.stream, "bias": soak.Soak.stream})
    assert soak.main([*ARGUMENTS, *small, "--minutes", "0.001"]) == 0
    (case,) = seen
    assert case.want is not None
    lifted = {token for token, bias in dict(case.params.logit_bias).items() if bias > 0}
    assert all(token in lifted and token in top for token, top in zip(case.want, case.tops, strict=True))
