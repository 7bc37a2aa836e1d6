"""Chunks that have pages before their KV is read from a file: `reserve`, and `fill` or `put_rows` and `complete`.

Between the two a chunk owns its pages like any other, so it counts and is released like any other. But nobody may read its KV: the prefix
index does not have its pages, and callers neither begin requests with it, nor fork, compose, save or offload it.
"""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from nanovllm.chunks.storage import blocks
from nanovllm.chunks.storage import file as chunk_file
from nanovllm.chunks.storage.format import Head
from nanovllm.engine.donation import commit_state, enter_with, guarded, require_live
from nanovllm.engine.host_copies import settled
from nanovllm.engine.mirrored import mirrored
from nanovllm.errors import ChunkFileError
from nanovllm.models.model import Model
from nanovllm.state import pool as pools
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.pages import require_writable
from nanovllm.state.vector import IntVector
from nanovllm.types import Tensor


@mirrored
def reserve(
    model: Model, state: EngineState, fd: int, path: Path, base: Chunk | None = None, num_shared: int = 0
) -> tuple[EngineState, Chunk]:
    """Take pages for the chunk of an open file, of which only the head is read.

    Donates `state`.

    Args:
        model: The model, which the file must be of.
        state: The newest state.
        fd: The file.
        path: Its name, for errors.
        base: A chunk whose first pages have, or will have, exact KV of the same tokens in the same namespace. None: there is none.
        num_shared: How many of its pages the chunk shares.

    Returns:
        The next state, and the chunk. Its KV is undefined until `fill` or `complete`.

    Raises:
        ChunkMismatchError: The file is of another model or KV dtype.
        ChunkFileError: Its head is damaged, or its size is not the one that its head claims.
        InvalidRequestError: The chunk is too long for the engine.
        OutOfPagesError: Too few pages are available.
    """
    state = enter_with(model, state)
    head = chunk_file.decode(model, fd, path)
    chunk_file.require_model(head, model, path)
    chunk_file.require_kv_dtype(head, state, path)
    chunk_file.require_length(head, state, path)
    shared = np.empty(0, np.int32) if base is None else require_live(state, base).pages.array(0, num_shared)
    pool = pools.acquire(state.pool, shared)
    missing = pages_for(len(head.tokens), state.config.page_size) - len(shared)
    if missing > pool.num_available:
        raise pools.too_few(pool, f"{path}: the chunk needs {missing} pages")
    with guarded(state) as taken:
        pool, fresh = pools.allocate(pools.planning(pool), missing) or (pool, ())
        taken.note(pool, fresh)
        state = settled(state, pool, taken)
        require_writable(state.pool.pages, fresh)
        pages = IntVector.of(shared).extend(fresh)
        chunk = Chunk(
            tokens=IntVector.of(head.tokens), pages=pages, provenance=head.provenance, num_exact=head.num_exact, gaps=head.gaps,
            fingerprint=model.fingerprint, engine=state.runtime.lease.engine, liveness=state.next_id,
        )  # fmt: skip
        state = replace(state, chunks=state.chunks.set(chunk.liveness, chunk), next_id=state.next_id + 1)
        return commit_state(state), chunk


@mirrored
def fill(model: Model, state: EngineState, fd: int, path: Path, chunk: Chunk, num_before: int = 0, namespace: int = 0) -> EngineState:
    """Read the KV of a reserved chunk from its file into its pages, all at once.

    Donates `state`. After an error the chunk is still reserved, and its pages that nobody else has filled are undefined.

    Args:
        model: The model.
        state: The newest state.
        fd: The file of `reserve`.
        path: Its name, for errors.
        chunk: The chunk of `reserve`.
        num_before: Leading pages that another chunk has filled.
        namespace: Its exact KV is indexed for requests of this namespace.

    Raises:
        ChunkMismatchError: The file is of another model by now.
        ChunkFileError: The file cannot be read, was changed, or is that of another chunk by now.
    """
    state = enter_with(model, state)
    head = same_head(model, fd, path, chunk)
    with guarded(state), closing(blocks.read_kv(fd, head, path, model.device)) as windows:
        put = chunk_file.scatterer(model, state, head, require_live(state, chunk).pages, num_before)
        for first, raw in windows:
            put(first, raw)
    return complete(model, state, chunk, namespace)


def same_head(model: Model, fd: int, path: Path, chunk: Chunk) -> Head:
    """The head of an open file, which must be that of a chunk.

    Raises:
        ChunkMismatchError: The file is of another model.
        ChunkFileError: It is damaged, or that of another chunk.
    """
    head = chunk_file.decode(model, fd, path)
    chunk_file.require_model(head, model, path)
    same = head.num_exact == chunk.num_exact and head.gaps == chunk.gaps and head.provenance == chunk.provenance
    if not same or not np.array_equal(head.tokens, chunk.token_ids):
        raise ChunkFileError(f"{path}: it has another chunk than when its pages were taken: the file was replaced")
    return head


def put_rows(model: Model, state: EngineState, head: Head, chunk: Chunk, first: int, rows: Tensor, num_before: int = 0) -> None:
    """Write rows of a reserved chunk's file into its pages. In an engine of one rank this is a part of `fill`, between two steps.

    Does not donate `state`. On a GPU the copies may still run on the current stream when it returns.

    Args:
        model: The model.
        state: The newest state.
        head: The head of the file, of `same_head`.
        chunk: The chunk of `reserve`.
        first: The first row.
        rows: Rows in host memory, uint8 `[n, row_bytes]`.
        num_before: As in `fill`.
    """
    state = enter_with(model, state)
    with guarded(state):
        chunk_file.scatterer(model, state, head, require_live(state, chunk).pages, num_before)(first, rows)


def complete(model: Model, state: EngineState, chunk: Chunk, namespace: int = 0) -> EngineState:
    """Let everybody read a reserved chunk, all of whose pages are filled and whose digest was checked. Its exact pages enter the index.

    Donates `state`.
    """
    state = enter_with(model, state)
    chunk = require_live(state, chunk)
    pool = pools.insert(state.pool, chunk.token_ids[: chunk.num_exact], chunk.pages.array(), namespace)
    return commit_state(replace(state, pool=pool, stats=state.stats.add(reused_tokens=len(chunk))))
