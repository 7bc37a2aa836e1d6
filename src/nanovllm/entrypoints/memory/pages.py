"""The figures of a memory report: who owns the pages, which pages are shared, and how many pages sharing saves."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from nanovllm.executor.disk_counts import DiskCounts
from nanovllm.state.chunk import EXACT, Provenance

Kind = Literal["chunk", "running", "waiting", "kept", "session"]
Path = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class PageOwner:
    """A live chunk or a request, with the pages that it owns.

    Attributes:
        kind: "chunk", or the phase of the request: "running", "waiting", "kept" (ended, to become a chunk) or "session" (between
            `begin` and `commit`).
        id: The chunk's `liveness`, or the request's id.
        name: The name that `memory` was given for it, or None.
        num_tokens: Tokens of the chunk or the request.
        num_filled: Tokens whose KV is filled.
        pages: The pages in order. The last may be partly filled, or not filled yet.
        num_own: Pages without another owner.
        provenance: Whether the KV is exact.

    Examples:
        >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
        >>> state, twin = nv.fork(state, facts)
        >>> owner = nv.memory(state).owners[0]
        >>> owner.kind, owner.num_tokens, owner.num_own, owner.num_shared
        ('chunk', 11, 0, 1)
    """

    kind: Kind
    id: int
    name: str | None
    num_tokens: int
    num_filled: int
    pages: Path
    num_own: int
    provenance: Provenance = EXACT

    @property
    def num_shared(self) -> int:
        """Pages that have other owners too."""
        return len(self.pages) - self.num_own

    def __repr__(self) -> str:
        return f"PageOwner({self}, {len(self.pages)} pages)"

    def __str__(self) -> str:
        what = f"chunk {self.id}" if self.kind == "chunk" else f"request {self.id}"
        state = [] if self.kind == "chunk" else [self.kind]
        filled = [f"{self.num_filled:,} filled"] if self.num_filled < self.num_tokens else []
        label = [] if self.provenance.exact else [str(self.provenance)]
        details = ", ".join([*state, f"{self.num_tokens:,} tokens", *filled, *label])
        return f"{what} ({details})" if self.name is None else f"{self.name} ({what}, {details})"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class PageRun:
    """Consecutive pages with the same owners: a node of the radix tree of all owners' pages.

    Attributes:
        pages: The pages in order.
        parent: The index in `MemoryReport.runs` of the node before this one, or None for a root.
        start: The number of pages before this node.
        owners: The owners of these pages at this place. Empty if only the prefix index holds them.
        ends: The owners whose last page is the last page of this node.

    Examples:
        >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
        >>> state, more = nv.prefill(model, state, " The capital of Aistonia is Velmora.", after=facts)
        >>> [(len(run.pages), run.parent, len(run.owners)) for run in nv.memory(state).runs]
        [(1, None, 1), (2, None, 1)]
    """

    pages: Path
    parent: int | None
    start: int
    owners: tuple[PageOwner, ...]
    ends: tuple[PageOwner, ...]

    def __repr__(self) -> str:
        return f"PageRun(pages {ranges(self.pages, 3)} after {self.start}, {len(self.owners)} owners)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameReport:
    """The frames of an engine whose model has sliding-window layers, without the dummy frame.

    A frame is the KV memory of a page in these layers.

    Attributes:
        num_frames: All frames.
        num_needed: Frames that an owner needs for one of its pages.
        num_spare: Frames that nobody needs but that later requests may reuse; they are evicted for new ones.
        frame_bytes: Bytes of a frame, over all sliding-window layers.
        num_held: Pages with an owner.
    """

    num_frames: int
    num_needed: int
    num_spare: int
    frame_bytes: int
    num_held: int

    @property
    def num_free(self) -> int:
        """Frames without a page."""
        return self.num_frames - self.num_needed - self.num_spare

    @property
    def num_saved(self) -> int:
        """Pages with an owner but without a needed frame: the frames that sliding windows save."""
        return self.num_held - self.num_needed


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskReport:
    """The KV on disk of an engine with `kv_dir`.

    Attributes:
        num_pages: Pages of this model that the engine knows.
        num_frames: Frames (the KV memory of sliding-window layers) of these pages, where they are apart, because other layers have none.
        num_bytes: The bytes of all pages in the folder, those of other models included.
        max_bytes: The limit of `num_bytes`.
        counts: What was read and written since the engine was made.

    Examples:
        >>> kept = nv.init_state(model, num_pages=64, host_kv_gib=0.01, kv_dir="kv", kv_dir_gib=1)
        >>> report = nv.memory(kept).disk
        >>> report.num_pages, report.max_bytes, report.counts.pages_read
        (0, 1073741824, 0)
    """

    num_pages: int
    num_frames: int
    num_bytes: int
    max_bytes: int
    counts: DiskCounts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class PageFigures:
    """The pages of an engine's pool by owner, without the dummy page: the figures that `MemoryReport` draws.

    An owner is a live chunk or a request. The prefix index is not an owner: a page that only the index holds is idle and can be evicted.

    Attributes:
        page_size: Tokens per page.
        page_bytes: Bytes of a page over all layers, its frame included.
        owners: The owners, chunks first.
        runs: The radix tree of the owners' pages and of the idle pages, each node after its parent. A page occurs twice only if a gap put
            it after other pages.
        page_owners: For each page its owners.
        idle: The idle pages.
        num_indexed: Pages that the prefix index can find, with and without owners.
        frames: The frames, if the model has sliding-window layers.
        num_host_pages: Pages of host memory.
        num_host_used: Pages of host memory that have KV.
        disk: The KV on disk. None: there is none.
    """

    page_size: int
    page_bytes: int
    owners: tuple[PageOwner, ...]
    runs: tuple[PageRun, ...]
    page_owners: tuple[tuple[PageOwner, ...], ...]
    idle: frozenset[int]
    num_indexed: int
    frames: FrameReport | None = None
    num_host_pages: int = 0
    num_host_used: int = 0
    disk: DiskReport | None = None

    @property
    def num_pages(self) -> int:
        """Pages of the pool: `num_used + num_free`."""
        return len(self.page_owners)

    @property
    def num_used(self) -> int:
        """Pages that are not free: `num_held + num_idle`."""
        return self.num_held + self.num_idle

    @property
    def num_free(self) -> int:
        """Pages without an owner that the index does not hold."""
        return self.num_pages - self.num_used

    @property
    def num_idle(self) -> int:
        """Pages that only the index holds. They are reusable until they are evicted."""
        return len(self.idle)

    @property
    def num_held(self) -> int:
        """Pages with an owner."""
        return sum(map(bool, self.page_owners))

    @property
    def num_chunk(self) -> int:
        """Pages owned by a chunk; requests may own them too."""
        return len({page for owner in self.owners if owner.kind == "chunk" for page in owner.pages})

    @property
    def num_request(self) -> int:
        """Pages owned by a request; chunks may own them too."""
        return len({page for owner in self.owners if owner.kind != "chunk" for page in owner.pages})

    @property
    def num_both(self) -> int:
        """Pages owned by chunks and by requests: `num_chunk + num_request - num_held`."""
        return self.num_chunk + self.num_request - self.num_held

    @property
    def num_shared(self) -> int:
        """Pages with at least two owners."""
        return sum(len(owners) > 1 for owners in self.page_owners)

    @property
    def num_references(self) -> int:
        """The sum of all owners' pages: the pages that would be needed without sharing."""
        return sum(len(owner.pages) for owner in self.owners)

    @property
    def num_saved(self) -> int:
        """Pages that sharing saves: `num_references - num_held`."""
        return self.num_references - self.num_held

    @property
    def saved_share(self) -> float:
        """The fraction of pages that sharing saves: `num_saved / num_references`, or 0 without owners."""
        return self.num_saved / max(1, self.num_references)


def ranges(pages: Iterable[int], most: int) -> str:
    """Page numbers as text, neighbours joined to ranges; at most `most` ranges, then `...`."""
    spans: list[list[int]] = []
    for page in pages:
        if spans and page == spans[-1][1] + 1:
            spans[-1][1] = page
        else:
            spans.append([page, page])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in spans[:most]]
    return ", ".join(shown + ["..."] * (len(spans) > most))
