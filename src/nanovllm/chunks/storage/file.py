"""Chunks in files: `save_chunk` and `load_chunk`.

`format.py` defines the content of a file; this module moves KV between files and pages. Memory is bounded for chunks of any size: three
windows of 32 MiB in host memory, pinned for CUDA, and two more on the device.
"""

import os
from collections.abc import Callable, Iterator
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
from nanovllm.chunks.storage.blocks import Windows
from nanovllm.chunks.storage.format import Head, Outline
from nanovllm.chunks.storage.heads import all_heads, own_heads
from nanovllm.config import Mesh, RopeConfig
from nanovllm.engine.donation import commit_state, enter, enter_with, guarded, require_live
from nanovllm.engine.host_copies import settled
from nanovllm.engine.mirrored import calling_mesh, mirrored
from nanovllm.engine.requests import capacity
from nanovllm.errors import ChunkFileError, ChunkMismatchError, InvalidRequestError, OutOfPagesError
from nanovllm.executor.distributed import agreed
from nanovllm.executor.executor import runtime_of
from nanovllm.files import as_path, open_file, put, temporary
from nanovllm.models.model import Model
from nanovllm.ops.kv_cache.fp8 import FP8, as_rows, chosen, in_fp8, write_rows
from nanovllm.state import pool as pools
from nanovllm.state.chunk import Chunk, offset_after
from nanovllm.state.device_errors import watched
from nanovllm.state.engine_state import EngineState, windowed_pools
from nanovllm.state.kv_cache import KVState, pages_for
from nanovllm.state.pages import require_writable
from nanovllm.state.request import Sequence
from nanovllm.state.vector import IntVector
from nanovllm.state.window_frames import frame_slots
from nanovllm.types import Float, Int32, Tensor


@torch.no_grad()
def save_chunk(state: EngineState, chunk: Chunk, path: str | os.PathLike[str]) -> None:
    """Write a chunk to a safetensors file.

    Does not donate `state`. A file at `path` is replaced only after the new one is complete on the disk. The file holds tokens, positions
    and KV `[L, T, 2, K, D]`, the model's fingerprint, and digests of all bytes; `chunks/storage/format.py` defines it.

    Args:
        state: The newest state of the engine. It stays usable.
        chunk: The chunk to write.
        path: The file to write, by convention with the suffix `.safetensors`.

    Raises:
        InvalidRequestError: `path` is not a file name, or `chunk` is not a chunk.
        ChunkFileError: The file cannot be written; no part of it is left.
        OutOfPagesError: The device has no memory for the staging buffers.
        DonatedStateError: `state` was donated to a later call.
        ReleasedChunkError: `chunk` was released.
        ForeignChunkError: `chunk` belongs to another engine.

    Examples:
        >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
        >>> nv.save_chunk(state, facts, "facts.safetensors")
        >>> from safetensors.numpy import load_file
        >>> load_file("facts.safetensors")["kv"].shape
        (8, 11, 2, 2, 64)
    """
    state, target = enter(state), as_path(path)
    require_live(state, chunk)
    if (mesh := calling_mesh(state)) is not None:
        _save_together(state, chunk, target, mesh)
        return
    with writing(target), temporary(target.parent) as (fd, made):
        write(state, chunk, fd)
        put(made, target)


def _save_together(state: EngineState, chunk: Chunk, path: Path, mesh: Mesh) -> None:
    """`save_chunk` by ranks that all call it. Rank 0 writes the file; the others give their heads, and return when it is there.

    Raises:
        ChunkFileError: The file cannot be written. All ranks raise it.
    """
    head, gather, done, problem = head_of(state, chunk), gatherer(state, chunk), 0, None

    def counted(first: int, out: Tensor) -> None:
        nonlocal done
        gather(first, out)
        done += 1

    if not mesh.rank:
        try:
            with writing(path), temporary(path.parent) as (fd, made):
                blocks.write_file(fd, head, counted, state.kv.pools[0].device)
                put(made, path)
        except ChunkFileError as error:
            problem = str(error)
    for first, last in blocks.row_windows(head)[done:]:  # rank 0: of a file that could not be written
        gather_rows(state, chunk, first, last - first)
    if (told := agreed(mesh, problem)) is not None:
        raise ChunkFileError(told)


@torch.no_grad()
def load_chunk(model: Model, state: EngineState, path: str | os.PathLike[str]) -> tuple[EngineState, Chunk]:
    """Load the chunk of a file into pages of this engine.

    Donates `state`. No token is run: `state.stats` counts all of them as reused. Exact leading pages that the prefix index holds are
    shared, and new ones enter it. The page size may differ from that of the engine that saved the file.

    Args:
        model: The model of `init_state`, with the fingerprint of the file. The dtype of the engine's KV must be that of the file.
        state: The newest state of the engine.
        path: A file of `save_chunk`.

    Returns:
        The next state, and the chunk.

    Raises:
        ChunkMismatchError: The file has another model or KV dtype.
        ChunkFileError: The file is missing, truncated, changed or not a chunk file, or has another format version.
        InvalidRequestError: The chunk is too long for the engine, or `path` is not a file name.
        OutOfPagesError: Too few pages are available now.
        DonatedStateError: `state` was donated to a later call.

    Examples:
        >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
        >>> nv.save_chunk(state, facts, "facts.safetensors")
        >>> other = nv.init_state(model, num_pages=64, page_size=8)
        >>> other, loaded = nv.load_chunk(model, other, "facts.safetensors")
        >>> len(loaded), other.stats.prefill_tokens, other.stats.reused_tokens
        (11, 0, 11)
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


@mirrored
def load(model: Model, state: EngineState, fd: int, path: Path, namespace: int = 0) -> tuple[EngineState, Chunk]:
    """`load_chunk` from an open file. Indexed KV is shared only within `namespace`."""
    state = enter_with(model, state)
    head = decode(model, fd, path)
    require_model(head, model, path)
    return place(model, state, head, path, lambda: blocks.read_kv(fd, head, path, model.device), namespace)


def place(
    model: Model, state: EngineState, head: Head, path: Path, read: Callable[[], Windows], namespace: int = 0
) -> tuple[EngineState, Chunk]:
    """Put the KV of a file into pages.

    Args:
        model: The model, which the file is of.
        state: The newest state, which is donated.
        head: The head of the file.
        path: Its name, for errors.
        read: Begins to read its KV from the first window on, as `blocks.read_kv` does.
        namespace: Indexed KV is shared only within it.
    """
    require_kv_dtype(head, state, path)
    require_length(head, state, path)
    count, size, gaps = len(head.tokens), state.config.page_size, head.gaps
    shared, _ = pools.reusable(state.pool, head.tokens[: head.num_exact], whole=True, namespace=namespace)
    pool = pools.acquire(state.pool, shared)
    missing = pages_for(count, size) - len(shared)
    if missing > pool.num_available:
        raise pools.too_few(pool, f"{path}: the chunk needs {missing} pages")
    if missing > pool.num_free:  # verify the file before pages of the index are evicted for it
        with watched(state.runtime.lease), closing(read()) as windows:
            for _ in windows:
                pass
    with guarded(state) as taken:
        pool, fresh = pools.allocate(pools.planning(pool), missing) or (pool, ())
        taken.note(pool, fresh)
        state = settled(state, pool, taken)
        pool = state.pool
        require_writable(pool.pages, fresh)
        pages = IntVector.of(shared).extend(fresh)
        put = scatterer(model, state, head, pages, len(shared))
        with closing(read()) as windows:
            for first, raw in windows:
                put(first, raw)
        sequence = Sequence(
            request=plain_request(count, namespace), tokens=IntVector.of(head.tokens), pages=pages, num_filled=count, most_filled=count,
            provenance=head.provenance, exact_len=head.num_exact, gaps=gaps,
        )  # fmt: skip
        state = replace(state, stats=state.stats.add(reused_tokens=count))
        state, chunk = chunk_of(model, state, sequence)
        return commit_state(state), chunk


def scatterer(model: Model, state: EngineState, head: Head, pages: IntVector, num_before: int) -> Callable[[int, Tensor], None]:
    """A function that writes rows of a file, as `blocks.read_kv` yields them, into pages. It is valid as long as the state is.

    Args:
        model: The model.
        state: The newest state, whose KV is written.
        head: The head of the file.
        pages: The pages for all its tokens.
        num_before: Leading pages that have their KV already, and are not written.
    """
    count, size, frames = len(head.tokens), state.config.page_size, state.pool.frames
    at = np.arange(count)
    slots = (pages.array()[at // size] * size + at % size).astype(np.int32)
    of_pools = [
        torch.from_numpy(frame_slots(frames, slots, size) if framed and frames is not None else slots).to(model.device)
        for framed in windowed_pools(state)
    ]

    def put(first: int, raw: Tensor) -> None:
        rows = own_heads(raw.to(model.device, non_blocking=True).view(head.dtype).view(-1, *head.shape[2:]), model.config)
        _scatter(state.kv, model.config.places, rows, first, of_pools, num_before * size)

    return put


def write(state: EngineState, chunk: Chunk, fd: int) -> Head:
    """Write a whole chunk file into an empty file, flush it to the disk, and return its head."""
    with watched(state.runtime.lease):
        return blocks.write_file(fd, head_of(state, chunk), gatherer(state, chunk), state.kv.pools[0].device)


def gatherer(state: EngineState, chunk: Chunk) -> Callable[[int, Tensor], None]:
    """A function that copies rows of a chunk into host memory, as `blocks.write_file` takes it. It is valid as long as the state is."""
    if state.runtime.lease.model.mesh is None:
        return _own_rows(state, chunk)

    def gather(first: int, out: Tensor) -> None:
        out.copy_(gather_rows(state, chunk, first, len(out))[1])

    return gather


@mirrored
def gather_rows(state: EngineState, chunk: Chunk, first: int, count: int) -> tuple[EngineState, Tensor]:
    """Rows of a chunk with the heads of all ranks, which call this at the same time. It does not donate `state`.

    Args:
        state: The newest state of the engine.
        chunk: The chunk.
        first: The first row.
        count: The number of rows.

    Returns:
        `state`, and the rows in host memory, uint8 `[count, bytes]`.
    """
    require_live(enter(state), chunk)
    like, key = state.kv.pools[0], state.runtime.lease.model
    assert key.mesh is not None, "without ranks rows are copied where they are needed"
    _, _, _, heads, _, width = like.shape
    own = torch.empty((count, 2 * heads * width * like.itemsize), dtype=torch.uint8)
    _own_rows(state, chunk)(first, own)
    if like.is_cuda:
        torch.cuda.current_stream(like.device).synchronize()
    return state, all_heads(own.view(count, 2, heads, -1), key.mesh, key.kv_copies, like.device)


def _own_rows(state: EngineState, chunk: Chunk) -> Callable[[int, Tensor], None]:
    """As `gatherer`, with the heads of this rank. Rows of a chunk in host memory are read there."""
    chunk, frames, host = require_live(state, chunk), state.pool.frames, state.pool.host
    page_ids, pools_of_kv = chunk.pages.array(), state.kv.pools
    if host is not None and chunk.liveness in host.moved:
        memory = runtime_of(state).host
        assert memory is not None
        memory.synchronize()
        page_ids, frames = np.array(host.moved[chunk.liveness].pages, np.int32), None
        pools_of_kv = tuple(images.transpose(0, 1) for images in memory.images)
    like = state.kv.pools[0]
    whole = not in_fp8(like) and like.shape[-1] * like.itemsize % 8 == 0  # copying the same bytes as int64 is several times as fast
    sources = [
        (
            pool.view(torch.int64) if whole else pool,
            torch.from_numpy(frames.of(page_ids) if framed and frames else page_ids.copy()).to(pool.device),
        )
        for pool, framed in zip(pools_of_kv, windowed_pools(state), strict=True)
    ]
    by_layer = [(sources[pool][0][index], sources[pool][1]) for pool, index in state.runtime.lease.model.places]

    def gather(first: int, out: Tensor) -> None:
        _, _, heads, _, dim = by_layer[0][0].shape
        _gather(by_layer, len(chunk), first, out.view(by_layer[0][0].dtype).view(-1, 2, heads, dim))

    return gather


def head_of(state: EngineState, chunk: Chunk) -> Head:
    """The head of a chunk's file, with the digest of the KV still unknown."""
    pool, key = state.kv.pools[0], state.runtime.lease.model
    _, _, _, heads, page_size, head_dim = pool.shape
    return Head(
        fingerprint=chunk.fingerprint,
        dtype=pool.dtype,
        shape=(key.num_layers, len(chunk), 2, heads if key.mesh is None else heads * key.mesh.size // key.kv_copies, head_dim),
        page_size=page_size,
        rope=_rope(key.rope),
        provenance=chunk.provenance,
        num_exact=chunk.num_exact,
        tokens=chunk.token_ids,
        positions=chunk.positions,
    )


def verify(fd: int, head: Head, path: Path, device: torch.device) -> None:
    """Read the whole KV of an open file and check its digest.

    Raises:
        ChunkFileError: The KV was changed.
    """
    with closing(blocks.read_kv(fd, head, path, device)) as windows:
        for _ in windows:
            pass


def decode(model: Model, fd: int, path: Path) -> Head:
    """The head of an open file with KV of a model's shape.

    Raises:
        ChunkMismatchError: The model's fingerprint differs.
        ChunkFileError: The file is not a valid chunk file, or its shape differs from the model's.
    """
    return chunk_format.decode(fd, path, model.fingerprint, _most(model))


def require_outline(outline: Outline, model: Model, kv_dtype: torch.dtype, path: Path) -> None:
    """Require the header of a file that an engine can load, as far as a header tells.

    Raises:
        ChunkMismatchError: The file is of another model, or its dtype is not that of the engine's KV.
        ChunkFileError: Its shape differs from the model's, or its metadata is wrong.
    """
    chunk_format.require_fit(outline, path, model.fingerprint, _most(model), _rope(model.config.rope))
    _require_same_dtype(outline.dtype, kv_dtype, path)


def require_model(head: Head, model: Model, path: Path) -> None:
    """Require a head of `decode` that fits the model in all else.

    Raises:
        ChunkMismatchError: The rotary embedding differs, or the dtype is neither the model's nor FP8.
        ChunkFileError: A token is outside the vocabulary.
    """
    config = model.config
    if head.dtype not in (model.dtype, FP8):
        raise ChunkMismatchError(f"{path}: its dtype is {head.dtype}, but the model {model.name} is loaded in {model.dtype}")
    if head.rope != (rope := _rope(config.rope)):
        raise ChunkMismatchError(f"{path}: its keys were rotated by {dict(head.rope)}, but the model rotates by {rope}")
    outside = head.tokens[(head.tokens < 0) | (head.tokens >= config.vocab_size)]
    if len(outside):
        raise ChunkFileError(f"{path}: token id {int(outside[0])} is outside the vocabulary 0 ... {config.vocab_size - 1}")


def require_length(head: Head, state: EngineState, path: Path) -> None:
    """Require a head of a chunk that is not too long for an engine.

    Raises:
        InvalidRequestError: It is.
    """
    count, limit = len(head.tokens), min(state.config.max_model_len - offset_after(head.gaps), capacity(state))
    if count > limit:
        raise InvalidRequestError(f"{path}: the chunk has {count} tokens; this engine holds at most {limit}")


def require_kv_dtype(head: Head, state: EngineState, path: Path) -> None:
    """Require a head whose KV has the dtype of an engine's KV.

    Raises:
        ChunkMismatchError: The dtype differs. KV is never converted: its provenance would no longer be true.
    """
    _require_same_dtype(head.dtype, state.kv.pools[0].dtype, path)


def _require_same_dtype(dtype: torch.dtype, own: torch.dtype, path: Path) -> None:
    if dtype != own:
        asked = "kv_dtype='fp8'" if dtype == FP8 else "kv_dtype=None"
        raise ChunkMismatchError(f"{path}: its KV is {dtype}, but this engine's is {own}: load it in an engine with {asked}")


def _most(model: Model) -> tuple[int, ...]:
    """The shape `[L, T, 2, K, D]` of the KV of the longest chunk."""
    config = model.config
    return config.num_layers, config.max_position_embeddings, 2, config.all_kv_heads, config.head_dim


def _rope(rope: RopeConfig) -> dict[str, Any]:
    """The rotary embedding of the keys, in the form that JSON returns."""
    return {**asdict(rope), "factors": list(rope.factors)}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the file system into `ChunkFileError`, and a device without memory for staging into `OutOfPagesError`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfPagesError(f"{path}: the device ran out of memory; no chunk was written") from error
    except OSError as error:
        raise ChunkFileError(f"{path}: could not be written: {error.strerror or error}") from error


def _spans(first: int, count: int, num_tokens: int) -> Iterator[tuple[int, int, int, int]]:
    """Split rows `first ... first + count - 1` by layer: (layer, first token, last token + 1, number of earlier rows)."""
    row = first
    while row < first + count:
        layer, token = divmod(row, num_tokens)
        stop = min(num_tokens, token + first + count - row)
        yield layer, token, stop, row - first
        row += stop - token


def _gather(by_layer: Seq[tuple[Tensor, Tensor]], num_tokens: int, first: int, out: Tensor) -> None:
    """Copy rows `[n, 2, K, D]` of a chunk into host memory, one layer at a time.

    Whole pages are gathered on the device and brought into the order of tokens first.

    Args:
        by_layer: For each layer its memory `[N, 2, K, S, D]` and the chunk's pages in it.
        num_tokens: Tokens of the chunk.
        first: The first row.
        out: The host buffer.
    """
    device = by_layer[0][0].device
    for layer, token, stop, at in _spans(first, len(out), num_tokens):
        memory, pages = by_layer[layer]
        size = memory.shape[3]
        before = token // size
        wanted = pages[before : -(-stop // size)]
        by_token = as_rows(chosen(memory, wanted)) if in_fp8(memory) else memory.index_select(0, wanted).permute(0, 3, 1, 2, 4)
        rows = by_token.flatten(0, 1)[token - before * size : stop - before * size]
        out[at : at + len(rows)].copy_(rows, non_blocking=True)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _scatter(
    kv: KVState, places: Seq[tuple[int, int]], rows: Float[Tensor, "n 2 K W"], first: int, slots: Seq[Int32[Tensor, "T"]], start: int
) -> None:
    """Write rows into their slots, which differ by pool. Rows of tokens before `start` are left out."""
    for layer, token, stop, at in _spans(first, len(rows), len(slots[0])):
        low, (pool, index) = max(token, start), places[layer]
        if low < stop:
            part = rows[at + low - token : at + stop - token]
            if in_fp8(rows):
                write_rows(kv.pools[pool][index], part, slots[pool][low:stop])
            else:
                ops.kv_write(kv.pools[pool], index, part[:, 0], part[:, 1], slots[pool][low:stop])
