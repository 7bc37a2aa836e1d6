"""`benchmarks/record_gpu.py`: its parts can be run, its exit code and its summary say what became of them, also if it is killed."""

import argparse
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record_gpu
from benchmarks.recording import machine, process
from benchmarks.recording import summary as summary_of
from benchmarks.recording.choose import Part
from benchmarks.recording.commands import Commands
from benchmarks.recording.outcomes import Outcomes
from benchmarks.recording.parts import GROUPS, PARTS
from benchmarks.recording.process import end_orphans
from benchmarks.recording.side_by_side import Row
from nanovllm.entrypoints.cli.bench.command import find_workloads
from nanovllm.entrypoints.cli.main import build_parser
from tests.test_side_by_side import alive, until

ROOT = Path(__file__).parents[1]
HEAD = "part   cards  seconds  result"


class Parsed(Exception):
    """The options that a program has parsed."""


@pytest.mark.parametrize("name", PARTS)
def test_each_part_can_be_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program takes its options."""
    inner = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *arguments: Any) -> None:
        raise Parsed(inner(self, *arguments))

    part = PARTS[name]
    _, *words = Commands(Path("results"), commit="abc").words(part)
    if words[:2] == ["-m", "torch.distributed.run"]:
        assert words[2:5] == ["--standalone", "--nproc-per-node", str(part.cards)]
        words = words[5:]
    if words[0] == "tests/gpu/two_ranks.py":
        assert all(word in (ROOT / words[0]).read_text() for word in words[1:])
        return
    if words[:2] == ["-m", "pytest"]:
        return  # `test_outcomes` runs pytest with the plugin
    if words[:2] == ["-m", "nanovllm"]:
        found = build_parser().parse_args(words[2:])
        if words[2] == "bench":
            assert find_workloads(found.which, found.model or "qwen3-0.6b", cuda=True)[1] == []
    else:
        run, program, *rest = (runpy.run_module, *words[1:]) if words[0] == "-m" else (runpy.run_path, *words)
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
        monkeypatch.setattr(sys, "argv", [program, *rest])
        monkeypatch.chdir(ROOT)
        monkeypatch.delitem(sys.modules, program, raising=False)  # another test may have imported it
        with pytest.raises(Parsed) as parsed:
            run(program, run_name="__main__")
        found = parsed.value.args[0]
    assert found.output.parent == Path("results") and getattr(found, "commit", None) == ("abc" if part.figures else None)


def test_no_two_parts_write_the_same_file() -> None:
    commands = Commands(Path("results"))
    files = [commands.figures(part) for part in PARTS.values() if part.figures]
    assert len(set(files)) == len(files)


def test_groups_are_figures_of_so_many_cards() -> None:
    assert GROUPS["x2"] == ("8b-x2", "32b-x2", "70b-x2", "235b-fp8-x2", "rank-faults") and "235b-fp8-x8" in GROUPS["x8"]
    assert GROUPS["of-8"] == ("8b-of-8", "32b-of-8", "70b-of-8", "235b-fp8-of-8") and len(GROUPS["of-4"]) == 4
    assert [part.name for part in record_gpu.chosen_parts("tests,x4,8b-x4")] == ["tests", *GROUPS["x4"]]


class Told:
    """In place of `Machine`."""

    def told(self, *, wait: bool) -> Mapping[str, Any]:
        return {"gpus": ["a card"] * 2, "commit": "abc", "versions": {"torch": "2"}}


def fake(name: str, code: str, limit: float = 60, **needs: Any) -> Part:
    return Part(name, (sys.executable, "-S", "-c", code), limit, figures=False, **needs)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Any]]]:
    """A function that records fake parts. It returns the exit code and the summary."""

    def recorded(*parts: Part, arguments: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(record_gpu, "PARTS", {part.name: part for part in parts})
        code = record_gpu.main(["--out", str(tmp_path / "out"), *arguments])
        return code, json.loads((tmp_path / "out/summary.json").read_text())

    monkeypatch.setattr(record_gpu, "Machine", Told)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return recorded


def test_a_failing_part_does_not_stop_others(recorded: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    see = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ.get('WORD'), 'OUT')"
    parts = fake("bad", "raise SystemExit(3)"), fake("good", see, cards=2, environment=(("WORD", "yes"),)), fake("wide", "", cards=4)
    code, summary = recorded(*parts)
    assert code == 1 and (tmp_path / "out/gpu-good.log").read_text() == f"0,1 yes {tmp_path / 'out'}\n"
    assert [(row["part"], row["cards"], row["result"]) for row in summary["parts"]] == [
        ("bad", [0], "exit code 3"),
        ("good", [0, 1], "done"),
        ("wide", [], "skipped: needs 4 cards"),
    ]
    assert summary["gpus"] == ["a card"] * 2 and summary["commit"] == "abc" and summary["versions"] == {"torch": "2"}
    printed = capsys.readouterr().out
    assert "bad: exit code 3" in printed and "wide: skipped: needs 4 cards\n" in printed
    assert printed.splitlines()[-4].split() == ["part", "cards", "seconds", "result"]


def test_a_skipped_part_is_no_failure(recorded: Callable[..., Any]) -> None:
    code, summary = recorded(fake("wide", "", cards=2), fake("good", ""), arguments=("--cards", "1", "--commit", "mine"))
    assert code == 0 and summary["parts"][0]["result"] == "skipped: needs 2 cards" and summary["commit"] == "mine"


def test_the_limits(recorded: Callable[..., Any]) -> None:
    slow, late = fake("slow", "import time; time.sleep(60)"), fake("late", "")
    code, summary = recorded(slow, late, arguments=("--cards", "1", "--limit", "0.02"))
    assert code == 1 and [row["result"] for row in summary["parts"]] == ["reached the limit of all parts", "not started"]
    slow = fake("slow", "import time; time.sleep(60)", limit=0.2)
    code, summary = recorded(slow, late, arguments=("--cards", "1"))
    assert code == 1 and [row["result"] for row in summary["parts"]] == ["reached its limit of 0.2 s", "done"]


def test_cards_keep_their_names(recorded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7,GPU-9")
    see = fake("see", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])", cards=2)
    assert recorded(see)[0] == 0 and (tmp_path / "out/gpu-see.log").read_text() == "GPU-7,GPU-9\n"
    with pytest.raises(SystemExit):
        recorded(see, arguments=("--cards", "3"))


def test_tests_that_failed_are_named(recorded: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"collected": 3}, {"test": "a::good", "outcome": "passed"}, {"test": "a::bad", "outcome": "failed"}, {"started": "a::slow"}]
    text = "\n".join(map(json.dumps, lines))
    code, summary = recorded(fake("tests", f"import pathlib; pathlib.Path('OUT/gpu-tests.jsonl').write_text({text!r})"))
    assert code == 0 and summary["parts"][0]["tests"] == {
        "collected": 3, "passed": 1, "skipped": 0, "failed": ["a::bad"], "unfinished": ["a::slow"],
    }  # fmt: skip
    said = "tests: 1 failed, 2 of 3 tests ran, 0 skipped, 1 unfinished\n  failed: a::bad\n  unfinished: a::slow\npart "
    assert said in capsys.readouterr().out
    many = {"tests": Outcomes(50, 0, 0, tuple(f"a::{at}" for at in range(50)), ())}
    assert summary_of.table([Row(fake("tests", ""))], many).splitlines()[-4:-1] == ["  failed: a::39", "  and 10 more", HEAD]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_summary_is_there_after_a_kill(number: signal.Signals, tmp_path: Path) -> None:
    """SIGTERM ends the parts too. Those that SIGKILL leaves are killed by the next run."""
    code = f"import os, pathlib, time; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); time.sleep(600)"
    parts = [["quick", ""], ["slow", code], ["late", ""]]
    program = f"""
import sys
from benchmarks import record_gpu
from benchmarks.recording.choose import Part
class Machine:
    def told(self, wait): return {{}}
record_gpu.Machine = Machine
record_gpu.PARTS = {{name: Part(name, (sys.executable, "-S", "-c", code), 60, figures=False) for name, code in {parts!r}}}
sys.exit(record_gpu.main(["--cards", "1", "--out", {str(tmp_path)!r}]))
"""
    recorder = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.DEVNULL, env={**os.environ})
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    pid, summary = int((tmp_path / "pid").read_text()), tmp_path / "summary.json"

    def results() -> list[str]:
        return [row["result"] for row in json.loads(summary.read_text())["parts"]]

    until(lambda: results() == ["done", "running", "waiting"])
    recorder.send_signal(number)
    code = recorder.wait(300)
    if number is signal.SIGTERM:
        assert code == 128 + number and results() == ["done", "ended from outside", "not started"]
    else:
        assert code == -number and results() == ["done", "running", "waiting"]
        end_orphans()  # as a recorder of another test may have done already
    until(lambda: not alive(pid))


def test_processes_with_marks_of_others_live_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark of another form is not ours. A recorder that was started in what an ended one left behind does not end itself."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    # In a namespace of its own, because a recorder of another test, which runs meanwhile, would end it rightly.
    program = "from benchmarks.recording import process; process.namespace = lambda: 1; process.end_orphans(); print('alive')"
    command = [sys.executable, "-c", program]
    for mark in ("1", f"1-{gone.pid}-x"):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, process.MARK: mark})
        assert done.stdout == "alive\n", done
    monkeypatch.setattr(process.os, "readlink", lambda _: "1")  # /proc of another namespace
    assert list(process.marks()) == []


def test_parts_do_not_end_because_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", broken)
    record_gpu.say("a line that cannot be written")


def test_what_figures_depend_on(capsys: pytest.CaptureFixture[str]) -> None:
    machine.main()
    told = json.loads(capsys.readouterr().out)
    assert isinstance(told["gpus"], list) and told["commit"] and "torch" in told["versions"]


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        record_gpu.main(["--parts", "tests,nothing"])
    assert error.value.code == 2 and "unknown part nothing; choose from kernels, 8b-x8" in capsys.readouterr().err


def test_a_dry_run_only_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record_gpu.main(["--parts", "8b-x2,http", "--card", "h200", "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    wide, quiet = capsys.readouterr().out.splitlines()
    assert wide.startswith("8b-x2 (2 cards, at most 400 s): ") and wide.endswith("out/h200x2-8b.json")
    assert quiet.startswith("http (1 card, quiet, at most 400 s): ") and not (tmp_path / "out").exists()
