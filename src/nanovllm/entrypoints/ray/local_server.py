"""The package's server inside of another process: its routes without sockets for clients, and its engine in a thread."""

import asyncio
import logging
import socket
import tempfile
import threading
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanovllm.engine.disk_flush import flush_kv
from nanovllm.entrypoints.cli.serve import kv_folder, make_kv_dir
from nanovllm.entrypoints.server.app import App
from nanovllm.entrypoints.server.engine_loop import EngineLoop
from nanovllm.entrypoints.server.engine_process import load_llm
from nanovllm.entrypoints.server.exchange import Scope
from nanovllm.entrypoints.server.front_model import load_front
from nanovllm.entrypoints.server.named_chunks import chunk_limits
from nanovllm.entrypoints.server.routes import ROUTES
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.errors import EngineDeadError
from nanovllm.files import as_path
from nanovllm.sampling.compiled_grammar import prepare_grammars

log = logging.getLogger("nanovllm.server")
TICK_SECONDS = 1.0
MOST_UNREAD = 64  # messages that wait for a reader of an answer, who then gets them as one piece
Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A request that has come in whole.

    Attributes:
        method: Such as `"POST"`.
        path: Without the query.
        query: What follows the question mark.
        headers: Names in lower case, with their values.
        body: The bytes of the body.
    """

    method: str
    path: str
    query: bytes = b""
    headers: Headers = ()
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The beginning of an answer.

    Attributes:
        status: The HTTP status.
        headers: Names in lower case, with their values.
        replica: The name of the replica that answers; "" if there are none.
    """

    status: int
    headers: Headers
    replica: str = ""

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream of events."""
        return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in self.headers)


class LocalServer:
    """A server of one engine, for one event loop.

    Examples:
        >>> import asyncio
        >>> server = LocalServer("tiny", Settings(), {"device": "cpu", "num_pages": 64})
        >>> async def main():
        ...     request = HttpRequest(method="GET", path="/health", headers=((b"host", b"localhost"),))
        ...     return [piece async for piece in server.answer(request)]
        >>> head, body = asyncio.run(main())
        >>> head.status, body
        (200, b'{"status":"ok"}')
        >>> server.close()
    """

    def __init__(self, model: str, settings: Settings, options: dict[str, Any]) -> None:
        """Load a model and start its engine. This blocks; no event loop is needed.

        Args:
            model: As in `LLM`.
            settings: What the operator of a server chooses. Addresses, chunk files, TLS and the chat page are not in use.
            options: The options of `LLM`.

        Raises:
            NanoVLLMError: As `LLM`, or a format of `settings` is unknown.
        """
        if options.get("kv_dir") is not None:
            folder = as_path(options["kv_dir"])
            if options.get("host_kv_gib") and settings.api_keys:  # otherwise `LLM` makes this folder itself, or refuses the options
                make_kv_dir(folder)
            options = {**options, "kv_dir": kv_folder(folder, settings.api_keys)}
        llm = load_llm(model, options, settings.tool_parser, settings.reasoning_parser)
        self._server = load_front(settings, model, options)
        prepare_grammars(llm.model.tokenizer, llm.model.config.vocab_size, llm.model.config.eos_token_ids)
        self._app = App(self._server, ROUTES)
        self._folder = tempfile.TemporaryDirectory(prefix="nanovllm-", ignore_cleanup_errors=True)
        self._path = Path(self._folder.name) / "engine"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self._path))
            listener.listen()
            limits: Any = {"max_waiting": settings.max_waiting, "max_waiting_tokens": settings.max_waiting_tokens}
            self._loop = EngineLoop(llm.model, llm.state, listener.dup(), **limits, chunk_limits=chunk_limits(settings))
        self._thread = threading.Thread(target=self._run, args=(llm.model.device,), name="nanovllm engine", daemon=True)
        self._thread.start()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def alive(self) -> bool:
        """Whether the engine runs."""
        return self._thread.is_alive()

    def require_alive(self) -> None:
        """Require that the engine runs.

        Raises:
            EngineDeadError: It has failed or was closed.
        """
        if not self.alive:
            raise EngineDeadError("the engine of this replica has failed or was closed: start the replica again")

    async def answer(self, request: HttpRequest) -> AsyncGenerator[Head | bytes, None]:
        """Answer a request as the server does. Closing the iterator is what a client does that goes away.

        Args:
            request: The request. It needs a header `host`, as HTTP does.

        Yields:
            The head, and then the bytes of the body as they come.
        """
        await self._connected()
        pieces: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(MOST_UNREAD)
        incoming, over = [{"type": "http.request", "body": request.body, "more_body": False}], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop()
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await pieces.put(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                over.set()

        async def run() -> None:
            try:
                await self._app(_scope(request), receive, send)
            finally:
                await pieces.put(None)

        task = asyncio.create_task(run())
        try:
            ended = False
            while not ended:
                messages = [await pieces.get()]
                while not pieces.empty():
                    messages.append(pieces.get_nowait())
                ended = messages[-1] is None
                for message in messages:
                    if message is not None and message["type"] == "http.response.start":
                        yield Head(status=message["status"], headers=tuple(message["headers"]))
                if data := b"".join(message.get("body", b"") for message in messages if message is not None):
                    yield data
        finally:
            over.set()
            task.cancel()

    def close(self) -> None:
        """End the engine after its step. Requests that run end with an error."""
        for task in self._tasks:
            with suppress(RuntimeError):  # its event loop is closed
                task.cancel()
        self._loop.stop()
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waking:
            waking.connect(str(self._path))
        self._thread.join()
        self._folder.cleanup()

    def _run(self, device: torch.device) -> None:
        if device.type == "cuda":  # a thread begins with the first GPU
            torch.cuda.set_device(device)
        try:
            self._loop.run()
            flush_kv(self._loop.state)
        except Exception:  # all who wait were told
            log.exception("the engine has failed")

    async def _connected(self) -> None:
        """Connect this event loop to the engine, once."""
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._keep_connected()),
                asyncio.create_task(self._tick()),
            ]
        if self.alive and self._server.engine.hello is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._server.engine.greeted.wait(), TICK_SECONDS)

    async def _keep_connected(self) -> None:
        """Be connected to the engine until the event loop ends."""
        try:
            await self._server.engine.keep_connected(self._path)
        finally:
            self._server.engine.close()

    async def _tick(self) -> None:
        """Keep silent streams open."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = asyncio.get_running_loop().time()
            for stream in [*self._server.streams]:
                stream.tick(now)


def _scope(request: HttpRequest) -> Scope:
    """The request as ASGI has it."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "path": request.path,
        "raw_path": request.path.encode(),
        "root_path": "",
        "query_string": request.query,
        "headers": [*request.headers],
        "client": None,
        "server": None,
        "scheme": "http",
    }
