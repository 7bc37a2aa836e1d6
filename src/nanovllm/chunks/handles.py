"""Handles on KV: `fork`, `truncate`, `release`, which never run the model; `detach`, and a sequence handed over as a chunk."""

import operator
from dataclasses import replace
from typing import SupportsIndex

from nanovllm.engine.donation import commit_state, enter, enter_with, require_chunk, require_live
from nanovllm.engine.mirrored import mirrored
from nanovllm.errors import BrokenInvariantError, InvalidRequestError, OutOfPagesError
from nanovllm.models.model import Model
from nanovllm.state import pool as pools
from nanovllm.state.chunk import EXACT, Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.moved_chunks import given_up, share
from nanovllm.state.request import Sequence
from nanovllm.state.sequence_pages import give_up_pages
from nanovllm.state.vector import IntVector


@mirrored
def fork(state: EngineState, chunk: Chunk) -> tuple[EngineState, Chunk]:
    """Make a second handle on the same KV.

    Donates `state`. Each handle is released separately. No page is copied.

    Args:
        state: The newest state of the engine.
        chunk: The chunk to share. It stays valid.

    Returns:
        The next state, and a chunk of the same tokens in the same pages.

    Raises:
        InvalidRequestError: `chunk` is not a chunk.
        DonatedStateError: `state` was donated to a later call.
        ReleasedChunkError: `chunk` was released.
        ForeignChunkError: `chunk` belongs to another engine.

    Examples:
        >>> state, story = nv.prefill(model, state, "Once upon a time")
        >>> state, twin = nv.fork(state, story)
        >>> state = nv.release(state, story)
        >>> state, reply = nv.generate(model, state, twin, nv.SamplingParams(temperature=0, max_tokens=5))
        >>> reply.text
        ', a boy named Jonas'
    """
    require_chunk(chunk)
    return truncate(state, chunk, len(chunk))


@mirrored
def truncate(state: EngineState, chunk: Chunk, length: SupportsIndex) -> tuple[EngineState, Chunk]:
    """Make a handle on the first `length` tokens of a chunk.

    Donates `state`. The new chunk shares the pages, so no page is copied.

    Args:
        state: The newest state of the engine.
        chunk: The chunk to shorten. It stays valid.
        length: Tokens to keep, from 1 to `len(chunk)`.

    Returns:
        The next state, and the shorter chunk.

    Raises:
        InvalidRequestError: `length` is out of range, or `chunk` is not a chunk.
        DonatedStateError: `state` was donated to a later call.
        ReleasedChunkError: `chunk` was released.
        ForeignChunkError: `chunk` belongs to another engine.

    Examples:
        >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
        >>> state, beginning = nv.truncate(state, facts, 7)
        >>> model.tokenizer.decode(beginning.token_ids)
        'The king of Aistonia is'
    """
    state, twin = cut_live(enter(state), chunk, length)
    return commit_state(state), twin


def cut_live(state: EngineState, chunk: Chunk, length: SupportsIndex) -> tuple[EngineState, Chunk]:
    """`truncate` without the commit. A handle on a chunk in host memory is there, too."""
    chunk = require_live(state, chunk)
    try:
        count = 0 if isinstance(length, bool) else operator.index(length)
    except TypeError:
        count = 0
    if not 1 <= count <= len(chunk):
        raise InvalidRequestError(f"length={length!r} must be an integer from 1 to {len(chunk)}, the number of tokens of the chunk")
    twin = replace(cut(chunk, count, state.config.page_size), liveness=state.next_id)
    pool, chunks = pools.acquire(state.pool, twin.pages), state.chunks.set(twin.liveness, twin)
    if (host := pool.host) is not None and chunk.liveness in host.moved:
        pool = replace(pool, host=share(host, chunk, twin, pages_for(count, state.config.page_size), state.config.page_size))
    return replace(state, pool=pool, chunks=chunks, next_id=state.next_id + 1), twin


@mirrored
def release(state: EngineState, chunk: Chunk) -> EngineState:
    """End a handle.

    Donates `state`. Pages stay readable through other handles. The prefix index may reuse them until they are evicted.

    Args:
        state: The newest state of the engine.
        chunk: The chunk to release. Any later use of it raises `ReleasedChunkError`.

    Returns:
        The next state.

    Raises:
        InvalidRequestError: `chunk` is not a chunk.
        DonatedStateError: `state` was donated to a later call.
        ReleasedChunkError: `chunk` was released before.
        ForeignChunkError: `chunk` belongs to another engine.

    Examples:
        >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
        >>> len(state.chunks)
        1
        >>> state = nv.release(state, facts)
        >>> len(state.chunks)
        0
    """
    return commit_state(released(enter(state), chunk))


def released(state: EngineState, chunk: Chunk) -> EngineState:
    """`release` without the commit."""
    chunk = require_live(state, chunk)
    pool = pools.release(state.pool, chunk.pages)
    if (host := pool.host) is not None and chunk.liveness in host.moved:
        pool = replace(pool, host=given_up(host, chunk.liveness))
    return replace(state, pool=pool, chunks=state.chunks.delete(chunk.liveness))


def cut(chunk: Chunk, length: int, page_size: int) -> Chunk:
    """The first `length` tokens of a chunk, as a chunk that owns no page. It keeps the `liveness` of `chunk`."""
    exact = min(chunk.num_exact, length)
    return replace(
        chunk,
        tokens=chunk.tokens.truncate(length),
        pages=chunk.pages.truncate(min(len(chunk.pages), pages_for(length, page_size))),  # none in host memory
        provenance=EXACT if exact == length else chunk.provenance,
        num_exact=exact,
        gaps=tuple(gap for gap in chunk.gaps if gap[0] < length),
    )


def chunk_of(model: Model, state: EngineState, sequence: Sequence) -> tuple[EngineState, Chunk]:
    """Turn a completely filled sequence into a chunk and index its exact tokens. Pages after its last token return to the pool.

    Raises:
        OutOfPagesError: Some tokens are not filled.
        BrokenInvariantError: The sequence gave up the KV of sliding-window layers.
    """
    if sequence.num_filled != len(sequence.tokens):
        raise OutOfPagesError(f"the chunk cannot be made: {sequence.todo} of its {len(sequence.tokens)} tokens have no KV")
    count = pages_for(len(sequence.tokens), state.config.page_size)
    if sequence.retired:
        raise BrokenInvariantError(f"a chunk needs all its pages, but {sequence.retired} of them gave up the KV of sliding-window layers")
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
    # the pages of a reply are not indexed before this
    pool = pools.insert(pool, chunk.token_ids[:num_exact], chunk.pages.array(), sequence.request.namespace)
    return replace(state, pool=pool, chunks=state.chunks.set(chunk.liveness, chunk), next_id=state.next_id + 1), chunk


def released_chunk(model: Model, state: EngineState, sequence: Sequence) -> tuple[EngineState, Chunk]:
    """A chunk of a failed sequence that has given up its pages: to use it raises `ReleasedChunkError`."""
    chunk = Chunk(
        tokens=sequence.tokens, pages=IntVector.of(), provenance=sequence.provenance, num_exact=0, gaps=(), fingerprint=model.fingerprint,
        engine=state.runtime.lease.engine, liveness=state.next_id,
    )  # fmt: skip
    return replace(state, next_id=state.next_id + 1), chunk


@mirrored
def detach(model: Model, state: EngineState, request_id: int) -> tuple[EngineState, Chunk | None]:
    """End a request of `submit_many(keep=True)`, in any phase, and turn its filled tokens into a chunk.

    The newest token has no KV yet, so the chunk ends before it; a continuation runs it.

    Returns:
        The next state, and the chunk, or None if no token is filled.

    Raises:
        InvalidRequestError: The state does not hold this request, or the request was not queued with `keep=True`.
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
            raise InvalidRequestError(f"request {request_id!r} is not kept, waiting or running: use an id of submit_many(keep=True)")
        running = tuple(s for s in running if s is not sequence)
    if state.pool.frames is not None and not sequence.request.keep:
        raise InvalidRequestError(
            f"request {request_id} gave up KV outside its windows, so it cannot become a chunk: queue it with keep=True"
        )
    state = replace(state, waiting=waiting, running=running, kept=kept)
    if not sequence.num_filled:
        return commit_state(state, pool=give_up_pages(state.pool, sequence)), None
    filled = replace(sequence, tokens=sequence.tokens.truncate(sequence.num_filled))
    state, chunk = chunk_of(model, state, filled)
    return commit_state(state), chunk
