"""`Threads`: threads that work off jobs in the order in which they were given, and can be told to wait while the engine is busy."""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, runtime_checkable

Job = Callable[[], None]


@runtime_checkable
class Workers(Protocol):
    """Who runs jobs beside the engine. Jobs raise no exceptions."""

    def submit(self, job: Job) -> bool:
        """Run a job later. Returns False if nobody will run it."""
        ...

    def hold(self, held: bool) -> None:
        """Tell whether jobs should wait, because the engine is busy."""
        ...

    def drain(self, left: int = 0) -> None:
        """Run jobs, and return when at most `left` of them have not ended."""
        ...

    def close(self) -> None:
        """Give up the jobs that have not begun, and run no others."""
        ...


class Threads:
    """Daemon threads. They start with the first job, and end with the program wherever they are: a job must be safe to lose.

    Args:
        count: How many threads.
        name: Their name.
        most_held: How many jobs may wait while the threads are told to wait. If there are more, they run all the same.
    """

    def __init__(self, count: int, name: str, most_held: int = 0) -> None:
        self._count, self._name, self._most_held = count, name, most_held
        self._changed = threading.Condition()
        self._jobs = deque[Job]()
        self._active = self._started = self._num_draining = 0
        self._held = self._closed = False

    def submit(self, job: Job) -> bool:
        """Run a job in a thread. Returns False if there is no thread, because the system gives none or after `close`."""
        with self._changed:
            if self._closed:
                return False
            self._jobs.append(job)
            if self._started < min(self._count, self._active + len(self._jobs)):
                self._start()
            if not self._started:
                self._jobs.pop()
                return False
            if self._may_run():  # else every job would wake all threads for nothing
                self._changed.notify_all()
            return True

    def hold(self, held: bool) -> None:
        """Tell whether jobs should wait."""
        if held is not self._held:
            with self._changed:
                self._held = held
                self._changed.notify_all()

    def drain(self, left: int = 0) -> None:
        """Return when at most `left` jobs have not ended. Those that wait run now."""
        with self._changed:
            self._num_draining += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._closed or len(self._jobs) + self._active <= left)
            finally:  # after Ctrl-C too
                self._num_draining -= 1

    def close(self) -> None:
        """Give up the jobs that have not begun. A job that runs is not waited for."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()

    def _start(self) -> None:
        """Start one more thread. If the system gives none, those that there are run all jobs."""
        with suppress(RuntimeError):
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._started += 1

    def _may_run(self) -> bool:
        return self._closed or (bool(self._jobs) and (not self._held or self._num_draining > 0 or len(self._jobs) > self._most_held))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._may_run)
                if self._closed:
                    return
                job = self._jobs.popleft()
                self._active += 1
            try:
                job()
            finally:
                del job
                with self._changed:
                    self._active -= 1
                    self._changed.notify_all()
