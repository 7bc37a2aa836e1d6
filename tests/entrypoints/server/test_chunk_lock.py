"""One server at a time keeps chunks in a folder."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm.entrypoints.server import chunk_lock
from nanovllm.entrypoints.server.chunk_lock import LOCK, only_server
from nanovllm.errors import InvalidRequestError

HOLD = """
import sys, time
from pathlib import Path
from nanovllm.entrypoints.server.chunk_lock import only_server
with only_server(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(1000)
"""


def test_a_second_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(chunk_lock, "LOCK_SECONDS", 0.2)
    monkeypatch.setattr(chunk_lock, "SAY_SECONDS", 0.1)
    (other := tmp_path / "other").mkdir()
    with only_server(tmp_path) as path, only_server(other):
        assert path == tmp_path / LOCK and path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(InvalidRequestError) as caught, only_server(tmp_path):
            pass
    assert str(tmp_path) in str(caught.value) and "--chunk-dir of its own" in str(caught.value)
    assert capfd.readouterr().err.count("waiting up to 0.2 seconds") == 1
    with only_server(tmp_path):  # it has ended
        pass


def test_it_waits_for_the_end_of_the_server_before(tmp_path: Path) -> None:
    ended, held = threading.Event(), threading.Event()

    def before() -> None:
        with only_server(tmp_path):
            held.set()
            time.sleep(0.3)
            ended.set()

    thread = threading.Thread(target=before)
    thread.start()
    assert held.wait(30)
    with only_server(tmp_path):
        assert ended.is_set()
    thread.join()


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        process.kill()
        with only_server(tmp_path):
            pass


def test_a_lock_that_was_deleted_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opening, path = os.open, tmp_path / LOCK

    def late(*args: Any) -> int:
        monkeypatch.setattr(os, "open", opening)
        fd = opening(*args)
        path.unlink()
        return fd

    monkeypatch.setattr(os, "open", late)
    with only_server(tmp_path):
        monkeypatch.setattr(chunk_lock, "LOCK_SECONDS", 0.0)
        with pytest.raises(InvalidRequestError, match="another server"), only_server(tmp_path):
            pass


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to a file": lambda path: (path.with_name("file").touch(), path.symlink_to("file")),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    DAMAGES[kind](tmp_path / LOCK)
    told = r"the lock .*nanovllm-chunks.lock of the chunk folder cannot be used: "
    with pytest.raises(InvalidRequestError, match=told), only_server(tmp_path):
        pass


def test_the_content_of_the_lock_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_bytes(b"\xff" * 100)
    with only_server(tmp_path):
        pass
