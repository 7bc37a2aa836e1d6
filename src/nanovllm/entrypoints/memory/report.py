"""`memory`: who owns the pages of an engine, which pages are shared, and how many pages sharing saves."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from nanovllm.engine.donation import enter, require_live
from nanovllm.entrypoints.memory.pages import DiskReport, FrameReport, Kind, PageFigures, PageOwner
from nanovllm.entrypoints.memory.svg import draw as draw_svg
from nanovllm.entrypoints.memory.text import draw as draw_text
from nanovllm.entrypoints.memory.tree import idle_paths, tree
from nanovllm.errors import InvalidRequestError
from nanovllm.executor.executor import Runtime
from nanovllm.sampling.keywords import explain_unknown_keywords
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import KVState
from nanovllm.state.request import Sequence
from nanovllm.types import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class MemoryReport(PageFigures):
    """The pages of an engine's pool by owner. `print` it, or write `svg()` to a file.

    Attributes:
        page_size: Tokens per page.
        page_bytes: Bytes of a page over all layers, its frame included.
        owners: The owners, chunks first.
        runs: The radix tree of the owners' pages and of the idle pages, each node after its parent.
        page_owners: For each page its owners.
        idle: The pages that only the prefix index holds.
        num_indexed: Pages that the prefix index can find, with and without owners.
        frames: The frames, if the model has sliding-window layers.
        num_host_pages: Pages of host memory; 0 without the option `host_kv_gib`.
        num_host_used: Pages of host memory that have KV.
        disk: The KV on disk. None: the engine was made without `kv_dir`.

    Examples:
        >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
        >>> state, twin = nv.fork(state, facts)
        >>> report = nv.memory(state)
        >>> report
        MemoryReport(1 of 64 pages used, 1 of 2 saved)
        >>> report.num_shared, report.num_free
        (1, 63)
    """

    def text(self, *, color: bool = False) -> str:
        """The figures, a map of the pages and the tree, as lines of text.

        Args:
            color: Whether to colour the map for a terminal.

        Returns:
            The text.

        Examples:
            >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
            >>> print(nv.memory(state, names={"facts": facts}).text())
            1 of 64 pages used (1 held by chunks, 0 by requests, 0 only in the index), 63 free
            0 shared; 0 of 1 page saved (0.00%): 128.0 KiB held instead of 128.0 KiB, 128.0 KiB per page
            <BLANKLINE>
             0  c...............................................................
            . free   - only in the index   c a chunk's   r a request's   2-9 owners   # more owners
            <BLANKLINE>
            [0] 1 page: facts (chunk 0, 11 tokens)
        """
        return draw_text(self, color=color)

    def svg(self) -> str:
        """The same as a picture, with tooltips that name a page and its owners.

        Returns:
            An SVG document.

        Examples:
            >>> nv.memory(state).svg()[:4]
            '<svg'
        """
        return draw_svg(self)

    def __repr__(self) -> str:
        return f"MemoryReport({self.num_used} of {self.num_pages} pages used, {self.num_saved} of {self.num_references} saved)"

    def __str__(self) -> str:
        return self.text()

    def _repr_svg_(self) -> str:
        return self.svg()


@explain_unknown_keywords
def memory(state: EngineState, *, names: Mapping[str, Chunk | int] | None = None) -> MemoryReport:
    """Report who owns the pages of a state, and how many pages sharing saves.

    Does not donate `state`. The report does not change with later calls. It takes time linear in the pool and in the owners' pages, and
    reads no device memory.

    Args:
        state: The newest state of the engine. It stays usable.
        names: Names for chunks, and for requests by their ids.

    Returns:
        The report.

    Raises:
        InvalidRequestError: A name is not a text, or its value is neither a chunk nor the id of a current request.
        DonatedStateError: `state` was donated to a later call.
        ReleasedChunkError: A named chunk was released.
        ForeignChunkError: A named chunk belongs to another engine.

    Examples:
        >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
        >>> state, question = nv.prefill(model, state, " Who is the king?", after=facts)
        >>> report = nv.memory(state, names={"facts": facts, "question": question})
        >>> report.num_used, [owner.name for owner in report.owners]
        (2, ['facts', 'question'])
    """
    state = enter(state)
    pool, index = state.config.num_pages, state.prefix
    num_host_pages, num_host_used = host_pages_of(state)
    drafts = drafts_of(state)
    called = _called(state, names, {number for _, kind, number in drafts if kind != "chunk"})
    owners = owners_of(drafts, called, pool)
    page_owners = by_page(owners, pool)
    return MemoryReport(
        page_size=state.config.page_size,
        page_bytes=page_bytes(state.kv),
        owners=owners,
        runs=tree([*((owner.pages, owner) for owner in owners if owner.pages), *((path, None) for path in idle_paths(index))]),
        page_owners=page_owners,
        idle=frozenset(index.idle_pages()),
        num_indexed=len(index.pages()),
        frames=_frames(state, sum(map(bool, page_owners))),
        num_host_pages=num_host_pages,
        num_host_used=num_host_used,
        disk=_disk(state),
    )


def host_pages_of(state: EngineState) -> tuple[int, int]:
    """How many pages host memory has room for, and how many of them have KV. Both are 0 without `host_kv_gib`."""
    host = state.pool.host
    return (0, 0) if host is None else (host.num_pages, host.used.num_used)


def _disk(state: EngineState) -> DiskReport | None:
    """The figures of KV on disk."""
    if not isinstance(state.runtime, Runtime) or (disk := state.runtime.disk) is None:
        return None
    folder = disk.folder
    num_frames = folder.num_frames
    return DiskReport(
        num_pages=len(folder) - num_frames, num_frames=num_frames, num_bytes=folder.size, max_bytes=folder.max_bytes, counts=disk.counts
    )


Draft = tuple[Chunk | Sequence, Kind, int]  # an owner, what it is, and its number


def drafts_of(state: EngineState) -> list[Draft]:
    """All owners, chunks first."""
    return [*_chunks(state), *_requests(state)]


def owners_of(drafts: Seq[Draft], names: Mapping[tuple[bool, int], str], pool: int) -> tuple[PageOwner, ...]:
    """Owners of the pages of a pool as the report has them, with names by (whether it is a chunk, number)."""
    arrays = [source.pages.array() for source, _, _ in drafts]
    counts = np.bincount(np.concatenate([np.empty(0, np.int32), *arrays]), minlength=pool)
    return tuple(
        PageOwner(
            kind=kind,
            id=number,
            name=names.get((kind == "chunk", number)),
            num_tokens=len(source.tokens),
            num_filled=source.num_filled if isinstance(source, Sequence) else len(source.tokens),
            pages=tuple(pages.tolist()),
            num_own=int((counts[pages] == 1).sum()),
            provenance=source.provenance,
        )
        for (source, kind, number), pages in zip(drafts, arrays, strict=True)
    )


def by_page(owners: Iterable[PageOwner], pool: int) -> tuple[tuple[PageOwner, ...], ...]:
    """For each page its owners."""
    found: dict[int, list[PageOwner]] = {}
    for owner in owners:
        for page in owner.pages:
            found.setdefault(page, []).append(owner)
    return tuple([tuple(found.get(page, ())) for page in range(pool)])


def _chunks(state: EngineState) -> Iterable[Draft]:
    """The live chunks."""
    return ((state.chunks[number], "chunk", number) for number in sorted(state.chunks))


def _requests(state: EngineState) -> Iterable[Draft]:
    """The requests in all phases."""
    groups: list[tuple[Kind, Iterable[Sequence]]] = [
        ("running", state.running),
        ("waiting", state.waiting),
        ("kept", state.kept.values()),
        ("session", (sequence for session in state.sessions.values() for sequence in session.sequences)),
    ]
    requests: list[Draft] = [(sequence, kind, sequence.request.request_id) for kind, group in groups for sequence in group]
    return sorted(requests, key=lambda draft: draft[2])


def _called(state: EngineState, names: Mapping[str, Chunk | int] | None, requests: set[int]) -> dict[tuple[bool, int], str]:
    """Names by (whether it is a chunk, id)."""
    if not isinstance(names, Mapping | None):
        raise InvalidRequestError(f"names must be a mapping from names to chunks or request ids, not {type(names).__name__}")
    called = {}
    for name, what in (names or {}).items():
        if not isinstance(name, str) or not name.strip():
            raise InvalidRequestError(f"names: the name {name!r} must be a text that is not blank")
        if isinstance(what, Chunk):
            require_live(state, what)
            called[True, what.liveness] = name
        elif isinstance(what, int) and not isinstance(what, bool) and what in requests:
            called[False, what] = name
        else:
            raise InvalidRequestError(f"names[{name!r}]={what!r} must be a chunk, or the id of a current request")
    return called


def page_bytes(kv: KVState) -> int:
    """Bytes of one page over all pools."""
    return sum(map(_bytes_in, kv.pools))


def _bytes_in(pool: Tensor) -> int:
    """Bytes of one page, or one frame, in a pool."""
    return pool.numel() // pool.shape[1] * pool.element_size()


def _frames(state: EngineState, num_held: int) -> FrameReport | None:
    """The report of the frames, or None without sliding-window layers."""
    frames = state.pool.frames
    if frames is None:
        return None
    spare = frames.spare.count
    return FrameReport(
        num_frames=frames.num_frames,
        num_needed=frames.used.num_used - spare,
        num_spare=spare,
        frame_bytes=_bytes_in(state.kv.pools[-1]),
        num_held=num_held,
    )
