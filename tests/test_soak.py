"""`benchmarks/soak.py` serves every kind of client, finds nothing wrong with the engine, and finds what is planted."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import soak
from nanovllm.testing.models import save_hf_folder, tiny_config

pytestmark = pytest.mark.unhooked  # it measures

ARGUMENTS = ["--device", "cpu", "--cases", "1", "--max-step-ms", "1e6"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The arguments for a small model of random weights."""
    return ["--model", str(save_hf_folder(tmp_path_factory.mktemp("model"), tiny_config(max_position_embeddings=256))), "--num-pages", "96"]


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
    assert "violations: 0" in capsys.readouterr().out


@pytest.mark.long
def test_the_packaged_model_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main([*ARGUMENTS, "--model", "tiny", "--num-pages", "224", "--minutes", "0.2"]) == 0
    assert "violations: 0" in capsys.readouterr().out


def test_what_is_wrong_is_found(small: list[str], short: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(run: soak.Soak) -> None:
        (case,) = run.cases["plain"]
        assert case.want is not None
        least = min(case.tops[3], key=case.tops[3].__getitem__)
        run.compare("plain", case, [*case.want[:3], least, *case.want[4:]])
        run.compare("plain", case, case.want[:-1])
        run.prefill([1, 2, 3])
        run.memory.append({"seconds": 10**6, "host": 2**50})
        run.steps.append((2000.0, 5))

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
