"""The list of the chunk files of a namespace, from their headers alone. It is bounded in number and in time.

A header tells of which model a file is and how long it must be, but not whether its KV was changed: loading checks every byte.
"""

import heapq
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nanovllm.chunks.storage import file as chunk_file
from nanovllm.chunks.storage import format as chunk_format
from nanovllm.entrypoints.server.errors import api_error
from nanovllm.entrypoints.server.saved_chunks import SUFFIX, name_of, opened
from nanovllm.errors import ChunkFileError, UnknownChunkError
from nanovllm.models.model import Model

MOST_LISTED = 1024
SECONDS = 1.0  # in which the folder and the headers are read; what is left then is not listed
FILE = re.compile(rf"[0-9a-f]{{64}}{re.escape(SUFFIX)}")
NAMELESS = "a chunk whose name is not known"


def listed(folder: Path, model: Model, kv_dtype: torch.dtype) -> dict[str, Any]:
    """The files of a folder, the newest first, and whether there are more.

    Args:
        folder: The folder of a namespace, which need not be there.
        model: The model of the engine that would load them.
        kv_dtype: The dtype of its KV.

    Raises:
        ChunkFileError: The folder cannot be read. The message tells no path.
    """
    end, data, seen = time.monotonic() + SECONDS, list[dict[str, Any]](), 0
    try:
        found = [*_files(folder, end)]
    except OSError as error:
        raise ChunkFileError(f"the chunk files could not be listed: {error.strerror or type(error).__name__}") from error
    cut = time.monotonic() > end  # then a part of the folder may not have been read
    for saved, path, size in heapq.nlargest(MOST_LISTED, found):
        if time.monotonic() > end:
            break
        seen += 1
        if (entry := _described(path, size, int(saved), model, kv_dtype)) is not None:
            data.append(entry)
    return {"object": "list", "data": data, "has_more": cut or seen < len(found)}


def _files(folder: Path, end: float) -> Iterator[tuple[float, Path, int]]:
    """When each file was written, its path and its size, as far as there is time."""
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:  # nothing was saved yet
        return
    with entries:
        for entry in entries:
            if time.monotonic() > end:
                return
            if FILE.fullmatch(entry.name):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # deleted meanwhile
                    continue
                yield status.st_mtime, Path(entry.path), status.st_size


def _described(path: Path, size: int, saved: int, model: Model, kv_dtype: torch.dtype) -> dict[str, Any] | None:
    """What clients are told of a file; None if it was deleted meanwhile. `error` is what a call to load the file would answer."""
    name, tokens, problem = name_of(path), None, None
    shown = Path(name or NAMELESS)
    try:
        with opened(path, NAMELESS if name is None else f"the chunk {name!r}") as fd:
            outline = chunk_format.outline(fd, shown)
        tokens = outline.shape[1]
        chunk_file.require_outline(outline, model, kv_dtype, shown)
    except UnknownChunkError:
        return None
    except ChunkFileError as error:  # also of another model
        problem = {"code": api_error(error).code, "message": str(error)}
    return {"object": "chunk.file", "name": name, "tokens": tokens, "bytes": size, "saved": saved, "error": problem}
