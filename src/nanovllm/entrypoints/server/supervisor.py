"""The processes of a server: this one, which only starts and ends the others; the engine's; and one or more front ends.

They are forked from this process, which never starts a thread or touches a GPU, so that it can fork again when one of them dies.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nanovllm.entrypoints.server.settings import Settings

MOST_RESTARTS, RESTART_SECONDS = 5, 60.0  # an engine that fails more often in this time stays down
KILL_SECONDS = 5.0  # for a process to end after its time is over
BACKLOG = 2048
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Supervisor:
    """The processes of one server.

    Args:
        settings: The operator's choices.
        model: As in `LLM`.
        options: The options of `LLM`.
        workers: The number of front ends.
        restart: Whether an engine that fails is started again.
    """

    def __init__(self, settings: Settings, model: str, options: dict[str, Any], *, workers: int = 1, restart: bool = True) -> None:
        self.settings, self.model, self.options, self.workers, self.restart = settings, model, options, workers, restart
        self.engine, self.fronts = 0, set[int]()
        self._deaths: list[float] = []

    def run(self, say: Callable[[str], None]) -> int:
        """Serve until SIGTERM or SIGINT. Returns the exit code.

        Args:
            say: Prints one line for the operator.
        """
        watched = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, watched)
        with tempfile.TemporaryDirectory(prefix="nanovllm-") as folder, contextlib.ExitStack() as sockets:
            self.path = Path(folder) / "engine"
            self.listener = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self.listener.bind(str(self.path))
            self.listener.listen(256)
            self.http = sockets.enter_context(bound(self.settings))
            address = url(self.http)
            try:
                ready = self._start_engine()
                self.fronts |= {self._fork(self._front) for _ in range(self.workers)}
                while True:
                    told = read_ready(ready)
                    if told is None and signal.sigtimedwait(watched - {signal.SIGCHLD}, 0) is not None:
                        return self._stop()
                    if told is not None:
                        break
                if told:
                    print(f"nanovllm: error: {told}", file=sys.stderr, flush=True)
                    return 2
                say(f"nanovllm serves {self.settings.model_name} at {address}")
                while True:
                    if signal.sigwait(watched) != signal.SIGCHLD:
                        return self._stop()
                    self._reap(say)
            finally:
                self._kill()

    def _start_engine(self) -> int:
        """Start an engine. Returns a file descriptor at which it says that it is ready."""
        reading, writing = os.pipe()
        self.engine = self._fork(self._engine, writing)
        os.close(writing)
        return reading

    def _reap(self, say: Callable[[str], None]) -> None:
        """Look which processes have ended, and start them again."""
        for pid, code in ended():
            if pid == self.engine:
                self.engine = 0
                now = time.monotonic()
                self._deaths = [*(t for t in self._deaths if now - t < RESTART_SECONDS), now]
                if not self.restart or len(self._deaths) > MOST_RESTARTS:
                    say(f"the engine has ended (exit code {code}) and is not started again: /health answers 503")
                    continue
                say(f"the engine has ended (exit code {code}): it is started again")
                os.close(self._start_engine())
            elif pid in self.fronts:
                say(f"a front end has ended (exit code {code}): another is started")
                self.fronts = self.fronts - {pid} | {self._fork(self._front)}

    def _stop(self) -> int:
        """End the front ends, which let their requests end, and then the engine. A second signal ends them at once."""
        for pid in self.fronts:
            os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + self.settings.shutdown_seconds + KILL_SECONDS
        while self.fronts and (left := end - time.monotonic()) > 0:
            came = signal.sigtimedwait({signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}, left)
            if came is not None and came.si_signo != signal.SIGCHLD:
                for pid in self.fronts:
                    os.kill(pid, signal.SIGTERM)
            self.fronts -= {pid for pid, _ in ended()}
        if self.engine:
            os.kill(self.engine, signal.SIGTERM)
        return 0

    def _kill(self) -> None:
        """End what is left."""
        left = {*self.fronts, self.engine} - {0}
        end = time.monotonic() + KILL_SECONDS * bool(self.engine)
        while left and (seconds := end - time.monotonic()) > 0 and not self.fronts & left:
            left -= {pid for pid, _ in ended()}
            if left:
                signal.sigtimedwait({signal.SIGCHLD}, seconds)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _fork(self, function: Callable[..., int], *args: Any) -> int:
        """Start a process that runs a function. Returns its id."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        if pid := os.fork():
            return pid
        code = 1
        try:
            os.setpgid(0, 0)  # Ctrl-C goes to the supervisor alone
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            code = function(*args)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _engine(self, ready: int) -> int:
        from nanovllm.entrypoints.server.engine_process import run_engine
        from nanovllm.entrypoints.server.named_chunks import chunk_limits

        self.http.close()
        parsers = (self.settings.tool_parser, self.settings.reasoning_parser)
        limits = {
            "max_waiting": self.settings.max_waiting,
            "max_waiting_tokens": self.settings.max_waiting_tokens,
            "chunk_limits": chunk_limits(self.settings),
        }
        return run_engine(self.model, self.options, parsers, limits, self.listener, ready)

    def _front(self) -> int:
        import uvloop

        from nanovllm.entrypoints.server.front import serve
        from nanovllm.entrypoints.server.front_model import load_front

        self.listener.close()
        uvloop.run(serve(load_front(self.settings, self.model, self.options), self.http, self.path))
        return 0


def ended() -> Iterator[tuple[int, int]]:
    """The processes that have ended, with their exit codes."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def read_ready(ready: int) -> str | None:
    """What a starting engine says: "" if it is ready, an error if it has failed. None: nothing within a tenth of a second."""
    import select

    if not select.select([ready], [], [], 0.1)[0]:
        return None
    told = os.read(ready, 4096)
    os.close(ready)
    if not told:
        return "the engine's process has ended during its start"
    return told.rstrip(b"\0").decode(errors="replace")


def bound(settings: Settings) -> socket.socket:
    """The socket that clients connect to.

    Raises:
        OSError: The address cannot be used.
    """
    family, *_, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(BACKLOG)  # clients that come before the front ends wait
    except OSError:
        sock.close()
        raise
    return sock


def url(sock: socket.socket) -> str:
    """The address of a bound socket."""
    host, port, *_ = sock.getsockname()
    return f"http://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"http://{host}:{port}"
