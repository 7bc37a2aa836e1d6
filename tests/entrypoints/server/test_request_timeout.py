"""A bound on the time of a whole request: it ends with a typed error in every phase, its pages are free, and others go on."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import nanovllm as nv
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.entrypoints.server.wire import Submit, frame
from nanovllm.sampling.process_logits import as_processor
from nanovllm.types import Tensor
from tests.entrypoints.server.live import LIMIT, Live, parsed

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
SECONDS = 2.5
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
HEAD += "content-type: application/json\r\ncontent-length: {size}\r\n\r\n"
LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 1900, "temperature": 0, "ignore_eos": True}


def slowly(logits: Tensor) -> Tensor:
    """The same logits, a while later."""
    time.sleep(0.006)
    return logits


@pytest.fixture(scope="module")
def slow() -> Iterator[Live]:
    settings = Settings(shutdown_seconds=1.0, request_timeout=SECONDS)
    with Live(settings=settings, max_num_seqs=1, limits={"process_logits": as_processor(slowly)}) as server:
        yield server


def require_timeout(error: dict[str, Any]) -> None:
    assert (error["type"], error["code"], error["param"]) == ("timeout_error", "request_timeout", None)
    assert "2.5 seconds" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_whole_reply_that_takes_too_long_is_an_error(slow: Live, path: str) -> None:
    own = {"/v1/completions": LONG, "/v1/responses": {"input": "Hello", "ignore_eos": True}}
    began = time.monotonic()
    answer = slow.post(path, own.get(path, {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}))
    assert SECONDS <= time.monotonic() - began < SECONDS + 60
    assert answer.status == 504 and answer.headers["x-should-retry"] == "false"
    require_timeout(answer.json()["error"])
    slow.wait_until_idle()
    assert slow.engine.state.pool.num_available == slow.engine.state.config.num_pages


def test_a_stream_ends_with_an_error_event(slow: Live) -> None:
    answer = slow.post("/v1/completions", LONG | {"stream": True})
    *events, last, done = parsed(answer.body)
    assert answer.status == 200 and done == "[DONE]" and events[0]["choices"][0]["text"]
    require_timeout(last["error"])
    slow.wait_until_idle()
    assert not slow.server.streams and not slow.server.engine.num_open
    answer = slow.post("/v1/responses", {"input": "Hello", "ignore_eos": True, "stream": True})
    *_, last = parsed(answer.body)
    assert last["type"] == "response.failed" and "2.5 seconds" in last["response"]["error"]["message"]
    slow.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_in_the_queue_ends_too(slow: Live, stream: bool) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(str(slow.path))
        ids = np.arange(300, 310, dtype=np.int32).tobytes()
        other.sendall(frame(Submit([1], [[ids]], [{"max_tokens": 1900, "ignore_eos": True}], False)))
        slow.wait_until_running()
        answer = slow.post("/v1/completions", {**LONG, "stream": stream})
        if stream:
            (event, done) = parsed(answer.body)
            assert answer.status == 200 and done == "[DONE]"
            require_timeout(event["error"])
        else:
            assert answer.status == 504
            require_timeout(answer.json()["error"])
        end = time.monotonic() + LIMIT
        while slow.engine.state.waiting:
            assert time.monotonic() < end
            time.sleep(0.001)
        assert len(slow.engine.state.running) == 1  # the other one goes on
    slow.wait_until_idle()


def test_a_body_that_comes_slowly_counts(slow: Live) -> None:
    head = HEAD.format(size=90).encode() + b"{"
    with socket.create_connection(("127.0.0.1", slow.port), timeout=LIMIT) as sock:
        sock.sendall(head)
        data = sock.recv(1 << 16)
    assert data.startswith(b"HTTP/1.1 504 ")
    require_timeout(json.loads(data.partition(b"\r\n\r\n")[2])["error"])


def test_what_is_quick_is_as_without(live: Live) -> None:
    with Live(live.model, Settings(shutdown_seconds=1.0, request_timeout=LIMIT)) as server:
        for body in (LONG | {"max_tokens": 6}, LONG | {"max_tokens": 6, "n": 2}):
            assert server.post("/v1/completions", body).json()["choices"] == live.post("/v1/completions", body).json()["choices"]
        body = LONG | {"max_tokens": 6, "stream": True}
        texts = ["".join(e["choices"][0]["text"] for e in each.events("/v1/completions", body)) for each in (server, live)]
        assert texts[0] == texts[1]


def test_a_reply_that_has_ended_may_be_read_later(live: Live) -> None:
    """The long name of the model fills the sockets' buffers, so that events wait for the client beyond the bound."""
    name = "long" * 1000
    body = json.dumps({**LONG, "model": name, "prompt": ["x"] * 6, "max_tokens": 100, "stream": True}).encode()
    head = HEAD.format(size=len(body)).encode()
    with Live(live.model, Settings(model_name=name, request_timeout=12.0)) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(LIMIT)
        sock.connect(("127.0.0.1", server.port))
        began = time.monotonic()
        sock.sendall(head + body)
        server.wait_until_generated(6 * 100)
        server.wait_until_idle()
        assert time.monotonic() - began < 12.0, "this machine is too slow for the test"
        time.sleep(12.5 - (time.monotonic() - began))
        data = b""
        while part := sock.recv(1 << 16):
            data += part
    assert b"request_timeout" not in data and b"[DONE]" in data


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_the_bound_is_checked(seconds: float) -> None:
    with pytest.raises(nv.InvalidRequestError, match="request_timeout"):
        Settings(request_timeout=seconds)
