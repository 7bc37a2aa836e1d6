"""The functions of an engine on named chunks, which front ends call between two steps, and how an ended request becomes a chunk.

They move KV on the device or only count owners. What runs many tokens is a request like others, so that its prompt shares steps with them.
"""

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from nanovllm.chunks.compose import compose, drop
from nanovllm.chunks.handles import detach, fork, release, truncate
from nanovllm.chunks.prefill import prefill
from nanovllm.chunks.storage.file import load, save_chunk
from nanovllm.chunks.thinking import think_spans
from nanovllm.entrypoints.server.held import Held
from nanovllm.entrypoints.server.named_chunks import Named, count_pages, deleted, settled
from nanovllm.entrypoints.server.wire import Keep
from nanovllm.errors import ChunkFileError, ChunkLimitError, InvalidRequestError, NanoVLLMError, OutOfPagesError, UnknownChunkError
from nanovllm.state.chunk import Chunk
from nanovllm.state.request import RequestOutput

SUFFIX = ".safetensors"


def described(name: str, named: Named) -> dict[str, Any]:
    """What clients are told of a chunk."""
    chunk = named.chunk
    return {
        "object": "chunk",
        "name": name,
        "created": named.created,
        "tokens": len(chunk),
        "pages": len(chunk.pages),
        "exact": chunk.provenance.exact,
        "operations": list(chunk.provenance.operations),
    }


def chunks(held: Held, *, space: str) -> tuple[Held, dict[str, Any]]:
    """The chunks of a namespace, and what it may have."""
    named, found = held.named, held.named.space(space)
    listed = [described(name, found[name]) for name in sorted(found)]
    used = count_pages(held.state, named.chunks(space))
    limits = {"chunks": named.limits.most, "pages": named.most_pages(held.state), "page_size": held.state.config.page_size}
    return held, {"object": "list", "data": listed, "pages": used, "limits": limits}


def chunk(held: Held, *, space: str, name: str) -> tuple[Held, dict[str, Any]]:
    """One chunk."""
    return held, described(name, held.named.get(space, name))


def token_ids(held: Held, *, space: str, names: list[str]) -> tuple[Held, bytes]:
    """The tokens of chunks in a row, int32."""
    return held, b"".join([held.named.get(space, name).chunk.token_ids.tobytes() for name in names])


def reuse(held: Held, *, space: str, names: list[str]) -> tuple[Held, dict[str, Any]]:
    """How many tokens chunks in a row have, and whether they are exact as a prompt's beginning."""
    found = [held.named.get(space, name).chunk for name in names]
    return held, {"tokens": sum(map(len, found)), "exact": len(found) == 1 and found[0].provenance.exact}


def delete(held: Held, *, space: str, name: str) -> tuple[Held, None]:
    """Release a chunk."""
    state, named = deleted(held.state, held.named, space, name)
    return replace(held, state=state, named=named), None


def fork_chunk(held: Held, *, space: str, name: str, to: str, replaced: bool) -> tuple[Held, Any]:
    """Give a chunk a second name."""
    source = held.named.get(space, name).chunk
    held.named.require_room(held.state, space, to, replaced=replaced)
    return _named(held, fork(held.state, source), space, to, replaced=replaced)


def truncate_chunk(held: Held, *, space: str, name: str, to: str, tokens: int, replaced: bool) -> tuple[Held, Any]:
    """Name the beginning of a chunk."""
    source = held.named.get(space, name).chunk
    held.named.require_room(held.state, space, to, replaced=replaced)
    return _named(held, truncate(held.state, source, tokens), space, to, replaced=replaced)


def compose_chunks(
    held: Held, *, space: str, names: list[str], to: str, recompute: Any, replaced: bool, namespace: int
) -> tuple[Held, Any]:
    """Join chunks."""
    sources = [held.named.get(space, name).chunk for name in names]
    held.named.require_room(held.state, space, to, replaced=replaced)
    return _named(held, compose(held.model, held.state, sources, recompute, namespace=namespace), space, to, replaced=replaced)


def drop_spans(
    held: Held, *, space: str, name: str, to: str, spans: list[list[int]], mode: Any, replaced: bool, namespace: int
) -> tuple[Held, Any]:
    """Name a chunk without some of its tokens. The spans are those of the chunk as it is; they neither overlap nor touch."""
    source = held.named.get(space, name).chunk
    held.named.require_room(held.state, space, to, replaced=replaced)
    state, current = held.state, source
    for start, stop in sorted(spans, reverse=True):
        try:
            after, shorter = drop(held.model, state, current, start, stop, mode, namespace=namespace)
        except NanoVLLMError as error:
            if current is source:
                raise
            return replace(held, state=release(state, current)), error
        state, current = (after if current is source else release(after, current)), shorter
    return _named(held, (state, current), space, to, replaced=replaced)


def save(held: Held, *, space: str, name: str) -> tuple[Held, dict[str, Any]]:
    """Write a chunk to its file."""
    found, path = held.named.get(space, name), _path(held, space, name)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not path.exists() and sum(1 for _ in path.parent.glob(f"*{SUFFIX}")) >= held.named.limits.most:
            raise ChunkLimitError(f"there are {held.named.limits.most} chunk files, and no more are allowed: delete some")
        save_chunk(held.state, found.chunk, path)
        size = path.stat().st_size
    except (OSError, ChunkFileError) as error:  # the folder's path is not the clients' business
        cause = error.__cause__ if isinstance(error, ChunkFileError) else error
        reason = cause.strerror if isinstance(cause, OSError) else "it could not be written"
        raise ChunkFileError(f"the chunk {name!r} could not be saved: {reason}") from error
    return held, {**described(name, found), "bytes": size}


def load_saved(held: Held, *, space: str, name: str, replaced: bool, namespace: int) -> tuple[Held, Any]:
    """Load the file of a name."""
    path = _path(held, space, name)
    held.named.require_room(held.state, space, name, replaced=replaced)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UnknownChunkError(f"there is no file of the chunk {name!r}") from None
    except OSError as error:
        raise ChunkFileError(f"the file of the chunk {name!r} could not be opened: {error.strerror or error}") from error
    try:
        loaded = load(held.model, held.state, fd, Path(name), namespace)
    finally:
        os.close(fd)
    return _named(held, loaded, space, name, replaced=replaced)


def delete_saved(held: Held, *, space: str, name: str) -> tuple[Held, None]:
    """Delete the file of a name."""
    try:
        _path(held, space, name).unlink()
    except FileNotFoundError:
        raise UnknownChunkError(f"there is no file of the chunk {name!r}") from None
    except OSError as error:
        raise ChunkFileError(f"the file of the chunk {name!r} could not be deleted: {error.strerror or error}") from error
    return held, None


def kept(
    held: Held, request_id: int, keep: Keep, output: RequestOutput, namespace: int
) -> tuple[Held, dict[str, Any] | NanoVLLMError | None]:
    """Make the chunk of a request of `submit_many(keep=True, namespace=namespace)` that has ended.

    Returns:
        What is held next; and the chunk's description, why there is no chunk, or None if the request itself failed.
    """
    state, made = detach(held.model, held.state, request_id)
    if output.error is not None or made is None:
        state = state if made is None else release(state, made)
        return replace(held, state=state), None if output.error is not None else OutOfPagesError("the chunk lost its pages")
    tokens = output.prompt_token_ids
    if keep.what != "prompt":
        tokens = np.concatenate([tokens, np.asarray(output.token_ids, np.int32)])
    stay = np.ones(len(tokens), bool)
    if keep.what == "reply" and held.model.tokenizer is not None:
        for start, stop in think_spans(held.model.tokenizer, tokens, len(output.prompt_token_ids), held.model.config.eos_token_ids):
            stay[start:stop] = False
    begin = min(len(made), len(tokens) if stay.all() else int(stay.argmin()))
    rest = tokens[begin:][stay[begin:]]
    if not begin and not len(rest):  # nothing but thinking
        begin, rest = min(len(made), len(tokens)), tokens[len(made) :]
    try:
        if begin and begin < len(made):
            state, shorter = truncate(state, made, begin)
            state, made = release(state, made), shorter
        if len(rest):
            after, whole = prefill(held.model, state, [made, rest] if begin else rest, namespace=namespace)
            state, made = release(after, made), whole
    except NanoVLLMError as error:
        return replace(held, state=release(state, made)), error
    return _named(replace(held, state=state), (state, made), keep.space, keep.name, replaced=keep.replaced)


def _named(held: Held, made: tuple[Any, Chunk], space: str, name: str, *, replaced: bool) -> tuple[Held, Any]:
    """Give a new chunk its name, or release it and return the error."""
    state, named, error = settled(made[0], held.named, space, name, made[1], created=int(time.time()), replaced=replaced)
    held = replace(held, state=state, named=named)
    return held, described(name, named.get(space, name)) if error is None else error


def _path(held: Held, space: str, name: str) -> Path:
    """The file of a name. Clients choose no part of it.

    Raises:
        InvalidRequestError: The server has no folder for chunks.
    """
    folder = held.named.limits.folder
    if folder is None:
        raise InvalidRequestError("this server does not save chunks: it was started without --chunk-dir")
    return folder / hashlib.sha256(space.encode()).hexdigest()[:32] / (hashlib.sha256(name.encode()).hexdigest() + SUFFIX)


CALLS: Mapping[str, Callable[..., tuple[Held, Any]]] = MappingProxyType(
    {
        "chunks": chunks,
        "chunk": chunk,
        "chunk_token_ids": token_ids,
        "chunk_reuse": reuse,
        "delete_chunk": delete,
        "fork_chunk": fork_chunk,
        "truncate_chunk": truncate_chunk,
        "compose_chunks": compose_chunks,
        "drop_spans": drop_spans,
        "save_chunk": save,
        "load_chunk": load_saved,
        "delete_saved": delete_saved,
    }
)
