"""A server without sockets for clients answers as one with them does, and its engine ends with it."""

import asyncio
import hashlib
import json
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nanovllm as nv
from nanovllm.entrypoints.ray.local_server import Head, HttpRequest, LocalServer
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.errors import EngineDeadError

pytestmark = pytest.mark.unhooked
HEADERS = ((b"host", b"localhost"), (b"content-type", b"application/json"))
ASKED: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}


@pytest.fixture
def server() -> Iterator[LocalServer]:
    made = LocalServer("tiny", Settings(), {"device": "cpu", "num_pages": 128, "max_num_seqs": 4})
    yield made
    made.close()


def post(path: str, body: dict[str, Any]) -> HttpRequest:
    return HttpRequest(method="POST", path=path, headers=HEADERS, body=json.dumps(body).encode())


async def whole(server: LocalServer, request: HttpRequest) -> tuple[Head, bytes]:
    first, *pieces = [piece async for piece in server.answer(request)]
    assert isinstance(first, Head)
    return first, b"".join(piece for piece in pieces if isinstance(piece, bytes))


def text_of(events: bytes) -> str:
    lines = [line.removeprefix(b"data: ") for line in events.split(b"\n\n") if line]
    assert lines[-1] == b"[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


def test_answers_are_those_of_the_library(server: LocalServer) -> None:
    expected = nv.LLM("tiny", device="cpu", num_pages=64).generate("Once upon a time", nv.SamplingParams(temperature=0, max_tokens=12))[0]

    async def main() -> None:
        head, body = await whole(server, post("/v1/completions", ASKED))
        assert head.status == 200 and not head.streams
        assert json.loads(body)["choices"][0]["text"] == expected.text
        answers = [whole(server, post("/v1/completions", {**ASKED, "stream": True})) for _ in range(6)]
        for head, body in await asyncio.gather(*answers):
            assert head.status == 200 and head.streams
            assert text_of(body) == expected.text

    asyncio.run(asyncio.wait_for(main(), 300))


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (HttpRequest(method="GET", path="/health", headers=HEADERS), 200),
        (HttpRequest(method="GET", path="/v1/nothing", headers=HEADERS), 404),
        (HttpRequest(method="GET", path="/health"), 400),
        (HttpRequest(method="POST", path="/v1/completions", headers=HEADERS, body=b"{"), 400),
        (post("/v1/completions", {**ASKED, "temperature": -1}), 400),
    ],
    ids=str,
)
def test_what_is_wrong_has_a_status(server: LocalServer, request_: HttpRequest, status: int) -> None:
    head, body = asyncio.run(asyncio.wait_for(whole(server, request_), 300))
    assert head.status == status and json.loads(body)


def test_who_stops_reading_cancels_the_request(server: LocalServer) -> None:
    async def main() -> None:
        long = {**ASKED, "stream": True, "max_tokens": 1000, "ignore_eos": True}
        async with aclosing(server.answer(post("/v1/completions", long))) as pieces:
            assert isinstance(await anext(pieces), Head)
            assert await anext(pieces)
        for _ in range(4000):
            if not server._loop.state.running:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the request still runs")

    asyncio.run(asyncio.wait_for(main(), 300))


def test_an_engine_that_fails_is_noticed(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise EngineDeadError("the device is broken")

    async def main() -> None:
        await whole(server, post("/v1/completions", ASKED))
        server.require_alive()
        monkeypatch.setattr(server._loop, "_step", broken)
        head, body = await whole(server, post("/v1/completions", ASKED))
        server._thread.join()
        assert (head.status, json.loads(body)["error"]["code"]) == (503, "engine_unavailable")
        with pytest.raises(EngineDeadError, match="start the replica again"):
            server.require_alive()
        head, _ = await whole(server, post("/v1/completions", ASKED))
        assert head.status == 503

    asyncio.run(asyncio.wait_for(main(), 300))


def test_kv_on_disk_is_that_of_the_keys_and_is_written_at_the_end(tmp_path: Path) -> None:
    options = {"device": "cpu", "num_pages": 64, "host_kv_gib": 0.01, "kv_dir": tmp_path, "kv_dir_gib": 1}
    request = post("/v1/completions", {**ASKED, "prompt": "Once upon a time, there was a cat. " * 4})
    found = list[set[Path]]()
    for secret in (b"one", b"two"):
        keyed = (*HEADERS, (b"authorization", b"Bearer " + secret))
        made = LocalServer("tiny", Settings(api_keys=(hashlib.sha256(secret).digest(),)), options)

        async def main(made: LocalServer = made, keyed: Any = keyed) -> None:
            head, _ = await whole(made, replace(request, headers=keyed))
            assert head.status == 200

        asyncio.run(asyncio.wait_for(main(), 300))
        made.close()
        found.append({*tmp_path.rglob("*.kv")} - set().union(*found))
    folders = [{path.relative_to(tmp_path).parts[0] for path in paths} for paths in found]
    assert all(len(one) == 1 for one in folders) and folders[0] != folders[1], "a server with other keys shares no pages"
