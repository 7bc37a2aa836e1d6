"""The files of commands: refused before any work if they cannot be written, and nothing is left of the attempt."""

import os
from pathlib import Path

import pytest

from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cli import memory
from nanovllm.entrypoints.cli.bench import command as bench
from nanovllm.entrypoints.cli.bench import profile
from nanovllm.entrypoints.cli.check import command as check
from nanovllm.entrypoints.cli.eval_reuse import command as eval_reuse
from nanovllm.entrypoints.outputs import require_output, write
from nanovllm.errors import InvalidRequestError


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "--output", "/proc/x.json"],
        ["bench", "--which", "b1", "--output", "/proc/x.json"],
        ["bench", "--which", "b1", "--plot", "/proc/x.svg"],
        ["profile", "--trace", "/proc/x.json"],
        ["memory", "--out", "/proc/x.svg"],
        ["eval-reuse", "--out", "/proc/x"],
    ],
    ids=" ".join,
)
def test_a_command_refuses_its_target_before_its_work(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    works = ((bench, "find_workloads"), (profile, "find_model"), (check, "outlook"), (eval_reuse, "load"), (memory, "load"))
    for module, name in works:
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("the work has begun"))
    assert cli.main([*arguments, "--model", "tiny", "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("nanovllm: error: /proc/x.") and captured.err.count("\n") == 1
    assert "cannot be written (No such file or directory): give another path" in captured.err


def test_a_folder_is_made_and_nothing_else(tmp_path: Path) -> None:
    require_output(tmp_path / "new" / "folder" / "x.json")
    assert [path.name for path in (tmp_path / "new").rglob("*")] == ["folder"]
    require_output(None)


def test_a_file_that_exists_keeps_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.json"
    write(file, "é")
    require_output(file)
    assert file.read_text(encoding="utf-8") == "é" and list(tmp_path.iterdir()) == [file]
    require_output(Path("/dev/null"))
    with pytest.raises(InvalidRequestError, match="/dev/null is not a regular file, and cannot be replaced"):
        require_output(Path("/dev/null"), replaced=True)
    require_output(file, replaced=True)
    assert file.read_text(encoding="utf-8") == "é" and list(tmp_path.iterdir()) == [file]
    with pytest.raises(InvalidRequestError, match="is a folder, not a file to write"):
        require_output(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)  # as for a file of somebody else
    with pytest.raises(InvalidRequestError, match=r"x.json cannot be written \(Permission denied\)"):
        require_output(file)


def test_an_error_of_writing_names_the_file() -> None:
    with pytest.raises(InvalidRequestError, match=r"/dev/full cannot be written \(No space left on device\)"):
        write(Path("/dev/full"), "x")
