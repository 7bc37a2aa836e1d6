"""Files of chunks are written and read beside the steps: requests go on, errors are told, and nothing is left behind."""

import errno
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import nanovllm as nv
from nanovllm.chunks.storage import blocks
from nanovllm.entrypoints.server import file_thread, saved_chunks
from nanovllm.entrypoints.server.settings import Settings
from tests.entrypoints.server.live import LIMIT, Answer, Live

KING = "The king of Aistonia is Oswin."
GREEDY: dict[str, Any] = {"prompt": " The king of Aistonia is", "max_tokens": 8, "temperature": 0}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Live]:
    """A server with a chunk."""
    with Live(settings=Settings(shutdown_seconds=10.0, chunk_dir=tmp_path, max_chunks=4), num_pages=128) as server:
        assert server.post("/v1/chunks", {"name": "king", "text": KING}).status == 200
        yield server


class Slow:
    """A disk that stops at a block until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        function = getattr(blocks, name)

        def waiting(*args: Any) -> Any:
            self.reached.set()
            assert self.go.wait(LIMIT)
            return function(*args)

        monkeypatch.setattr(blocks, name, waiting)


class Calling:
    """A POST in a thread of its own."""

    def __init__(self, live: Live, path: str, body: Any) -> None:
        self._answers: list[Answer] = []
        self._thread = threading.Thread(target=lambda: self._answers.append(live.post(path, body)))
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def answer(self) -> Answer:
        self._thread.join(LIMIT)
        return self._answers[0]


def code_of(answer: Answer) -> tuple[int, str | None]:
    return answer.status, answer.json()["error"]["code"]


def files(live: Live) -> list[Path]:
    assert live.settings.chunk_dir is not None
    return [path for path in live.settings.chunk_dir.rglob("*") if path.is_file() and path.suffix != ".name"]


def test_replies_go_on_while_a_file_is_written_and_read(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = served.post("/v1/completions", {**GREEDY, "chunks": ["king"]}).json()["choices"]
    disk = Slow(monkeypatch, "_write_block")
    saving = Calling(served, "/v1/chunks/king/save", {})
    assert disk.reached.wait(LIMIT)
    assert served.post("/v1/completions", {**GREEDY, "chunks": ["king"]}).json()["choices"] == wanted
    assert served.call("DELETE", "/v1/chunks/king").status == 200
    assert len(served.engine.state.chunks) == 1 and not saving.ended  # the file still needs the pages
    disk.go.set()
    assert saving.answer().json()["bytes"] == files(served)[0].stat().st_size
    served.wait_until_idle()
    assert len(served.engine.state.chunks) == 0

    disk = Slow(monkeypatch, "_read_block")
    loading = Calling(served, "/v1/chunks/king/load", {})
    assert disk.reached.wait(LIMIT)
    assert served.post("/v1/completions", GREEDY).status == 200
    assert served.get("/v1/chunks/king").status == 404 and not loading.ended
    disk.go.set()
    assert loading.answer().json()["tokens"] == 11
    assert served.post("/v1/completions", {**GREEDY, "chunks": ["king"]}).json()["choices"] == wanted


@pytest.mark.parametrize("piece", [1, 3000])
def test_a_file_is_that_of_the_library_whatever_the_pieces(
    served: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(saved_chunks, "PIECE", piece)
    assert served.post("/v1/chunks/king/save", {}).status == 200
    nv.save_chunk(served.engine.state, served.engine.named.get("", "king").chunk, tmp_path / "other")
    (file,) = [path for path in files(served) if path.suffix]
    assert file.read_bytes() == (tmp_path / "other").read_bytes()


def test_a_disk_that_fails_is_told_of_without_its_path(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for problem, told in ((full, "No space left on device"), (lambda *_: 1 / 0, "ZeroDivisionError")):
        with monkeypatch.context() as patch:
            patch.setattr(blocks, "write_at", problem)
            answer = served.post("/v1/chunks/king/save", {})
        assert code_of(answer) == (500, "chunk_file") and told in answer.body.decode()
        assert str(served.settings.chunk_dir) not in answer.body.decode() and not files(served)
    assert len(served.engine.state.chunks) == 1
    assert served.post("/v1/chunks/king/save", {}).status == 200
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "_read_block", full)
        assert code_of(served.post("/v1/chunks/king/load", {"replace": True})) == (500, "chunk_file")
    served.wait_until_idle()
    assert served.post("/v1/completions", {**GREEDY, "chunks": ["king"]}).status == 200


def test_a_name_that_is_taken_while_its_file_is_read(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.post("/v1/chunks/king/save", {}).status == 200
    assert served.call("DELETE", "/v1/chunks/king").status == 200
    disk = Slow(monkeypatch, "_read_block")
    loading = Calling(served, "/v1/chunks/king/load", {})
    assert disk.reached.wait(LIMIT)
    assert served.post("/v1/chunks", {"name": "king", "text": "Another."}).status == 200
    disk.go.set()
    assert code_of(loading.answer()) == (409, "chunk_exists")
    assert len(served.engine.state.chunks) == 1


def test_calls_for_files_are_bounded(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_thread, "MOST_CALLS", 2)
    disk = Slow(monkeypatch, "_write_block")
    first = Calling(served, "/v1/chunks/king/save", {})
    assert disk.reached.wait(LIMIT)
    second = Calling(served, "/v1/chunks/king/save", {})
    while len(served.engine.state.chunks) < 3:
        time.sleep(0.001)
    assert code_of(served.post("/v1/chunks/king/save", {})) == (429, "queue_full")
    disk.go.set()
    assert first.answer().status == second.answer().status == 200
    served.wait_until_idle()
    assert len(served.engine.state.chunks) == 1


def test_a_call_counts_until_the_engine_has_ended_it(served: Live) -> None:
    calls, ended, read = file_thread.FileThread(), list[Any](), list[int]()
    held, deadline = served.engine._held(), time.monotonic() + LIMIT

    def reading(number: int, _: file_thread.Between) -> int:
        read.append(number)
        return number

    for number in range(file_thread.MOST_CALLS + 3):  # the engine is in a long step
        calls.begin(file_thread.Later(work=partial(reading, number), end=lambda held, result: (held, result)), ended.append)
    time.sleep(0.1)
    assert read == [0]  # the others are read once it was put into pages
    while len(ended) < file_thread.MOST_CALLS + 3:
        assert time.monotonic() < deadline
        if calls.waits:
            calls.turn(held)[1]()
    assert [value for value in ended if isinstance(value, int)] == read == [*range(file_thread.MOST_CALLS)]
    assert sum(isinstance(value, nv.QueueFullError) for value in ended) == 3
    calls.begin(file_thread.Later(work=lambda _: 7, end=lambda held, result: (held, result)), ended.append)
    while ended[-1] != 7:
        assert time.monotonic() < deadline
        if calls.waits:
            calls.turn(held)[1]()
    calls.close()


def test_an_orderly_end_waits_for_a_file(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Slow(monkeypatch, "_write_block")
    saving = Calling(served, "/v1/chunks/king/save", {})
    assert disk.reached.wait(LIMIT)
    served.loop.call_soon_threadsafe(served.front.stop)
    time.sleep(0.1)
    assert served.front_thread.is_alive() and not saving.ended
    disk.go.set()
    assert saving.answer().status == 200 and len(files(served)) == 1
    served.front_thread.join(LIMIT)
    assert not served.front_thread.is_alive()


def test_an_engine_that_ends_leaves_no_part_of_a_file(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, began = Slow(monkeypatch, "_write_block"), time.monotonic()
    saving, waiting = (Calling(served, "/v1/chunks/king/save", {}) for _ in range(2))
    assert disk.reached.wait(LIMIT)
    threading.Timer(0.2, disk.go.set).start()
    served.stop_engine()
    assert code_of(saving.answer()) == code_of(waiting.answer()) == (503, "engine_unavailable")
    assert time.monotonic() - began < LIMIT / 2
    assert [path.suffix for path in files(served)] in ([], [".safetensors"])
    served.start_engine()


def test_chunks_with_files_are_loaded_when_an_engine_is_started_again(served: Live, capfd: pytest.CaptureFixture[str]) -> None:
    wanted = served.post("/v1/completions", {**GREEDY, "chunks": ["king"]}).json()["choices"]
    for name in ("b", "c", "unsaved"):
        assert served.post("/v1/chunks", {"name": name, "token_ids": [5, 6, 7]}).status == 200
    for name in ("king", "b", "c"):
        assert served.post(f"/v1/chunks/{name}/save", {}).status == 200
    assert served.call("DELETE", "/v1/chunks/b").status == 200  # its file stays, but it was not in memory
    (broken,) = [path for path in files(served) if path == saved_chunks.path_of(served.engine.named.limits, "", "c")]
    broken.write_bytes(broken.read_bytes()[:-1])
    broken.with_name("odd.name").write_text("king")  # no mark of this file's name
    served.stop_engine()
    served.start_engine(again=True)
    served.wait_until_healthy()
    assert [chunk["name"] for chunk in served.get("/v1/chunks").json()["data"]] == ["king"]
    assert "a chunk was not loaded again: c: " in capfd.readouterr().err
    assert served.post("/v1/completions", {**GREEDY, "chunks": ["king"]}).json()["choices"] == wanted
    assert served.post("/v1/chunks/b/load", {}).status == 200
    assert served.call("DELETE", "/v1/chunks/king/save").status == 200
    served.stop_engine()
    served.start_engine(again=True)
    served.wait_until_healthy()
    assert [chunk["name"] for chunk in served.get("/v1/chunks").json()["data"]] == ["b"]
