"""The files that commands write: a target is tried before the work, and an error names it."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanovllm.errors import InvalidRequestError
from nanovllm.files import temporary


def require_output(path: Path | None, *, replaced: bool = False) -> None:
    """Require a file name that can be written, and make its folder. Commands call this before long work. No file is left behind.

    Args:
        path: The file; None requires nothing.
        replaced: Whether the file will be replaced by a new one, as `write_whole` does, and not written into.

    Raises:
        InvalidRequestError: The folder cannot be made, the file cannot be written, or the path is a folder.
    """
    if path is None:
        return
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise InvalidRequestError(f"{path} is a folder, not a file to write: give the name of a file")
        if replaced and path.exists() and not path.is_file():
            raise InvalidRequestError(f"{path} is not a regular file, and cannot be replaced: give the name of a file")
        if replaced or not path.exists():
            with temporary(path.resolve().parent):
                pass
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def write(path: Path, text: str) -> None:
    """Write a text to a file. Raises `InvalidRequestError` if that fails."""
    with naming(path):
        path.write_text(text, encoding="utf-8")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an `OSError` of this block into an `InvalidRequestError` that names the file."""
    try:
        yield
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written ({error.strerror or error}): give another path") from None
