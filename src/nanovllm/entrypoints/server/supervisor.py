"""The processes of a server: this one, which only starts and ends the others; the engine's; and one or more front ends.

They are forked from this process, which never starts a thread or touches a GPU, so that it can fork again when one of them dies.
"""

import contextlib
import ctypes
import os
import select
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
from nanovllm.entrypoints.server.starting import FAILED, READY, first_line, tell
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.operator_lines import say as warn

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
        self._awaited = 1 + workers  # processes that have not said that they are ready
        self._ready = self._telling = -1  # a pipe in which starting processes say that they are ready, or why they fail
        self._engine_deaths, self._front_deaths = Deaths(MOST_RESTARTS), Deaths(MOST_RESTARTS * workers)

    def run(self, say: Callable[[str], None], spelled: Callable[[str], str] = str) -> int:
        """Serve until SIGTERM, SIGINT or SIGHUP.

        Args:
            say: Prints one line for the operator.
            spelled: An error of the start, with options as the operator gave them.

        Returns:
            The exit code. 0: an orderly end. 1: a second signal came, or front ends failed again and again. 2: the start failed, and one
            line on stderr said why.

        Raises:
            InvalidRequestError: The address cannot be used.
        """
        ends = {signal.SIGTERM, signal.SIGINT} | ({signal.SIGHUP} if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else set())
        self._ends, watched = ends, ends | {signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, watched)
        with tempfile.TemporaryDirectory(prefix="nanovllm-", ignore_cleanup_errors=True) as folder, contextlib.ExitStack() as sockets:
            self.path = Path(folder) / "engine"
            self.listener = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._listen(folder)
            self.http = sockets.enter_context(bound(self.settings))
            self._ready, self._telling = os.pipe()
            for end in (self._ready, self._telling):
                os.set_blocking(end, False)
                sockets.callback(os.close, end)
            try:
                self.engine = self._fork(self._engine)
                self.fronts |= {self._fork(self._front) for _ in range(self.workers)}
                while (told := self._told()) is None:
                    if signal.sigtimedwait(ends, 0) is not None:
                        return self._stop()
                if told:
                    warn(f"error: {spelled(told)}")
                    return FAILED
                address = url(self.http, tls=self.settings.certificate is not None)
                say(f"nanovllm serves {self.settings.model_name} at {address}")
                if self.settings.page:
                    say(f"the chat page: {address}/")
                while True:
                    if signal.sigwait(watched) != signal.SIGCHLD:
                        return self._stop()
                    if not self._reap(say):
                        return self._stop() or 1
            finally:
                self._kill()

    def _listen(self, folder: str) -> None:
        try:
            self.listener.bind(str(self.path))
        except OSError as error:
            raise InvalidRequestError(f"a socket in {folder} cannot be used: {error}; TMPDIR can name another folder") from None
        self.listener.listen(256)

    def _told(self) -> str | None:
        """What starting processes say: "" if all are ready, an error if one has failed. None: neither within a tenth of a second."""
        select.select([self._ready], [], [], 0.1)
        gone = [*ended()]  # before the last words are read
        told = self._words()
        if error := first_line(told):
            return error
        for pid, code in gone:
            who = "the engine" if pid == self.engine else "a front end"
            self._forget(pid)
            return f"{who} has ended during its start (exit code {code})"
        self._awaited -= told.count(READY.decode())
        return None if self._awaited else ""

    def _words(self) -> str:
        """What was said in the pipe since the last call."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self._ready, 1 << 16).decode(errors="replace")
        return ""

    def _forget(self, pid: int) -> None:
        self.fronts.discard(pid)
        if pid == self.engine:
            self.engine = 0

    def _reap(self, say: Callable[[str], None]) -> bool:
        """Look which processes have ended, and start them again. Returns whether the server can go on."""
        for pid, code in ended():
            words = first_line(self._words())
            why = f"exit code {code}" + (f": {words}" if words else "")
            if pid == self.engine:
                self.engine = 0
                if self._engine_deaths.too_many() or not self.restart:
                    say(f"the engine has ended ({why}) and is not started again: /health answers 503")
                    continue
                say(f"the engine has ended ({why}): it is started again")
                self.engine = self._fork(self._engine, True)
            elif pid in self.fronts:
                self.fronts.discard(pid)
                if self._front_deaths.too_many():
                    say(f"a front end has ended ({why}), as others before it: the server ends")
                    return False
                say(f"a front end has ended ({why}): another is started")
                self.fronts.add(self._fork(self._front))
        return True

    def _stop(self) -> int:
        """End the front ends, which let their requests end, and then the engine. A second signal ends them at once.

        Returns the exit code.
        """
        saving = self.settings.shutdown_seconds if self.settings.keep_chunks else 0.0
        in_time = self._ended(self.fronts, self.settings.shutdown_seconds, KILL_SECONDS)
        in_time &= self._ended({self.engine} - {0}, saving if in_time else 0.0, 0.0)
        if self.engine and self.settings.keep_chunks:
            warn("the engine is ended before all chunks are saved")
        return int(not in_time)

    def _ended(self, pids: set[int], seconds: float, after_second: float) -> bool:
        """Send SIGTERM to processes, and wait for their ends: for a time, or after a second signal for another time.

        Returns whether no second signal came.
        """
        in_time, end = True, time.monotonic() + seconds + KILL_SECONDS
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        left = {*pids}
        while left and (wait := end - time.monotonic()) > 0:
            came = signal.sigtimedwait(self._ends | {signal.SIGCHLD}, wait)
            if came is not None and came.si_signo != signal.SIGCHLD:
                in_time, end = False, time.monotonic() + after_second
                for pid in left:
                    os.kill(pid, signal.SIGTERM)
            for pid, _ in ended():
                left.discard(pid)
                self._forget(pid)
        return in_time

    def _kill(self) -> None:
        """End what is left."""
        for pid in {*self.fronts, self.engine} - {0}:
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

    def _engine(self, again: bool = False) -> int:
        from nanovllm.entrypoints.server.engine_process import run_engine
        from nanovllm.entrypoints.server.named_chunks import chunk_limits

        self.http.close()
        parsers = (self.settings.tool_parser, self.settings.reasoning_parser)
        limits = {
            "max_waiting": self.settings.max_waiting,
            "max_waiting_tokens": self.settings.max_waiting_tokens,
            "chunk_limits": chunk_limits(self.settings),
        }
        return run_engine(self.model, self.options, parsers, limits, self.listener, self._telling, again=again)

    def _front(self) -> int:
        import uvloop

        from nanovllm.entrypoints.server.front import serve
        from nanovllm.entrypoints.server.front_model import load_front

        self.listener.close()
        try:
            server = load_front(self.settings, self.model, self.options)
        except NanoVLLMError as error:
            return tell(self._telling, error)
        uvloop.run(serve(server, self.http, self.path, self._telling))
        return 0


class Deaths:
    """Counts how often processes have ended in the last `RESTART_SECONDS`."""

    def __init__(self, most: int) -> None:
        self._most, self._times = most, list[float]()

    def too_many(self) -> bool:
        """Note one more. Returns whether there are more than `most`."""
        now = time.monotonic()
        self._times = [*(t for t in self._times if now - t < RESTART_SECONDS), now]
        return len(self._times) > self._most


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


def bound(settings: Settings) -> socket.socket:
    """The socket that clients connect to.

    Raises:
        InvalidRequestError: The address cannot be used.
    """
    with contextlib.ExitStack() as opened:
        try:
            family, *_, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            sock = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(BACKLOG)  # clients that come before the front ends wait
        except (OSError, UnicodeError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or error
            raise InvalidRequestError(f"--host {settings.host} --port {settings.port} cannot be used: {reason}") from None
        opened.pop_all()
        return sock


def url(sock: socket.socket, *, tls: bool = False) -> str:
    """The address of a bound socket."""
    host, port, *_ = sock.getsockname()
    return f"http{'s' * tls}://" + (f"[{host}]:{port}" if sock.family == socket.AF_INET6 else f"{host}:{port}")
