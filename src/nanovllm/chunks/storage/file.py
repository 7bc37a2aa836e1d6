"""Chunks in files: `save_chunk` and `load_chunk`. `format.py` says what a file holds; this file moves it to and from the pages.

Neither holds more of a chunk than three windows of 32 MiB in host memory, pinned for CUDA, whatever its size, and two more on the device
(where that is a CPU, in host memory too).
"""

import os
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanovllm import ops
from nanovllm.chunks.handles import chunk_of
from nanovllm.chunks.prefill import plain_request
from nanovllm.chunks.storage import blocks
from nanovllm.chunks.storage import format as chunk_format
from nanovllm.chunks.storage.format import Head
from nanovllm.config import RopeConfig
from nanovllm.engine.donation import commit_state, enter, enter_with, guarded, require_live
from nanovllm.engine.requests import capacity
from nanovllm.errors import ChunkFileError, InvalidRequestError, OutOfPagesError
from nanovllm.files import as_path, open_file, put, temporary
from nanovllm.models.model import Model
from nanovllm.state import pool as pools
from nanovllm.state.chunk import Chunk, offset_after
from nanovllm.state.engine_state import EngineState, windowed_pools
from nanovllm.state.kv_cache import KVState, pages_for
from nanovllm.state.pages import require_writable
from nanovllm.state.request import Sequence
from nanovllm.state.vector import IntVector
from nanovllm.state.window_frames import frame_slots
from nanovllm.types import Float, Int32, Tensor


@torch.no_grad()
def save_chunk(state: EngineState, chunk: Chunk, path: str | os.PathLike[str]) -> None:
    """Write a chunk to a safetensors file, in place of an older one or not at all; the state stays what it was, and usable.

    The file holds tokens, positions and KV `[L, T, 2, K, D]`, and in its metadata what they are and digests of every byte
    (see `format.py`). It is complete on the disk when this returns. Raises `ReleasedChunkError` and `ForeignChunkError` for a chunk that
    cannot be used, `ChunkFileError` where the file cannot be written; then nothing is left of it.
    """
    state, target = enter(state), as_path(path)
    require_live(state, chunk)
    with writing(target), temporary(target.parent) as (fd, made):
        write(state, chunk, fd)
        put(made, target)


@torch.no_grad()
def load_chunk(model: Model, state: EngineState, path: str | os.PathLike[str]) -> tuple[EngineState, Chunk]:
    """The chunk that a file holds, in pages of this engine, whatever the size of a page was where it was saved.

    Exact leading pages that the prefix index has are shared, and those that are new enter it. Nothing is run: `state.stats` counts all
    tokens as reused. Raises `ChunkFileError` naming the file and the reason: missing, no chunk file, truncated, changed, of another
    model, dtype or format version; `InvalidRequestError` for more tokens than the engine can hold, `OutOfPagesError` for more than it
    can hold now.
    """
    state, source = enter_with(model, state), as_path(path)
    try:
        fd = open_file(source)
    except OSError as error:
        raise ChunkFileError(f"{source}: could not be opened: {error.strerror or error}") from error
    try:
        return load(model, state, fd, source)
    finally:
        os.close(fd)


def load(model: Model, state: EngineState, fd: int, path: Path) -> tuple[EngineState, Chunk]:
    """`load_chunk` from an open file."""
    head = chunk_format.decode(fd, path)
    require_model(head, model, path)
    count, size, gaps = len(head.tokens), state.config.page_size, head.gaps
    limit = min(state.config.max_model_len - offset_after(gaps), capacity(state))
    if count > limit:
        raise InvalidRequestError(f"{path}: the chunk has {count} tokens; this engine holds at most {limit}")
    shared, _ = pools.reusable(state.pool, head.tokens[: head.num_exact], whole=True)
    pool = pools.acquire(state.pool, shared)
    missing = pages_for(count, size) - len(shared)
    if missing > pool.num_available:
        raise pools.too_few(pool, f"{path}: the chunk needs {missing} pages")
    if missing > pool.num_free:  # pages would be taken from the index: for a file that is known to be good only
        verify(fd, head, path, model.device)
    with guarded(state) as taken:
        pool, fresh = pools.allocate(pool, missing) or (pool, ())
        taken.note(pool, fresh)
        require_writable(pool.pages, fresh)
        pages = IntVector.of(shared).extend(fresh)
        start = len(shared) * size
        at = np.arange(count)
        slots = (pages.array()[at // size] * size + at % size).astype(np.int32)
        state = replace(state, pool=pool)
        of_pools = [
            torch.from_numpy(frame_slots(pool.frames, slots, size) if framed and pool.frames is not None else slots).to(model.device)
            for framed in windowed_pools(state)
        ]
        with closing(blocks.read_kv(fd, head, path, model.device)) as windows:
            for first, raw in windows:
                rows = raw.to(model.device, non_blocking=True).view(head.dtype).view(-1, *head.shape[2:])
                _scatter(state.kv, model.config.places, rows, first, of_pools, start)
        sequence = Sequence(
            request=plain_request(count), tokens=IntVector.of(head.tokens), pages=pages, num_filled=count, most_filled=count,
            provenance=head.provenance, exact_len=head.num_exact, gaps=gaps,
        )  # fmt: skip
        state = replace(state, stats=state.stats.add(reused_tokens=count))
        state, chunk = chunk_of(model, state, sequence)
        return commit_state(state), chunk


def write(state: EngineState, chunk: Chunk, fd: int) -> Head:
    """A whole chunk file into an empty file, and to the disk; returns its head."""
    held, frames = chunk.pages.array(), state.pool.frames
    like = state.kv.pools[0]
    whole = like.shape[-1] * like.itemsize % 8 == 0  # the same bytes in larger numbers, several times as fast
    sources = [
        (pool.view(torch.int64) if whole else pool, torch.from_numpy(frames.of(held) if framed and frames else held.copy()).to(pool.device))
        for pool, framed in zip(state.kv.pools, windowed_pools(state), strict=True)
    ]
    by_layer = [(sources[pool][0][index], sources[pool][1]) for pool, index in state.runtime.lease.model.places]

    def gather(first: int, out: Tensor) -> None:
        _, _, heads, _, dim = by_layer[0][0].shape
        _gather(by_layer, len(chunk), first, out.view(by_layer[0][0].dtype).view(-1, 2, heads, dim))

    head = head_of(state, chunk)
    return blocks.write_file(fd, head, gather, like.device)


def head_of(state: EngineState, chunk: Chunk) -> Head:
    """What a file of this chunk says of it, the digest of the KV not yet."""
    pool = state.kv.pools[0]
    _, _, _, heads, page_size, head_dim = pool.shape
    return Head(
        fingerprint=chunk.fingerprint,
        dtype=pool.dtype,
        shape=(len(state.runtime.lease.model.places), len(chunk), 2, heads, head_dim),
        page_size=page_size,
        rope=_rope(state.runtime.lease.model.rope),
        provenance=chunk.provenance,
        num_exact=chunk.num_exact,
        tokens=chunk.token_ids,
        positions=chunk.positions,
    )


def verify(fd: int, head: Head, path: Path, device: torch.device) -> None:
    """Read the whole KV of an open file and keep nothing. Raises `ChunkFileError` where it was changed."""
    with closing(blocks.read_kv(fd, head, path, device)) as windows:
        for _ in windows:
            pass


def require_model(head: Head, model: Model, path: Path) -> None:
    """Raise `ChunkFileError` unless the KV of a file is this model's."""
    config = model.config
    if head.fingerprint != model.fingerprint:
        raise ChunkFileError(f"{path}: the KV of another model: its fingerprint is {head.fingerprint!r}, not {model.fingerprint!r}")
    if head.dtype != model.dtype:
        raise ChunkFileError(f"{path}: its dtype is {head.dtype}, the model {model.name} is loaded in {model.dtype}")
    if head.rope != (rope := _rope(config.rope)):
        raise ChunkFileError(f"{path}: its keys were turned by {dict(head.rope)}, the model's are by {rope}")
    shape = (config.num_layers, len(head.tokens), 2, config.num_kv_heads, config.head_dim)
    if head.shape != shape:
        raise ChunkFileError(f"{path}: its kv has shape {list(head.shape)}, the model's has {list(shape)}")
    outside = head.tokens[(head.tokens < 0) | (head.tokens >= config.vocab_size)]
    if len(outside):
        raise ChunkFileError(f"{path}: token id {int(outside[0])} is outside the vocabulary 0 ... {config.vocab_size - 1}")


def _rope(rope: RopeConfig) -> dict[str, Any]:
    """How keys were turned, as JSON gives it back."""
    return {**asdict(rope), "factors": list(rope.factors)}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the system refuses into `ChunkFileError`, and a device without memory for 64 MiB more into `OutOfPagesError`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfPagesError(f"{path}: the device's memory ran out; no chunk was written") from error
    except OSError as error:
        raise ChunkFileError(f"{path}: could not be written: {error.strerror or error}") from error


def _spans(first: int, count: int, num_tokens: int) -> Iterator[tuple[int, int, int, int]]:
    """Rows `first ... first + count - 1` layer by layer: (layer, first token, last + 1, how many rows came before)."""
    row = first
    while row < first + count:
        layer, token = divmod(row, num_tokens)
        stop = min(num_tokens, token + first + count - row)
        yield layer, token, stop, row - first
        row += stop - token


def _gather(by_layer: Seq[tuple[Tensor, Tensor]], num_tokens: int, first: int, out: Tensor) -> None:
    """Rows `[n, 2, K, ...]` of a chunk, whose pages lie in a tensor `[N, 2, K, S, ...]` of each layer, into host memory: whole pages are
    gathered on the device, brought into the order of tokens, and copied, a layer at a time.
    """
    device = by_layer[0][0].device
    for layer, token, stop, at in _spans(first, len(out), num_tokens):
        memory, pages = by_layer[layer]
        size = memory.shape[3]
        before = token // size
        held = memory.index_select(0, pages[before : -(-stop // size)])  # n 2 K S ...
        rows = held.permute(0, 3, 1, 2, 4).flatten(0, 1)[token - before * size : stop - before * size]
        out[at : at + len(rows)].copy_(rows, non_blocking=True)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _scatter(
    kv: KVState, places: Seq[tuple[int, int]], rows: Float[Tensor, "n 2 K D"], first: int, slots: Seq[Int32[Tensor, "T"]], start: int
) -> None:
    """Rows into their slots, which each pool has its own of; those of tokens before `start` are left out."""
    for layer, token, stop, at in _spans(first, len(rows), len(slots[0])):
        low, (pool, index) = max(token, start), places[layer]
        if low < stop:
            part = rows[at + low - token : at + stop - token]
            ops.kv_write(kv.pools[pool], index, part[:, 0], part[:, 1], slots[pool][low:stop])
