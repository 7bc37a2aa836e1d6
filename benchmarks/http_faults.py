"""Hurt a server of the packaged model in the ways of hostile clients and dying processes, and measure what it costs.

    python -m benchmarks.http_faults --output benchmarks/results/cpu-http-faults.json

For each fault: what its client is told and when, when a control request is answered rightly again, the memory that the engine and the front
end have gained since before it, and the pages that are neither free nor kept for prompts that come again. Memory is told where both
processes live on.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.http_bench import served
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.loading.load_model import load_model

CONTROL: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
RIGHT = ", a boy named Jonas lived in a"
LONG = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": True}
PATH, LIMIT = "/v1/completions", 60.0
PAGES = re.compile(r'^nanovllm_pages\{.*owner="(?:running|chunks)".*\} (\S+)$', re.M)
DEEP: dict[str, Any] = {"type": "object"}
for _ in range(300):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
BOMBS = (
    {"guided_regex": "(a{1000}){1000}"},
    {"guided_regex": "(a|a)*" * 2000},
    {"guided_json": DEEP},
    {"guided_json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}},
    {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
    {"guided_json": {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$" * 400}},
    {"guided_grammar": "start: a\na: a a | a\n" * 400},
    {"guided_choice": ["x" * 50] * 5000},
)


class Hurt:
    """A server that is hurt."""

    def __init__(self, url: str, pid: int) -> None:
        parts = urlsplit(url)
        self.address, self._parent = (parts.hostname or "", parts.port or 0), pid
        self.engine, self.front = sorted(self.children())

    def children(self) -> set[int]:
        """The engine and the front end."""
        return {*map(int, Path(f"/proc/{self._parent}/task/{self._parent}/children").read_text().split())}

    def ask(self, body: Any, path: str = PATH) -> tuple[int, bytes]:
        """The status and the body of an answer; status 0 if there is none."""
        connection = http.client.HTTPConnection(*self.address, timeout=LIMIT)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request("GET" if data is None else "POST", path, data, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def connect(self, data: bytes) -> socket.socket:
        """A connection on which some bytes are sent."""
        sock = socket.create_connection(self.address, timeout=LIMIT)
        sock.sendall(data)
        return sock

    def until_right(self) -> float:
        """Seconds until the control request is answered rightly."""
        started = time.perf_counter()
        while time.perf_counter() - started < LIMIT:
            status, body = self.ask(CONTROL)
            if status == 200 and json.loads(body)["choices"][0]["text"] == RIGHT:
                return time.perf_counter() - started
            time.sleep(0.01)
        raise RuntimeError("no right answer comes")

    def memory(self) -> int:
        """Bytes that the engine and the front end hold."""
        found = [re.search(r"^VmRSS:\s*(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M) for pid in self.children()]
        return sum(int(one[1]) << 10 for one in found if one is not None)

    def pages(self) -> float:
        """Pages that requests and chunks hold."""
        return sum(map(float, PAGES.findall(self.ask(None, "/metrics")[1].decode())))


def post(body: Any) -> bytes:
    """A request as bytes."""
    data = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        PATH.encode(),
        len(data),
        data,
    )


def killed(server: Hurt, pid: int) -> str:
    """kill -9 of the engine or of the front end while a stream runs."""
    with server.connect(post(LONG)) as sock:
        said = sock.recv(1 << 16)
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            while data := sock.recv(1 << 16):
                said = (said + data)[-4096:]
                if b"[DONE]" in said:
                    return "an error event, `engine_unavailable`" if b"engine_unavailable" in said else "wrong"
    return "the connection closes"


def dropped(server: Hurt) -> str:
    """1,000 connections that end at random times."""
    draw, streamed = random.Random(0), LONG | {"n": 2}
    bodies = (LONG, LONG | {"stream": False}, streamed, {"prompt": ["a story"] * 20, "echo": True, "logprobs": 3, "max_tokens": 0})
    opened = []
    for _ in range(1000):
        data = post(draw.choice(bodies))
        opened.append(server.connect(data[: draw.choice((len(data), draw.randrange(1, len(data))))]))
        if len(opened) > 40:
            opened.pop(draw.randrange(len(opened))).close()
    for sock in opened:
        sock.close()
    return "they have gone"


def slow_heads(server: Hurt) -> str:
    """1,000 heads that never end; a control request comes meanwhile."""
    opened = [server.connect(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-A: ") for _ in range(1000)]
    meanwhile = server.until_right()
    said = {sock.recv(1 << 12).split(b"\r\n", 1)[0].split()[1].decode() for sock in opened}
    for sock in opened:
        sock.close()
    return f"{', '.join(sorted(said))}; others are answered in {meanwhile:.2f} s meanwhile"


def statuses(server: Hurt, *bodies: Any) -> str:
    """The statuses of some requests, with how long the slowest took."""
    found, slowest = set[str](), 0.0
    for body in bodies:
        started = time.perf_counter()
        status, said = server.ask(body)
        slowest = max(slowest, time.perf_counter() - started)
        found.add(f"{status}" if not said.startswith(b'{"error"') else f"{status} `{json.loads(said)['error']['type']}`")
    return ", ".join(sorted(found)) + (f"; the slowest of {len(bodies)} after {slowest:.2f} s" if len(bodies) > 1 else "")


FAULTS: dict[str, Callable[[Hurt], str]] = {
    "1,000 connections that are dropped at random times": dropped,
    "1,000 heads that do not end": slow_heads,
    "a body of 100 MB": lambda server: statuses(server, b" " * 100_000_000),
    "JSON of 100,000 levels, a number of 100,000 digits": lambda server: statuses(server, b"[" * 100_000, b'{"n":' + b"9" * 100_000 + b"}"),
    "schemas and patterns that would take long": lambda server: statuses(server, *(CONTROL | bomb for bomb in BOMBS)),
    "`n` of a million": lambda server: statuses(server, CONTROL | {"n": 10**6}),
    "kill -9 of the front end in the middle of a stream": lambda server: killed(server, server.front),
    "kill -9 of the engine in the middle of a stream": lambda server: killed(server, server.engine),
}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", metavar="C", help="the commit that is recorded")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a file for the result, besides stdout")
    options = parser.parse_args()
    rows = []
    with served("tiny", ["--device", "cpu", "--num-pages", "512"]) as (url, pid):
        server = Hurt(url, pid)
        dropped(server)  # what a first burst takes for good
        for fault, hurt in FAULTS.items():
            server.until_right()
            before, pids, started = server.memory(), server.children(), time.perf_counter()
            said = hurt(server)
            told, right = time.perf_counter() - started, server.until_right()
            time.sleep(1.0)
            grown = round((server.memory() - before) / 1e6, 1) if server.children() == pids else None  # a new process has other memory
            row = {"fault": fault, "told": said, "told_s": round(told, 2), "right_s": round(right, 2), "grown_mb": grown}
            rows.append(row | {"pages": int(server.pages())})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    command = " ".join(["python -m benchmarks.http_faults", *sys.argv[1:]])
    text = json.dumps(record(load_model("tiny", device="cpu"), {"rows": rows}, command, options.commit), indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
