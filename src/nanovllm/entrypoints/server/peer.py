"""`Peer`: the engine's end of the connection to one front end. What is said in a round goes out in one write."""

import socket
import time
from collections import deque
from dataclasses import dataclass, field

from nanovllm.entrypoints.server.wire import Outward, frame

AT_ONCE = 1 << 18  # bytes of one write
MOST_UNSENT = 16 << 20  # bytes for a front end that has stopped to read; the longest answers alone have more
MOST_IN_ALL = 1 << 29  # for one that reads
STALL_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class Peer:
    """One front end: its socket, what was read of an incomplete frame, what is not yet sent, and its requests by number.

    Attributes:
        coming: The numbers of requests whose grammars are being compiled, or whose chunks are being read.
        frames: Frames of which nothing is sent.
        rest: What is left of frames that are being sent.
        unsent: The number of bytes of both.
        blocked: Whether the socket takes no more for now.
        moved: When the front end last took something, on the monotonic clock; from then on it is looked at how long it takes nothing.
    """

    sock: socket.socket
    most_unsent: int = MOST_UNSENT
    stall_seconds: float = STALL_SECONDS
    inward: bytearray = field(default_factory=bytearray)
    requests: dict[int, int] = field(default_factory=dict)
    coming: set[int] = field(default_factory=set)
    frames: deque[bytes] = field(default_factory=deque)
    rest: memoryview = field(default_factory=lambda: memoryview(b""))
    unsent: int = 0
    blocked: bool = False
    moved: float = 0.0

    def add(self, message: Outward) -> None:
        """Say something with the next `flush`."""
        data = frame(message)
        if not self.unsent:
            self.moved = time.monotonic()
        self.frames.append(data)
        self.unsent += len(data)

    def flush(self) -> None:
        """Send what the socket takes.

        Raises:
            OSError: The connection is lost.
        """
        self.blocked = False
        while self.unsent:
            if not self.rest:
                self.rest = memoryview(self._next())
            try:
                count = self.sock.send(self.rest)
            except BlockingIOError:
                self.blocked = True
                return
            self.rest = self.rest[count:]
            self.unsent -= count
            self.moved = time.monotonic()

    def _next(self) -> bytes:
        """The first frames, about as many as one write takes."""
        if len(self.frames) == 1:
            return self.frames.popleft()
        parts, size = [], 0
        while self.frames and size < AT_ONCE:
            parts.append(self.frames.popleft())
            size += len(parts[-1])
        return b"".join(parts)

    @property
    def stalled(self) -> bool:
        """Whether more waits for the front end than is kept for it."""
        if self.unsent <= self.most_unsent:
            return False
        return self.unsent > MOST_IN_ALL or time.monotonic() - self.moved > self.stall_seconds
