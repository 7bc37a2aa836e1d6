"""The processes of the other ranks as rank 0 sees them: how they start and end, and the thread that watches over them."""

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO

import nanovllm.errors
from nanovllm.config import Mesh
from nanovllm.entrypoints.ranks.beats import Beats
from nanovllm.entrypoints.ranks.channel import Kind, Outcome, receive, send
from nanovllm.entrypoints.ranks.settings import STARTING, Settings
from nanovllm.errors import EngineDeadError, NanoVLLMError
from nanovllm.executor.distributed import given_up, left
from nanovllm.ops.import_paths import import_paths
from nanovllm.state.lease import NEW_ENGINE, Lease

TICK = 0.2  # seconds between two looks at all ranks
GRACE = 10.0  # seconds for which a call that failed on one rank may go on on another
GONE = 5.0  # seconds for the exit code of a rank that has closed its connection
ENDING = 2.0  # seconds in which a rank ends that was asked to
SHOWN = 6  # last lines of a rank's stderr in an error


def _nothing() -> None:
    """Nothing is to be freed."""


class Follower:
    """One process."""

    def __init__(self, rank: int, size: int, beats: Beats, settings: Settings) -> None:
        """Start it and send it the settings."""
        self.rank, self.hello, self.at, self.beat = rank, False, time.monotonic(), 0
        self.outcome: Outcome | None = None
        self.failed: tuple[Outcome, float] | None = None
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it is open as long as the process
        self.link, theirs = socket.socketpair()
        self.link.settimeout(settings.rank_timeout)
        asked = [str(number) for number in (theirs.fileno(), beats.descriptor, rank, size, os.getpid())]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nanovllm.entrypoints.ranks.follower", *asked],
                pass_fds=(theirs.fileno(), beats.descriptor),
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                start_new_session=True,  # Ctrl-C in the terminal reaches rank 0 alone
                env={**os.environ, "PYTHONPATH": import_paths()},
            )
        send(self.link, Kind.SETTINGS, settings.encode())

    def ended(self) -> str:
        """How the process has ended, with its last lines."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GONE)
        code = self.process.returncode
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        return f"rank {self.rank} (process {self.process.pid}) {how}{self.last_lines()}"

    def last_lines(self) -> str:
        """The last lines that it wrote to stderr."""
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - 4096))
        lines = self.log.read().decode(errors="replace").strip().splitlines()[-SHOWN:]
        return "".join(["; its last lines:", *(f"\n    {line}" for line in lines)]) if lines else ""


class Followers:
    """The other ranks of one engine. One thread reads what they send, and finds those that are gone.

    Attributes:
        dead: Why the engine has ended, or None.
        refusal: The error of a rank that could not start, or None.
        mesh: The group of all ranks, once they have joined it; None before, and if they join none.
        lease: The lease of rank 0's engine, which is told of the end; None while the engine is made.
        free: Frees the graphs of rank 0's engine. `close` calls it unless a call still replays them.
        number: The number of the newest call.
        busy: Whether rank 0 makes it now.
    """

    def __init__(self, settings: Settings) -> None:
        """Start the processes."""
        self.settings, size = settings, len(settings.devices)
        self.dead: str | None = None
        self.refusal: NanoVLLMError | None = None
        self.mesh: Mesh | None = None
        self._pid = os.getpid()
        self.lease: Lease | None = None
        self.free: Callable[[], object] = _nothing
        self.number, self.busy, self.ready, self.closing = 0, False, False, False
        self.beats, self.changed = Beats(size), threading.Condition()
        self.all = list[Follower]()
        self._selector = selectors.DefaultSelector()
        try:
            for rank in range(1, size):
                self.all.append(one := Follower(rank, size, self.beats, settings))
                self._selector.register(one.link, selectors.EVENT_READ, one)
        except BaseException:
            self._end_processes()
            raise
        self._thread = threading.Thread(target=self._watch, daemon=True, name="nanovllm-ranks")
        self._thread.start()

    def broadcast(self, kind: Kind, body: bytes = b"", *, report: bool = False, files: Sequence[int] = ()) -> None:
        """Send a frame to all ranks. A rank that is gone, or that takes nothing for too long, ends the engine."""
        for one in self.all:
            try:
                send(one.link, kind, body, report=report, files=files)
            except TimeoutError:
                self.fail(self._stuck(one))
            except OSError:
                self.fail(one.ended())

    def wait(self, done: Callable[[Follower], bool], seconds: float) -> list[Follower]:
        """Wait until all ranks are done, the engine is dead, or no further call has ended on any rank for so many seconds.

        Returns:
            The ranks that are not done.
        """
        with self.changed:
            seen, until = self.beats.counts[:, 1].tolist(), time.monotonic() + seconds
            while late := [one for one in self.all if not done(one)]:
                if self.dead is not None or time.monotonic() > until:
                    return late
                self.changed.wait(min(TICK, seconds))
                if (now := self.beats.counts[:, 1].tolist()) != seen:
                    seen, until = now, time.monotonic() + seconds
            return []

    def outcomes(self, number: int, seconds: float, blame: str = "") -> list[Outcome]:
        """How a call has ended on the other ranks. One that does not tell for so many seconds ends the engine; `blame` says more.

        Raises:
            EngineDeadError: The engine is dead.
        """
        late = self.wait(lambda one: one.outcome is not None and one.outcome.number == number, seconds)
        if late and self.dead is None:
            self.fail(f"{blame}{'; ' if blame else ''}{self._stuck(late[0], seconds)}")
        self.require_alive()
        return [one.outcome for one in self.all if one.outcome is not None]

    def require_alive(self, cause: BaseException | None = None) -> None:
        """Raise `EngineDeadError` if the engine is dead."""
        if self.dead is not None:
            raise died(self.dead) from cause

    def fail(self, cause: str) -> None:
        """End all ranks but this one, and let every call with the engine raise. Calls that wait for other ranks are released."""
        if os.getpid() != self._pid:
            return
        with self.changed:
            if self.dead is not None or self.closing:
                return
            self.dead = cause
            if self.lease is not None:
                self.lease.kill(cause, NEW_ENGINE)
            for one in self.all:
                one.process.kill()
            self.changed.notify_all()
        if self.mesh is not None:
            left(self.mesh)

    def close(self) -> None:
        """End all ranks but this one, the graphs of this one's engine, and the group."""
        if os.getpid() != self._pid:  # a copy in a forked process, which owns nothing
            return
        with self.changed:
            if self.closing:
                return
            self.closing = True
            if self.dead is None:
                self.dead = "it was closed"
                if self.lease is not None:
                    self.lease.kill(self.dead, NEW_ENGINE)
            self.changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * GONE)  # it may wait for the exit code of one rank
        try:
            self._leave()
        finally:
            for one in self.all:
                with suppress(OSError):
                    one.link.settimeout(TICK)
                    send(one.link, Kind.END)
            self._end_processes()

    def _leave(self) -> None:
        """Free the graphs unless a call still replays them, and end the group. NCCL ends it only after the graphs with its sums."""
        if self.lease is None:
            return
        until = time.monotonic() + GONE
        while (holder := self.lease.holder) is not None and holder != threading.get_ident() and time.monotonic() < until:
            time.sleep(TICK / 10)
        with suppress(Exception):  # of a device that is broken, or of an interpreter that ends
            if holder is None:
                self.free()
            if self.mesh is not None:
                left(self.mesh)
                if holder is None:
                    given_up(self.mesh, GONE)
        self.free = _nothing  # the method that was there holds the executor

    def _end_processes(self) -> None:
        self.closing = True
        for one in self.all:
            one.link.close()
        until = time.monotonic() + ENDING
        for one in self.all:
            try:
                one.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
            one.log.close()
        self._selector.close()
        os.close(self.beats.descriptor)

    # The thread.

    def _watch(self) -> None:
        while not self.closing and self.dead is None:
            for key, _ in self._selector.select(TICK):
                self._read(key.data)
            for one in self.all:
                self._look(one)

    def _read(self, one: Follower) -> None:
        try:
            kind, _, body, _ = receive(one.link)
        except (EOFError, OSError):
            if self.dead is None and not self.closing:
                self.fail(one.ended())
            return
        found = Outcome.decode(body) if body else None
        with self.changed:
            if kind is Kind.HELLO:
                one.hello = True
            elif kind in (Kind.READY, Kind.OUTCOME):
                one.outcome, one.failed = found, None
            elif kind is Kind.FAILED and found is not None:
                one.failed = found, time.monotonic()
            self.changed.notify_all()
        if kind is Kind.REFUSED and found is not None:
            self.refusal = refused(one.rank, found, one.last_lines())
            self.fail(str(self.refusal))

    def _look(self, one: Follower) -> None:
        """End the engine if a rank shows no sign of life, or if it failed in a call in which this rank still waits."""
        now, beat = time.monotonic(), int(self.beats.counts[one.rank, 0])
        if beat != one.beat:
            one.beat, one.at = beat, now
        elif now - one.at > (self.settings.rank_timeout if self.ready else max(STARTING, self.settings.rank_timeout)):
            self.fail(self._stuck(one))
        if (failed := one.failed) is not None and self.busy and failed[0].number == self.number and now - failed[1] > GRACE:
            self.fail(f"call {self.number} failed on rank {one.rank} alone: {failed[0].told()}")

    def _stuck(self, one: Follower, seconds: float | None = None) -> str:
        waited = self.settings.rank_timeout if seconds is None else seconds
        return f"rank {one.rank} (process {one.process.pid}) does not answer for {waited:g} seconds"


def died(cause: str) -> EngineDeadError:
    """The error of a call with an engine whose ranks have ended."""
    return EngineDeadError(f"the engine is dead: {cause}. No call with a state of it can succeed: {NEW_ENGINE}")


def refused(rank: int, found: Outcome, lines: str) -> NanoVLLMError:
    """The error of a rank that could not start, of the same type if it is one of ours."""
    kind = getattr(nanovllm.errors, found.error, None)
    if isinstance(kind, type) and issubclass(kind, NanoVLLMError):
        return kind(f"rank {rank}: {found.message}")
    return EngineDeadError(f"rank {rank} could not start: {found.error}: {found.message}{lines}")
