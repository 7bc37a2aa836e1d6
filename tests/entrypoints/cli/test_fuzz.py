"""`nanovllm fuzz`: exit codes, reports, the test that it writes, and Ctrl-C."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis.stateful import RuleBasedStateMachine

from nanovllm import testing
from nanovllm.entrypoints.cli.fuzz import command, progress, run
from nanovllm.entrypoints.cli.main import main

pytestmark = pytest.mark.unhooked  # machines, as in tests/property

COUNTER = '''
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule


class Counter(RuleBasedStateMachine):
    """Test a counter."""

    @initialize()
    def start(self) -> None:
        """Start at zero."""
        self.count = 0

    @rule(more=st.integers(1, 99))
    def put(self, more: int) -> None:
        """Put a number.

        And no more.
        """
        self.count = more

    @invariant()
    def is_small(self) -> None:
        """Compare with the limit."""
        assert self.count < LIMIT, f"{self.count} is too large"


LIMIT = 20
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a machine of the user's."""
    (tmp_path / "counting.py").write_text(COUNTER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "counting", raising=False)
    return tmp_path


def test_a_failure_becomes_a_test_for_plain_pytest(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--machines", "pages,counting:Counter", "--examples", "20", "--out", "found"]) == 1
    (written,) = (mine / "found").iterdir()
    *story, head, first, second = capsys.readouterr().out.splitlines()
    _, many, calls, *_ = second.split()
    assert story == [
        f"counting:Counter: a failure after {many} examples and {calls} calls with --seed 0, made small:",
        "  1. start()",
        "     Start at zero.",
        "  2. put(more=20)",
        "     Put a number.",
        "  After call 2, the check `is_small` (Compare with the limit) failed:",
        "     AssertionError: 20 is too large",
        f"  Run it again: python -m pytest found/{written.name}",
        "",
    ]
    assert [line.split() for line in (head, first, second)] == [
        ["machine", "examples", "calls", "result"],
        ["pages", "20", first.split()[2], "no", "failure"],
        ["counting:Counter", many, calls, "a", "failure:", written.name],
    ]
    own = {"PYTEST_ADDOPTS": "-q -p no:cacheprovider", "PYTEST_PLUGINS": ""}
    pytest_alone = [sys.executable, *story[-2].split()[4:]]
    done = subprocess.run(pytest_alone, cwd=mine, env=os.environ | own, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "20 is too large" in done.stdout, done.stdout + done.stderr
    (mine / "counting.py").write_text(COUNTER.replace("LIMIT = 20", "LIMIT = 21"))
    done = subprocess.run(pytest_alone, cwd=mine, env=os.environ | own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_machine_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(run.MACHINES)
    assert lines[1].startswith("pages  ") and "  Test a page allocator: " in lines[1]
    public = {value for value in vars(testing).values() if isinstance(value, type) and issubclass(value, RuleBasedStateMachine)}
    assert public == set(run.MACHINES.values())


BROKEN = """
from hypothesis.stateful import RuleBasedStateMachine, rule


class Broken(RuleBasedStateMachine):
    calls = 0

    def __init__(self):
        super().__init__()
        IN_INIT

    @rule()
    def go(self):
        Broken.calls += 1
        IN_RULE
"""


@pytest.mark.parametrize(
    ("in_init", "in_rule", "told"),
    [
        ("raise ValueError('in init')", "", ["ValueError: in init"]),
        ("", "raise SystemExit(5)", ["SystemExit: 5"]),
        ("", "raise type('Panic', (BaseException,), {})('of Rust')", ["Panic: of Rust"]),
        ("", "raise ValueError('a lone \\udc80, \\x00 and \\x1b')", [r"ValueError: a lone \udc80, \x00 and \x1b"]),
        ("", "assert Broken.calls != 7, 'once'", ["FlakyFailure: Inconsistent results", "  AssertionError: once"]),
    ],
    ids=["init", "exit", "panic", "letters", "flaky"],
)
def test_whatever_a_machine_raises_is_told(
    in_init: str, in_rule: str, told: list[str], mine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (mine / "broken.py").write_text(BROKEN.replace("IN_INIT", in_init).replace("IN_RULE", in_rule))
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    assert main(["fuzz", "--machines", "broken:Broken", "--examples", "9"]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith(" failed:"))
    assert all(line.startswith(f"     {start}") for line, start in zip(lines[at + 1 :], told, strict=False)), lines
    (written,) = mine.glob("test_fuzz_broken_*.py")
    compile(written.read_text(encoding="utf-8"), str(written), "exec")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machines", "page"], "unknown machine 'page'; choose from pages, frames, "),
        (["--machines", "pages,"], "unknown machine ''"),
        (["--machines", "os:path"], "os:path is <module"),
        (["--machines", "nowhere:Machine"], "the machine 'nowhere:Machine' cannot be imported: No module named 'nowhere'"),
        (["--machines", "hypothesis.stateful:RuleBasedStateMachine"], "defines no rules"),
        (["--machines", "engine", "--model", "random:Elman"], "unknown architecture 'Elman' in --model random:Elman; choose from "),
        (["--machines", "windows", "--model", "random:LlamaForCausalLM"], "windows needs a model with sliding windows"),
        (["--machines", "engine", "--model", "nowhere/model"], "nowhere/model"),
        (["--minutes", "0"], "'0' must be a number of minutes above 0"),
        (["--minutes", "nan"], "'nan' must be"),
        (["--examples", "0"], "'0' must be an integer of at least 1"),
        (["--machines", "pages", "--examples", "1", "--out", "counting.py"], "counting.py"),
    ],
)
def test_wrong_arguments_end_with_2(arguments: list[str], message: str, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["fuzz", *arguments])
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    assert captured.err.startswith("nanovllm: error: ") and captured.err.count("\n") == 1 and message in captured.err


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert main(["fuzz"]) == 2
    assert capsys.readouterr().err == 'nanovllm: error: fuzz needs hypothesis, which is not installed: pip install "nanovllm[testing]"\n'


def test_ctrl_c_keeps_what_was_done(mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    hunt = run.hunt

    def interrupted(machine, watch, **options):
        if machine.__name__ != "PrefixMachine":
            return hunt(machine, watch, **options)
        watch.most = 3
        hunt(machine, watch, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "hunt", interrupted)
    assert main(["fuzz", "--machines", "pages,prefix,engine", "--examples", "5", "--steps", "10"]) == 130
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=3)[0::3] for line in lines[1:]] == [
        ["pages", "no failure"],
        ["prefix", "interrupted, no failure until then"],
        ["engine", "not run"],
    ]
    assert lines[2].split()[1] == "3"


def test_ctrl_c_keeps_a_failure_that_is_not_small_yet(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "shrunk", interrupted)
    assert main(["fuzz", "--machines", "counting:Counter", "--examples", "20"]) == 130
    assert len(list(mine.glob("test_fuzz_counter_*.py"))) == 1
    assert "not made small:" in capsys.readouterr().out


def test_lines_tell_how_far_it_is(mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    assert main(["fuzz", "--machines", "pages", "--examples", "2", "--steps", "4"]) == 0
    assert capsys.readouterr().err == "pages: 1 examples, 4 calls\npages: 2 examples, 8 calls\n"
    assert main(["fuzz", "--machines", "counting:Counter", "--minutes", "9"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("counting:Counter: making a failure small, ")
    assert all(line.endswith(" s left") for line in lines if "small" not in line)


def test_a_model_that_nothing_runs_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--machines", "scheduler,pages", "--examples", "1", "--model", "random:Qwen2ForCausalLM"]) == 2
    assert "no machine of --machines scheduler,pages runs a model, leave --model out" in capsys.readouterr().err


def test_a_model_is_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--machines", "engine,pages", "--examples", "2", "--steps", "15", "--model", "random:Qwen2ForCausalLM"]
    assert main(["fuzz", *arguments]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["machine", "engine", "pages"]
    options = run.argparse.Namespace(machines="all", model="random:GemmaForCausalLM")
    left = {"failures", "chunks", "host-chunks", "model-chunks", "cascade-chunks", "windows", "mixed-windows", "window-chunks"}
    left |= {"host-windows", "host-frames", "host-window-chunks", "disk-windows", "disk-frames"}
    assert {subject.name for subject in run.subjects_of(options)} == set(run.MACHINES) - left
    assert len(capsys.readouterr().err.splitlines()) == len(left)
