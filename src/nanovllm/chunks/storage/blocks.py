"""The KV of a chunk file in blocks, each with a digest; several threads read and write them."""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from nanovllm.chunks.storage.format import Head, encode
from nanovllm.errors import ChunkFileError
from nanovllm.types import Tensor

BLOCK = 2 << 20  # the largest number of bytes per digest; part of the format
WINDOW = 16  # blocks that are staged together
STAGES = 3  # windows in host memory: one is copied to or from the device, threads work on two
THREADS = min(STAGES * WINDOW, os.cpu_count() or 1)  # hashing, reading and writing release the interpreter lock

Windows = Generator[tuple[int, Tensor], None, None]


def read_kv(fd: int, head: Head, path: Path, device: torch.device) -> Windows:
    """Read the KV in windows of (first row, bytes `[rows, row_bytes]`) in host memory, pinned for CUDA.

    A window is valid until the next one is requested; copies from it may still run on the current stream. Close the generator if it is not
    read to its end.

    Raises:
        ChunkFileError: The file cannot be read, or a byte was changed. A change is found only after the last window, so do not rely on
            earlier windows before the end.
    """
    start, digest, stages = len(encode(head)), hashlib.sha256(), _stages(head, device)
    windows = row_windows(head)
    with ThreadPoolExecutor(THREADS, "chunk-file") as threads:

        def begin(i: int) -> list[Future[bytes]]:
            view = stages[i % STAGES].numpy().data
            return [
                threads.submit(_read_block, fd, view[low - windows[i][0] : high - windows[i][0]], start + low * head.row_bytes)
                for low, high in _blocks(head, *windows[i])
            ]

        pending = deque(begin(i) for i in range(min(STAGES - 1, len(windows))))
        for i, (low, high) in enumerate(windows):
            try:
                for block in pending.popleft():
                    digest.update(block.result())
            except (OSError, EOFError) as error:
                raise ChunkFileError(f"{path}: could not be read: {error}") from error
            if i + STAGES - 1 < len(windows):
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()  # wait for copies out of the oldest buffer
                pending.append(begin(i + STAGES - 1))
            yield low, stages[i % STAGES][: high - low]
    if digest.hexdigest() != head.kv_sha256:
        raise ChunkFileError(f"{path}: its KV was changed: SHA-256 is {digest.hexdigest()}, but the file says {head.kv_sha256}")


def read_whole(fd: int, head: Head, path: Path) -> Tensor:
    """The whole KV in host memory, `[rows, row_bytes]`, once its digest was checked.

    Raises:
        ChunkFileError: As `read_kv`.
    """
    whole = torch.empty((head.num_rows, head.row_bytes), dtype=torch.uint8)
    with closing(read_kv(fd, head, path, whole.device)) as windows:
        for first, rows in windows:
            whole[first : first + len(rows)] = rows
    return whole


def windows_of(head: Head, whole: Tensor) -> Windows:
    """What `read_kv` yields, from the KV in host memory."""
    for low, high in row_windows(head):
        yield low, whole[low:high]


def write_file(fd: int, head: Head, gather: Callable[[int, Tensor], None], device: torch.device) -> Head:
    """Write a whole file and flush it to the disk.

    Args:
        fd: An empty file.
        head: Its head, without the digest of the KV.
        gather: `gather(first, out)` copies rows from `first` on into host memory.
        device: The device of the KV.

    Returns:
        The head with the digest.
    """
    start, digest, stages = len(encode(head)), hashlib.sha256(), _stages(head, device)
    pending: deque[list[Future[bytes]]] = deque()

    def finish() -> None:
        for block in pending.popleft():
            digest.update(block.result())

    with ThreadPoolExecutor(THREADS, "chunk-file") as threads:
        for i, (first, last) in enumerate(row_windows(head)):
            if len(pending) == STAGES:
                finish()
            stage = stages[i % STAGES][: last - first]
            gather(first, stage)
            view = stage.numpy().data
            pending.append(
                [
                    threads.submit(_write_block, fd, view[low - first : high - first], start + low * head.row_bytes)
                    for low, high in _blocks(head, first, last)
                ]
            )
        while pending:
            finish()
    head = replace(head, kv_sha256=digest.hexdigest())
    write_at(fd, memoryview(encode(head)), 0)
    os.fsync(fd)
    return head


def _rows_per_block(head: Head) -> int:
    return max(1, BLOCK // head.row_bytes)


def row_windows(head: Head) -> list[tuple[int, int]]:
    """The first and last (exclusive) row of each window of a file."""
    rows, step = head.num_rows, WINDOW * _rows_per_block(head)
    return [(low, min(low + step, rows)) for low in range(0, rows, step)]


def _blocks(head: Head, first: int, last: int) -> list[tuple[int, int]]:
    step = _rows_per_block(head)
    return [(low, min(low + step, last)) for low in range(first, last, step)]


def _stages(head: Head, device: torch.device) -> list[Tensor]:
    """Host buffers of one window each, `[rows, row_bytes]`, and not more buffers than windows."""
    windows = row_windows(head)
    shape = (windows[0][1], head.row_bytes)
    return [torch.empty(shape, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(min(STAGES, len(windows)))]


def _read_block(fd: int, view: memoryview, offset: int) -> bytes:
    """Read one block and return its digest."""
    flat, done = view.cast("B"), 0
    while done < len(flat):
        count = os.preadv(fd, [flat[done:]], offset + done)
        if not count:
            raise EOFError("it ends while it is being read")
        done += count
    return hashlib.sha256(flat).digest()


def _write_block(fd: int, view: memoryview, offset: int) -> bytes:
    """Write one block and return its digest."""
    flat = view.cast("B")
    write_at(fd, flat, offset)
    return hashlib.sha256(flat).digest()


def write_at(fd: int, view: memoryview, offset: int) -> None:
    """Write all bytes at an offset of an open file."""
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
