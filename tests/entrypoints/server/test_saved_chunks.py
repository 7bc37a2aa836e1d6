"""Files of chunks are written and read beside the steps: requests go on, errors are told, and nothing is left behind."""

import errno
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import nanovllm as nv
from nanovllm.chunks.storage import blocks, reserved
from nanovllm.engine import host_memory
from nanovllm.engine.disk_flush import flush_kv
from nanovllm.entrypoints.server import idle_saves, saved_chunks
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.entrypoints.server.side_thread import Between, Later, SideThread
from nanovllm.files import temporary
from nanovllm.testing.models import random_model, tiny_config
from tests.entrypoints.server.live import LIMIT, Live
from tests.entrypoints.server.slow_disk import Calling, Slow, code_of

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
KING = "The king of Aistonia is Oswin."
GREEDY: dict[str, Any] = {"prompt": " The king of Aistonia is", "max_tokens": 8, "temperature": 0}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Live]:
    """A server with a chunk."""
    with Live(settings=Settings(shutdown_seconds=10.0, chunk_dir=tmp_path, max_chunks=4), num_pages=128) as server:
        assert server.post("/v1/chunks", {"name": "king", "text": KING}).status == 200
        yield server


def files(live: Live) -> list[Path]:
    assert live.settings.chunk_dir is not None
    return [path for path in live.settings.chunk_dir.rglob("*") if path.is_file() and path.suffix not in (".name", ".label")]


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
    monkeypatch.setattr(served.engine._files, "_most", 2)
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


def test_a_deleted_chunk_counts_until_its_file_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, tokens = Settings(shutdown_seconds=10.0, chunk_dir=tmp_path, chunk_share=0.1), [*range(5, 165)]
    with Live(settings=settings, num_pages=128) as server:  # 12 pages for chunks
        assert server.post("/v1/chunks", {"name": "x", "token_ids": tokens}).status == 200
        disk = Slow(monkeypatch, "_write_block")
        saving = Calling(server, "/v1/chunks/x/save", {})
        assert disk.reached.wait(LIMIT)
        assert server.get("/v1/chunks").json()["pages"] == 10  # once, as long as the chunk has its name
        assert server.call("DELETE", "/v1/chunks/x").status == 200
        assert server.get("/v1/chunks").json()["pages"] == 10
        answer = server.post("/v1/chunks", {"name": "y", "token_ids": tokens[::-1]})
        assert code_of(answer) == (400, "chunk_limit") and "also those that are being saved" in answer.body.decode()
        disk.go.set()
        assert saving.answer().status == 200
        assert server.get("/v1/chunks").json()["pages"] == 0
        assert server.post("/v1/chunks", {"name": "y", "token_ids": tokens[::-1]}).status == 200
        server.wait_until_idle()


def test_a_call_counts_until_the_engine_has_ended_it(served: Live) -> None:
    calls, ended, read, most = SideThread("files", 32, "{most} calls"), list[Any](), list[int](), 32
    held, deadline = served.engine._held(), time.monotonic() + LIMIT

    def reading(number: int, _: Between) -> int:
        read.append(number)
        return number

    for number in range(most + 3):  # the engine is in a long step
        calls.begin(Later(work=partial(reading, number), end=lambda held, result: (held, result)), ended.append)
    while not calls.waits:
        assert time.monotonic() < deadline
    time.sleep(0.1)
    assert read == [0]  # the others are read once it was put into pages
    while len(ended) < most + 3:
        assert time.monotonic() < deadline
        if calls.waits:
            calls.turn(held)[1]()
    assert [value for value in ended if isinstance(value, int)] == read == [*range(most)]
    assert [str(value) for value in ended if isinstance(value, nv.QueueFullError)] == ["32 calls"] * 3
    calls.begin(Later(work=lambda _: 7, end=lambda held, result: (held, result)), ended.append)
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


def again(live: Live) -> list[tuple[str, int]]:
    """Let the engine be started again. Returns the chunks that it has then, and their numbers of tokens."""
    live.stop_engine()
    live.start_engine(again=True)
    live.wait_until_healthy()
    return [(chunk["name"], chunk["tokens"]) for chunk in live.get("/v1/chunks").json()["data"]]


def test_a_save_of_a_chunk_whose_name_is_anothers_by_then(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Slow(monkeypatch, "_write_block")
    saving = Calling(served, "/v1/chunks/king/save", {})
    assert disk.reached.wait(LIMIT)
    assert served.call("DELETE", "/v1/chunks/king").status == 200
    assert served.post("/v1/chunks", {"name": "king", "token_ids": [5, 6, 7]}).status == 200
    disk.go.set()
    assert saving.answer().status == 200
    assert again(served) == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("", {"name": "king", "token_ids": [5, 6, 7], "replace": True}),
        ("/king/truncate", {"tokens": 3}),
        ("/king/drop", {"spans": [[2, 4]], "mode": "shift"}),
        ("/compose", {"names": ["king", "other"], "name": "king", "replace": True}),
        ("/other/fork", {"to": "king", "replace": True}),
    ],
    ids=["made anew", "truncate", "drop", "compose", "fork"],
)
def test_old_content_of_a_replaced_chunk_does_not_come_back(served: Live, path: str, body: dict[str, Any]) -> None:
    assert served.post("/v1/chunks", {"name": "other", "token_ids": [5, 6, 7]}).status == 200
    assert served.post("/v1/chunks/king/save", {}).status == 200
    refused = served.post("/v1/chunks", {"name": "king", "token_ids": [5, 6, 7]})
    assert code_of(refused) == (409, "chunk_exists")
    assert again(served) == [("king", 11)]  # also after a call that was refused
    assert served.post("/v1/chunks", {"name": "other", "token_ids": [5, 6, 7]}).status == 200
    answer = served.post("/v1/chunks" + path, body)
    assert answer.status == 200, answer
    assert again(served) == []
    assert served.post("/v1/chunks/king/load", {}).json()["tokens"] == 11
    assert again(served) == [("king", 11)]


def test_a_reply_that_is_kept_in_place_of_a_chunk_has_no_file(served: Live) -> None:
    assert served.post("/v1/chunks/king/save", {}).status == 200
    assert served.post("/v1/completions", {**GREEDY, "keep": "king", "keep_replace": True}).status == 200
    assert again(served) == []


def test_a_file_that_is_deleted_while_it_is_read(served: Live, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert served.post("/v1/chunks/king/save", {}).status == 200
    disk = Slow(monkeypatch, "_read_block")
    loading = Calling(served, "/v1/chunks/king/load", {"replace": True})
    assert disk.reached.wait(LIMIT)
    assert served.call("DELETE", "/v1/chunks/king/save").status == 200
    disk.go.set()
    assert loading.answer().status == 200
    assert again(served) == [] and "not loaded again" not in capfd.readouterr().err


def test_another_server_loads_nothing_by_itself(served: Live) -> None:
    assert served.post("/v1/chunks/king/save", {}).status == 200
    served.stop_engine()
    served.start_engine()
    served.wait_until_healthy()
    assert again(served) == []
    assert served.post("/v1/chunks/king/load", {}).status == 200


def test_kept_chunks_come_back_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(shutdown_seconds=1.0, chunk_dir=tmp_path, keep_chunks=True, max_chunks=4)

    def restarted(live: Live) -> list[tuple[str, int]]:
        live.stop_engine()
        live.engine.save_chunks()
        live.start_engine()
        live.wait_until_healthy()
        return [(chunk["name"], chunk["tokens"]) for chunk in live.get("/v1/chunks").json()["data"]]

    with Live(settings=settings, num_pages=128) as server:
        assert server.post("/v1/chunks", {"name": "king", "text": KING}).status == 200
        wanted = server.post("/v1/completions", {**GREEDY, "chunks": ["king"]}).json()["choices"]
        assert server.post("/v1/completions", {**GREEDY, "chunks": ["king"], "keep": "talk"}).status == 200
        names = [name for name, _ in restarted(server)]
        assert names == ["king", "talk"]
        assert server.post("/v1/completions", {**GREEDY, "chunks": ["king"]}).json()["choices"] == wanted
        assert server.call("DELETE", "/v1/chunks/talk").status == 200
        assert server.post("/v1/chunks", {"name": "king", "token_ids": [5, 6, 7], "replace": True}).status == 200
        written, write = list[str](), saved_chunks.write

        def noted(between: Any, path: Path, name: str, *args: Any) -> int:
            written.append(name)
            return write(between, path, name, *args)

        monkeypatch.setattr(saved_chunks, "write", noted)
        assert restarted(server) == [("king", 3)] and written == ["king"]  # the file is that of the newer chunk
        assert restarted(server) == [("king", 3)] and written == ["king"]  # and need not be written again
        for name in ("a", "b", "c"):  # with the file of "talk" there are five
            assert server.post("/v1/chunks", {"name": name, "token_ids": [5, 6]}).status == 200
        assert restarted(server) == [("a", 2), ("b", 2), ("king", 3)]
        assert "a chunk was not saved: there are 4 chunk files" in capfd.readouterr().err
        server.wait_until_idle()


@pytest.mark.parametrize("windows", [(6, 0), (6, 5)], ids=["mixed", "alone"])
def test_a_server_with_windows_has_its_chunks_and_its_prompts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, windows: tuple[int, ...]
) -> None:
    monkeypatch.setattr(host_memory, "prompt_rates", lambda model, limits, executor, kv, *_: (1.0, math.inf, kv))  # so that it always reads
    (chunks := tmp_path / "chunks").mkdir()
    settings = Settings(shutdown_seconds=1.0, chunk_dir=chunks, keep_chunks=True, max_chunks=4)
    kept = {"host_kv_gib": 0.01, "kv_dir": tmp_path / "kv", "kv_dir_gib": 0.01}
    ids, bodies = [*range(9, 40)], [{**GREEDY, "prompt": [*range(3, 60)]}, {**GREEDY, "prompt": [7, 8], "chunks": ["king"]}]
    with Live(random_model(tiny_config(windows=windows)), settings, num_pages=64, num_frames=64, page_size=4, **kept) as live:
        assert live.post("/v1/chunks", {"name": "king", "token_ids": ids}).status == 200
        wanted = [live.post("/v1/completions", body).json()["choices"] for body in bodies]
        live.wait_until_idle()
        live.stop_engine()
        live.engine.save_chunks()
        flush_kv(live.engine.state)
        live.start_engine()
        live.wait_until_healthy()
        assert [chunk["tokens"] for chunk in live.get("/v1/chunks").json()["data"]] == [len(ids)]
        assert [live.post("/v1/completions", body).json()["choices"] for body in bodies] == wanted
        assert live.engine.state.stats.read_tokens == 56
        live.wait_until_idle()


def test_what_happens_to_one_file_keeps_no_engine_from_its_start(
    served: Live, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert served.post("/v1/chunks", {"name": "b", "token_ids": [5, 6, 7]}).status == 200
    for name in ("king", "b"):
        assert served.post(f"/v1/chunks/{name}/save", {}).status == 200
    reserve = reserved.reserve

    def broken(model: nv.Model, state: nv.EngineState, fd: int, path: Path, *base: Any) -> Any:
        if path.name == "king":
            raise MemoryError
        return reserve(model, state, fd, path, *base)

    monkeypatch.setattr(reserved, "reserve", broken)
    assert again(served) == [("b", 3)]
    assert "a chunk was not loaded again: king: the file could not be loaded: MemoryError" in capfd.readouterr().err


def test_a_mark_that_cannot_be_deleted(served: Live) -> None:
    assert served.post("/v1/chunks/king/save", {}).status == 200
    mark = saved_chunks.path_of(served.engine.named.limits, "", "king").with_suffix(saved_chunks.MARK)
    mark.unlink()
    mark.mkdir()
    assert served.call("DELETE", "/v1/chunks/king/save").status == 200 and not files(served)
    assert served.call("DELETE", "/v1/chunks/king").status == 200


def test_a_log_on_a_full_disk_ends_no_server(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.post("/v1/chunks/king/save", {}).status == 200
    (saved,) = files(served)
    saved.write_bytes(saved.read_bytes()[:-1])
    with open("/dev/full", "w", encoding="utf-8", buffering=1) as log:
        monkeypatch.setattr(sys, "stderr", log)
        assert again(served) == []
        monkeypatch.undo()
        with suppress(OSError):  # what is left in its buffer
            log.close()
    assert served.post("/v1/completions", GREEDY).status == 200


def test_a_mark_is_never_there_in_part(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved_chunks.path_of(served.engine.named.limits, "", "king")
    mark, seen, opening = path.with_suffix(saved_chunks.MARK), list[str | None](), os.open

    def noting(*args: Any, **options: Any) -> int:
        seen.append(mark.read_text() if mark.exists() else None)
        return opening(*args, **options)

    path.parent.mkdir(exist_ok=True)
    path.touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", noting)
        saved_chunks.mark(path, "king", 1)
        mark.write_text("another")
        saved_chunks.mark(path, "king", 1)
        old = mark.stat().st_mtime_ns
        saved_chunks.mark(path, "king", 1)
    assert {*seen} == {None, "another", "king"} and mark.stat().st_mtime_ns > old
    assert saved_chunks.is_marked(path, "king") and not [*path.parent.glob("*.tmp")]


def test_a_mark_that_is_a_pipe_is_none_and_nobody_waits_for_it(served: Live) -> None:
    assert served.post("/v1/chunks/king/save", {}).status == 200
    path = saved_chunks.path_of(served.engine.named.limits, "", "king")
    path.with_suffix(saved_chunks.MARK).unlink()
    os.mkfifo(path.with_suffix(saved_chunks.MARK))
    assert again(served) == [] and not saved_chunks.is_marked(path, "king")
    saved_chunks.mark(path, "king", 1)
    assert again(served) == [("king", 11)]


def test_temporary_files_of_killed_engines_are_deleted(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.post("/v1/chunks/king/save", {}).status == 200
    (saved,), old_time = files(served), time.time() - 3600.0
    old, new, other = (saved.with_name(name) for name in (".nanovllm-1.tmp", ".nanovllm-2.tmp", "other.tmp"))
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (old_time, old_time))
    with temporary(saved.parent) as (_, locked):
        os.utime(locked, (old_time, old_time))
        assert again(served) == [("king", 11)]
        assert {*files(served)} == {saved, new, other, locked}


def test_a_file_that_does_not_fit_this_engine_is_a_conflict(served: Live) -> None:
    assert served.post("/v1/chunks/king/save", {}).status == 200
    served.stop_engine()
    served.options["kv_dtype"] = "fp8"
    try:
        served.start_engine()
        served.wait_until_healthy()
        answer = served.post("/v1/chunks/king/load", {})
    finally:
        served.stop_engine()
        served.options.pop("kv_dtype")
        served.start_engine()
        served.wait_until_healthy()
    assert code_of(answer) == (409, "chunk_mismatch") and answer.headers["x-should-retry"] == "false"
    told = "king: its KV is torch.float32, but this engine's is torch.float8_e4m3fn: load it in an engine with kv_dtype=None"
    assert answer.json()["error"]["message"] == told
    other = random_model(tiny_config())
    state, chunk = nv.prefill(other, nv.init_state(other, num_pages=8), [1, 2, 3])
    nv.save_chunk(state, chunk, files(served)[0])
    answer = served.post("/v1/chunks/king/load", {})
    assert code_of(answer) == (409, "chunk_mismatch") and "another model" in answer.json()["error"]["message"]
    assert served.get("/v1/chunks/king").status == 404 and served.post("/v1/chunks", {"name": "king", "text": "x"}).status == 200


def test_a_file_is_written_to_its_end_though_the_request_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(shutdown_seconds=1.0, chunk_dir=tmp_path, request_timeout=6.0)
    with Live(settings=settings, num_pages=128) as server:
        assert server.post("/v1/chunks", {"name": "king", "text": KING}).status == 200
        disk = Slow(monkeypatch, "_write_block")
        answer = server.post("/v1/chunks/king/save", {})
        assert code_of(answer) == (504, "request_timeout") and not [path for path in files(server) if path.suffix == ".safetensors"]
        disk.go.set()
        end = time.monotonic() + LIMIT
        while not [path for path in files(server) if path.suffix == ".safetensors"] or len(server.engine.named.pinned):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert server.post("/v1/chunks/king/load", {"replace": True}).status == 200


def test_a_slow_disk_gets_one_file_after_the_other_of_chunks_that_nobody_asked_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (chunks := tmp_path / "chunks").mkdir()
    settings = Settings(shutdown_seconds=1.0, chunk_dir=chunks, keep_chunks=True, max_chunks=8)
    kept = {"host_kv_gib": 0.01, "kv_dir": tmp_path / "kv", "kv_dir_gib": 0.01}
    with Live(settings=settings, num_pages=128, **kept) as live:
        monkeypatch.setattr(live.engine._files, "_most", 2)
        disk, rounds, write = Slow(monkeypatch, "_write_block"), list[bool](), live.engine._write_some
        monkeypatch.setattr(live.engine, "_write_some", lambda: rounds.append(write()) or rounds[-1])
        for number in range(5):
            assert live.post("/v1/chunks", {"name": f"c{number}", "token_ids": [5, 6, 7 + number]}).status == 200
        assert disk.reached.wait(LIMIT)
        seen = len(rounds)
        while len(rounds) < seen + 3:  # while the first file is being written
            time.sleep(0.001)
        assert not any(rounds[seen:])
        disk.go.set()
        while live.engine._unwritten or live.engine._files.busy:  # calls would keep the engine from being idle
            time.sleep(0.001)
        assert len(live.get("/v1/saved_chunks").json()["data"]) == 5
        live.wait_until_idle()
    assert "not saved" not in capfd.readouterr().err


def waited(live: Live, true: Callable[[], object]) -> None:
    """Wait without calls, which would wake the engine."""
    end = time.monotonic() + LIMIT
    while not true():
        assert live.engine_thread.is_alive() and time.monotonic() < end
        time.sleep(0.005)


def test_a_save_that_nobody_asked_for_is_tried_again_after_the_disk_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (chunks := tmp_path / "chunks").mkdir()
    settings = Settings(shutdown_seconds=1.0, chunk_dir=chunks, keep_chunks=True, max_chunks=2)
    tries = list[float]()

    def full(*_: Any) -> None:
        tries.append(time.monotonic())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(idle_saves, "RETRY_SECONDS", 0.3)
    with Live(settings=settings, num_pages=128, host_kv_gib=0.01, kv_dir=tmp_path / "kv", kv_dir_gib=0.01) as live:
        with monkeypatch.context() as patch:
            patch.setattr(blocks, "write_at", full)
            for name in ("one", "two"):
                assert live.post("/v1/chunks", {"name": name, "text": KING}).status == 200
            waited(live, lambda: len(tries) >= 3)
            assert all(later - first > 0.29 for first, later in pairwise(tries)), "a full disk is left alone for a while"
        waited(live, lambda: len([*chunks.rglob("*.safetensors")]) == 2)
        told = f"nanovllm: a chunk was not saved in {chunks}: the chunk 'one' could not be saved: No space left on device"
        assert capfd.readouterr().err == f"{told}; it is tried again in 0.3 seconds\n"
        live.wait_until_idle()


def test_a_folder_that_was_deleted_is_made_again_and_gets_all_chunks(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    settings = Settings(shutdown_seconds=1.0, chunk_dir=folder / "chunks", keep_chunks=True)
    with Live(settings=settings, num_pages=128, host_kv_gib=0.01, kv_dir=folder, kv_dir_gib=0.01) as live:
        assert live.post("/v1/chunks", {"name": "one", "token_ids": [*range(5, 50)]}).status == 200
        waited(live, lambda: [*folder.rglob("*.name")])
        waited(live, lambda: [*folder.rglob("*.kv")])
        shutil.rmtree(folder)
        assert live.post("/v1/chunks", {"name": "two", "token_ids": [*range(7, 50)]}).status == 200
        waited(live, lambda: len([*folder.rglob("*.name")]) == 2)
        waited(live, lambda: [*folder.rglob("*.kv")])
        assert [path.stat().st_mode & 0o777 for path in (folder, folder / "chunks", folder / "pages")] == [0o700] * 3
        live.wait_until_idle()
