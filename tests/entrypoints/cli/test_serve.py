"""How `nanovllm serve` starts."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.entrypoints.cli.main import main
from nanovllm.entrypoints.cli.serve import SPINS, WAITING, chunk_folder, let_threads_sleep, make_kv_dir, runs_on_cpu
from nanovllm.errors import InvalidRequestError
from nanovllm.files import as_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that this one would become, on a machine of several cores."""
    made = list[Any]()
    monkeypatch.setattr(os, "execv", lambda *program: made.append((*program, os.environ.get(WAITING[0]))))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    for name in WAITING:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    return made


def test_threads_of_a_server_sleep_while_they_wait(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "-m", "nanovllm", "serve", "--port", "0"])
    let_threads_sleep()
    assert started == [(sys.executable, [sys.executable, "-X", "dev", "-m", "nanovllm", "serve", "--port", "0"], SPINS)]


@pytest.mark.parametrize("name", WAITING)
def test_an_environment_that_says_how_threads_wait_is_kept(name: str, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "active")
    let_threads_sleep()
    assert not started


def test_one_thread_waits_for_none(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    let_threads_sleep()
    assert not started


@pytest.mark.parametrize(("built", "cards", "cpu"), [(None, [], True), ("13.0", [], True), ("13.0", ["/dev/nvidia0"], False)])
def test_whether_a_cpu_serves_is_found_without_cuda(
    built: str | None, cards: list[str], cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has asked CUDA for anything cannot fork an engine that uses it."""

    def asked(*_: Any) -> Any:
        raise AssertionError("CUDA was asked")

    for name in ("is_available", "device_count", "current_device", "init"):
        monkeypatch.setattr(torch.cuda, name, asked)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(map(Path, cards)))
    assert runs_on_cpu(None) == cpu and runs_on_cpu("cpu") and not runs_on_cpu("cuda:0")


def test_pages_and_chunks_are_in_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    options = argparse.Namespace(kv_dir=Path("~/kv"), chunk_dir=None)
    assert chunk_folder(options) == as_path(options.kv_dir) / "chunks" == tmp_path / "kv" / "chunks"
    assert not (tmp_path / "kv").exists()
    make_kv_dir(as_path(options.kv_dir), chunk_folder(options) or Path())
    assert [folder.stat().st_mode & 0o777 for folder in (tmp_path / "kv", tmp_path / "kv" / "chunks")] == [0o700, 0o700]


def test_a_folder_that_exists_keeps_its_permissions(tmp_path: Path):
    (tmp_path / "kv").mkdir(mode=0o755)
    make_kv_dir(tmp_path / "kv", tmp_path / "kv" / "chunks")
    assert [folder.stat().st_mode & 0o777 for folder in (tmp_path / "kv", tmp_path / "kv" / "chunks")] == [0o755, 0o700]
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequestError, match=r"--kv-dir .*file cannot be used: .*/file is a file, not a folder"):
        make_kv_dir(tmp_path / "file")


@pytest.mark.parametrize("more", [[], ["--host-kv-gib", "0.1", "--chunk-dir", "missing"], ["--host-kv-gib", "0.1", "--host", "0.0.0.0"]])
def test_options_that_are_refused_make_no_folder(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "new"
    assert main(["serve", "--device", "cpu", "--kv-dir", str(folder), *more]) == 2
    assert not folder.exists()
    assert more or f"--kv-dir {folder} needs host memory" in capsys.readouterr().err
