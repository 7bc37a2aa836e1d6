"""The functions of an engine on named chunks, which front ends call between two steps, and how an ended request becomes a chunk.

They move KV on the device or only count owners. What runs many tokens is a request like others, so that its prompt shares steps with them.
Files are written and read in a thread, while steps run.
"""

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
from nanovllm.chunks.storage import blocks
from nanovllm.chunks.storage import file as chunk_file
from nanovllm.chunks.thinking import think_spans
from nanovllm.entrypoints.server import saved_chunks
from nanovllm.entrypoints.server.held import Held
from nanovllm.entrypoints.server.named_chunks import Named, NamedChunks, count_pages, deleted, settled
from nanovllm.entrypoints.server.saved_list import listed
from nanovllm.entrypoints.server.side_thread import Between, Later
from nanovllm.entrypoints.server.wire import Keep
from nanovllm.errors import ChunkFileError, InvalidRequestError, NanoVLLMError, OutOfPagesError
from nanovllm.executor.executor import runtime_of
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.request import RequestOutput

# Functions that read the KV of the chunks that they name, or give up its file.
READERS = frozenset(("fork_chunk", "truncate_chunk", "compose_chunks", "drop_spans", "save_chunk", "delete_saved"))


def unread_by(named: NamedChunks, function: str, arguments: Mapping[str, Any]) -> int | None:
    """The `liveness` of the first chunk whose KV must be read from its file before a function of this module is called, or None."""
    if function not in READERS:
        return None
    return named.first_unread(arguments["space"], arguments.get("names") or [arguments["name"]])


def described(name: str, named: Named, *, loaded: bool = True) -> dict[str, Any]:
    """What clients are told of a chunk. It is not `loaded` as long as its KV is only in its file."""
    chunk = named.chunk
    return {
        "object": "chunk",
        "name": name,
        "created": named.created,
        "tokens": len(chunk),
        "pages": len(chunk.pages),
        "exact": chunk.provenance.exact,
        "operations": list(chunk.provenance.operations),
        "loaded": loaded,
    }


def chunks(held: Held, *, space: str) -> tuple[Held, dict[str, Any]]:
    """The chunks of a namespace, and what it may have."""
    named, found = held.named, held.named.space(space)
    listed = [_described(named, found[name], name) for name in sorted(found)]
    used = count_pages(held.state, named.chunks(space))
    most, pages, size = named.limits.most, named.most_pages(held.state), held.state.config.page_size
    limits = {"chunks": most, "files": most if named.limits.folder is not None else 0, "pages": pages, "page_size": size}
    return held, {"object": "list", "data": listed, "pages": used, "limits": limits}


def chunk(held: Held, *, space: str, name: str) -> tuple[Held, dict[str, Any]]:
    """One chunk."""
    return held, _described(held.named, held.named.get(space, name), name)


def _described(named: NamedChunks, found: Named, name: str) -> dict[str, Any]:
    return described(name, found, loaded=found.chunk.liveness not in named.unread)


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
    held = replace(held, state=state, named=named)
    saved_chunks.unmark(held, space, name)
    return held, None


def fork_chunk(held: Held, *, space: str, name: str, to: str, replaced: bool) -> tuple[Held, Any]:
    """Give a chunk a second name."""
    source = held.named.get(space, name).chunk
    held.named.require_room(held.state, space, to, replaced=replaced)
    return _named(held, fork(held.state, source), space, to, replaced=replaced)


def truncate_chunk(held: Held, *, space: str, name: str, to: str, tokens: int, replaced: bool) -> tuple[Held, Any]:
    """Name the beginning of a chunk."""
    source = held.named.get(space, name).chunk
    if not 1 <= tokens <= len(source):
        raise InvalidRequestError(f"tokens={tokens} must be an integer from 1 to {len(source)}, the number of tokens of the chunk")
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


def save(held: Held, *, space: str, name: str) -> tuple[Held, Later]:
    """Write a chunk to its file, while steps run. Its pages stay until the file is complete, and count until then."""
    held.named.get(space, name)
    path = saved_chunks.path_of(held.named.limits, space, name)
    saved_chunks.require_own(path, name, held.model, held.state.kv.pools[0].dtype)
    saved_chunks.disclaim(path)
    return save_unasked(held, space=space, name=name, own=False)


def save_unasked(held: Held, *, space: str, name: str, own: bool = True) -> tuple[Held, Later]:
    """`save`, but if the file is the server's `own`, it goes when the chunk goes."""
    found, path, most = held.named.get(space, name), saved_chunks.path_of(held.named.limits, space, name), held.named.limits.most
    state, pinned = fork(held.state, found.chunk)
    head, model = chunk_file.head_of(state, pinned), held.model
    own = own and saved_chunks.claim(path)
    pin = space, pinned

    def end(held: Held, size: Any) -> tuple[Held, Any]:
        left = tuple(one for one in held.named.pinned if one is not pin)
        held = replace(held, state=release(held.state, pinned), named=replace(held.named, pinned=left))
        if isinstance(size, Exception):
            return held, told(size, f"the chunk {name!r} could not be saved")
        now = held.named.space(space).get(name)
        if now is not None and now.chunk.liveness == found.chunk.liveness:  # not another chunk of this name, nor deleted
            saved_chunks.mark(path, name, found.created)
        elif own:
            saved_chunks.discard(path)
        return held, {**described(name, found), "bytes": size}

    def work(between: Between) -> int:
        return saved_chunks.write(between, path, name, pinned, head, model, most)

    named = replace(held.named, pinned=(*held.named.pinned, pin))
    return replace(held, state=state, named=named), Later(work=work, end=end)


def load_saved(held: Held, *, space: str, name: str, replaced: bool, namespace: int) -> tuple[Held, Later]:
    """Load the file of a name. It is read and checked while steps run, and then put into pages."""
    path = saved_chunks.path_of(held.named.limits, space, name)
    held.named.without_refusal(space, name).require_room(held.state, space, name, replaced=replaced)

    def end(held: Held, found: Any) -> tuple[Held, Any]:
        if isinstance(found, Exception):
            return held, told(found, f"the file of the chunk {name!r} could not be read")
        return _put_into_pages(held, found, space, name, replaced=replaced, namespace=namespace)

    return held, Later(work=lambda _: saved_chunks.read(path, name, held.model), end=end)


def delete_saved(held: Held, *, space: str, name: str) -> tuple[Held, Later]:
    """Delete the file of a name, while steps run."""
    path = saved_chunks.path_of(held.named.limits, space, name)

    def end(held: Held, found: Any) -> tuple[Held, Any]:
        if isinstance(found, Exception):
            return held, told(found, f"the file of the chunk {name!r} could not be deleted")
        if not path.exists():  # not saved once more meanwhile
            saved_chunks.unmark(held, space, name)
            held = replace(held, named=held.named.without_refusal(space, name))
        return held, None

    return held, Later(work=lambda _: saved_chunks.delete(path, name), end=end, short=True)


def list_saved(held: Held, *, space: str) -> tuple[Held, Later]:
    """The files of a namespace, whose headers are read while steps run."""
    folder, kv_dtype = saved_chunks.path_of(held.named.limits, space, "").parent, held.state.kv.pools[0].dtype

    def end(held: Held, found: Any) -> tuple[Held, Any]:
        return held, told(found, "the chunk files could not be listed") if isinstance(found, Exception) else found

    return held, Later(work=lambda _: listed(folder, held.model, kv_dtype), end=end, short=True)


def save_kept(held: Held) -> list[str]:
    """Save the chunks that are not as their files, at an orderly end, if chunks are kept. Returns why chunks were not saved."""
    problems, limits = [], held.named.limits
    for space, _ in limits.spaces if limits.kept else ():
        for name, found in sorted(held.named.space(space).items(), key=lambda item: (item[1].created, item[0])):
            if saved_chunks.is_marked(path := saved_chunks.path_of(limits, space, name), name):
                continue
            if found.chunk.liveness in held.named.unread:  # its file, which somebody else has changed, was all that there was of it
                continue
            try:
                head = chunk_file.head_of(held.state, found.chunk)
                saved_chunks.write(lambda copy: copy(held), path, name, found.chunk, head, held.model, limits.most)
                saved_chunks.mark(path, name, found.created)
            except Exception as error:  # of one chunk; the others are saved all the same
                problems.append(str(told(error, f"{name}: the file could not be written")))
    return problems


def _put_into_pages(held: Held, found: Any, space: str, name: str, *, replaced: bool, namespace: int) -> tuple[Held, Any]:
    """Name a chunk that was read."""
    head, whole = found
    refused = held.named.refused
    held = replace(held, named=held.named.without_refusal(space, name))  # of the file that is being loaded
    held.named.require_room(held.state, space, name, replaced=replaced)
    if runtime_of(held.state).mirror is None:
        loaded = chunk_file.place(held.model, held.state, head, Path(name), lambda: blocks.windows_of(head, whole), namespace)
    else:  # the other ranks read the file, too
        loaded = _from_file(held, space, name, namespace)
    held, value = _loaded(held, loaded, space, name, replaced=replaced)
    if isinstance(value, NanoVLLMError):
        held = replace(held, named=replace(held.named, refused=refused))
    return held, value


def _from_file(held: Held, space: str, name: str, namespace: int) -> tuple[EngineState, Chunk]:
    """A chunk whose file is read straight into pages. Its digest is checked before the chunk is made."""
    path = saved_chunks.path_of(held.named.limits, space, name)
    with saved_chunks.opened(path, f"the chunk {name!r}") as fd:
        return chunk_file.load(held.model, held.state, fd, Path(name), namespace)


def _loaded(held: Held, loaded: tuple[EngineState, Chunk], space: str, name: str, *, replaced: bool) -> tuple[Held, Any]:
    """Name a chunk that was loaded, and note that it is as its file, which a client has asked for."""
    path = saved_chunks.path_of(held.named.limits, space, name)
    saved_chunks.disclaim(path)  # otherwise it is deleted, as that of an older chunk
    held, value = _named(held, loaded, space, name, replaced=replaced)
    if not isinstance(value, NanoVLLMError):
        saved_chunks.mark(path, name, held.named.get(space, name).created)
    return held, value


def told(error: Exception, problem: str) -> NanoVLLMError:
    """What clients are told of an error in the thread of files."""
    return error if isinstance(error, NanoVLLMError) else ChunkFileError(f"{problem}: {type(error).__name__}")


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
    return _named(replace(held, state=state), (state, made), keep.space, keep.name, replaced=keep.replaced, field=keep.field)


def _named(held: Held, made: tuple[Any, Chunk], space: str, name: str, *, replaced: bool, field: str = "replace") -> tuple[Held, Any]:
    """Give a new chunk its name, or release it and return the error."""
    state, named, error = settled(made[0], held.named, space, name, made[1], created=int(time.time()), replaced=replaced, field=field)
    held = replace(held, state=state, named=named)
    if error is not None:
        return held, error
    saved_chunks.unmark(held, space, name)  # if the name has a file, it is that of an older chunk
    return held, described(name, named.get(space, name))


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
        "list_saved": list_saved,
    }
)
