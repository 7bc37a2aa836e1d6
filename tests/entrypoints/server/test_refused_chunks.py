"""Files of named chunks that do not fit a server, such as those of another model, stay as they are."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm.entrypoints.server import saved_chunks
from nanovllm.entrypoints.server.named_chunks import ChunkLimits
from nanovllm.entrypoints.server.settings import Settings
from tests.entrypoints.server.live import Live
from tests.entrypoints.server.slow_disk import code_of

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
KING = "The king of Aistonia is Oswin."
KEEPING: dict[str, Any] = {"prompt": "Once", "max_tokens": 2, "keep": "policy", "keep_replace": True}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Live]:
    """A server that keeps chunks, with a chunk "policy" whose file no client has asked for."""
    with Live(settings=Settings(shutdown_seconds=1.0, chunk_dir=tmp_path, keep_chunks=True, max_chunks=4), num_pages=128) as server:
        assert server.post("/v1/chunks", {"name": "policy", "text": KING}).status == 200
        yield server


def restart(live: Live, **options: Any) -> None:
    """End the server in an orderly way, and start another with other options of the engine."""
    live.stop_engine()
    live.engine.save_chunks()
    live.options.update(options)
    live.start_engine()
    live.wait_until_healthy()


def path_of(live: Live, name: str) -> Path:
    return saved_chunks.path_of(live.engine.named.limits, "", name)


def names(live: Live) -> list[str]:
    return [chunk["name"] for chunk in live.get("/v1/chunks").json()["data"]]


@pytest.mark.parametrize("asked_for", [False, True])
def test_a_file_that_was_refused_at_the_start_is_not_written_over(served: Live, asked_for: bool) -> None:
    if asked_for:
        assert served.post("/v1/chunks/policy/save", {}).status == 200
    restart(served)
    path, before = path_of(served, "policy"), served.get("/v1/chunks/policy").json()
    saved = path.read_bytes()
    if not asked_for:
        path.with_suffix(saved_chunks.OWN).touch()  # as if it had been saved while there was nothing to do
    restart(served, kv_dtype="fp8")
    assert names(served) == []
    for more in ({}, {"replace": True}):
        answer = served.post("/v1/chunks", {"name": "policy", "token_ids": [5, 6, 7], **more})
        assert code_of(answer) == (409, "chunk_exists")
        told = answer.json()["error"]["message"]
        assert "file of the chunk 'policy' was not loaded" in told and "its KV is torch.float32" in told
        assert "DELETE /v1/chunks/policy/save" in told and str(path.parent) not in told
    assert served.post("/v1/chunks", {"name": "other", "token_ids": [5, 6, 7]}).status == 200
    to = {"to": "policy", "replace": True}
    calls = [("fork", to), ("truncate", {"tokens": 2, **to}), ("drop", {"spans": [[0, 1]], **to})]
    assert {code_of(served.post(f"/v1/chunks/other/{call}", body)) for call, body in calls} == {(409, "chunk_exists")}
    composed = {"names": ["other", "other"], "name": "policy", "replace": True}
    assert code_of(served.post("/v1/chunks/compose", composed)) == (409, "chunk_exists")
    assert code_of(served.post("/v1/completions", KEEPING)) == (409, "chunk_exists")
    assert code_of(served.post("/v1/chunks/policy/load", {"replace": True})) == (409, "chunk_mismatch")
    assert code_of(served.call("DELETE", "/v1/chunks/policy")) == (404, "chunk_not_found")
    served.wait_until_idle()
    restart(served)
    assert names(served) == ["other"] and path.read_bytes() == saved
    restart(served, kv_dtype=None)
    assert names(served) == ["policy"] and path.read_bytes() == saved
    after = served.get("/v1/chunks/policy").json()
    assert {**after, "loaded": True} == {**before, "loaded": True}


@pytest.mark.parametrize("asked_for", [False, True])
def test_a_file_of_another_version_is_neither_written_over_nor_deleted(served: Live, asked_for: bool) -> None:
    restart(served)
    path = path_of(served, "policy")
    saved = path.read_bytes()
    assert b'"version":"1"' in saved
    path.write_bytes(saved := saved.replace(b'"version":"1"', b'"version":"9"'))
    path.with_suffix(saved_chunks.MARK).unlink()  # so that the start does not look at it
    path.with_suffix(saved_chunks.OWN).unlink(missing_ok=True)
    if not asked_for:
        path.with_suffix(saved_chunks.OWN).touch()
    served.stop_engine()
    served.start_engine()
    served.wait_until_healthy()
    assert served.post("/v1/chunks", {"name": "policy", "token_ids": [5, 6, 7]}).status == 200
    answer = served.post("/v1/chunks/policy/save", {})
    assert code_of(answer) == (500, "chunk_file") and "DELETE /v1/chunks/policy/save" in answer.json()["error"]["message"]
    assert path.read_bytes() == saved and path.with_suffix(saved_chunks.OWN).exists() == (not asked_for)


def test_a_file_that_the_system_cannot_read_keeps_its_name(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    restart(served)
    path = path_of(served, "policy")
    saved, open_ = path.read_bytes(), os.open

    def full(name: Any, *more: Any, **options: Any) -> int:
        if name == path:
            raise OSError(24, "Too many open files")
        return open_(name, *more, **options)

    with monkeypatch.context() as patch:
        patch.setattr(saved_chunks.os, "open", full)
        restart(served)
    assert names(served) == []
    assert code_of(served.post("/v1/chunks", {"name": "policy", "token_ids": [5, 6, 7], "replace": True})) == (409, "chunk_exists")
    assert path.read_bytes() == saved
    restart(served)
    assert names(served) == ["policy"]


def test_a_refused_name_is_free_once_its_file_is_deleted(served: Live) -> None:
    restart(served, kv_dtype="fp8")
    assert served.call("DELETE", "/v1/chunks/policy/save").status == 200 and not path_of(served, "policy").exists()
    for _ in range(2):  # its own file is no reason later
        assert served.post("/v1/chunks", {"name": "policy", "text": KING, "replace": True}).status == 200
        assert served.post("/v1/chunks/policy/save", {}).status == 200
    restart(served)
    assert names(served) == ["policy"]


def test_a_refused_name_is_free_once_the_operator_has_taken_the_file_away(served: Live, tmp_path: Path) -> None:
    restart(served, kv_dtype="fp8")
    path_of(served, "policy").rename(tmp_path / "policy")
    for _ in range(2):
        assert served.post("/v1/chunks", {"name": "policy", "text": KING, "replace": True}).status == 200
        assert served.post("/v1/chunks/policy/save", {}).status == 200


def test_a_chunk_that_had_no_room_at_the_start_can_be_loaded_later(served: Live) -> None:
    restart(served)
    saved = path_of(served, "policy").read_bytes()
    limits = served.limits["chunk_limits"]
    served.limits["chunk_limits"] = ChunkLimits(folder=limits.folder, kept=True, most=0)
    restart(served)
    assert code_of(served.post("/v1/chunks/policy/load", {})) == (400, "chunk_limit")
    assert code_of(served.post("/v1/chunks", {"name": "policy", "text": "x"})) == (409, "chunk_exists")
    served.engine.named = replace(served.engine.named, limits=limits)
    assert served.post("/v1/chunks/policy/load", {}).status == 200
    assert path_of(served, "policy").read_bytes() == saved
    assert served.post("/v1/chunks", {"name": "policy", "text": "x", "replace": True}).status == 200


@pytest.mark.parametrize("asked_for", [False, True])
def test_a_file_of_another_dtype_without_a_mark_is_not_written_over(
    served: Live, capfd: pytest.CaptureFixture[str], asked_for: bool
) -> None:
    if asked_for:
        assert served.post("/v1/chunks/policy/save", {}).status == 200
    served.stop_engine()
    served.engine.save_chunks()
    path = path_of(served, "policy")
    path.with_suffix(saved_chunks.MARK).unlink()
    if not asked_for:
        path.with_suffix(saved_chunks.OWN).touch()
    saved = path.read_bytes()
    served.options["kv_dtype"] = "fp8"
    served.start_engine()
    served.wait_until_healthy()
    assert served.post("/v1/chunks", {"name": "policy", "text": "x"}).status == 200
    answer = served.post("/v1/chunks/policy/save", {})
    assert code_of(answer) == (409, "chunk_mismatch") and "DELETE /v1/chunks/policy/save" in answer.json()["error"]["message"]
    served.stop_engine()
    served.engine.save_chunks()
    assert "a chunk was not saved: the chunk 'policy' cannot be saved" in capfd.readouterr().err
    served.start_engine()
    served.wait_until_healthy()
    assert names(served) == [] and path.read_bytes() == saved
    assert served.post("/v1/chunks", {"name": "policy", "text": "x"}).status == 200
    assert served.call("DELETE", "/v1/chunks/policy").status == 200 and path.read_bytes() == saved


def test_a_chunk_keeps_the_time_at_which_it_got_its_name(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    created, now = served.get("/v1/chunks/policy").json()["created"], time.time()
    monkeypatch.setattr(time, "time", lambda: now + 1000)
    for _ in range(2):
        restart(served)
        assert served.get("/v1/chunks/policy").json()["created"] == created
    path = path_of(served, "policy")
    path.with_suffix(saved_chunks.LABEL).unlink()  # as in the folder of an older version
    os.utime(path, (created - 5000, created - 5000))
    for _ in range(2):
        restart(served)
        assert served.get("/v1/chunks/policy").json()["created"] == created - 5000
