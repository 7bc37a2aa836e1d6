"""The processes of one part: started with an environment variable that marks them, and all ended at a limit or when the first has ended.

A process group would not be enough: `torchrun` and engines of several ranks start their ranks in sessions of their own. So the processes
of a part are those of the group and all whose environment has the mark, which their children inherit.
"""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

MARK = "NANOVLLM_RECORDED_PART"
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
GIVE_UP = 30.0  # seconds after SIGKILL for which a process that a driver holds is waited for


def marks() -> Iterator[tuple[int, str]]:
    """The process id and the mark of each process that has one. None are found without Linux's /proc."""
    try:
        own = os.readlink("/proc/self")
    except OSError:
        return
    # Another number of this process: then /proc counts processes in another namespace than signals do.
    for path in Path("/proc").glob("[0-9]*/environ") if own == f"{os.getpid()}" else ():
        with suppress(OSError):  # it has ended, or is another user's
            for word in path.read_bytes().split(b"\0"):
                if word.startswith(f"{MARK}=".encode()):
                    yield int(path.parent.name), word.partition(b"=")[2].decode()


def namespace() -> int:
    """The namespace in which process ids are counted: processes of a container have others than its host."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def end_orphans() -> None:
    """Kill the processes of parts whose recorder was killed: they would still have cards. A mark begins with the recorder."""
    for pid, mark in list(marks()):
        counted_in, _, rest = mark.partition("-")
        recorder, _, _ = rest.partition("-")
        ours = counted_in == f"{namespace()}" and recorder.isdecimal() and pid not in (os.getpid(), os.getppid())
        if ours and not Path("/proc", recorder).exists():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


class Processes:
    """A command that runs, and all processes that came of it.

    Attributes:
        code: The exit code of the command, or None while it runs.
        over: Whether the command was ended from here, not by itself.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str], seconds: float) -> None:
        """Start the command, in a session of its own. Its output goes to `log`. After so many seconds it is ended."""
        self.code: int | None = None
        self.over = False
        self._mark = f"{namespace()}-{os.getpid()}-{uuid.uuid4().hex}"
        self._end, self._kill_at = time.monotonic() + seconds, float("inf")
        with log.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**environment, MARK: self._mark},
                start_new_session=True,
            )

    def end(self) -> None:
        """End them from the next call of `have_ended` on."""
        self._end = min(self._end, time.monotonic())

    def have_ended(self) -> bool:
        """Whether none is left. From the end of the command or of its time on, each call goes on with ending the others."""
        now, self.code = time.monotonic(), self._process.poll()
        if self.code is None and now < self._end:
            return False
        if self.code is not None and not self._marked():
            return True
        if self._kill_at == float("inf"):
            self.over, self._kill_at = self.code is None, now + GRACE
            self._send(signal.SIGTERM)
        elif now >= self._kill_at:
            self._send(signal.SIGKILL)  # again each time: some may have started others meanwhile
        return now >= self._kill_at + GIVE_UP

    def _marked(self) -> list[int]:
        return [pid for pid, mark in marks() if mark == self._mark]

    def _send(self, number: signal.Signals) -> None:
        """Send a signal once to each process."""
        group = self._process.pid
        if self.code is None:  # later the number of the group may be another's
            with suppress(ProcessLookupError):
                os.killpg(group, number)
        for pid in self._marked():
            with suppress(ProcessLookupError):
                if self.code is not None or os.getpgid(pid) != group:
                    os.kill(pid, number)
