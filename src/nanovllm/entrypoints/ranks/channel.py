"""What rank 0 and another rank send each other: frames over a pair of sockets, with open files beside them."""

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

from nanovllm.errors import InvalidRequestError

HEADER = Struct("<BBHIQ")  # kind, whether an outcome is wanted, number of files, nothing, length of the body
MOST_FILES = 4


class Kind(IntEnum):
    """What a frame says. The first five are sent by rank 0."""

    SETTINGS = 1  # how to make the model and the engine
    GO = 2  # all ranks are there: begin
    CALL = 3  # make this call
    REPORT = 4  # send the outcome of the last call
    END = 5
    HELLO = 6  # the process runs
    READY = 7  # the engine is made; its outcome
    OUTCOME = 8  # of the last call
    FAILED = 9  # the last call raised, and its outcome was not asked for
    REFUSED = 10  # the engine could not be made, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a call has ended on one rank.

    Attributes:
        number: The number of the call, from 1; 0 is the making of the engine.
        digest: The digest of the state after it.
        error: The name of the exception's class; empty if it returned.
        message: Its text.
    """

    number: int
    digest: str
    error: str = ""
    message: str = ""

    def told(self) -> str:
        """The outcome in words."""
        return f"{self.error}: {self.message}" if self.error else f"state {self.digest[:8]}"

    def encode(self) -> bytes:
        """The outcome as bytes."""
        return json.dumps([self.number, self.digest, self.error, self.message[:2000]]).encode()

    @staticmethod
    def decode(body: bytes) -> "Outcome":
        """The outcome from bytes."""
        number, digest, error, message = json.loads(body)
        return Outcome(number=number, digest=digest, error=error, message=message)


def send(to: socket.socket, kind: Kind, body: bytes = b"", *, report: bool = False, files: Sequence[int] = ()) -> None:
    """Send a frame.

    Raises:
        OSError: The other end has gone, or takes nothing for as long as the socket's timeout.
    """
    if len(files) > MOST_FILES:
        raise InvalidRequestError(f"{len(files)} files in one frame exceed {MOST_FILES}")
    header = HEADER.pack(kind, report, len(files), 0, len(body))
    if files:
        socket.send_fds(to, [header], list(files))
        to.sendall(body)
    else:
        to.sendall(header + body)


def receive(of: socket.socket) -> tuple[Kind, bool, bytes, list[int]]:
    """Receive a frame: its kind, whether an outcome is wanted, its body, and open files.

    Raises:
        EOFError: The other end has gone.
        OSError: It sends nothing for as long as the socket's timeout.
    """
    head, files, _, _ = socket.recv_fds(of, HEADER.size, MOST_FILES)
    kind, report, _, _, length = HEADER.unpack(head + _exactly(of, HEADER.size - len(head), begun=bool(head)))
    return Kind(kind), bool(report), _exactly(of, length, begun=True), list(files)


def _exactly(of: socket.socket, length: int, *, begun: bool) -> bytes:
    if length and not begun:
        raise EOFError
    body = bytearray(length)
    view, done = memoryview(body), 0
    while done < length:
        count = of.recv_into(view[done:])
        if not count:
            raise EOFError
        done += count
    return bytes(body)
