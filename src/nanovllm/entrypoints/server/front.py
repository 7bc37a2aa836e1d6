"""A front end: uvicorn with the application, its connection to the engine, and an orderly end."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import uvicorn

from nanovllm.entrypoints.process import freeze
from nanovllm.entrypoints.server.app import App, Server
from nanovllm.entrypoints.server.http_protocol import BoundedProtocol
from nanovllm.entrypoints.server.page_files import PAGE_ROUTES
from nanovllm.entrypoints.server.routes import ROUTES
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.entrypoints.server.starting import READY
from nanovllm.errors import EngineClosedError, EngineDeadError

TICK_SECONDS = 1.0
OTHER_FILES = 64
ENDED = EngineClosedError("the server has shut down")
POLL_SECONDS = 0.02  # while the last requests end


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers: a front end first lets its requests end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


class FrontEnd:
    """A front end of one event loop.

    Args:
        server: What its functions share.
        sock: A bound socket.
        engine_path: The engine's socket.
    """

    def __init__(self, server: Server, sock: socket.socket, engine_path: Path) -> None:
        self.server, self._sock, self._engine_path = server, sock, engine_path
        limits, (certificate, key) = server.settings.limits, server.settings.certificate or (None, None)
        config = uvicorn.Config(
            App(server, (*ROUTES, *(PAGE_ROUTES if server.settings.page else ()))),  # pyright: ignore[reportArgumentType]
            http=partial(BoundedProtocol, limits),  # pyright: ignore[reportArgumentType]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.CRITICAL,  # clients must not be able to fill a log
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=limits.keep_alive_seconds,  # pyright: ignore[reportArgumentType]
            timeout_graceful_shutdown=1,
            backlog=2048,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        self._uvicorn = _Uvicorn(config)
        self._draining: asyncio.Task[None] | None = None

    async def run(self, *, signals: bool = False) -> None:
        """Serve until `stop`; with `signals`, until SIGTERM or SIGINT, of which a second one ends at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT) if signals else ():
            loop.add_signal_handler(number, self.stop)
        tasks = [asyncio.create_task(self.server.engine.keep_connected(self._engine_path)), asyncio.create_task(self._tick())]
        try:
            await self._uvicorn.serve(sockets=[self._sock])
        finally:
            for task in tasks:
                task.cancel()
            self.server.engine.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        """End: at first after the requests that run, if it is called again at once."""
        if self._draining is not None:
            self.server.engine.give_up(ENDED)
            self._uvicorn.should_exit = self._uvicorn.force_exit = True
            return
        self.server.draining = True
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        """Let requests end, for a time, and then the server."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.server.settings.shutdown_seconds
        while self.server.num_running and loop.time() < end:
            await asyncio.sleep(POLL_SECONDS)
        self.server.engine.give_up(ENDED)
        self._uvicorn.should_exit = True

    async def _tick(self) -> None:
        """Look after the open streams and connections, and tell the engine what was answered."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = asyncio.get_running_loop().time()
            for stream in [*self.server.streams]:
                stream.tick(now)
            for connection in [*self._uvicorn.server_state.connections]:
                connection.tick(now)  # pyright: ignore[reportAttributeAccessIssue]
            if self.server.engine.alive and (counts := self.server.answers.take()):
                with contextlib.suppress(EngineDeadError):
                    await self.server.engine.ask("answered", http=counts)


async def serve(server: Server, sock: socket.socket, engine_path: Path, ready: int) -> None:
    """Serve until SIGTERM or SIGINT, as the only task of a process. The file descriptor `ready` is told `READY` when there is an engine."""
    freeze()
    log_to_stderr(server.settings)
    allow_connections(server.settings.limits.connections)
    telling = asyncio.create_task(_tell_ready(server, ready))
    await FrontEnd(server, sock, engine_path).run(signals=True)
    telling.cancel()


async def _tell_ready(server: Server, ready: int) -> None:
    await server.engine.greeted.wait()
    os.write(ready, READY)


def log_to_stderr(settings: Settings) -> None:
    """Print errors of the server and, if it was asked for, one line for each request."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    if settings.access_log:
        logging.getLogger("nanovllm.access").setLevel(logging.INFO)


def allow_connections(count: int) -> None:
    """Raise the limit of open files of this process as far as so many connections need, and the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
