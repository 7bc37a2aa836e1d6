"""Chunks by function calls: `prefill`, `fork`, `truncate`, `release`."""

import operator
from dataclasses import replace
from typing import SupportsIndex

from nanovllm.engine.donation import commit_state, enter, enter_with, require_chunk, require_live
from nanovllm.errors import BrokenInvariantError, InvalidRequestError, OutOfPagesError
from nanovllm.models.model import Model
from nanovllm.state import pool as pools
from nanovllm.state.chunk import EXACT, Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.request import Sequence
from nanovllm.state.sequence_pages import give_up_pages
from nanovllm.state.vector import IntVector


def fork(state: EngineState, chunk: Chunk) -> tuple[EngineState, Chunk]:
    """A second handle on the same KV, released on its own. Costs no page."""
    require_chunk(chunk)
    return truncate(state, chunk, len(chunk))


def truncate(state: EngineState, chunk: Chunk, length: SupportsIndex) -> tuple[EngineState, Chunk]:
    """A handle on the first `length` tokens, sharing the pages; `chunk` stays valid.

    Raises `InvalidRequestError` for a length outside 1 ... len(chunk).
    """
    state, twin = cut_live(enter(state), chunk, length)
    return commit_state(state), twin


def cut_live(state: EngineState, chunk: Chunk, length: SupportsIndex) -> tuple[EngineState, Chunk]:
    """`truncate`, uncommitted."""
    require_live(state, chunk)
    try:
        count = 0 if isinstance(length, bool) else operator.index(length)
    except TypeError:
        count = 0
    if not 1 <= count <= len(chunk):
        raise InvalidRequestError(f"length={length!r} must be an integer in 1 ... {len(chunk)}, the tokens of the chunk")
    twin = replace(cut(chunk, count, state.config.page_size), liveness=state.next_id)
    pool, chunks = pools.acquire(state.pool, twin.pages), state.chunks.set(twin.liveness, twin)
    return replace(state, pool=pool, chunks=chunks, next_id=state.next_id + 1), twin


def release(state: EngineState, chunk: Chunk) -> EngineState:
    """End a handle. Its pages stay readable through other handles, and reusable through the prefix index until they are evicted."""
    return commit_state(released(enter(state), chunk))


def released(state: EngineState, chunk: Chunk) -> EngineState:
    """`release`, uncommitted."""
    require_live(state, chunk)
    return replace(state, pool=pools.release(state.pool, chunk.pages), chunks=state.chunks.delete(chunk.liveness))


def cut(chunk: Chunk, length: int, page_size: int) -> Chunk:
    """The first `length` tokens of a chunk, in its pages. It owns none of them: `liveness` is the chunk's."""
    exact = min(chunk.num_exact, length)
    return replace(
        chunk,
        tokens=chunk.tokens.truncate(length),
        pages=chunk.pages.truncate(pages_for(length, page_size)),
        provenance=EXACT if exact == length else chunk.provenance,
        num_exact=exact,
        gaps=tuple(gap for gap in chunk.gaps if gap[0] < length),
    )


def chunk_of(model: Model, state: EngineState, sequence: Sequence) -> tuple[EngineState, Chunk]:
    """Hand a wholly filled sequence's pages over to a new chunk, and index what is exact; pages beyond its tokens return to the pool."""
    if sequence.num_filled != len(sequence.tokens):
        raise OutOfPagesError(f"{sequence.todo} of {len(sequence.tokens)} tokens are not filled")
    count = pages_for(len(sequence.tokens), state.config.page_size)
    if sequence.retired:
        raise BrokenInvariantError(f"a chunk needs all its pages and {sequence.retired} are retired")
    spare, num_exact = sequence.pages.array(count), sequence.num_exact
    chunk = Chunk(
        tokens=sequence.tokens,
        pages=IntVector.of(sequence.pages.array(0, count)) if len(spare) else sequence.pages,
        provenance=EXACT if num_exact == len(sequence.tokens) else sequence.provenance,
        num_exact=num_exact,
        gaps=sequence.gaps,
        fingerprint=model.fingerprint,
        engine=state.runtime.lease.engine,
        liveness=state.next_id,
    )
    pool = pools.release(state.pool, spare.tolist())
    pool = pools.insert(pool, chunk.token_ids[:num_exact], chunk.pages.array(), 0)  # a reply's pages are not indexed yet
    return replace(state, pool=pool, chunks=state.chunks.set(chunk.liveness, chunk), next_id=state.next_id + 1), chunk


def detach(model: Model, state: EngineState, request_id: int) -> tuple[EngineState, Chunk | None]:
    """End a request of `submit_many(keep=True)`, wherever it stands, and hand its KV over as a chunk of the tokens filled so far.

    The newest token is not among them: a continuation runs it. None where nothing is filled. Raises
    `InvalidRequestError` for a request that this state does not hold.
    """
    state = enter_with(model, state)
    waiting, running, kept = state.waiting, state.running, state.kept
    if request_id in kept:
        sequence, kept = kept[request_id], kept.delete(request_id)
    elif request_id in waiting.items:
        sequence, waiting = waiting.items[request_id], waiting.pop(request_id)
    else:
        sequence = next((s for s in running if s.request.request_id == request_id), None)
        if sequence is None:
            raise InvalidRequestError(f"request {request_id!r} is neither kept, waiting nor running")
        running = tuple(s for s in running if s is not sequence)
    if state.pool.frames is not None and not sequence.request.keep:
        raise InvalidRequestError(f"request {request_id} was not queued to be kept, and gives up what is outside of the model's windows")
    state = replace(state, waiting=waiting, running=running, kept=kept)
    if not sequence.num_filled:
        return commit_state(state, pool=give_up_pages(state.pool, sequence)), None
    filled = replace(sequence, tokens=sequence.tokens.truncate(sequence.num_filled))
    state, chunk = chunk_of(model, state, filled)
    return commit_state(state), chunk
