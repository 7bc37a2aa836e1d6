"""Named chunks that a new engine has at once, though their KV is still in files: their pages are taken at its start, and filled later.

At the start only the heads of the files are read. A file whose content turns out to be damaged takes its chunk's name with it.
"""

from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm.chunks.storage import file as chunk_file
from nanovllm.chunks.storage import reserved
from nanovllm.entrypoints.server import saved_chunks
from nanovllm.entrypoints.server.chunk_calls import told
from nanovllm.entrypoints.server.held import Held
from nanovllm.entrypoints.server.named_chunks import NamedChunks, Refused, Unread, deleted, settled
from nanovllm.entrypoints.server.side_thread import Between, Later
from nanovllm.errors import ChunkLimitError, EngineDeadError, NanoVLLMError, OutOfPagesError, UnknownChunkError
from nanovllm.executor.executor import runtime_of
from nanovllm.state.chunk import Chunk
from nanovllm.state.device_errors import out_of_memory
from nanovllm.state.prefix_keys import keys_from

Shared = dict[bytes, Chunk]  # a chunk by the key of each of its full pages of exact KV


def hold_marked(held: Held) -> tuple[Held, list[str]]:
    """Name the chunks that were in memory and have files, as far as they fit, when an engine is started again or chunks are kept.

    Their pages are taken and their heads checked; their KV is not read. Those that begin with the same tokens share pages. The files of
    those that do not fit are noted as refused.

    Returns:
        What is held next, and why chunks are missing.
    """
    problems, limits, shared, refused = list[str](), held.named.limits, Shared(), held.named.refused
    spaces = limits.spaces if limits.folder is not None else ()
    todo = [(used, space, namespace, name) for space, namespace in spaces for name, used in saved_chunks.marked(limits, space).items()]
    for _, space, namespace, name in sorted(todo):
        try:
            held.named.require_room(held.state, space, name, replaced=False)
            held, error = _with_pages(held, space, namespace, name, shared)
        except EngineDeadError:
            raise
        except Exception as problem:  # of one chunk, which the others and the engine can do without
            error = told(problem, f"{name}: the file could not be loaded")
        if error is None:
            continue
        problems.append(str(error))
        path = saved_chunks.path_of(limits, space, name)
        if isinstance(error, UnknownChunkError):
            saved_chunks.forget(path)
        elif not (isinstance(error, (ChunkLimitError, OutOfPagesError)) and saved_chunks.is_claimed(path)):  # such a chunk lacks only room
            refused = refused.set((space, name), Refused(path=path, why=str(error)))
    return replace(held, named=replace(held.named, refused=refused)), problems


def _with_pages(held: Held, space: str, namespace: int, name: str, shared: Shared) -> tuple[Held, NanoVLLMError | None]:
    """Name the chunk of a file, and note its pages for chunks that begin with the same tokens.

    Returns:
        What is held next, and why the chunk has no name, or None.
    """
    path = saved_chunks.path_of(held.named.limits, space, name)
    with saved_chunks.opened(path, f"the chunk {name!r}") as fd:
        head = chunk_file.decode(held.model, fd, Path(name))
        keys = [*keys_from(head.tokens[: head.num_exact], 0, held.state.config.page_size, namespace)]
        known = [*takewhile(shared.__contains__, keys)]
        base = shared[known[-1]] if known else None
        state, chunk = reserved.reserve(held.model, held.state, fd, Path(name), base, len(known))
    saved_chunks.label(path, name)  # a file may have come without one
    state, named, error = settled(state, held.named, space, name, chunk, created=saved_chunks.created(path), replaced=False)
    if error is None:
        shared.update(dict.fromkeys(keys[len(known) :], chunk))
        unread = Unread(space=space, name=name, chunk=chunk, namespace=namespace)
        named = replace(named, unread=named.unread.set(chunk.liveness, unread))
    return replace(held, state=state, named=named), error


def read_in(held: Held, number: int) -> Later:
    """Read the KV of a chunk from its file, while steps run. With several ranks steps wait for the whole file, which all ranks read.

    The value is the error if the file cannot be read or is damaged: the chunk has lost its name then. It keeps it if only memory is short.
    It is None if the chunk has its KV, or was deleted or replaced meanwhile.

    Args:
        held: What is held.
        number: The `liveness` of a chunk that is `unread`.
    """
    model, first = held.model, held.named.unread[number]
    path, alone = saved_chunks.path_of(held.named.limits, first.space, first.name), runtime_of(held.state).mirror is None

    def work(between: Between) -> None:
        if alone:
            saved_chunks.read_into_pages(between, path, first, model)

    def end(held: Held, found: Any) -> tuple[Held, Any]:
        if (unread := held.named.unread.get(number)) is None:
            return held, None
        try:
            if isinstance(found, Exception):
                raise found
            if alone:
                state = reserved.complete(model, held.state, unread.chunk, unread.namespace)
            else:
                with saved_chunks.opened(path, f"the chunk {unread.name!r}") as fd:
                    name, before = Path(unread.name), unread.num_filled
                    state = reserved.fill(model, held.state, fd, name, unread.chunk, before, unread.namespace)
        except EngineDeadError:
            raise
        except OutOfPagesError as error:
            return held, error
        except Exception as error:
            if not isinstance(error, NanoVLLMError) and (isinstance(error, MemoryError) or out_of_memory(error)):
                short = OutOfPagesError(f"there is too little memory to read the file of the chunk {unread.name!r}: try again later")
                short.__cause__ = error  # so that clients are told of no pages
                return held, short
            state, named = deleted(held.state, held.named, unread.space, unread.name)
            problem = told(error, f"{unread.name}: the file could not be loaded")
            if _by_the_disk(error):  # the file may be whole, so it is kept
                refused = Refused(path=path, why=str(problem))
                named = replace(named, refused=named.refused.set((unread.space, unread.name), refused))
            return replace(held, state=state, named=named), problem
        return replace(held, state=state, named=_filled(held.named, unread)), None

    return Later(work=work, end=end)


def _by_the_disk(error: BaseException | None) -> bool:
    """Whether an error of the system is behind another one."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None


def _filled(named: NamedChunks, read: Unread) -> NamedChunks:
    """The chunks once one of them was read: those that share its first pages need not fill these."""
    unread, pages = named.unread.delete(read.chunk.liveness), read.chunk.pages.array()
    for number, other in unread.items():
        if other.space == read.space:
            own = other.chunk.pages.array(0, len(pages))
            differ = np.flatnonzero(own != pages[: len(own)])
            count = int(differ[0]) if len(differ) else len(own)
            if count > other.num_filled:
                unread = unread.set(number, replace(other, num_filled=count))
    return replace(named, unread=unread)
