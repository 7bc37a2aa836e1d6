"""`offload`: a live chunk leaves the device for host memory; and which chunks do so when requests lack pages."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np

from nanovllm.engine.admission import HELD
from nanovllm.engine.disk_pages import with_reads_ended
from nanovllm.engine.donation import commit_state, enter, guarded, require_live
from nanovllm.engine.draft import missing_pages
from nanovllm.engine.host_copies import settled
from nanovllm.engine.mirrored import mirrored
from nanovllm.engine.resident import chunks_in
from nanovllm.errors import InvalidRequestError, OutOfPagesError
from nanovllm.state import pool as pools
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.moved_chunks import move_out
from nanovllm.state.pool import Pool
from nanovllm.state.request import Sequence
from nanovllm.state.sequence_pages import shares_tail
from nanovllm.state.vector import IntVector, joined
from nanovllm.state.window_frames import least_frames


@mirrored
def offload(state: EngineState, chunk: Chunk) -> EngineState:
    """Move the KV of a live chunk to host memory, so that its pages of the device are available.

    Donates `state`. The chunk stays the same: the next call that needs its KV copies it back first. `fork`, `truncate`, `release` and
    `save_chunk` do not need that. A chunk that is in host memory already stays there. Pages that other chunks or requests share stay on
    the device for them. Exact KV of equal prefixes is kept once. If host memory has too few pages because KV is being read from the disk,
    the call waits for it.

    Args:
        state: The newest state of an engine with the option `host_kv_gib`.
        chunk: The chunk. It stays valid.

    Returns:
        The next state. `state.chunks[chunk.liveness]` has no pages until the chunk comes back, and then those that it has now.

    Raises:
        InvalidRequestError: `chunk` is not a chunk, or the engine has no host memory.
        OutOfPagesError: Host memory has too few pages that are not those of other chunks.
        DonatedStateError: `state` was donated to a later call.
        ReleasedChunkError: `chunk` was released.
        ForeignChunkError: `chunk` belongs to another engine.

    Examples:
        >>> state = nv.init_state(model, num_pages=64, host_kv_gib=0.01)
        >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
        >>> state = nv.offload(state, facts)
        >>> len(state.chunks[facts.liveness].pages), state.stats.offloaded_tokens
        (0, 16)
        >>> greedy = nv.SamplingParams(temperature=0, max_tokens=8, stop=".")
        >>> state, reply = nv.generate(model, state, [facts, " The king of Aistonia is"], greedy)
        >>> reply.text, len(state.chunks[facts.liveness].pages)
        (' Oswin', 1)
    """
    state = enter(state)
    chunk = require_live(state, chunk)
    host = state.pool.host
    if host is None:
        raise InvalidRequestError("offload needs host memory: give host_kv_gib to init_state")
    if chunk.liveness in host.moved:
        return commit_state(state)
    pool = move_out(pools.planning(state.pool), chunk)
    room = host.used.num_free + host.ages.count + (0 if host.disk is None else len(host.disk.reading))
    if pool is None and host.disk is not None and host.disk.reading and len(chunk.pages) <= room:
        state = with_reads_ended(state)
        host = state.pool.host or host
        pool = move_out(pools.planning(state.pool), chunk)
    if pool is None:
        free = host.used.num_free + host.ages.count
        raise OutOfPagesError(
            f"{chunk!r} needs host memory, of which {free} of {host.num_pages} pages are available: release chunks, or raise host_kv_gib"
        )
    with guarded(state) as taken:
        without = replace(chunk, pages=IntVector.of())
        moved = settled(replace(state, chunks=state.chunks.set(chunk.liveness, without)), pool, taken)
        return commit_state(moved)


def moved_until(state: EngineState, enough: Callable[[EngineState], bool], keep: Collection[int] = ()) -> EngineState:
    """The state after chunks were moved to host memory, the oldest first, until there is enough room, or no chunk is left to move.

    Donates `state` if a chunk was moved. Chunks whose pages others share are not moved, because that would give no pages.

    Args:
        state: The newest state.
        enough: Whether a state has enough room.
        keep: The `liveness` of chunks that stay.
    """
    if state.pool.host is None or enough(state):
        return state
    for liveness in sorted(state.chunks.keys()):
        chunk = state.chunks[liveness]
        if liveness in keep or not _num_freed(state, chunk):
            continue
        try:
            state = offload(state, chunk)
        except OutOfPagesError:  # host memory is full of chunks; a smaller one may fit
            continue
        if enough(state):
            break
    return state


def with_pages(state: EngineState, num_pages: int, keep: Collection[int] = ()) -> EngineState:
    """`moved_until` as many pages are available."""
    return moved_until(state, lambda after: after.pool.num_available >= num_pages, keep)


def with_room_for(state: EngineState, contexts: Any, keep: Collection[int] = ()) -> EngineState:
    """`moved_until` all chunks of some contexts that are in host memory find room on the device. They stay in any case."""
    host = state.pool.host
    if host is None or not host.moved:
        return state
    own = {chunk.liveness for chunk in chunks_in(contexts)}
    count = sum(len(host.moved[liveness].pages) for liveness in own if liveness in host.moved)
    return with_pages(state, count, own.union(keep))


def relieved(state: EngineState, keep: Collection[int] = ()) -> EngineState:
    """The state after chunks were moved to host memory because without their pages the next request could not go on, ever.

    Donates `state` if a chunk was moved. As long as requests hold pages for which another one can wait, nothing is moved. The next request
    is the first one that runs, or the first one that waits, at which a step looks only now and then while something runs.

    Args:
        state: The newest state.
        keep: The `liveness` of chunks that stay.
    """
    host = state.pool.host
    if host is None or len(host.moved) == len(state.chunks):
        return state
    if state.running and state.pool.num_available < 2:  # a page for its next token, and one in which a shared one is copied
        first = state.running[0]
        state = _with_pages_for(state, first, first.num_filled + 1, keep)
    first = state.waiting.first()
    if first is not None and not (state.running and state.num_steps % HELD):
        state = _with_pages_for(state, first, first.tokens.length + 1, keep)
    return state


def _with_pages_for(state: EngineState, sequence: Sequence, length: int, keep: Collection[int]) -> EngineState:
    """The state in which a sequence gets pages for so many tokens once the other requests give up theirs, if chunks stand in its way."""
    size, frames = state.config.page_size, state.pool.frames
    wanted = max(0, missing_pages(sequence, length, size)) + shares_tail(state.pool, sequence, size)
    # a request that does not become a chunk needs frames for its window only
    framed = wanted if frames is None or sequence.request.keep else min(wanted, least_frames(frames.window, size))
    if _has(state.pool, wanted, framed):
        return state
    own = sequence.request.request_id
    held = [(s.pages, 0, s.pages.length) for s in (*state.running, *state.waiting) if s.request.request_id != own and s.pages.length]
    others = len(np.unique(joined(held))) if held else 0
    return moved_until(state, lambda after: _has(after.pool, wanted - others, framed - others), keep)


def _has(pool: Pool, num_pages: int, num_frames: int) -> bool:
    """Whether so many pages and so many frames are available."""
    frames = pool.frames is None or pool.frames.num_available >= num_frames
    return frames and pool.pages.num_free + pool.prefix.num_idle >= num_pages


def _num_freed(state: EngineState, chunk: Chunk) -> int:
    """How many pages become available if a chunk gives up its own."""
    pages = chunk.pages.array()
    return int(np.count_nonzero(state.pool.pages.owners(pages) - state.pool.prefix.contains(pages) == 1)) if len(pages) else 0
