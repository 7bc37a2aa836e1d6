"""`GET /v1/saved_chunks`: the files of one key, from their headers alone, whatever their state, and not for long."""

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nanovllm as nv
from nanovllm.chunks.storage import blocks
from nanovllm.chunks.storage import format as chunk_format
from nanovllm.entrypoints.server import saved_chunks, saved_list
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.testing.models import random_model, tiny_config
from tests.entrypoints.server.live import LIMIT, Answer, Live

KING = "The king of Aistonia is Oswin."


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with a chunk."""
    settings = Settings(shutdown_seconds=1.0, chunk_dir=tmp_path_factory.mktemp("chunks"))
    with Live(settings=settings, num_pages=128) as server:
        assert server.post("/v1/chunks", {"name": "king", "text": KING}).status == 200
        yield server


@pytest.fixture(autouse=True)
def no_files(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test begins without files."""
    yield
    if "served" in request.fixturenames:
        for path in folder_of(request.getfixturevalue("served")).glob("*"):
            path.rmdir() if path.is_dir() else path.unlink()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is read to its end, also on a busy machine."""
    monkeypatch.setattr(saved_list, "SECONDS", LIMIT)


def folder_of(live: Live) -> Path:
    return path_of(live, "").parent


def path_of(live: Live, name: str) -> Path:
    return saved_chunks.path_of(live.engine.named.limits, "", name)


def saved(live: Live, name: str = "king", headers: dict[str, str] | None = None) -> Path:
    answer = live.call("POST", f"/v1/chunks/{name}/save", {}, headers)
    assert answer.status == 200, answer
    return path_of(live, name)


def copied(live: Live, source: Path, name: str) -> Path:
    """The file of a name that has the content of another, with its label."""
    path = path_of(live, name)
    path.write_bytes(source.read_bytes())
    saved_chunks.label(path, name)
    return path


def listed(live: Live, headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
    answer = live.call("GET", "/v1/saved_chunks", headers=headers)
    assert answer.status == 200, answer
    return answer.json()["data"]


def code_of(answer: Answer) -> tuple[int, str | None]:
    return answer.status, answer.json()["error"]["code"]


def test_a_file_is_listed_until_it_is_deleted(served: Live) -> None:
    assert served.get("/v1/saved_chunks").json() == {"object": "list", "data": [], "has_more": False}
    path, now = saved(served), time.time()
    (file,) = listed(served)
    assert abs(file.pop("saved") - now) < LIMIT
    assert file == {"object": "chunk.file", "name": "king", "tokens": 11, "bytes": path.stat().st_size, "error": None}
    assert served.call("DELETE", "/v1/chunks/king/save").json()["object"] == "chunk.file.deleted"
    assert listed(served) == [] and [*folder_of(served).iterdir()] == []
    assert code_of(served.call("DELETE", "/v1/chunks/king/save")) == (404, "chunk_not_found")


def test_the_kv_is_not_read(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    path, places, read = saved(served), list[int](), chunk_format._read

    def noted(fd: int, count: int, offset: int) -> bytes:
        places.append(offset + count)
        return read(fd, count, offset)

    monkeypatch.setattr(chunk_format, "_read", noted)
    monkeypatch.setattr(blocks, "_read_block", lambda *_: 1 / 0)
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert listed(served)[0]["error"] is None and max(places) == header


def test_each_key_sees_and_deletes_its_own_files(tmp_path: Path) -> None:
    settings = Settings(shutdown_seconds=1.0, chunk_dir=tmp_path, api_keys=tuple(hashlib.sha256(key).digest() for key in (b"a", b"b")))
    with Live(settings=settings, num_pages=128) as server:
        one, two = ({"x-api-key": key} for key in "ab")
        for key, names in ((one, ("both", "first")), (two, ("both",))):
            for name in names:
                body = {"name": name, "token_ids": [5, 6, 7] if key is one else [5, 6]}
                assert server.call("POST", "/v1/chunks", body, key).status == 200
                saved(server, name, key)
        assert server.get("/v1/saved_chunks").status == 401
        assert {(file["name"], file["tokens"]) for file in listed(server, one)} == {("both", 3), ("first", 3)}
        assert [(file["name"], file["tokens"]) for file in listed(server, two)] == [("both", 2)]
        for name in ("first", "..%2f", "%2e%2e", "a%00b", "a" * 65):
            assert server.call("DELETE", f"/v1/chunks/{name}/save", headers=two).status in (400, 404)
        assert server.call("DELETE", "/v1/chunks/both/save", headers=two).status == 200
        assert listed(server, two) == [] and len(listed(server, one)) == 2


def test_a_server_without_a_folder_refuses(live: Live) -> None:
    answer = live.get("/v1/saved_chunks")
    assert answer.status == 400 and answer.json()["error"]["message"].endswith("without --chunk-dir")
    assert live.get("/v1/chunks").json()["limits"]["files"] == 0


def test_damaged_files_and_those_of_other_models_do_not_fail_the_list(served: Live, tmp_path: Path) -> None:
    whole = saved(served).read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    contents = {
        "cut": whole[:-1],
        "long": whole + b"\0",
        "empty": b"",
        "huge": (1 << 40).to_bytes(8, "little") + whole[8:],
        "no-json": whole[:8] + b"{" * (length - 8) + whole[length:],
        "list": (2).to_bytes(8, "little") + b"[]",
        "version": whole.replace(b'"version":"1"', b'"version":"2"'),
        "shape": whole.replace(b'"kv":{"dtype":"F32"', b'"kv":{"dtype":"X32"'),
        "rope": whole.replace(b'"rope":"{', b'"rope":"['),
    }
    for name, content in contents.items():
        copied(served, path_of(served, "king"), name).write_bytes(content)
    model = random_model(tiny_config())
    state, chunk = nv.prefill(model, nv.init_state(model, num_pages=8), [1, 2, 3])
    nv.save_chunk(state, chunk, tmp_path / "other")
    copied(served, tmp_path / "other", "other")
    for name, make in {"folder": Path.mkdir, "pipe": os.mkfifo, "link": lambda path: path.symlink_to(path_of(served, "king"))}.items():
        make(path_of(served, name))
    (folder_of(served) / "foreign.safetensors").write_bytes(whole)
    found = {file["name"]: file for file in listed(served)}
    nameless = [file for file in listed(served) if file["name"] is None]
    assert found.keys() == {*contents, "king", "other", None} and len(nameless) == 3
    assert found["king"]["error"] is None
    assert found["other"]["error"]["code"] == "chunk_mismatch" and "another model" in found["other"]["error"]["message"]
    assert found["other"]["tokens"] == 3
    for file in [*nameless, *(found[name] for name in contents)]:
        error = file["error"]
        assert error["code"] == "chunk_file" and error["message"].startswith(("the file of", file["name"] or saved_list.NAMELESS)), error
        assert str(served.settings.chunk_dir) not in error["message"]
    for name in (*contents, "other"):
        assert code_of(served.post(f"/v1/chunks/{name}/load", {}))[1] == found[name]["error"]["code"], name
        assert served.call("DELETE", f"/v1/chunks/{name}/save").status == 200
    assert "KV is torch.float32" in refused_in_fp8(served)


def refused_in_fp8(live: Live) -> str:
    """What the list says of the file of "king" when the engine's KV is in FP8."""
    entry = saved_list.listed(folder_of(live), live.model, nv.init_state(live.model, num_pages=8, kv_dtype="fp8").kv.pools[0].dtype)
    (error,) = [file["error"] for file in entry["data"] if file["name"] == "king"]
    return error["message"]


def test_a_file_without_a_label_gets_one_when_it_is_loaded(served: Live) -> None:
    path = saved(served)
    for suffix in (saved_chunks.LABEL, saved_chunks.MARK):
        path.with_suffix(suffix).unlink()
    assert [file["name"] for file in listed(served)] == [None]
    path.with_suffix(saved_chunks.LABEL).write_text("another")
    assert [file["name"] for file in listed(served)] == [None]
    assert served.post("/v1/chunks/king/load", {"replace": True}).status == 200
    assert [file["name"] for file in listed(served)] == ["king"]
    assert path.with_suffix(saved_chunks.LABEL).read_text() == "king"


def test_labels_without_files_are_deleted_at_the_next_start(served: Live) -> None:
    path = saved(served)
    (orphan := path_of(served, "gone").with_suffix(saved_chunks.LABEL)).write_text("gone")
    saved_chunks.tidy(served.engine.named.limits, again=True)
    assert not orphan.exists() and [file["name"] for file in listed(served)] == ["king"] and path.exists()


def test_many_files_are_bounded_in_number_and_time(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(served)
    for number in range(40):
        os.utime(copied(served, source, f"n{number}"), (number, number))
    assert len(listed(served)) == 41
    monkeypatch.setattr(saved_list, "MOST_LISTED", 3)
    answer = served.get("/v1/saved_chunks").json()
    assert [file["name"] for file in answer["data"]] == ["king", "n39", "n38"] and answer["has_more"]
    monkeypatch.setattr(saved_list, "MOST_LISTED", 1024)
    described = saved_list._described

    def slow(*args: Any) -> Any:
        time.sleep(0.02)
        return described(*args)

    monkeypatch.setattr(saved_list, "_described", slow)
    monkeypatch.setattr(saved_list, "SECONDS", 0.1)
    answer = served.get("/v1/saved_chunks").json()
    assert len(answer["data"]) < 10 and answer["has_more"]


def test_a_list_that_became_complete_when_time_was_up_has_no_more(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(served)
    described, now = saved_list._described, [0.0]

    def slow(*args: Any) -> Any:
        now[0] += 1e6
        return described(*args)

    monkeypatch.setattr(saved_list, "_described", slow)
    monkeypatch.setattr(saved_list, "time", SimpleNamespace(monotonic=lambda: now[0]))
    answer = served.get("/v1/saved_chunks").json()
    assert [file["name"] for file in answer["data"]] == ["king"] and not answer["has_more"]


class Waiting:
    """A file that is read, block by block, only when `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go, read = threading.Event(), threading.Event(), blocks._read_block

        def waiting(*args: Any) -> Any:
            self.reached.set()
            assert self.go.wait(LIMIT)
            return read(*args)

        monkeypatch.setattr(blocks, "_read_block", waiting)


def test_the_list_and_deletions_wait_for_no_file_that_is_read(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    path, disk, answers = saved(served), Waiting(monkeypatch), list[Answer]()
    loading = threading.Thread(target=lambda: answers.append(served.post("/v1/chunks/king/load", {"replace": True})))
    loading.start()
    assert disk.reached.wait(LIMIT)
    assert [file["name"] for file in listed(served)] == ["king"]
    assert served.call("DELETE", "/v1/chunks/king/save").status == 200
    assert listed(served) == [] and loading.is_alive()
    disk.go.set()
    loading.join(LIMIT)
    assert answers[0].status == 200 and answers[0].json()["tokens"] == 11
    assert not path.with_suffix(saved_chunks.LABEL).exists() and not path.with_suffix(saved_chunks.MARK).exists()


def test_files_that_are_deleted_while_they_are_listed_are_left_out(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    source, described = saved(served), saved_list._described
    copied(served, source, "other")

    def first(path: Path, *args: Any) -> Any:
        for each in folder_of(served).glob("*"):
            each.unlink()
        return described(path, *args)

    monkeypatch.setattr(saved_list, "_described", first)
    assert listed(served) == []


def test_steps_go_on_while_the_folder_is_slow_and_waiting_calls_are_bounded(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(served)
    reached, go, described = threading.Event(), threading.Event(), saved_list._described

    def waiting(*args: Any) -> Any:
        reached.set()
        assert go.wait(LIMIT)
        return described(*args)

    monkeypatch.setattr(saved_list, "_described", waiting)
    monkeypatch.setattr(served.engine._folders, "_most", 1)
    thread = threading.Thread(target=lambda: listed(served))
    thread.start()
    assert reached.wait(LIMIT)
    assert served.post("/v1/completions", {"prompt": "x", "max_tokens": 4}).status == 200
    assert code_of(served.get("/v1/saved_chunks")) == (429, "queue_full")
    assert code_of(served.call("DELETE", "/v1/chunks/king/save")) == (429, "queue_full")
    go.set()
    thread.join(LIMIT)
    assert not thread.is_alive()


def test_a_folder_that_cannot_be_read_is_told_without_its_path(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(saved_list.os, "scandir", refused)
        answer = served.get("/v1/saved_chunks")
    assert code_of(answer) == (500, "chunk_file") and str(served.settings.chunk_dir) not in answer.body.decode()
