"""The lock of a folder of named chunks: one server at a time has its chunks in it.

Two servers would not see each other's chunks: what one deletes would come back through the other.
"""

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from nanovllm.errors import InvalidRequestError
from nanovllm.operator_lines import say

LOCK = ".nanovllm-chunks.lock"
LOCK_SECONDS = 10.0  # for the server before this one to end
SAY_SECONDS = 1.0  # after which the operator is told of the wait
LOOK_SECONDS = 0.02


@contextmanager
def only_server(folder: Path) -> Iterator[Path]:
    """Hold the lock of a chunk folder. Processes that are forked meanwhile hold it too, and the system takes it back when all have ended.

    Args:
        folder: The folder, which exists.

    Yields:
        The lock's file, which may be deleted within the block.

    Raises:
        InvalidRequestError: Another server has chunks in the folder, and does not end within `LOCK_SECONDS`; or the file of the lock
            cannot be opened.
    """
    path = folder / LOCK
    try:
        fd = _locked(folder, path)
    except OSError as error:
        raise InvalidRequestError(f"the lock {path} of the chunk folder cannot be used: {error.strerror or error}") from error
    try:
        yield path
    finally:
        os.close(fd)


def _locked(folder: Path, path: Path) -> int:
    """The open file of the lock, once it is locked."""
    begin, told = time.monotonic(), False
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # a server that fails at its start removes what it made
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise InvalidRequestError(f"the lock {path} of the chunk folder cannot be used: it is not a regular file")
            flock(fd, LOCK_EX | LOCK_NB)
            if _is_at(fd, path):  # a server that failed at its start may have deleted it meanwhile
                taken, fd = fd, -1
                return taken
        except BlockingIOError:
            waited = time.monotonic() - begin
            if waited >= LOCK_SECONDS:
                raise InvalidRequestError(
                    f"another server has its chunks in the folder {folder}: give each server a --chunk-dir of its own "
                    "(the pages of --kv-dir may be shared)"
                ) from None
            if waited >= SAY_SECONDS and not told:
                told = True
                say(f"another server has its chunks in the folder {folder}: waiting up to {LOCK_SECONDS:g} seconds for its end")
            time.sleep(LOOK_SECONDS)
        finally:
            if fd >= 0:
                os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
