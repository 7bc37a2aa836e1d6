"""The folder in the user's cache where what was built or measured on this machine lies, for later processes to find."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path

from nanovllm.errors import InvalidRequestError

TEMPORARY = ".nanovllm-*.tmp"  # what `temporary` calls its files, beside those that they become


def cache_path() -> Path:
    """`$XDG_CACHE_HOME/nanovllm`, by default `~/.cache/nanovllm`, there or not. Raises `OSError` for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "nanovllm"
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, str(error)) from error


def cache_folder() -> Path:
    """The folder, made where it was missing. Raises `OSError` where it cannot be made, or is not this user's alone to write."""
    folder = cache_path()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise PermissionError(f"{folder} can be written by other users")
    return folder


def is_private(path: Path) -> bool:
    """Whether nobody else can write a file or folder."""
    status = path.stat()
    return os.name != "posix" or (status.st_uid == os.getuid() and not status.st_mode & 0o022)


def as_path(path: str | os.PathLike[str]) -> Path:
    """A path, or `InvalidRequestError`."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "\0" in str(path):
        raise InvalidRequestError(f"path={path!r} must be the name of a file")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # no such user
        raise InvalidRequestError(f"path={path!r} begins in a home folder that is not known; write ./~ for a file of that name") from error


def open_file(path: Path) -> int:
    """A file descriptor to read from; what is no file does not make it wait. Raises `OSError`."""
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def write_whole(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a small file, to the disk, in place of an older one or not at all. Raises `OSError`; then nothing is left of it."""
    with temporary(path.parent, mode) as (fd, made):
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        put(made, path)


@contextmanager
def temporary(folder: Path, mode: int = 0o666) -> Iterator[tuple[int, Path]]:
    """An empty file in a folder, open and locked, that is gone at the end of the block unless it got another name.

    A process that is killed leaves it behind, and the lock not: whoever gets the lock may delete it.
    """
    path = folder / TEMPORARY.replace("*", secrets.token_hex(8))
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        flock(fd, LOCK_EX)
        yield fd, path
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def put(made: Path, target: Path) -> None:
    """Give a written file its name, in place of whatever had it, and the folder to the disk."""
    os.replace(made, target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
