"""`SideThread`: calls that take long, such as those for files, in a thread beside the engine's steps."""

import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from nanovllm.entrypoints.server.held import Held
from nanovllm.errors import EngineClosedError, EngineDeadError, NanoVLLMError, QueueFullError

CLOSE_SECONDS = 2.0  # for the call that runs when the engine ends
Between = Callable[[Callable[[Held], Any]], Any]
Turn = Callable[[Held], tuple[Held, Callable[[], None]]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Later:
    """A call that does not end between two steps.

    Attributes:
        work: Runs in the thread beside the engine's. Its argument runs a function of what is held in the engine's thread, between two
            steps, and returns what the function returns.
        end: Runs in the engine's thread at last. It is given what `work` returned or raised, and returns the call's value or its error.
        short: Whether `work` is short, and should not wait for calls that write or read whole files.
    """

    work: Callable[[Between], Any]
    end: Callable[[Held, Any], tuple[Held, Any]]
    short: bool = False


class SideThread:
    """A thread that runs one call after the other, and what the engine's thread has to do for it.

    Attributes:
        woken: A socket that can be read when `turn` has something to do.

    Args:
        name: The thread's name.
        most: How many calls there may be whose `Later.end` has not run.
        full: What a call beyond them is told, with `{most}` for the number.
    """

    def __init__(self, name: str, most: int, full: str) -> None:
        self._most, self._full = most, full
        self.woken, self._waking = socket.socketpair()
        for sock in (self.woken, self._waking):
            sock.setblocking(False)
        self._lock = threading.Lock()
        self._turns = deque[tuple[Turn, Future[Any] | None]]()
        self._calls = set[Future[None]]()
        self._num_calls = 0  # used in the engine's thread only
        self._thread = ThreadPoolExecutor(1, name)
        self._closed = False

    @property
    def waits(self) -> bool:
        """Whether `turn` has something to do."""
        return bool(self._turns)

    @property
    def busy(self) -> bool:
        """Whether a call has not ended."""
        return self._num_calls > 0

    def begin(self, later: Later, tell: Callable[[Any], None]) -> None:
        """Run a call. `tell` is given its value or its error in the engine's thread."""
        if self._num_calls >= self._most:
            self._end(later, QueueFullError(self._full.format(most=self._most)), tell, None)
            return
        self._num_calls += 1
        call = self._thread.submit(self._run, later, tell)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def turn(self, held: Held) -> tuple[Held, Callable[[], None]]:
        """Do one thing that the thread waits for, in the engine's thread. There must be one.

        Returns:
            What is held next, and what is to be called then.
        """
        with self._lock:
            function, _ = self._turns.popleft()
        return function(held)

    def close(self) -> None:
        """End. What was not finished is given up."""
        with self._lock:
            self._closed = True
            turns = [*self._turns]
            self._turns.clear()
        for _, future in turns:
            if future is not None:
                future.set_exception(EngineClosedError("the engine has ended"))
        self._thread.shutdown(wait=False, cancel_futures=True)
        wait([*self._calls], CLOSE_SECONDS)
        self._waking.close()
        self.woken.close()

    def _run(self, later: Later, tell: Callable[[Any], None]) -> None:
        try:
            result = later.work(self._between)
        except Exception as error:
            result = error
        done = Future[None]()
        with suppress(EngineClosedError):
            self._end(later, result, tell, done)
            done.result()  # before the next call: what was read of a file is in memory until then

    def _between(self, function: Callable[[Held], Any]) -> Any:
        future = Future[Any]()

        def called(held: Held) -> tuple[Held, Callable[[], None]]:
            try:
                future.set_result(function(held))
            except Exception as error:
                future.set_exception(error)
                if isinstance(error, EngineDeadError):
                    raise
            return held, _nothing

        self._add(called, future)
        return future.result()

    def _end(self, later: Later, result: Any, tell: Callable[[Any], None], done: Future[None] | None) -> None:
        def ended(held: Held) -> tuple[Held, Callable[[], None]]:
            try:
                held, value = later.end(held, result)
            except NanoVLLMError as error:
                value = error
            finally:
                if done is not None:
                    self._num_calls -= 1
                    done.set_result(None)
            return held, partial(tell, value)

        self._add(ended, done)

    def _add(self, function: Turn, future: Future[Any] | None) -> None:
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine has ended")
            self._turns.append((function, future))
            with suppress(BlockingIOError):
                self._waking.send(b"\0")


def _nothing() -> None:
    pass
