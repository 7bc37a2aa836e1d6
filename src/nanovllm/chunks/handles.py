"""Chunks by function calls: `prefill`, `fork`, `truncate`, `release`."""

import operator
from dataclasses import replace
from typing import Any, SupportsIndex

import torch

from nanovllm.chunks.prefill import adopt, fill, plain_sequence, reserve_all
from nanovllm.engine.prompt import parts_of, require_chunk, require_live, resolve
from nanovllm.engine.step import capacity, commit_state, enter, enter_with, guarded
from nanovllm.errors import BrokenInvariantError, InvalidRequestError, OutOfPagesError
from nanovllm.loading.load_model import Model
from nanovllm.sampling.keywords import explain_unknown_keywords
from nanovllm.state import pool as pools
from nanovllm.state.chunk import EXACT, Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.request import Sequence
from nanovllm.state.vector import IntVector


@explain_unknown_keywords
@torch.no_grad()
def prefill(model: Model, state: EngineState, text_or_ids: Any, after: Chunk | None = None) -> tuple[EngineState, Chunk]:
    """Fill the KV of a text, of token ids or of a list of these, after a chunk or alone, and return the whole run as a chunk.

    `after` stays valid. Pages of an indexed prefix are shared, not run again. Raises `InvalidRequestError` for what can never fit,
    `OutOfPagesError` for what does not fit now, `ReleasedChunkError` and `ForeignChunkError` for an `after` that cannot be used.
    """
    state = enter_with(model, state)
    if after is not None:
        require_chunk(after, "after")
        text_or_ids = [after, *parts_of(text_or_ids)]
    resolved = resolve(model, state, text_or_ids)
    num_tokens, limit = len(resolved.tokens), capacity(state, resolved.base)
    if num_tokens > limit:
        raise InvalidRequestError(f"the chunk would have {num_tokens} tokens; this engine holds at most {limit}")
    with guarded(state) as taken:
        filled, sequences = adopt(state, [plain_sequence(resolved.tokens, resolved.base)])
        filled, sequences = reserve_all(filled, sequences, [num_tokens], taken)
        filled, (sequence,) = fill(model, filled, sequences)
        filled, chunk = chunk_of(model, filled, sequence)
        return commit_state(filled), chunk


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
