"""Pages that chunks hold and requests lack: prompts for which chunks leave too few pages, and what clients are told."""

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np

from nanovllm.chunks.handles import release
from nanovllm.chunks.offload import moved_until, with_room_for
from nanovllm.entrypoints.server.named_chunks import NamedChunks, count_pages, held_pages
from nanovllm.errors import NanoVLLMError, OutOfPagesError
from nanovllm.state import pool as pools
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import pages_for

DELETE = "delete chunks that are not needed (DELETE /v1/chunks/NAME), or try again later"


def require_pages(
    state: EngineState, named: NamedChunks, contexts: Seq[Seq[Any]], *, whole: bool, namespace: int
) -> tuple[EngineState, NamedChunks]:
    """Refuse prompts that could not run while the chunks exist, even if nothing else did. An engine would queue them first.

    Compositions that none of the prompts begins with are released if that helps, because they are only kept to save time.

    Args:
        state: The newest state.
        named: The chunks.
        contexts: The parts of each prompt: at most one chunk, and then token ids.
        whole: Whether the KV of all tokens is kept when the request ends.
        namespace: As in `submit_many`.

    Returns:
        The next state and chunks.

    Raises:
        OutOfPagesError: A prompt does not fit. Nothing was released.
    """
    size, total = state.config.page_size, state.config.num_pages
    lengths = [sum(map(len, parts)) for parts in contexts]
    if not state.chunks or pages_for(max(lengths), size) <= state.pool.num_available:
        return state, named
    room = total - count_pages(state, state.chunks.values())
    own = [pages_for(length, size) - shared_pages(state, parts) for parts, length in zip(contexts, lengths, strict=True)]
    short = {_key(parts): (parts, needed) for parts, needed in zip(contexts, own, strict=True) if needed > room}
    if not short:
        return state, named
    begun = {part.liveness for parts in contexts for part in parts[:1] if isinstance(part, Chunk)}
    spare = [entry for entry in named.composed if entry.chunk.liveness not in begun]
    passing = {entry.chunk.liveness for entry in spare}
    lasting = held_pages(state, [chunk for key, chunk in state.chunks.items() if key not in passing])
    wanted = max(min(needed, _beside(state, lasting, parts, whole=whole, namespace=namespace)) for parts, needed in short.values())
    if wanted > (left := total - int(lasting.sum())):
        raise OutOfPagesError(f"the prompt needs {wanted} pages of KV memory, and chunks leave it {left} of {total}: {DELETE}")
    while spare and wanted > room:
        oldest = spare.pop(0)
        state = release(state, oldest.chunk)
        named = replace(named, composed=tuple(entry for entry in named.composed if entry is not oldest))
        room = total - count_pages(state, state.chunks.values())
    return state, named


def moved_away(state: EngineState, named: NamedChunks, contexts: Seq[Seq[Any]]) -> EngineState:
    """The state after chunks were moved to host memory because prompts could not run beside them. It raises nothing.

    Those that a prompt begins with stay, and those that are being saved or were not read from their files yet.

    Args:
        state: The newest state.
        named: The chunks.
        contexts: As in `require_pages`.
    """
    size, total, host = state.config.page_size, state.config.num_pages, state.pool.host
    if host is None or not state.chunks:
        return state
    wanted = max(pages_for(sum(map(len, parts)), size) - shared_pages(state, parts) for parts in contexts)
    begun = {part.liveness for parts in contexts for part in parts[:1] if isinstance(part, Chunk)}
    if wanted > state.pool.num_available:
        state = moved_until(state, lambda after: total - count_pages(after, after.chunks.values()) >= wanted, begun | staying(named))
    return with_room_for(state, contexts, staying(named))


def staying(named: NamedChunks) -> set[int]:
    """The `liveness` of chunks that stay on the device: files are being made of them, or their KV was not read from files yet."""
    return {chunk.liveness for _, chunk in named.pinned}.union(named.unread.keys())


def shared_pages(state: EngineState, parts: Seq[Any]) -> int:
    """How many whole pages a prompt shares with the chunk that it begins with, if this is on the device."""
    if not parts or not isinstance(parts[0], Chunk) or not len(state.chunks[parts[0].liveness].pages):
        return 0
    return len(parts[0]) // state.config.page_size


def _key(parts: Seq[Any]) -> tuple[Any, ...]:
    """What two prompts have in common that are the same."""
    return tuple([part.liveness if isinstance(part, Chunk) else part.tobytes() for part in parts])


def _beside(state: EngineState, held: np.ndarray, parts: Seq[Any], *, whole: bool, namespace: int) -> int:
    """How many pages a prompt takes in addition to those of chunks that the prefix index finds for it."""
    tokens = np.concatenate([part.token_ids if isinstance(part, Chunk) else part for part in parts])
    found, _ = pools.reusable(state.pool, tokens, whole=whole, namespace=namespace)
    return pages_for(len(tokens), state.config.page_size) - int(held[found].sum())


def explained(state: EngineState, error: NanoVLLMError) -> NanoVLLMError:
    """An error of the engine in words for clients of a server, who have no pages to release but chunks to delete."""
    if not isinstance(error, OutOfPagesError) or error.__cause__ is not None or DELETE in str(error):
        return error
    total, held = state.config.num_pages, count_pages(state, state.chunks.values())
    what = "this needs more pages of KV memory than are free now"
    if held:
        return OutOfPagesError(f"{what}, and chunks hold {held} of {total}: {DELETE}")
    return OutOfPagesError(f"{what}, of {total}: try again later")
