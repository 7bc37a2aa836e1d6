"""Paths and files: opened safely, written as a whole; and the folder in the user's cache for results that later processes reuse."""

import errno
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from nanovllm.errors import InvalidRequestError

TEMPORARY = ".nanovllm-*.tmp"  # the names of files of `temporary`, in the same folder as their targets
ABANDONED = 60.0  # seconds after which an unlocked temporary file is deleted: live processes lock theirs at once


def cache_path() -> Path:
    """`$XDG_CACHE_HOME/nanovllm`, by default `~/.cache/nanovllm`, whether it exists or not.

    Raises:
        OSError: The user has no home folder.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "nanovllm"
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, str(error)) from error


def cache_folder() -> Path:
    """The cache folder, made if it is missing.

    Raises:
        OSError: It cannot be made, or other users can write it.
    """
    folder = cache_path()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise PermissionError(f"{folder} can be written by other users")
    return folder


def is_private(path: Path) -> bool:
    """Whether no other user can write a file or folder."""
    status = path.stat()
    return os.name != "posix" or (status.st_uid == os.getuid() and not status.st_mode & 0o022)


def as_path(path: str | os.PathLike[str]) -> Path:
    """A path.

    Raises:
        InvalidRequestError: `path` is not the name of a file.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "\0" in str(path):
        raise InvalidRequestError(f"path={path!r} must be the name of a file: a non-empty str or a path object")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # no such user
        raise InvalidRequestError(f"path={path!r} begins with an unknown home folder; write ./~ for a file of that name") from error


def open_file(path: Path) -> int:
    """A file descriptor for reading. It does not block on a FIFO.

    Raises:
        OSError: The file cannot be opened.
    """
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def make_private(folder: Path) -> None:
    """Make a folder, and the missing ones above it, for their own user only. One that exists stays as it is.

    Raises:
        OSError: One cannot be made, or is a file.
    """
    missing = [each for each in (folder, *folder.parents) if not os.path.isdir(each)]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)


def write_whole(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a small file to the disk and replace an older one.

    Raises:
        OSError: The file cannot be written; no part of it is left.
    """
    with temporary(path.parent, mode) as (fd, made):
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        put(made, path)


@contextmanager
def temporary(folder: Path, mode: int = 0o666) -> Iterator[tuple[int, Path]]:
    """An empty file in a folder, open and locked. It is deleted at the end of the block unless it was renamed.

    A killed process leaves the file but not the lock, so whoever gets the lock may delete the file.
    """
    path = folder / TEMPORARY.replace("*", secrets.token_hex(8))
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        flock(fd, LOCK_EX)
        yield fd, path
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def delete_abandoned(folder: Path) -> None:
    """Delete files of `temporary` that processes left when they were killed."""
    for path in folder.glob(TEMPORARY):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    flock(fd, LOCK_EX | LOCK_NB)
                    path.unlink(missing_ok=True)
                finally:
                    os.close(fd)


def put(made: Path, target: Path) -> None:
    """Rename a written file to its target, replace an older one, and flush the folder to the disk."""
    os.replace(made, target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
