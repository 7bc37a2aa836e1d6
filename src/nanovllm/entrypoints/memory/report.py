"""`memory`: who holds the pages of an engine, what they share, and what sharing saves."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from nanovllm.engine.donation import enter, require_live
from nanovllm.entrypoints.memory.pages import FrameReport, Kind, PageFigures, PageOwner, PageRun, Path
from nanovllm.entrypoints.memory.svg import draw as draw_svg
from nanovllm.entrypoints.memory.text import draw as draw_text
from nanovllm.errors import InvalidRequestError
from nanovllm.sampling.keywords import explain_unknown_keywords
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import KVState
from nanovllm.state.prefix_cache import ROOT, PrefixIndex
from nanovllm.state.request import Sequence
from nanovllm.types import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class MemoryReport(PageFigures):
    """The pages of an engine's pool by who holds them: `PageFigures` that can be drawn. `print` it, or write `svg()` to a file."""

    def text(self, *, color: bool = False) -> str:
        """The figures, the map of the pages and the tree, in lines; `color` styles the map for a terminal."""
        return draw_text(self, color=color)

    def svg(self) -> str:
        """The same as a picture: an SVG document that names a page and its owners where the pointer rests."""
        return draw_svg(self)

    def __repr__(self) -> str:
        return f"MemoryReport({self.num_used} of {self.num_pages} pages used, {self.num_saved} of {self.num_references} saved)"

    def __str__(self) -> str:
        return self.text()

    def _repr_svg_(self) -> str:
        return self.svg()


@explain_unknown_keywords
def memory(state: EngineState, *, names: Mapping[str, Chunk | int] | None = None) -> MemoryReport:
    """Who holds the pages of a state now, and what sharing saves. The state stays usable, and the report as it is.

    `names` are what to call chunks, and requests by their ids. Linear in the pool and in what the owners hold; reads no device memory.
    Raises `DonatedStateError` for an old state, `InvalidRequestError` for a name or a request id that is none, `ReleasedChunkError` and
    `ForeignChunkError` for a chunk that is not this state's.
    """
    state = enter(state)
    pool, index = state.config.num_pages, state.prefix
    drafts = [*_chunks(state), *_requests(state)]
    called = _called(state, names, {id for _, kind, id in drafts if kind != "chunk"})
    arrays = [source.pages.array() for source, _, _ in drafts]
    counts = np.bincount(np.concatenate([np.empty(0, np.int32), *arrays]), minlength=pool)
    owners = tuple(
        PageOwner(
            kind=kind,
            id=id,
            name=called.get((kind == "chunk", id)),
            num_tokens=len(source.tokens),
            num_filled=source.num_filled if isinstance(source, Sequence) else len(source.tokens),
            pages=tuple(pages.tolist()),
            num_own=int((counts[pages] == 1).sum()),
            provenance=source.provenance,
        )
        for (source, kind, id), pages in zip(drafts, arrays, strict=True)
    )
    page_owners: list[list[PageOwner]] = [[] for _ in range(pool)]
    for owner in owners:
        for page in owner.pages:
            page_owners[page].append(owner)
    return MemoryReport(
        page_size=state.config.page_size,
        page_bytes=_page_bytes(state.kv),
        owners=owners,
        runs=_tree([*((owner.pages, owner) for owner in owners if owner.pages), *((path, None) for path in _idle_paths(index))]),
        page_owners=tuple(map(tuple, page_owners)),
        idle=frozenset(index.idle_pages()),
        num_indexed=len(index.pages()),
        frames=_frames(state, sum(map(bool, page_owners))),
    )


Draft = tuple[Chunk | Sequence, Kind, int]


def _chunks(state: EngineState) -> Iterable[Draft]:
    return ((state.chunks[id], "chunk", id) for id in sorted(state.chunks))


def _requests(state: EngineState) -> Iterable[Draft]:
    groups: list[tuple[Kind, Iterable[Sequence]]] = [
        ("running", state.running),
        ("waiting", state.waiting),
        ("kept", state.kept.values()),
        ("session", (sequence for session in state.sessions.values() for sequence in session.sequences)),
    ]
    found: list[Draft] = [(sequence, kind, sequence.request.request_id) for kind, group in groups for sequence in group]
    return sorted(found, key=lambda draft: draft[2])


def _called(state: EngineState, names: Mapping[str, Chunk | int] | None, requests: set[int]) -> dict[tuple[bool, int], str]:
    """Names by (is a chunk, id)."""
    if not isinstance(names, Mapping | None):
        raise InvalidRequestError(f"names must map names to chunks and request ids, not be {type(names).__name__}")
    called = {}
    for name, what in (names or {}).items():
        if not isinstance(name, str) or not name.strip():
            raise InvalidRequestError(f"names: {name!r} is no name")
        if isinstance(what, Chunk):
            require_live(state, what)
            called[True, what.liveness] = name
        elif isinstance(what, int) and not isinstance(what, bool) and what in requests:
            called[False, what] = name
        else:
            raise InvalidRequestError(f"names[{name!r}]={what!r} is neither a chunk nor the id of a request that is under way")
    return called


def _page_bytes(kv: KVState) -> int:
    return sum(map(_bytes_in, kv.pools))


def _bytes_in(pool: Tensor) -> int:
    """Bytes of a page, or a frame, of one pool."""
    return pool.numel() // pool.shape[1] * pool.element_size()


def _frames(state: EngineState, num_held: int) -> FrameReport | None:
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


def _idle_paths(index: PrefixIndex) -> list[Path]:
    """From its root, the ways through the index to the idle pages behind which no other idle page stands."""
    idle, paths = index.idle_pages(), []
    above = {index.before(page) for page in idle}
    for page in idle:
        if page not in above:
            path = [page]
            while (before := index.before(path[-1])) != ROOT:
                path.append(before)
            paths.append(tuple(reversed(path)))
    return paths


def _tree(paths: Seq[tuple[Path, PageOwner | None]]) -> tuple[PageRun, ...]:
    """The radix tree of paths of pages: in order of pages, each run before what stands behind it."""
    order = sorted(paths, key=lambda entry: entry[0])
    runs: list[PageRun] = []
    left: list[tuple[int, int, int, int | None]] = [(0, len(order), 0, None)]  # paths low ... high - 1 are alike in `start` pages
    while left:
        low, high, start, parent = left.pop()
        if low == high:
            continue
        first, last = order[low][0], order[high - 1][0]
        if first[start] != last[start]:
            cuts = [low, *(i for i in range(low + 1, high) if order[i][0][start] != order[i - 1][0][start]), high]
            left.extend((a, b, start, parent) for a, b in reversed(list(pairwise(cuts))))
            continue
        stop, most = start + 1, min(len(first), len(last))
        while stop < most and first[stop] == last[stop]:  # what the first and the last share in order, all between them share
            stop += 1
        behind = low
        while behind < high and len(order[behind][0]) == stop:
            behind += 1
        owners = tuple(owner for _, owner in order[low:high] if owner is not None)
        ends = tuple(owner for _, owner in order[low:behind] if owner is not None)
        runs.append(PageRun(pages=first[start:stop], parent=parent, start=start, owners=owners, ends=ends))
        left.append((behind, high, stop, len(runs) - 1))
    return tuple(runs)
