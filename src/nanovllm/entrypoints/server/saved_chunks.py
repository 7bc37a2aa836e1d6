"""The files of named chunks: where they are, and how they are written and read in a thread beside the engine's steps.

A file's name is made of digests, so that clients choose no part of it. A label in the same folder has the chunk's name, for lists. A mark
has it too, and says that the chunk of this file is in memory. An engine that is started again by the same server has the chunks that have
marks. So has the next server's engine, if the operator wants chunks to be kept: then an orderly end saves those that have no mark.

A server with nothing else to do may save chunks that no client has asked it to save. A claim beside such a file says so: the file is
deleted when the chunk is deleted, or when its name is that of another chunk.

Servers of several models may use a folder one after the other. A file that does not fit an engine's model and KV dtype is neither written
over nor deleted together with a chunk.
"""

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from nanovllm.chunks.storage import blocks, reserved
from nanovllm.chunks.storage import file as chunk_file
from nanovllm.chunks.storage import format as chunk_format
from nanovllm.chunks.storage.format import Head
from nanovllm.entrypoints.server.held import Held
from nanovllm.entrypoints.server.named_chunks import ChunkLimits, Unread
from nanovllm.entrypoints.server.side_thread import Between
from nanovllm.errors import ChunkFileError, ChunkLimitError, ChunkMismatchError, InvalidRequestError, UnknownChunkError
from nanovllm.files import delete_abandoned, make_private, put, temporary, write_whole
from nanovllm.models.model import Model
from nanovllm.state.chunk import Chunk
from nanovllm.state.device_errors import watched
from nanovllm.types import Tensor

SUFFIX, MARK, LABEL, OWN = ".safetensors", ".name", ".label", ".own"
PIECE = 4 << 20  # bytes that are copied between two steps
MOST_NAME = 64  # bytes of a name


def path_of(limits: ChunkLimits, space: str, name: str) -> Path:
    """The file of a name.

    Raises:
        InvalidRequestError: The server has no folder for chunks.
    """
    if limits.folder is None:
        raise InvalidRequestError("this server does not save chunks: it was started without --chunk-dir")
    return limits.folder / hashlib.sha256(space.encode()).hexdigest()[:32] / (_digest(name) + SUFFIX)


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def name_of(path: Path) -> str | None:
    """The name of a file's chunk, or None if neither a label nor a mark tells it."""
    return _noted(path, LABEL) or _noted(path, MARK)


def _noted(path: Path, suffix: str) -> str | None:
    """The name in a small file beside a chunk's file, if it is that of the file."""
    with suppress(OSError, UnicodeDecodeError, UnknownChunkError, ChunkFileError), opened(path.with_suffix(suffix), "") as fd:
        name = os.read(fd, MOST_NAME).decode()
        return name if _digest(name) == path.stem else None
    return None


def label(path: Path, name: str) -> None:
    """Note the name of a file, if the file is still there. A label that cannot be written is none: lists then lack the name.

    The label gets the time of the file, until `mark` gives it that of the chunk.
    """
    with suppress(OSError):
        if path.exists() and _noted(path, LABEL) != name:
            write_whole(path.with_suffix(LABEL), name.encode())
            saved = path.stat().st_mtime_ns
            os.utime(path.with_suffix(LABEL), ns=(saved, saved))


def mark(path: Path, name: str, created: int) -> None:
    """Note that the chunk of a file is in memory, if the file is still there, and when the chunk was `created`, in Unix time.

    A mark that cannot be written is none.
    """
    with suppress(OSError):
        os.utime(path.with_suffix(LABEL), (created, created))
    with suppress(OSError):
        if is_marked(path, name):
            os.utime(path.with_suffix(MARK))
        elif path.exists():
            with temporary(path.parent) as (fd, made):  # a process that is killed here leaves the old mark or the new one
                os.write(fd, name.encode())
                os.replace(made, path.with_suffix(MARK))


def is_marked(path: Path, name: str) -> bool:
    """Whether the chunk in memory is that of the file."""
    with suppress(OSError):
        return path.exists() and _noted(path, MARK) == name
    return False


def forget(path: Path) -> None:
    """Remove the mark and the claim of a file that has gone."""
    for suffix in (MARK, OWN):
        with suppress(OSError):
            path.with_suffix(suffix).unlink()


def created(path: Path) -> int:
    """When the chunk of a file that has a mark was created, in Unix time: the time of its label, or else that of the file, or now."""
    for each in (path.with_suffix(LABEL), path):
        with suppress(OSError):
            return int(each.stat(follow_symlinks=False).st_mtime)
    return int(time.time())


def unmark(held: Held, space: str, name: str) -> None:
    """Note that the chunk of a name is not in memory. Its file is deleted if no client has asked for it and it fits the engine."""
    if held.named.limits.folder is not None:
        path = path_of(held.named.limits, space, name)
        with suppress(OSError, ChunkFileError, ChunkMismatchError):
            path.with_suffix(MARK).unlink(missing_ok=True)
            if is_claimed(path):
                require_own(path, name, held.model, held.state.kv.pools[0].dtype)
                discard(path)


def require_own(path: Path, name: str, model: Model, kv_dtype: torch.dtype) -> None:
    """Require that a file is missing, or of this model and KV dtype, before it is written over. Only its header is read.

    Raises:
        ChunkMismatchError: It is of another model or KV dtype.
        ChunkFileError: It cannot be read, or is of another version of the format, or damaged.
    """
    try:
        with opened(path, name) as fd:
            chunk_file.require_outline(chunk_format.outline(fd, Path(name)), model, kv_dtype, Path(name))
    except (ChunkMismatchError, ChunkFileError) as error:
        told = f"the chunk {name!r} cannot be saved, because a file that is not written over has its name ({error})"
        raise type(error)(f"{told}: take another name, or delete the file with DELETE /v1/chunks/{name}/save") from None
    except UnknownChunkError:
        pass


def is_claimed(path: Path) -> bool:
    """Whether no client has asked for a file, so that its chunk may be made anew."""
    return os.path.exists(path.with_suffix(OWN))


def claim(path: Path) -> bool:
    """Note that a file is made that no client has asked for. Returns False if a client has asked for the one that is there."""
    with suppress(OSError):
        if not path.exists():
            make_private(path.parent)
            path.with_suffix(OWN).touch(mode=0o600)
    return is_claimed(path)


def disclaim(path: Path) -> None:
    """Note that a client has asked for a file."""
    with suppress(OSError):
        path.with_suffix(OWN).unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Delete a file that no client has asked for, its claim last."""
    with suppress(OSError):
        for suffix in (LABEL, SUFFIX, OWN):
            path.with_suffix(suffix).unlink(missing_ok=True)


def marked(limits: ChunkLimits, space: str) -> dict[str, int]:
    """The names of a namespace whose chunks were in memory and have files, and when these were saved, loaded or `used`, in nanoseconds."""
    times = dict[str, int]()
    for path in path_of(limits, space, "").parent.glob(f"*{MARK}"):
        with suppress(OSError):
            if (name := _noted(path, MARK)) is not None:
                times[name] = path.stat().st_mtime_ns
    return times


def used(limits: ChunkLimits, space: str, name: str) -> None:
    """Note that a chunk was used. After a restart the files of chunks that were used last are read first."""
    if limits.folder is not None:
        with suppress(OSError):  # it has no mark
            os.utime(path_of(limits, space, name).with_suffix(MARK))


def tidy(limits: ChunkLimits, *, again: bool) -> None:
    """Delete what no engine needs when one is started: temporary files of engines that were killed, labels without files, and, unless it is
    started `again` or chunks are kept, the marks of a server before this one. Servers that share a folder and keys share marks too.
    """
    for space, _ in limits.spaces if limits.folder is not None else ():
        folder = path_of(limits, space, "").parent
        delete_abandoned(folder)
        marks = [] if again or limits.kept else [*folder.glob(f"*{MARK}")]
        for path in [*marks, *(each for each in folder.glob(f"*{LABEL}") if not each.with_suffix(SUFFIX).exists())]:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def write(between: Between, path: Path, name: str, chunk: Chunk, head: Head, model: Model, most: int) -> int:
    """Write a chunk's file. Its KV is copied in the engine's thread, a piece between two steps; digests and the disk take none of its time.

    Returns:
        The size of the file.

    Raises:
        ChunkFileError: The file cannot be written. The message tells no path, which is not the clients' business.
        ChunkLimitError: There are too many files.
        ChunkMismatchError: The name has the file of a chunk of another model or KV dtype, which is not written over.
    """
    rows = max(1, PIECE // head.row_bytes)

    def copy(first: int, out: Tensor, held: Held) -> None:
        with watched(held.state.runtime.lease):
            chunk_file.gatherer(held.state, chunk)(first, out)

    def gather(first: int, out: Tensor) -> None:
        for low in range(0, len(out), rows):
            between(partial(copy, first + low, out[low : low + rows]))

    try:
        make_private(path.parent)  # the whole chunk folder may have been deleted meanwhile
        require_own(path, name, model, head.dtype)
        if not path.exists() and sum(1 for _ in path.parent.glob(f"*{SUFFIX}")) >= most:
            raise ChunkLimitError(f"there are {most} chunk files, and no more are allowed: delete some")
        with temporary(path.parent) as (fd, made):
            blocks.write_file(fd, head, gather, model.device)
            size = os.fstat(fd).st_size
            put(made, path)
        label(path, name)
    except OSError as error:
        raise ChunkFileError(f"the chunk {name!r} could not be saved: {error.strerror or 'it could not be written'}") from error
    return size


def read(path: Path, name: str, model: Model) -> tuple[Head, Tensor]:
    """The head of a chunk's file, and its KV in host memory. Both were checked.

    Raises:
        UnknownChunkError: There is no file.
        ChunkMismatchError: The file is of another model.
        ChunkFileError: The file cannot be read, or was changed.
    """
    with opened(path, f"the chunk {name!r}") as fd:
        head = chunk_file.decode(model, fd, Path(name))
        chunk_file.require_model(head, model, Path(name))
        whole = blocks.read_whole(fd, head, Path(name))
    label(path, name)  # a file may have come without one
    return head, whole


@contextmanager
def opened(path: Path, owner: str) -> Iterator[int]:
    """The file of a chunk, open for reading. Links are not followed. Errors call the chunk `owner`.

    Raises:
        UnknownChunkError: There is no file.
        ChunkFileError: It cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UnknownChunkError(f"there is no file of {owner}") from None
    except OSError as error:
        raise ChunkFileError(f"the file of {owner} could not be opened: {error.strerror or error}") from error
    try:
        yield fd
    finally:
        os.close(fd)


def read_ahead(fd: int) -> None:
    """Let the system read the rest of an open file into its memory meanwhile."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)


def read_into_pages(between: Between, path: Path, unread: Unread, model: Model) -> None:
    """Read the KV of a chunk's file into the chunk's pages, a window of it between two steps.

    The digest is checked at the end; until then the pages are not trusted by anybody.

    Raises:
        UnknownChunkError: There is no file, or the chunk was deleted or replaced meanwhile.
        ChunkMismatchError: The file is of another model.
        ChunkFileError: The file cannot be read, or was changed.
    """
    name, chunk = Path(unread.name), unread.chunk

    def put(first: int, rows: Tensor, held: Held) -> torch.cuda.Event | None:
        if (now := held.named.unread.get(chunk.liveness)) is None:
            raise UnknownChunkError(f"there is no chunk {unread.name!r} any more")
        reserved.put_rows(model, held.state, head, now.chunk, first, rows, now.num_filled)
        if model.device.type != "cuda":
            return None
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(model.device))
        return copied

    with opened(path, f"the chunk {unread.name!r}") as fd:
        read_ahead(fd)
        head = reserved.same_head(model, fd, name, chunk)
        with closing(blocks.read_kv(fd, head, name, model.device)) as windows:
            for first, rows in windows:
                copied = between(partial(put, first, rows))
                if copied is not None:  # the window is filled with other rows then
                    copied.synchronize()


def delete(path: Path, name: str) -> None:
    """Delete the file of a name, its label first: so a file that is written meanwhile has one. The mark is the engine's thread's business.

    Raises:
        UnknownChunkError: There is none.
        ChunkFileError: It cannot be deleted.
    """
    with suppress(OSError):
        path.with_suffix(LABEL).unlink(missing_ok=True)
    try:
        path.unlink()
    except FileNotFoundError:
        raise UnknownChunkError(f"there is no file of the chunk {name!r}") from None
    except OSError as error:
        raise ChunkFileError(f"the file of the chunk {name!r} could not be deleted: {error.strerror or error}") from error
