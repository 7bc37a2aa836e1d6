"""After a restart a server has its named chunks at once. Their KV is read when a request needs it, or when there is nothing else to do."""

import http.client
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nanovllm as nv
from nanovllm.chunks.storage import blocks, reserved
from nanovllm.entrypoints.server import saved_chunks
from nanovllm.entrypoints.server.chunk_reads import ChunkReads
from nanovllm.entrypoints.server.engine_metrics import EngineMetrics
from nanovllm.entrypoints.server.held import Held
from nanovllm.entrypoints.server.named_chunks import ChunkLimits, NamedChunks
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.entrypoints.server.unread_chunks import hold_marked, read_in
from tests.entrypoints.ranks.twins import Twins
from tests.entrypoints.server.live import LIMIT, Live
from tests.entrypoints.server.slow_disk import Calling, Slow, code_of

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
KING, CITY = "The king of Aistonia is Oswin.", "\n\nThe capital of Aistonia is Velmora."
GREEDY: dict[str, Any] = {"prompt": " The king of Aistonia is", "max_tokens": 8, "temperature": 0}
COMPLETIONS = "/v1/completions"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Live]:
    """A server with two chunks that have files, of which "city" was saved last."""
    settings = Settings(shutdown_seconds=10.0, chunk_dir=tmp_path, keep_chunks=True, max_chunks=6)
    with Live(settings=settings, num_pages=128) as server:
        for name, text in (("king", KING), ("city", CITY)):
            make(server, name, text=text)
        yield server


def make(live: Live, name: str, **content: Any) -> None:
    """Make a chunk and save it."""
    assert live.post("/v1/chunks", {"name": name, **content}).status == 200
    assert live.post(f"/v1/chunks/{name}/save", {}).status == 200


def restart(live: Live) -> None:
    """Kill the engine and start another."""
    live.stop_engine()
    live.start_engine()
    live.wait_until_healthy()


def stopped(live: Live, monkeypatch: pytest.MonkeyPatch) -> Slow:
    """Start another engine, whose first read of a file stops until `go`. That is the file of the chunk that was used last."""
    disk = Slow(monkeypatch, "_read_block")
    restart(live)
    assert disk.reached.wait(LIMIT)
    return disk


def loaded(live: Live) -> dict[str, bool]:
    return {chunk["name"]: chunk["loaded"] for chunk in live.get("/v1/chunks").json()["data"]}


def until(true: Callable[[], bool]) -> None:
    """Wait until something is so. The wait sleeps, because the engine is a thread of this process."""
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def num_waiting(live: Live) -> int:
    """How many requests and calls wait for chunks."""
    return sum(map(len, [*live.engine._reads._waiting.values()]))


def wait_until_loaded(live: Live) -> None:
    until(lambda: not live.engine.named.unread)
    live.wait_until_idle()


def using(*names: str) -> dict[str, Any]:
    return {**GREEDY, "chunks": [*names]}


def damage(live: Live, name: str) -> Path:
    """Change a byte of the KV in the file of a chunk."""
    path = saved_chunks.path_of(live.engine.named.limits, "", name)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def test_chunks_are_there_before_their_files_are_read(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    before = served.get("/v1/chunks").json()
    wanted = served.post(COMPLETIONS, using("king")).json()
    assert loaded(served) == {"city": True, "king": True}
    disk = stopped(served, monkeypatch)
    now = served.get("/v1/chunks").json()
    assert loaded(served) == {"city": False, "king": False}
    assert (now["pages"], now["limits"]) == (before["pages"], before["limits"])
    told = ("name", "tokens", "pages", "exact", "operations")
    assert [[chunk[key] for key in told] for chunk in now["data"]] == [[chunk[key] for key in told] for chunk in before["data"]]
    assert served.get("/v1/chunks/king").json()["loaded"] is False
    assert served.engine.state.stats.reused_tokens == 0
    nv.check(served.engine.state)
    disk.go.set()
    wait_until_loaded(served)
    assert loaded(served) == {"city": True, "king": True}
    again = served.post(COMPLETIONS, using("king")).json()
    assert again["choices"] == wanted["choices"] and again["usage"] == wanted["usage"]


def test_a_request_waits_for_its_own_chunk_alone(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    make(served, "third", token_ids=[5, 6, 7])
    wanted, plain = (served.post(COMPLETIONS, body).json()["choices"] for body in (using("king", "city"), GREEDY))
    read, read_into = list[str](), saved_chunks.read_into_pages

    def noted(between: Any, path: Path, unread: Any, model: nv.Model) -> None:
        read.append(unread.name)
        read_into(between, path, unread, model)

    monkeypatch.setattr(saved_chunks, "read_into_pages", noted)
    assert served.post(COMPLETIONS, using("king")).status == 200
    served.wait_until_idle()
    served.stop_engine()
    served.engine.save_chunks()  # notes that "king" was used last
    disk = stopped(served, monkeypatch)
    assert read == ["king"]
    waiting = Calling(served, COMPLETIONS, using("king", "city"))
    assert served.post(COMPLETIONS, GREEDY).json()["choices"] == plain and not waiting.ended
    disk.go.set()
    assert waiting.answer().json()["choices"] == wanted
    wait_until_loaded(served)
    assert read == ["king", "city", "third"]  # "third" was used after "city", but nobody waits for it


def test_a_damaged_file_is_found_by_the_request_that_needs_it(
    served: Live, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(served, "king")
    disk = stopped(served, monkeypatch)
    waiting = [Calling(served, COMPLETIONS, using("king")), Calling(served, "/v1/chunks/king/fork", {"to": "twin"})]
    other = Calling(served, COMPLETIONS, using("city"))
    assert loaded(served) == {"city": False, "king": False}
    until(lambda: num_waiting(served) == 3)
    disk.go.set()
    for call in waiting:
        assert code_of(call.answer()) == (500, "chunk_file")
        assert call.answer().json()["error"]["message"].startswith("king: its KV was changed: SHA-256 is ")
    assert other.answer().status == 200
    wait_until_loaded(served)
    assert loaded(served) == {"city": True} and len(served.engine.state.chunks) == 1
    assert code_of(served.post(COMPLETIONS, using("king"))) == (404, "chunk_not_found")
    assert "nanovllm: a chunk was not loaded again: king: its KV was changed" in capfd.readouterr().err
    assert served.post("/v1/chunks", {"name": "king", "text": KING}).status == 200
    assert served.post(COMPLETIONS, using("king")).status == 200


def test_a_file_that_is_damaged_or_gone_is_found_when_nobody_asks(served: Live, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("gone", "third"):
        make(served, name, token_ids=[5, 6, 7, len(name)])
    damage(served, "city")
    served.stop_engine()
    served.start_engine()
    wait_until_loaded(served)
    assert loaded(served) == {"gone": True, "king": True, "third": True}
    assert "a chunk was not loaded again: city: its KV was changed" in capfd.readouterr().err
    served.stop_engine()
    gone = saved_chunks.path_of(served.engine.named.limits, "", "gone")
    load_chunks = type(served.engine).load_chunks

    def lost(self: Any, *, again: bool) -> None:
        load_chunks(self, again=again)
        gone.unlink()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(served.engine), "load_chunks", lost)
        served.start_engine()
    wait_until_loaded(served)
    assert loaded(served) == {"king": True, "third": True}
    assert "a chunk was not loaded again: there is no file of the chunk 'gone'" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["king", "city"], ids=["unread", "being read"])
def test_a_chunk_that_is_deleted_before_it_is_read(
    served: Live, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    disk, other = stopped(served, monkeypatch), {"king": "city", "city": "king"}[name]
    waiting = Calling(served, COMPLETIONS, using(name))
    until(lambda: num_waiting(served) == 1)
    assert served.call("DELETE", f"/v1/chunks/{name}").status == 200
    assert served.get(f"/v1/chunks/{name}").status == 404 and len(served.engine.state.chunks) == 1
    disk.go.set()
    assert code_of(waiting.answer()) == (404, "chunk_not_found")
    wait_until_loaded(served)
    assert loaded(served) == {other: True} and served.engine.state.stats.reused_tokens > 0
    assert "not loaded again" not in capfd.readouterr().err
    restart(served)
    assert [*loaded(served)] == [other]
    wait_until_loaded(served)
    assert served.post(f"/v1/chunks/{name}/load", {}).status == 200  # a client has asked for its file


@pytest.mark.parametrize("name", ["king", "city"], ids=["unread", "being read"])
def test_a_chunk_that_is_replaced_before_it_is_read(served: Live, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    body = {"name": name, "token_ids": [5, 6, 7]}
    disk = stopped(served, monkeypatch)
    assert code_of(served.post("/v1/chunks", body)) == (409, "chunk_exists")
    waiting = Calling(served, COMPLETIONS, using(name))
    until(lambda: num_waiting(served) == 1)
    assert served.post("/v1/chunks", {**body, "replace": True}).json()["loaded"] is True
    disk.go.set()
    assert waiting.answer().json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    wait_until_loaded(served)
    assert served.get(f"/v1/chunks/{name}").json()["tokens"] == 3
    served.wait_until_idle()


CALLS: dict[str, tuple[str, Any]] = {
    "fork": ("/v1/chunks/king/fork", {"to": "new"}),
    "truncate": ("/v1/chunks/king/truncate", {"tokens": 7, "to": "new"}),
    "drop": ("/v1/chunks/king/drop", {"spans": [[2, 4]], "mode": "shift", "to": "new"}),
    "drop and run": ("/v1/chunks/king/drop", {"spans": [[2, 4]], "to": "new"}),
    "compose": ("/v1/chunks/compose", {"names": ["city", "king"], "name": "new"}),
    "continue": ("/v1/chunks", {"name": "new", "after": "king", "token_ids": [5, 6, 7]}),
    "keep": (COMPLETIONS, {**using("king"), "keep": "new"}),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_is_made_of_an_unread_chunk_is_what_is_made_of_a_read_one(served: Live, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path, body = CALLS[call]
    disk = stopped(served, monkeypatch)
    waiting = Calling(served, path, body)
    if call != "drop and run":  # which needs no KV
        until(lambda: num_waiting(served) == 1)
        assert "new" not in loaded(served)
    disk.go.set()
    assert waiting.answer().status == 200
    made, reply = served.get("/v1/chunks/new").json(), served.post(COMPLETIONS, using("new")).json()
    wait_until_loaded(served)
    assert served.call("DELETE", "/v1/chunks/new").status == 200
    assert served.post(path, body).status == 200  # now that all are read
    now = served.get("/v1/chunks/new").json()
    assert {**now, "created": 0} == {**made, "created": 0} and made["loaded"]
    assert served.post(COMPLETIONS, using("new")).json()["choices"] == reply["choices"]
    served.wait_until_idle()


def test_saving_and_deleting_the_file_of_an_unread_chunk(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = served.post(COMPLETIONS, using("king")).json()["choices"]
    path = saved_chunks.path_of(served.engine.named.limits, "", "king")
    data = path.read_bytes()
    disk = stopped(served, monkeypatch)
    saving = Calling(served, "/v1/chunks/king/save", {})
    until(lambda: num_waiting(served) == 1)
    assert not saving.ended
    disk.go.set()
    assert saving.answer().json()["bytes"] == len(data) and path.read_bytes() == data
    wait_until_loaded(served)

    disk = stopped(served, monkeypatch)
    assert served.get("/v1/saved_chunks").json()["data"][0]["error"] is None  # lists do not wait
    answers = list[Any]()
    deleting = Calling(served, "/v1/chunks/king/truncate", {"tokens": 3, "to": "short"})  # waits, too
    connection = served.connect()
    connection.request("DELETE", "/v1/chunks/king/save")
    until(lambda: num_waiting(served) == 2)
    assert path.exists()
    disk.go.set()
    answers.append(connection.getresponse())
    connection.close()
    assert answers[0].status == 200 and deleting.answer().status == 200 and not path.exists()
    wait_until_loaded(served)
    assert served.post(COMPLETIONS, using("king")).json()["choices"] == wanted  # it was read before
    served.stop_engine()
    served.engine.save_chunks()
    served.start_engine()
    assert path.read_bytes() == data  # and is saved at an orderly end


def test_the_file_of_a_chunk_that_cannot_be_read_can_be_deleted(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    path = damage(served, "city")
    disk = stopped(served, monkeypatch)
    connection = served.connect()
    connection.request("DELETE", "/v1/chunks/city/save")
    until(lambda: num_waiting(served) == 1)
    disk.go.set()
    assert connection.getresponse().status == 200 and not path.exists()
    connection.close()


def test_limits_hold_for_chunks_that_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    settings, ids = Settings(shutdown_seconds=1.0, chunk_dir=tmp_path, keep_chunks=True, max_chunks=3, chunk_share=0.25), [*range(5, 165)]
    with Live(settings=settings, num_pages=128) as server:  # 32 pages for chunks
        make(server, "a", token_ids=ids)
        make(server, "b", token_ids=ids[::-1])
        disk = stopped(server, monkeypatch)
        assert server.get("/v1/chunks").json()["pages"] == 20
        long = server.post("/v1/chunks", {"name": "c", "token_ids": [*range(6, 250)]})
        assert code_of(long) == (400, "chunk_limit") and "hold 20 of the 32" in long.body.decode()
        assert server.post("/v1/chunks", {"name": "c", "token_ids": [1, 2]}).status == 200
        assert code_of(server.post("/v1/chunks", {"name": "d", "token_ids": [1, 2]})) == (400, "chunk_limit")
        disk.go.set()
        wait_until_loaded(server)
        server.stop_engine()
        server.engine.save_chunks()
        server.limits["chunk_limits"] = replace(server.limits["chunk_limits"], most=2)
        server.start_engine()
        server.wait_until_healthy()
        assert [*loaded(server)] == ["a", "b"]  # those that were saved or used first
        assert "a chunk was not loaded again: there are 2 chunks, and 2 are allowed" in capfd.readouterr().err
        wait_until_loaded(server)


def test_chunks_with_the_same_beginning_share_pages_before_and_after_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, ids = Settings(shutdown_seconds=1.0, chunk_dir=tmp_path, keep_chunks=True), [*range(5, 105)]
    with Live(settings=settings, num_pages=64) as server:
        make(server, "base", token_ids=ids)
        for name in ("one", "two"):
            make(server, name, after="base", token_ids=[len(name), ord(name[0])] * 10)
        assert server.post("/v1/chunks/one/fork", {"to": "twin"}).status == 200
        assert server.post("/v1/chunks/twin/save", {}).status == 200
        pages = server.get("/v1/chunks").json()["pages"]
        wanted = {name: server.post(COMPLETIONS, using(name)).json()["choices"] for name in ("base", "one", "two", "twin")}
        disk = stopped(server, monkeypatch)
        assert server.get("/v1/chunks").json()["pages"] == pages + 1  # the fork has a last page of its own
        assert server.call("DELETE", "/v1/chunks/base").status == 200  # the others hold its pages
        disk.go.set()
        wait_until_loaded(server)
        for name in ("twin", "one", "two"):
            answer = server.post(COMPLETIONS, using(name)).json()
            assert answer["choices"] == wanted[name]
        server.wait_until_idle()


def test_an_engine_that_is_killed_before_it_has_read_its_chunks(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = served.post(COMPLETIONS, using("king")).json()["choices"]
    disk = stopped(served, monkeypatch)
    waiting = Calling(served, COMPLETIONS, using("king"))
    until(lambda: num_waiting(served) == 1)
    served.stop_engine()
    assert code_of(waiting.answer()) == (503, "engine_unavailable")
    disk.go.set()
    served.engine.save_chunks()  # an orderly end writes no pages that were not filled
    served.start_engine()
    served.wait_until_healthy()
    assert served.post(COMPLETIONS, using("king")).json()["choices"] == wanted
    wait_until_loaded(served)
    assert loaded(served) == {"city": True, "king": True}


def test_a_request_whose_client_has_gone_does_not_run(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = stopped(served, monkeypatch)
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    connection.request("POST", COMPLETIONS, json.dumps(using("king")), {"content-type": "application/json"})
    until(lambda: num_waiting(served) == 1)
    connection.close()
    until(lambda: not any(peer.coming for peer in peers(served)))
    disk.go.set()
    wait_until_loaded(served)
    assert served.engine.metrics.generation_tokens == 0


def peers(live: Live) -> list[Any]:
    return [key.data for key in live.engine._selector.get_map().values() if hasattr(key.data, "coming")]


def test_a_chunk_for_which_memory_is_short_keeps_its_name(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    put_rows, shorts = reserved.put_rows, [2]

    def short(*args: Any) -> None:
        if shorts[0]:
            shorts[0] -= 1
            raise nv.OutOfPagesError("the device ran out of memory during the call; the state is as it was before")
        put_rows(*args)

    monkeypatch.setattr(reserved, "put_rows", short)
    restart(served)
    until(lambda: shorts[0] == 0 and len(served.engine._reads._put_off) == 2)  # neither is tried again by itself
    assert loaded(served) == {"city": False, "king": False}
    shorts[0] = 1
    assert code_of(served.post(COMPLETIONS, using("king"))) == (503, "out_of_memory")
    assert served.post(COMPLETIONS, using("king", "city")).status == 200
    assert loaded(served) == {"city": True, "king": True}


def test_a_file_can_not_be_deleted_as_long_as_memory_is_short_for_its_chunk(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()

    def short(*_: Any) -> None:
        calls.append(1)
        raise nv.OutOfPagesError("the device ran out of memory during the call; the state is as it was before")

    with monkeypatch.context() as patch:
        patch.setattr(reserved, "put_rows", short)
        restart(served)
        until(lambda: len(served.engine._reads._put_off) == 2)
        assert code_of(served.call("DELETE", "/v1/chunks/king/save")) == (503, "out_of_memory")
        assert len(calls) == 3  # it was tried once more
    assert saved_chunks.path_of(served.engine.named.limits, "", "king").exists()
    assert served.call("DELETE", "/v1/chunks/king/save").status == 200
    assert loaded(served)["king"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("CUDA error: out of memory")])
def test_a_chunk_keeps_its_name_if_there_is_no_memory_to_read_its_file_into(
    served: Live, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    stages = blocks._stages

    def short(*_: Any) -> None:
        raise error

    monkeypatch.setattr(blocks, "_stages", short)
    restart(served)
    until(lambda: len(served.engine._reads._put_off) == 2)
    assert loaded(served) == {"city": False, "king": False}
    assert code_of(served.post(COMPLETIONS, using("king"))) == (503, "out_of_memory")
    monkeypatch.setattr(blocks, "_stages", stages)
    assert served.post(COMPLETIONS, using("king", "city")).status == 200


def test_requests_that_wait_for_chunks_are_bounded(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.entrypoints.server.chunk_reads.MOST_WAITING", 1)
    disk = stopped(served, monkeypatch)
    first = Calling(served, COMPLETIONS, using("king"))
    until(lambda: num_waiting(served) == 1)
    assert code_of(served.post(COMPLETIONS, using("king"))) == (429, "queue_full")
    assert code_of(served.post("/v1/chunks/king/fork", {"to": "twin"})) == (429, "queue_full")
    disk.go.set()
    assert first.answer().status == 200
    served.wait_until_idle()


@pytest.mark.parametrize("last", ["one", "base"])
def test_a_damaged_file_changes_no_page_of_a_chunk_with_the_same_beginning(tmp_path: Path, last: str) -> None:
    settings, ids = Settings(shutdown_seconds=1.0, chunk_dir=tmp_path, keep_chunks=True), [*range(5, 105)]
    with Live(settings=settings, num_pages=64) as server:
        make(server, "base", token_ids=ids)
        make(server, "one", after="base", token_ids=[3, 4] * 10)
        wanted = server.post(COMPLETIONS, using("one")).json()["choices"]
        server.stop_engine()
        limits = server.engine.named.limits
        path = saved_chunks.path_of(limits, "", "base")
        data = bytearray(path.read_bytes())
        middle = slice(len(data) // 3, 2 * len(data) // 3)
        data[middle] = bytes(len(data[middle]))
        path.write_bytes(data)
        for name in ("one", "base"):
            os.utime(saved_chunks.path_of(limits, "", name).with_suffix(saved_chunks.MARK), ns=(0, 10 if name == last else 0))  # read first
        server.start_engine()
        wait_until_loaded(server)
        assert loaded(server) == {"one": True}
        assert server.post(COMPLETIONS, using("one")).json()["choices"] == wanted


def test_a_chunk_is_not_moved_to_host_memory_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(shutdown_seconds=1.0, chunk_dir=tmp_path, keep_chunks=True, chunk_share=1.0)
    long = {**GREEDY, "prompt": [*range(5, 205)]}
    with Live(settings=settings, num_pages=24, page_size=16, host_kv_gib=0.1) as server:
        make(server, "king", token_ids=[*range(7, 247)])  # 15 of the 24 pages
        wanted = server.post(COMPLETIONS, using("king")).json()["choices"]
        disk = stopped(server, monkeypatch)
        assert code_of(server.post(COMPLETIONS, long)) == (503, "out_of_memory")
        host = server.engine.state.pool.host
        assert host is not None and not host.moved and loaded(server) == {"king": False}
        disk.go.set()
        wait_until_loaded(server)
        assert server.post(COMPLETIONS, long).status == 200
        assert server.post(COMPLETIONS, using("king")).json()["choices"] == wanted


def restarted(folder: Path, *names: str, spaces: tuple[tuple[str, int], ...] = (("", 0),)) -> Held:
    """What a new engine holds if chunks of the same tokens with these names were saved in each namespace."""
    model, named = nv.load_model("tiny", device="cpu"), NamedChunks(limits=ChunkLimits(folder=folder, kept=True, spaces=spaces))
    state, chunk = nv.prefill(model, nv.init_state(model, num_pages=32, page_size=4), [*range(5, 25)])
    for space, _ in spaces:
        for name in names:
            path = saved_chunks.path_of(named.limits, space, name)
            path.parent.mkdir(exist_ok=True)
            nv.save_chunk(state, chunk, path)
            saved_chunks.mark(path, name, 1)
    state = nv.init_state(model, num_pages=32, page_size=4)
    held, problems = hold_marked(Held(model=model, state=state, named=named, metrics=EngineMetrics()))
    assert not problems
    return held


def test_chunks_share_pages_only_within_their_namespace(tmp_path: Path) -> None:
    held = restarted(tmp_path, "king", "queen", spaces=(("a", 1), ("b", 2)))
    pages = {space: {*held.named.get(space, "king").chunk.pages} for space in ("a", "b")}
    assert held.state.pool.pages.num_used == 10 and pages["a"].isdisjoint(pages["b"])


def test_a_busy_engine_reads_only_what_somebody_waits_for(tmp_path: Path) -> None:
    held, reads, told = restarted(tmp_path, "king", "queen"), ChunkReads(), list[Any]()
    number = held.named.get("", "king").chunk.liveness
    with closing(reads.thread):
        assert not reads.go_on(held, idle=False) and not reads.thread.busy
        reads.wait(number, told.append)
        reads.go_on(held, idle=False)
        while reads.thread.busy:
            if reads.thread.waits:
                held, tell = reads.thread.turn(held)
                tell()
        assert told == [None] and [*held.named.unread] == [held.named.get("", "queen").chunk.liveness]
        reads.go_on(held, idle=False)
        assert not reads.thread.busy
        reads.go_on(held, idle=True)
        assert reads.thread.busy


def test_all_ranks_take_the_pages_and_read_the_files(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"num_pages": 32, "page_size": 4}
    model, tokens = nv.load_model("tiny", device="cpu"), [*range(5, 25)]
    named = NamedChunks(limits=ChunkLimits(folder=tmp_path, kept=True))
    state, chunk = nv.prefill(model, nv.init_state(model, **limits), tokens)
    for name in ("king", "queen", "wrong"):
        path = saved_chunks.path_of(named.limits, "", name)
        path.parent.mkdir(exist_ok=True)
        nv.save_chunk(state, chunk, path)
        saved_chunks.mark(path, name, 1)
    path.write_bytes(path.read_bytes()[:-1] + b"~")
    state = nv.init_state(model, **limits)
    twins = Twins(model, state, nv.init_state(model, **limits))
    held, problems = hold_marked(Held(model=model, state=state, named=named, metrics=EngineMetrics()))
    assert not problems and twins.sent == ["reserve"] * 3 and held.state.pool.pages.num_free == 32 - 5  # all have the same five pages
    for name, error in (("wrong", nv.ChunkFileError), ("king", None), ("queen", None)):
        number = held.named.get("", name).chunk.liveness
        later = read_in(held, number)
        held, value = later.end(held, later.work(lambda _: None))
        assert type(value) is (error or type(None)) and number not in held.named.unread
    assert twins.sent[3:] == ["fill", "release", "fill", "fill"]
    for each in (held.state, twins.second):
        nv.check(each)
    greedy, queen = nv.SamplingParams(temperature=0, max_tokens=4), held.named.get("", "queen").chunk
    replies = [nv.generate(model, *of, greedy)[1] for of in ((held.state, [queen, [7]]), (nv.init_state(model, num_pages=8), [*tokens, 7]))]
    assert replies[0].token_ids == replies[1].token_ids
