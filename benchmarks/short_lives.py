"""Servers that live in a process of their own for a moment, and that can be killed at any call by which they change files.

A life is a process that was forked from one which has loaded the model and has run nothing. It has an engine and a front end in threads of
its own, and asks them over HTTP, as clients do. What it tells comes out of a pipe, also if it is killed.
"""

import asyncio
import contextlib
import errno
import http.client
import io
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

import nanovllm as nv
from nanovllm.engine import host_memory
from nanovllm.engine.disk_flush import flush_kv
from nanovllm.entrypoints.server.app import Server
from nanovllm.entrypoints.server.engine_client import EngineClient
from nanovllm.entrypoints.server.engine_loop import EngineLoop
from nanovllm.entrypoints.server.front import FrontEnd
from nanovllm.entrypoints.server.named_chunks import chunk_limits
from nanovllm.entrypoints.server.serving_tokenizer import ReplyFormats
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.entrypoints.server.supervisor import bound
from nanovllm.sampling.params import from_generation_config

LIMIT = 60.0  # seconds after which a life counts as hung
PAGE = 8  # tokens of a page
ENGINE: dict[str, Any] = {"num_pages": 96, "page_size": PAGE, "max_num_seqs": 4, "max_model_len": 256, "host_kv_gib": 0.01}
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.utime", "os.link", "os.rmdir", "os.truncate")  # audit events, besides "open"
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_WRITE = os.write

Tell = Callable[[Any], None]


class RefusedError(Exception):
    """The server has refused to start, with a typed error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a life ended.

    Attributes:
        told: What it has told, in order.
        code: Its exit code, or the negative number of the signal that ended it.
        errors: What was on stderr.
        killed: Whether it was killed on purpose.
    """

    told: list[Any]
    code: int
    errors: str
    killed: bool


def lived(act: Callable[[Tell], None], kill_after: float | None = None) -> Ended:
    """Run a function in a process of its own.

    Args:
        act: The function. It is given one that tells JSON values to this process.
        kill_after: So many seconds after it has told something for the first time, the process is killed.
    """
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as errors:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.dup2(errors.fileno(), 2)
                sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0, closefd=False), write_through=True)
                act(lambda value: (_WRITE(writing, json.dumps(value).encode() + b"\n"), None)[1])
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writing)
        said, end = b"", time.monotonic() + LIMIT
        with os.fdopen(reading, "rb", 0) as pipe:
            while select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0] and (data := pipe.read(1 << 16)):
                if not said and kill_after is not None:
                    end = time.monotonic() + kill_after
                said += data
        is_late = time.monotonic() >= end
        if is_late:
            os.kill(pid, signal.SIGKILL)  # it is not waited for yet, so the id is its own
        status = os.waitpid(pid, 0)[1]
        errors.seek(0)
        code, lines = os.waitstatus_to_exitcode(status), said.split(b"\n")
        killed = code == -signal.SIGKILL and (kill_after is not None or not is_late)
        return Ended(told=[*map(json.loads, lines[:-1])], code=code, errors=errors.read().decode(errors="replace"), killed=killed)


class Client:
    """Calls of the server of this process.

    Attributes:
        loop: The engine's loop.
    """

    def __init__(self, port: int, loop: EngineLoop) -> None:
        self._port, self.loop = port, loop

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """The status and the body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LIMIT)
        with contextlib.closing(connection):
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null")

    def reply(self, prompt: list[int], length: int, *chunks: str) -> tuple[list[int] | None, str | None]:
        """The tokens of a greedy reply; or None and the code of the error."""
        body = {"model": "model", "prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        status, said = self.call("POST", "/v1/completions", body | ({"chunks": list(chunks)} if chunks else {}))
        return (said["choices"][0]["token_ids"], None) if status == 200 else (None, said["error"]["code"])


@contextlib.contextmanager
def serving(model: nv.Model, folder: Path, kv_dir_gib: float, *, ends: bool = True) -> Iterator[Client]:
    """Serve in threads of this process, with pages and named chunks in a folder.

    If it `ends` orderly, it writes what is not on the disk. Otherwise its threads go on until the process ends. Pages on the disk are
    always read: how fast prompts run is not measured.

    Raises:
        RefusedError: The server does not start.
    """
    assert callable(host_memory.prompt_rates)  # an assignment alone would not see that it has another name by now
    host_memory.prompt_rates = lambda model, limits, executor, kv, *_: (1.0, math.inf, kv)
    chunks = folder / "chunks"
    chunks.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings = Settings(port=0, model_name="model", shutdown_seconds=1.0, chunk_dir=chunks, keep_chunks=True)
    assert model.tokenizer is not None
    formats = ReplyFormats.of(model.tokenizer, settings.tool_parser, settings.reasoning_parser)
    shown, generation = formats.shown(model.tokenizer), from_generation_config(model.generation_config)
    with tempfile.TemporaryDirectory() as made, contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        path = Path(made) / "engine"
        listener.bind(str(path))
        listener.listen()
        sock = bound(settings)
        try:
            state = nv.init_state(replace(model, tokenizer=shown), kv_dir=folder, kv_dir_gib=kv_dir_gib, **ENGINE)
        except nv.NanoVLLMError as error:
            raise RefusedError(f"{type(error).__name__}: {error}") from error
        loop = EngineLoop(replace(model, tokenizer=shown), state, listener.dup(), chunk_limits=chunk_limits(settings))
        loop.load_chunks(again=False)
        front, events = FrontEnd(Server(settings, EngineClient(), shown, generation, formats), sock, path), uvloop.new_event_loop()

        def serve() -> None:
            asyncio.set_event_loop(events)
            events.run_until_complete(front.run())

        threads = [threading.Thread(target=each, daemon=True) for each in (loop.run, serve)]
        for thread in threads:
            thread.start()
        client = Client(sock.getsockname()[1], loop)
        while client.call("GET", "/health")[0] != 200:
            time.sleep(0.002)
        yield client
        if not ends:
            return
        events.call_soon_threadsafe(front.stop)
        threads[1].join(LIMIT)
        loop.stop()
        with socket.socket(socket.AF_UNIX) as waking:
            waking.connect(str(path))
        threads[0].join(LIMIT)
        nv.check(loop.state)
        loop.save_chunks()
        flush_kv(loop.state)


class Points:
    """The calls by which this process changes files under a folder, counted; it kills itself at one of them.

    A write of several bytes counts twice: before it, and when half of the bytes have been written.

    Attributes:
        count: How many there were.

    Args:
        folder: The folder.
        last: The number of the call at which the process is killed. None: it is not killed.
    """

    def __init__(self, folder: Path, last: int | None) -> None:
        self.count, self._last, self._lock, self._root = 0, last, threading.Lock(), str(folder)
        sys.addaudithook(self._audit)
        pwrite, pwritev, write, fsync = os.pwrite, os.pwritev, os.write, os.fsync

        def half_pwrite(fd: int, data: Any, offset: int) -> int:
            self._at(lambda: None)
            self._at(lambda: pwrite(fd, memoryview(data)[: len(data) // 2], offset))
            return pwrite(fd, data, offset)

        def half_pwritev(fd: int, parts: Any, offset: int) -> int:
            whole = b"".join(parts)
            self._at(lambda: None)
            self._at(lambda: pwrite(fd, whole[: len(whole) // 2], offset))
            return pwritev(fd, parts, offset)

        def late_fsync(fd: int) -> None:
            self._at(lambda: None)
            fsync(fd)

        def half_write(fd: int, data: Any) -> int:
            self._at(lambda: None)
            self._at(lambda: write(fd, memoryview(data)[: len(data) // 2]))
            return write(fd, data)

        os.pwrite, os.pwritev, os.write, os.fsync = half_pwrite, half_pwritev, half_write, late_fsync

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self._root) and flags & WRITING:
                self._at(lambda: None)
        elif event in CHANGES and (isinstance(args[0], int) or os.fspath(args[0]).startswith(self._root)):
            self._at(lambda: None)

    def _at(self, part: Callable[[], Any]) -> None:
        """One such call: if it is the last one, a part of it is done, and the process is killed."""
        with self._lock:
            here, self.count = self.count, self.count + 1
        if here == self._last:
            part()
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(LIMIT)


class Full:
    """A full disk: writes of this process fail.

    Args:
        most: The size of a file beyond which the system refuses writes (`RLIMIT_FSIZE`, error `EFBIG`). None: no limit.
        free: The bytes by which `os.pwrite` and `os.pwritev` can still make files longer; then they raise `ENOSPC`. None: any number.
    """

    def __init__(self, most: int | None, free: int | None) -> None:
        if most is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        if free is None:
            return
        self._free, self._lock = free, threading.Lock()
        pwrite = os.pwrite

        def bounded(fd: int, data: Any, offset: int) -> int:
            return pwrite(fd, data[: self._take(fd, offset, len(data))], offset)

        def bounded_parts(fd: int, parts: Any, offset: int) -> int:
            return bounded(fd, b"".join(parts), offset)

        os.pwrite, os.pwritev = bounded, bounded_parts

    def _take(self, fd: int, offset: int, count: int) -> int:
        """How many of some bytes can be written. Those that replace others of a file need no space."""
        if offset + count <= os.fstat(fd).st_size:
            return count
        with self._lock:
            if not self._free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken = min(count, self._free)
            self._free -= taken
            return taken
