"""The folder in the user's cache where what was built or measured on this machine lies, for later processes to find."""

import errno
import os
from pathlib import Path


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
