"""`NamedChunks`: the chunks that clients have named, and the compositions of several that requests asked for."""

import os
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from immutables import Map

from nanovllm.chunks.compose import compose
from nanovllm.chunks.handles import release
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.errors import ChunkExistsError, ChunkLimitError, NanoVLLMError, UnknownChunkError
from nanovllm.models.model import Model
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState

MOST_COMPOSED = 16  # compositions that are kept for later requests


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLimits:
    """What the chunks of one namespace may use.

    Attributes:
        folder: Where chunk files go; None: chunks are not saved.
        kept: Whether chunks are saved at an orderly end, and loaded at the next start.
        most: How many chunks a namespace may have, and how many files.
        share: The part of the engine's pages that the chunks of a namespace may hold.
        spaces: The namespaces that there can be, each with the number within whose requests its KV may be shared.
    """

    folder: Path | None = None
    kept: bool = False
    most: int = 256
    share: float = 0.5
    spaces: tuple[tuple[str, int], ...] = (("", 0),)


def chunk_limits(settings: Settings) -> ChunkLimits:
    """The limits of each namespace. The keys share what chunks may hold, so that none can take it from the others."""
    share = settings.chunk_share / max(1, len(settings.api_keys))
    spaces = tuple((digest.hex(), place) for place, digest in enumerate(settings.api_keys, 1)) or (("", 0),)
    return ChunkLimits(folder=settings.chunk_dir, kept=settings.keep_chunks, most=settings.max_chunks, share=share, spaces=spaces)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Named:
    """A chunk, and when it got its name, in Unix time."""

    chunk: Chunk
    created: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unread:
    """A named chunk that has its pages, but whose KV is still in its file.

    Attributes:
        space: The namespace of its name.
        name: Its name.
        chunk: The chunk.
        namespace: Within whose requests its KV may be shared.
        num_filled: Its leading pages that are filled, because they are those of another chunk too.
    """

    space: str
    name: str
    chunk: Chunk
    namespace: int
    num_filled: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The file of a chunk that could not be loaded at the start, and why. It may be that of another server, so it is not written over."""

    path: Path
    why: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Composed:
    """A composition, and its members by `liveness`."""

    space: str
    members: tuple[int, ...]
    chunk: Chunk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NamedChunks:
    """The chunks of front ends. A value: functions that change it return the next one, with the next state of the engine.

    Attributes:
        limits: What each namespace may use.
        spaces: The chunks by namespace and name.
        composed: The compositions, the last used last.
        pinned: Chunks without names whose pages files are being made of, each with its namespace, which they count in.
        unread: The chunks whose KV was not read from their files yet, by `liveness`, which ascends from the one that was not used for the
            longest time. They count like the others, and nobody may read their pages.
        refused: The files that were not loaded at the start, by namespace and name. While one is there, no other chunk gets its name.
    """

    limits: ChunkLimits = field(default_factory=ChunkLimits)
    spaces: Map[str, Map[str, Named]] = field(default_factory=Map)
    composed: tuple[Composed, ...] = ()
    pinned: tuple[tuple[str, Chunk], ...] = ()
    unread: Map[int, Unread] = field(default_factory=Map)
    refused: Map[tuple[str, str], Refused] = field(default_factory=Map)

    def space(self, space: str) -> Map[str, Named]:
        """The chunks of a namespace by name."""
        return self.spaces.get(space) or Map()

    def get(self, space: str, name: str) -> Named:
        """The chunk of a name.

        Raises:
            UnknownChunkError: There is none.
        """
        found = self.space(space).get(name)
        if found is None:
            raise UnknownChunkError(f"there is no chunk {name!r}")
        return found

    def first_unread(self, space: str, names: Iterable[str]) -> int | None:
        """The `liveness` of the first chunk of some names whose KV must be read from its file first; None if there is none."""
        found = [self.space(space).get(name) for name in names] if self.unread else []
        return next((named.chunk.liveness for named in found if named is not None and named.chunk.liveness in self.unread), None)

    def chunks(self, space: str, *but: str) -> list[Chunk]:
        """All chunks that hold pages of a namespace's share, but for those of some names."""
        found = [named.chunk for name, named in self.space(space).items() if name not in but]
        return [*found, *(chunk for own, chunk in self.pinned if own == space)]

    def require_room(
        self,
        state: EngineState,
        space: str,
        name: str,
        *,
        replaced: bool,
        coming: int = 0,
        num_pages: int = 0,
        field: str = "replace",
    ) -> None:
        """Refuse a chunk that could not get its name.

        Args:
            state: The newest state.
            space: The namespace.
            name: The name.
            replaced: Whether an older chunk of the name is replaced.
            coming: Chunks of the namespace that are being made.
            num_pages: Pages that the chunk takes besides those of the others.
            field: The field of requests that lets it replace another.

        Raises:
            ChunkExistsError: The name is taken, or has a file that is not to be written over, whatever `replaced` says.
            ChunkLimitError: There are too many chunks, or they are too long.
        """
        if (refused := self.refused.get((space, name))) is not None and os.path.lexists(refused.path):
            left = f"the file of the chunk {name!r} was not loaded when the engine started, and is not written over ({refused.why})"
            raise ChunkExistsError(f"{left}: take another name, or delete the file with DELETE /v1/chunks/{name}/save")
        space_now = self.space(space)
        if name in space_now:
            if not replaced:
                raise ChunkExistsError(f"there is a chunk {name!r} already: delete it, or set {field}")
        elif len(space_now) + coming >= self.limits.most:
            raise ChunkLimitError(f"there are {len(space_now) + coming} chunks, and {self.limits.most} are allowed: delete some")
        most, used = self.most_pages(state), count_pages(state, self.chunks(space, *([name] if replaced else [])))
        if used + num_pages > most:
            wanted = f"the chunk {name!r} needs {num_pages} pages of {state.config.page_size} tokens"
            saved = ", also those that are being saved," if any(own == space for own, _ in self.pinned) else ""
            raise ChunkLimitError(f"{wanted}; chunks{saved} hold {used} of the {most} that they may hold: delete some")

    def without_refusal(self, space: str, name: str) -> "NamedChunks":
        """The chunks, as if the file of a name had not been refused: it was loaded now, or has gone."""
        return replace(self, refused=self.refused.delete((space, name))) if (space, name) in self.refused else self

    def most_pages(self, state: EngineState) -> int:
        """How many pages the chunks of a namespace may hold."""
        return int(self.limits.share * state.config.num_pages)


def settled(
    state: EngineState, named: NamedChunks, space: str, name: str, chunk: Chunk, *, created: int, replaced: bool, field: str = "replace"
) -> tuple[EngineState, NamedChunks, NanoVLLMError | None]:
    """Give a chunk its name. If that cannot be, it is released.

    Returns:
        The next state and chunks, and why the chunk was refused, or None.
    """
    old = named.space(space).get(name)
    others = named.chunks(space, name) if replaced else named.chunks(space)
    more = count_pages(state, [*others, chunk]) - count_pages(state, others)
    try:
        named.require_room(state, space, name, replaced=replaced, num_pages=more, field=field)
    except NanoVLLMError as error:
        return release(state, chunk), named, error
    entry = Named(chunk=chunk, created=created)
    named = replace(named.without_refusal(space, name), spaces=named.spaces.set(space, named.space(space).set(name, entry)))
    if old is not None:
        state, named = _let_go(state, named, old.chunk)
    return *_within(state, named, space), None


def deleted(state: EngineState, named: NamedChunks, space: str, name: str) -> tuple[EngineState, NamedChunks]:
    """Release a chunk.

    Raises:
        UnknownChunkError: There is none of this name.
    """
    chunk = named.get(space, name).chunk
    left = named.space(space).delete(name)
    return _let_go(state, replace(named, spaces=named.spaces.set(space, left) if left else named.spaces.delete(space)), chunk)


def prefix(
    model: Model, state: EngineState, named: NamedChunks, space: str, names: Seq[str], namespace: int
) -> tuple[EngineState, NamedChunks, Chunk, bool]:
    """One chunk of several in a row: the chunk itself, or a composition, which later requests use again.

    Returns:
        The next state and chunks, the chunk, and whether the caller must release it.

    Raises:
        UnknownChunkError: There is no chunk of one of the names.
        InvalidRequestError: The chunks cannot be composed. As after every error, the state is as it was.
        OutOfPagesError: There are too few pages.
    """
    chunks = [named.get(space, name).chunk for name in names]
    if len(chunks) == 1:
        return state, named, chunks[0], False
    members = tuple(chunk.liveness for chunk in chunks)
    for entry in named.composed:
        if entry.members == members:
            return state, replace(named, composed=(*(e for e in named.composed if e is not entry), entry)), entry.chunk, False
    state, whole = compose(model, state, chunks, namespace=namespace)
    if count_pages(state, [*named.chunks(space), whole]) > named.most_pages(state):
        return state, named, whole, True
    named = replace(named, composed=(*named.composed, Composed(space=space, members=members, chunk=whole)))
    return *_within(state, named, space), whole, False


def without_compositions(state: EngineState, named: NamedChunks) -> tuple[EngineState, NamedChunks]:
    """Release all compositions. Requests that begin with one keep its pages."""
    for entry in named.composed:
        state = release(state, entry.chunk)
    return state, replace(named, composed=())


def count_pages(state: EngineState, chunks: Iterable[Chunk]) -> int:
    """How many pages some chunks hold together."""
    return int(held_pages(state, chunks).sum())


def held_pages(state: EngineState, chunks: Iterable[Chunk]) -> np.ndarray:
    """For each page whether one of some chunks holds it, bool `[N]`."""
    held = np.zeros(state.config.num_pages, bool)
    for chunk in chunks:
        held[state.chunks.get(chunk.liveness, chunk).pages.array()] = True  # those that it has now: none in host memory
    return held


def _let_go(state: EngineState, named: NamedChunks, chunk: Chunk) -> tuple[EngineState, NamedChunks]:
    """Release a chunk that has lost its name, and the compositions with it."""
    stale = [entry for entry in named.composed if chunk.liveness in entry.members]
    for one in (chunk, *(entry.chunk for entry in stale)):
        state = release(state, one)
    unread = named.unread.delete(chunk.liveness) if chunk.liveness in named.unread else named.unread
    return state, replace(named, composed=tuple(entry for entry in named.composed if entry not in stale), unread=unread)


def _within(state: EngineState, named: NamedChunks, space: str) -> tuple[EngineState, NamedChunks]:
    """Release the compositions that were not used for the longest time, until the others are within the limits."""
    while named.composed:
        own = [entry for entry in named.composed if entry.space == space]
        held = count_pages(state, [*named.chunks(space), *(entry.chunk for entry in own)])
        if len(named.composed) <= MOST_COMPOSED and (not own or held <= named.most_pages(state)):
            break
        oldest = named.composed[0] if len(named.composed) > MOST_COMPOSED else own[0]
        state = release(state, oldest.chunk)
        named = replace(named, composed=tuple(entry for entry in named.composed if entry is not oldest))
    return state, named
