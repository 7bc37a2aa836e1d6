"""`ChunkReads`: which chunk is read from its file next, and who waits for it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from nanovllm.entrypoints.server.held import Held
from nanovllm.entrypoints.server.side_thread import SideThread
from nanovllm.entrypoints.server.unread_chunks import read_in
from nanovllm.errors import NanoVLLMError, OutOfPagesError, QueueFullError
from nanovllm.operator_lines import say

MOST_WAITING = 1024  # requests and calls that wait for chunks

Tell = Callable[[NanoVLLMError | None], None]


class ChunkReads:
    """Reads one chunk at a time: those that somebody waits for, in the order in which they were asked for, and then those used last.

    All methods are called in the engine's thread.

    Attributes:
        thread: The thread that reads.
    """

    def __init__(self) -> None:
        self.thread = SideThread("engine-chunks", 1, "{most} chunk is being read: try again later")
        self._waiting: dict[int, list[Tell]] = {}  # by the `liveness` of chunks
        self._now: int | None = None  # the chunk that is being read
        self._put_off = set[int]()  # chunks for which memory was short: they are read only if somebody asks for them

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for a chunk."""
        return bool(self._waiting)

    def wait(self, number: int, tell: Tell) -> None:
        """Read a chunk before others. `tell` is given None once the chunk has its KV or has gone, or why it could not be read.

        Raises:
            QueueFullError: Too many wait.
        """
        if sum(map(len, self._waiting.values())) >= MOST_WAITING:
            raise QueueFullError(f"{MOST_WAITING} requests wait for chunks that are read from files: try again later")
        self._waiting.setdefault(number, []).append(tell)

    def go_on(self, held: Held, *, idle: bool) -> bool:
        """Begin to read the next chunk, unless one is being read. Without `idle` only one that somebody waits for.

        If one that is waited for has gone, those who wait are told instead. What is held may be another one after that, requests may be
        queued, and more chunks may have gone.

        Returns:
            Whether somebody was told.
        """
        if self._now is not None:
            return False
        unread = held.named.unread
        for number in self._waiting:
            if number not in unread:
                self._tell(number, None)
                return True
        number = next(iter(self._waiting), None)
        if number is None and idle:
            number = max((each for each in unread if each not in self._put_off), default=None)
        if number is not None:
            self._now = number
            self.thread.begin(read_in(held, number), partial(self._ended, number))
        return False

    def _ended(self, number: int, value: Any) -> None:
        self._now = None
        error = value if isinstance(value, NanoVLLMError) else None
        if isinstance(error, OutOfPagesError):
            self._put_off.add(number)
        elif error is not None:
            say(f"a chunk was not loaded again: {error}")
        self._tell(number, error)

    def _tell(self, number: int, error: NanoVLLMError | None) -> None:
        for tell in self._waiting.pop(number, []):
            tell(error)
