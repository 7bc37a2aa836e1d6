"""Chunks that a call needs on the device: those that are in host memory come back before the call does anything else."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from nanovllm.engine.donation import guarded, overwritten
from nanovllm.engine.host_copies import settled
from nanovllm.engine.prompt import is_ids
from nanovllm.state import pool as pools
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.moved_chunks import move_in


def resident(state: EngineState, *contexts: Any) -> EngineState:
    """Donates the KV. The state in which all chunks of some contexts have pages of the device.

    The call that asked for them goes on with this state. If it fails, the state before it is as it was: the chunks are still in host
    memory. Chunks of other engines and those that were released are left to the call.

    Raises:
        OutOfPagesError: Too few pages are available for a chunk.
    """
    host = state.pool.host
    if host is None or not host.moved:
        return state
    engine = state.runtime.lease.engine
    wanted = dict.fromkeys(c.liveness for c in chunks_in(contexts) if c.engine == engine and c.liveness in host.moved)
    if not wanted:
        return state
    before, pool, chunks = state, pools.planning(state.pool), state.chunks
    with guarded(state) as taken:
        for liveness in wanted:
            done = move_in(pool, chunks[liveness])
            if done is None:
                count = pages_for(len(chunks[liveness]), state.config.page_size)
                raise pools.too_few(before.pool, f"{chunks[liveness]!r} needs {count} pages to come back from host memory")
            pool, pages, fresh, framed = done
            chunks = chunks.set(liveness, replace(chunks[liveness], pages=pages))
            taken.note(pool, fresh, framed)
        state = settled(replace(state, chunks=chunks), pool, taken)
    # The call may still fail. Then the state before it must not trust what was overwritten, or what the call may take from now on.
    owned, left = before.pages.counts.copy() > 0, state.pages.counts.copy() > 0
    lost = overwritten(before.pool, taken.pages, taken.frames).union(np.flatnonzero(owned & ~left).tolist())
    state.runtime.lease.lose(lost, taken.host_pages)
    return state


def chunks_in(context: Any) -> Iterator[Chunk]:
    """The chunks of a context, or of a list of contexts. Only the first and last items of a list tell whether it is token ids."""
    if isinstance(context, Chunk):
        yield context
    elif isinstance(context, list | tuple) and not is_ids(context):
        for part in context:
            yield from chunks_in(part)
