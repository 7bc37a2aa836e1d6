"""A live server for tests: an engine and a front end in threads of this process, with a real socket for clients and one between them."""

import asyncio
import contextlib
import http.client
import json
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import uvloop

import nanovllm as nv
from nanovllm.entrypoints.server.app import Server
from nanovllm.entrypoints.server.engine_client import EngineClient
from nanovllm.entrypoints.server.engine_loop import EngineLoop
from nanovllm.entrypoints.server.front import FrontEnd
from nanovllm.entrypoints.server.front_model import load_front
from nanovllm.entrypoints.server.named_chunks import chunk_limits
from nanovllm.entrypoints.server.serving_tokenizer import ReplyFormats
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.entrypoints.server.supervisor import bound
from nanovllm.errors import EngineDeadError
from nanovllm.sampling.params import from_generation_config

LIMIT = 120.0  # seconds that any answer may take on a busy machine


@dataclass(frozen=True)
class Answer:
    """An answer: its status, its headers with names in lower case, and its body."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class Live:
    """A server for the packaged model, or another, as a context.

    Attributes:
        port: The port.
        engine: The engine's loop.
        server: What the front end's functions share. It belongs to the front end's thread.
        clients: Clients that are closed with the server.
    """

    def __init__(
        self, model: nv.Model | None = None, settings: Settings | None = None, *, limits: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.packaged = model is None
        self.model = nv.load_model("tiny", device="cpu") if model is None else model
        self.settings = replace(settings or Settings(shutdown_seconds=1.0), port=0)
        self.options = {"num_pages": 256, "max_num_seqs": 8, **options}
        self.limits = {
            "max_waiting": self.settings.max_waiting,
            "max_waiting_tokens": self.settings.max_waiting_tokens,
            "chunk_limits": chunk_limits(self.settings),
            **(limits or {}),
        }

    def __enter__(self) -> "Live":
        self.clients = contextlib.ExitStack()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "engine"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.path))
        self.listener.listen()
        self.sock = bound(self.settings)
        self.port = self.sock.getsockname()[1]
        self.server = load_front(self.settings, "tiny", {}) if self.packaged else front_of(self.model, self.settings)
        self.model = replace(self.model, tokenizer=self.server.tokenizer)
        self.start_engine()
        self.loop = uvloop.new_event_loop()
        self.front = FrontEnd(self.server, self.sock, self.path)
        self.front_thread = threading.Thread(target=self._front, daemon=True)
        self.front_thread.start()
        self.wait_until_healthy()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.clients.close()
        if self.front_thread.is_alive():
            self.loop.call_soon_threadsafe(self.front.stop)
        self.front_thread.join(LIMIT)
        self.stop_engine()
        self.listener.close()
        self.folder.cleanup()

    def _front(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self.front.run())
        self.loop.close()

    def start_engine(self, *, again: bool = False) -> None:
        """Start an engine, in place of one that was stopped, `again` with its chunks that have files."""
        state = nv.init_state(self.model, **self.options)
        self.engine = EngineLoop(self.model, state, self.listener.dup(), **self.limits)
        self.engine.load_chunks(again=again)
        self.engine_thread = threading.Thread(target=self._engine, daemon=True)
        self.engine_thread.start()

    def _engine(self) -> None:
        with contextlib.suppress(EngineDeadError):
            self.engine.run()

    def stop_engine(self) -> None:
        """End the engine in the middle of whatever it does, as a death of its process would."""
        self.engine.stop()
        if self.engine_thread.is_alive():
            with socket.socket(socket.AF_UNIX) as waking:
                waking.connect(str(self.path))
                self.engine_thread.join(LIMIT)

    def wait_until_healthy(self) -> None:
        """Wait until requests are taken."""
        end = time.monotonic() + LIMIT
        while self.get("/health").status != 200:
            assert time.monotonic() < end, "the server did not become healthy"
            time.sleep(0.01)

    def wait_until_running(self) -> None:
        """Wait until the engine runs a request. The wait sleeps, because the engine is a thread of this process."""
        end = time.monotonic() + LIMIT
        while not self.engine.state.running:
            assert time.monotonic() < end, "the engine runs nothing"
            time.sleep(0.001)

    def wait_until_generated(self, count: int) -> None:
        """Wait until the engine has made so many tokens in all: it may be idle again before anybody looks."""
        end = time.monotonic() + LIMIT
        while self.engine.metrics.generation_tokens < count:
            assert time.monotonic() < end, f"the engine has made {self.engine.metrics.generation_tokens} of {count} tokens"
            time.sleep(0.005)

    def wait_until_idle(self) -> None:
        """Wait until the engine runs nothing, and check its pages."""
        end = time.monotonic() + LIMIT
        while self.engine.state.running or self.engine.state.waiting:
            assert time.monotonic() < end, "the engine still runs requests"
            time.sleep(0.005)
        time.sleep(0.02)
        nv.check(self.engine.state)

    # Clients

    def connect(self) -> http.client.HTTPConnection:
        """A connection of its own."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """Send one request. A body that is no bytes is sent as JSON."""
        connection = self.connect()
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            given = {"content-type": "application/json"} if data is not None else {}
            connection.request(method, path, data, given | (headers or {}))
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        """Send a GET."""
        return self.call("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        """Send a POST."""
        return self.call("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})

    def events(self, path: str, body: Any) -> list[Any]:
        """Send a POST and read its stream to the end: the events as JSON, without the last one, `[DONE]`."""
        answer = self.post(path, body)
        assert answer.status == 200, answer
        found = list(parsed(answer.body))
        assert found.pop() == "[DONE]"
        return found

    def raw(self, data: bytes, seconds: float = LIMIT) -> bytes:
        """Send bytes and read until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as sock:
            sock.sendall(data)
            parts = []
            while part := sock.recv(1 << 16):
                parts.append(part)
            return b"".join(parts)


def front_of(model: nv.Model, settings: Settings) -> Server:
    """What the functions of a front end share, for a model in memory."""
    assert model.tokenizer is not None
    formats = ReplyFormats.of(model.tokenizer, settings.tool_parser, settings.reasoning_parser)
    generation = from_generation_config(model.generation_config)
    return Server(settings, EngineClient(), formats.shown(model.tokenizer), generation, formats)


def parsed(body: bytes) -> Iterator[Any]:
    """The events of a stream, as JSON or, the last one, as text. Comments are left out."""
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        lines = [line for line in block.split("\n") if not line.startswith((":", "event: "))]
        if lines:
            assert len(lines) == 1 and lines[0].startswith("data: "), block
            data = lines[0].removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)
