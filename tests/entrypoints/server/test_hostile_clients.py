"""Clients that are slow, malformed, huge or gone: each is answered with an error or closed, and others are served as before."""

import contextlib
import json
import random
import re
import select
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nanovllm.entrypoints.server.settings import MOST_TOKENS, Limits, Settings
from tests.entrypoints.server.live import LIMIT, Live

pytestmark = pytest.mark.unhooked  # uvloop's transports are of types of its own

PATH = "/v1/completions"
GREEDY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
LONG = GREEDY | {"max_tokens": 1500, "ignore_eos": True}
# Short, and yet so long that a client of a busy machine says in time what it has to say.
SHORT_TIMES = Limits(head_seconds=3.0, body_seconds=3.5, keep_alive_seconds=3.2, stall_seconds=5.0, linger_seconds=5.0, ping_seconds=0.2)


@pytest.fixture(scope="module")
def hasty(live: Live) -> Iterator[Live]:
    """A server that waits for nobody."""
    with Live(live.model, Settings(shutdown_seconds=1.0, limits=SHORT_TIMES)) as server:
        yield server


@pytest.fixture(scope="module")
def text(live: Live) -> str:
    return live.post(PATH, GREEDY).json()["choices"][0]["text"]


def head(body: bytes | int = b"", path: str = PATH, more: str = "") -> bytes:
    length = body if isinstance(body, int) else len(body)
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n{more}\r\n".encode()


def asked(value: Any, more: str = "") -> bytes:
    body = json.dumps(value).encode()
    return head(body, more=more) + body


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error_of(answer: bytes) -> dict[str, Any]:
    """The error object of an answer, which must have OpenAI's four fields."""
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def right(live: Live, text: str) -> None:
    """Another client gets the right answer, and nothing is left of the former ones."""
    assert live.post(PATH, GREEDY).json()["choices"][0]["text"] == text
    live.wait_until_idle()
    eventually(lambda: not live.server.streams and not live.server.engine.num_open and not live.server.num_running)


def eventually(met: Any, seconds: float = LIMIT) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, met
        time.sleep(0.005)


def connected(live: Live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), timeout=LIMIT)


def reset(sock: socket.socket) -> None:
    """Close with RST."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def send_all(sock: socket.socket, data: bytes) -> bool:
    """Whether the server took all."""
    try:
        sock.sendall(data)
    except (ConnectionError, BrokenPipeError):
        return False
    return True


def read_all(sock: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def read_one(sock: socket.socket) -> bytes:
    """An answer whose head tells its length. It may come in pieces."""
    data = b""
    while not (found := re.search(rb"content-length: (\d+)\r\n(?:.*\r\n)*?\r\n", data)) or len(data) < found.end() + int(found[1]):
        part = sock.recv(1 << 16)
        assert part, data
        data += part
    return data


# What is no request

NOT_HTTP = {
    "no HTTP": b"hello there, server\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an unknown method": b"BREW /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a version of its own": b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "a NUL in a header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
    "a folded header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n: c\r\n\r\n",
    "a length that is no number": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "a length beyond 64 bits": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    "a length and chunks": head(4, more="Transfer-Encoding: chunked\r\n") + b"0\r\n\r\n",
    "chunks that are none": head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"zz\r\nabc\r\n",
    "a chunk of 2**70 bytes": head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"4" + b"0" * 17 + b"\r\n",
    "CONNECT": b"CONNECT localhost:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "bytes beyond ASCII in the path": b"GET /v1/\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\nConnection: close\r\n\r\n",
}


@pytest.mark.parametrize("name", NOT_HTTP)
def test_what_is_no_http_is_refused_with_a_reason(hasty: Live, text: str, name: str):
    answer = hasty.raw(NOT_HTTP[name])
    assert status_of(answer) in (400, 404), answer
    error_of(answer)
    right(hasty, text)


def test_a_head_is_bounded_in_bytes_and_number(hasty: Live, text: str):
    floods = [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 101,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 10_000_000,
        b"GET /" + b"a" * 1_000_000,
        b"GET /health HTTP/1.1\r\n" + b"".join(b"x%d: y\r\n" % i for i in range(100_000)),
    ]
    for flood in floods:
        with connected(hasty) as sock:
            send_all(sock, flood)
            answer = read_all(sock)
        assert status_of(answer) == 431 and error_of(answer), answer[:200]
    many = b"".join(b"x%d: y\r\n" % i for i in range(95))
    assert status_of(hasty.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + many + b"\r\n")) == 200
    right(hasty, text)


def test_slow_heads_and_slow_bodies_are_ended_in_time(hasty: Live, text: str):
    """Bytes that drip in do not prolong the time."""
    request = asked(GREEDY)
    for whole, least in ((b"", 3.0), (request[:40], 3.0), (request[:-5], 3.5)):
        began = time.monotonic()
        with connected(hasty) as sock:
            sock.sendall(whole)
            sock.settimeout(0.1)
            while True:
                with contextlib.suppress(TimeoutError):
                    answer = sock.recv(4096)
                    break
                if 0 < len(whole) < 100:
                    send_all(sock, b"X")
            assert least - 0.1 < time.monotonic() - began < least + 30
            sock.settimeout(LIMIT)
            answer += read_all(sock)
            assert status_of(answer) == 408 and error_of(answer)
    right(hasty, text)


def test_a_connection_that_is_kept_alive_is_closed_after_a_time(hasty: Live, text: str):
    began = time.monotonic()
    with connected(hasty) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status_of(read_all(sock)) == 200 and 3.0 < time.monotonic() - began < 33
    right(hasty, text)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_100_mb_is_refused_without_being_kept(live: Live, text: str, chunked: bool):
    size, before = 100 << 20, memory()
    start = head(size) if not chunked else head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    piece = b"x" * (1 << 20)
    if chunked:
        piece = b"%x\r\n%b\r\n" % (len(piece), piece)
    with connected(live) as sock:
        sock.sendall(start)
        for _ in range(100):
            if not send_all(sock, piece):
                break
        if chunked:
            send_all(sock, b"0\r\n\r\n")
        answer = read_one(sock)
        assert status_of(answer) == 413 and error_of(answer)
        sock.sendall(asked(GREEDY))  # the connection goes on
        assert status_of(read_one(sock)) == 200
    assert memory() - before < 64 << 20
    right(live, text)


def memory() -> int:
    """The bytes of memory that this process uses."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def test_bodies_that_come_in_at_the_same_time_are_bounded_together(live: Live, text: str):
    limits = Limits(held_bytes=1 << 20, body_seconds=60.0)
    with Live(live.model, Settings(shutdown_seconds=1.0, limits=limits)) as small, contextlib.ExitStack() as opened:
        socks = [opened.enter_context(connected(small)) for _ in range(4)]
        for sock in socks:
            sock.sendall(head(2 << 20) + b"[" + b" " * (400 << 10))
        eventually(lambda: len(select.select(socks, [], [], 0)[0]) == 2)  # which are refused, and the others hold what they sent
        answer = small.post(PATH, b" " * (700 << 10) + b"{}")
        assert answer.status == 503 and answer.headers["retry-after"] == "1"
        opened.close()
        eventually(lambda: not small.server.num_running)
        right(small, text)


# Requests that are odd, but right


def test_a_request_in_small_pieces_is_answered(live: Live, text: str):
    request = asked(GREEDY, "Connection: close\r\n")
    with connected(live) as sock:
        for at in range(0, len(request), 7):
            sock.sendall(request[at : at + 7])
            time.sleep(0.0005)
        assert text in json.loads(read_all(sock).partition(b"\r\n\r\n")[2])["choices"][0]["text"]


def test_expect_100_continue(live: Live, text: str):
    body = json.dumps(GREEDY).encode()
    with connected(live) as sock:
        sock.sendall(head(body, more="Expect: 100-continue\r\nConnection: close\r\n"))
        assert sock.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert json.loads(read_all(sock).partition(b"\r\n\r\n")[2])["choices"][0]["text"] == text
    with connected(live) as sock:  # what would be refused is not asked for
        sock.sendall(head(100 << 20, more="Expect: 100-continue\r\n"))
        assert status_of(sock.recv(1 << 16)) == 413


def test_http_1_0_and_head_and_options(live: Live):
    answer = live.raw(b"GET /health HTTP/1.0\r\n\r\n")
    assert status_of(answer) == 200 and answer.endswith(b'{"status":"ok"}') and b"connection: close" in answer
    stream = live.raw(asked(GREEDY | {"stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert status_of(stream) == 200 and b"[DONE]" in stream
    answer = live.raw(b"HEAD /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert status_of(answer) == 200 and answer.endswith(b"\r\n\r\n") and b"content-length: 15" in answer
    for method, path, status in (("HEAD", PATH, 405), ("OPTIONS", PATH, 405), ("DELETE", "/v1/models", 405), ("OPTIONS", "/none", 404)):
        assert live.call(method, path).status == status
    assert status_of(live.raw(b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")) in (400, 404)


def test_paths(live: Live, text: str):
    absolute = b"GET http://localhost/v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert status_of(live.raw(absolute)) == 200
    assert live.get("/v1/%6dodels").status == 200
    odd = ("/v1/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/%00", "/%ff%fe", "//health", "/v1/models/%2e%2e%2fx", "/" + "a/" * 20_000)
    for path in odd:
        answer = live.get(path)
        assert answer.status == 404 and set(answer.json()["error"]) == {"message", "type", "param", "code"}, path
    right(live, text)


@pytest.mark.parametrize("upgrade", ["websocket", "h2c"])
def test_an_upgrade_is_not_taken(live: Live, text: str, upgrade: str):
    more = f"Upgrade: {upgrade}\r\nConnection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    answer = live.raw(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + more.encode() + b"\x81\x05hello" * 10_000)
    assert status_of(answer) == 200 and b"connection: close" in answer
    right(live, text)


def test_what_is_sent_ahead_is_not_answered(live: Live, text: str):
    """The first request is answered and the connection closed, as HTTP allows; the client asks again for the others."""
    get = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = live.raw(asked(GREEDY) + get * 1000)
    assert answer.count(b"HTTP/1.1 ") == 1 and b"connection: close" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == text
    so_far = live.engine.metrics.generation_tokens
    with connected(live) as sock:
        sock.sendall(asked(LONG))
        eventually(lambda: live.engine.state.running)
        sock.sendall(asked(GREEDY) + b"x" * 1_000_000)
    eventually(lambda: not live.engine.state.running)
    assert live.engine.metrics.generation_tokens - so_far < 1500  # the end is noticed behind the bytes
    right(live, text)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("[" * 1_000_000, 400),
        ('{"prompt":' * 500_000, 400),
        ('{"prompt":[' + "[]," * 2_000_000 + "[]]}", 400),
        ('{"prompt":"x","seed":' + "9" * 10_000 + "}", 400),
        ('{"prompt":"x","n":' + "9" * 4_000 + "}", 400),
        ('{"prompt":"x","temperature":' + "9" * 5_000 + "}", 400),
        ('{"prompt":"x","temperature":1e999}', 400),
        ('{"prompt":[' + "9" * 4_000 + "]}", 400),
        ('{"prompt":["x",' + "9" * 4_000 + "]}", 400),
        ('{"prompt":"x","priority":' + "9" * 4_000 + "}", 400),
        ('{"prompt":"x","logit_bias":{"' + "9" * 5_000 + '":1}}', 400),
        ('{"prompt":"x","max_tokens":' + "9" * 4_000 + "}", 400),
        ('{"prompt":"x","temperature":NaN}', 400),
        ('{"prompt":"x","temperature":-Infinity}', 400),
        ('{"prompt":"\\ud83d"}', 400),
        ('{"prompt":"x","stop":"\\udc00"}', 400),
        ('{"prompt":"x","model":"\\ud800"}', 400),
        ('{"prompt":"x","prompt":"Once upon a time","max_tokens":1,"max_tokens":8,"temperature":0}', 200),
        ('{"prompt":"x","n":1000000}', 400),
        (json.dumps({"prompt": ["x"] * 5000}), 400),
        (json.dumps({"prompt": ["x"] * 2000, "n": 2}), 400),
        (json.dumps({"prompt": "x", "stop": ["y"] * 100_000}), 400),
        (json.dumps({"prompt": "x", "stop_token_ids": [0] * 100_000 + [-1]}), 400),
        (json.dumps({"prompt": ["x"] * 100, "max_tokens": 1, "logit_bias": {str(i): 1 for i in range(MOST_TOKENS + 1)}}), 400),
        (json.dumps({"prompt": "x", "user": "a\r\nb", "model": "x\r\nset-cookie: y"}), 404),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bomb_of_json_is_refused_at_once(live: Live, text: str, body: str, status: int):
    began = time.monotonic()
    answer = live.post(PATH, body.encode())
    assert answer.status == status, answer.body[:300]
    assert time.monotonic() - began < 30.0
    if status == 200:
        assert answer.json()["choices"][0]["text"] == text
    else:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"} and len(answer.body) < 2000
    right(live, text)


def test_many_long_prompts_do_not_stop_the_front_end(live: Live, text: str):
    """Texts are encoded outside the event loop, which answers others meanwhile."""
    prompts = ["once upon a time " * 230] * 400 + ["word " * 5000]  # the last one has too many tokens
    body = json.dumps(GREEDY | {"prompt": prompts, "max_tokens": 1}).encode()
    with connected(live) as sock:
        sock.sendall(head(body) + body)
        count = 0
        while not select.select([sock], [], [], 0)[0]:
            assert live.get("/health").status == 200
            count += 1
        answer = read_one(sock)
        assert status_of(answer) == 400 and b"prompt[400]" in answer
    assert count >= 10
    right(live, text)


# Clients that go, or do not read


@pytest.mark.parametrize("leave", ["close", "reset", "half-close"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_a_client_is_noticed(live: Live, text: str, leave: str, stream: bool):
    for phase in ("body", "queued", "running"):
        others, so_far = [], live.engine.metrics.generation_tokens
        sock = connected(live)
        data = asked(LONG | {"stream": stream, "prompt": ["x"] * (20 if phase == "queued" else 1)})
        sock.sendall(data if phase != "body" else data[:-3])
        if phase == "body":
            eventually(lambda: live.server.num_running)
        elif phase == "queued":
            eventually(lambda: live.engine.state.running and live.engine.state.waiting)
        else:
            eventually(lambda: live.engine.state.running)
        if leave == "reset":
            reset(sock)
        elif leave == "half-close":
            sock.shutdown(socket.SHUT_WR)
            others.append(sock)
        else:
            sock.close()
        quick = 20.0 if phase == "body" else LIMIT  # less than a body may take
        eventually(lambda: not live.engine.state.running and not live.engine.state.waiting and not live.server.num_running, quick)
        rows = live.engine.state.config.max_num_seqs if phase == "queued" else 1
        assert live.engine.metrics.generation_tokens - so_far < 1500 * rows  # none runs to its end
        for other in others:
            other.close()
    right(live, text)


def drop_at_random(live: Live, count: int, at_once: int, seed: int = 0) -> None:
    """Clients that begin some request, and go at some time in some way; some stay to the end."""
    rng = random.Random(seed)
    requests = [
        lambda: asked(GREEDY | {"stream": rng.random() < 0.5}),
        lambda: asked(LONG | {"stream": rng.random() < 0.5, "n": rng.choice((1, 1, 1, 12))}),
        lambda: asked(GREEDY)[: rng.randrange(250)],
        lambda: asked(GREEDY | {"temperature": -1}),
        lambda: b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" * rng.choice((1, 3)),
        lambda: rng.randbytes(rng.randrange(200)),
    ]
    open_now: list[socket.socket] = []
    for number in range(count):
        sock = connected(live)
        send_all(sock, rng.choice(requests)())
        open_now.append(sock)
        while len(open_now) >= at_once or (number == count - 1 and open_now):
            one = open_now.pop(rng.randrange(len(open_now)))
            if rng.random() < 0.5:
                one.settimeout(0.02)
                with contextlib.suppress(OSError):
                    one.recv(rng.choice((1, 100, 1 << 16)))
            if rng.random() < 0.5:
                reset(one)
            else:
                if rng.random() < 0.3:
                    with contextlib.suppress(OSError):
                        one.shutdown(socket.SHUT_WR)
                one.close()


def test_clients_that_go_at_any_time_leave_nothing(live: Live, text: str):
    drop_at_random(live, 250, 24)
    right(live, text)


@pytest.mark.long
def test_a_thousand_clients_that_go_leave_nothing_and_no_memory(live: Live, text: str):
    drop_at_random(live, 1000, 60, 1)
    before = memory()
    for round_ in range(4):
        drop_at_random(live, 1000, 60, 2 + round_)
        right(live, text)
    assert memory() - before < 32 << 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_reads_nothing_is_dropped(live: Live, text: str, stream: bool):
    """The long name of the model fills the sockets' buffers."""
    settings = Settings(model_name="long" * (500 if stream else 3_000_000), limits=Limits(stall_seconds=4.0, keep_alive_seconds=4.0))
    with Live(live.model, settings) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(LIMIT)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(asked(GREEDY | ({"stream": True, "prompt": ["x"] * 40, "max_tokens": 100, "ignore_eos": True} if stream else {})))
        connections = server.front._uvicorn.server_state.connections
        eventually(lambda: any(one.transport.get_write_buffer_size() for one in [*connections]))
        began = time.monotonic()
        eventually(lambda: not connections)
        assert 0.5 < time.monotonic() - began < 60.0
        server.wait_until_idle()
        with pytest.raises(ConnectionResetError):  # the kernel's buffer is given up, too
            while sock.recv(1 << 16):
                pass
        assert server.post(PATH, GREEDY).json()["choices"][0]["text"] == text


def test_a_silent_stream_gets_comments(live: Live):
    settings = Settings(shutdown_seconds=1.0, limits=Limits(ping_seconds=0.2))
    with Live(live.model, settings, max_num_seqs=1) as server, connected(server) as first, connected(server) as second:
        first.sendall(asked(LONG | {"stream": True}))
        eventually(lambda: server.engine.state.running)
        second.sendall(asked(GREEDY | {"stream": True}, "Connection: close\r\n"))
        data = b""
        while b": ping\n\n" not in data:
            part = second.recv(1 << 16)
            assert part, data
            data += part
        first.close()
        assert b"[DONE]" in data + read_all(second)


def test_more_connections_than_are_served_are_told_so(live: Live, text: str):
    with Live(live.model, Settings(shutdown_seconds=1.0, limits=Limits(connections=5))) as server, contextlib.ExitStack() as opened:
        connections = server.front._uvicorn.server_state.connections
        eventually(lambda: not connections)
        socks = [opened.enter_context(connected(server)) for _ in range(5)]
        eventually(lambda: len(connections) == 5)
        with connected(server) as more:
            assert status_of(read_all(more)) == 503
        socks[0].sendall(asked(GREEDY, "Connection: close\r\n"))
        assert json.loads(read_all(socks[0]).partition(b"\r\n\r\n")[2])["choices"][0]["text"] == text


def test_the_answer_has_an_id_and_tells_nothing_of_the_server(live: Live):
    answer = live.get("/v1/models", x_request_id="mine 1")
    assert answer.headers["x-request-id"] == "mine 1" and "server" not in answer.headers
    for odd in ("x" * 129, "\x85", ""):
        given = live.call("GET", "/v1/models", headers={"x-request-id": odd}).headers["x-request-id"]
        assert given != odd and len(given) == 32


@pytest.mark.parametrize("twice", [False, True])
def test_a_server_that_ends_tells_those_whom_it_does_not_wait_for(live: Live, twice: bool):
    """A second call ends it at once."""
    with Live(live.model, Settings(shutdown_seconds=900.0 if twice else 1.5)) as server, connected(server) as sock:
        sock.sendall(asked(LONG | {"stream": True, "n": 8}))
        eventually(lambda: server.engine.state.running)
        began = time.monotonic()
        server.loop.call_soon_threadsafe(server.front.stop)
        eventually(lambda: server.get("/health").status == 503)
        answer = server.post(PATH, GREEDY)
        assert answer.status == 503 and answer.headers["connection"] == "close" and answer.json()["error"]["code"] == "shutting_down"
        if twice:
            server.loop.call_soon_threadsafe(server.front.stop)
        data = read_all(sock)
        assert b"the server has shut down" in data and b"[DONE]" in data
        server.front_thread.join(LIMIT)
        assert time.monotonic() - began < LIMIT
        server.wait_until_idle()
