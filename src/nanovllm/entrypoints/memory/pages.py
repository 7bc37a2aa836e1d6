"""The figures of a memory report: who holds the pages, what the owners share, and what sharing saves."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from nanovllm.state.chunk import EXACT, Provenance

Kind = Literal["chunk", "running", "waiting", "kept", "session"]
Path = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class PageOwner:
    """A live chunk or a request, and the pages it holds, in order; the last may be partly filled, or not filled yet.

    `kind` is "chunk" or where the request stands: "running", "waiting", "kept" (ended, to become a chunk), "session" (between `begin` and
    `commit`). `id` is the chunk's `liveness`, or the request's id. `num_filled` of `num_tokens` tokens have their KV. `num_own` pages have
    no other owner.
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
        told = ", ".join([*state, f"{self.num_tokens:,} tokens", *filled, *label])
        return f"{what} ({told})" if self.name is None else f"{self.name} ({what}, {told})"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class PageRun:
    """Pages that the same owners hold one after another: a node in the tree of what begins alike.

    `parent` is the place in `MemoryReport.runs` of the run that stands right before (None: nothing does), and `start` the number of all
    pages before. `owners` hold the run there, and for `ends` its last page is their last. Without owners, only the index leads there.
    """

    pages: Path
    parent: int | None
    start: int
    owners: tuple[PageOwner, ...]
    ends: tuple[PageOwner, ...]

    def __repr__(self) -> str:
        return f"PageRun(pages {ranges(self.pages, 3)} behind {self.start}, {len(self.owners)} owners)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameReport:
    """The frames of an engine whose model has layers with windows: the KV memory of these layers (the dummy frame aside).

    `num_needed` are those that an owner needs, each for a page of its own; `num_spare` hold what a later request may find, and go to
    whoever needs one.
    """

    num_frames: int
    num_needed: int
    num_spare: int
    frame_bytes: int  # of one frame, over the layers with a window
    num_held: int  # pages with an owner

    @property
    def num_free(self) -> int:
        """Frames that no page has."""
        return self.num_frames - self.num_needed - self.num_spare

    @property
    def num_saved(self) -> int:
        """Pages with an owner whose frame nobody needs: what their owners would hold if layers with windows kept all KV."""
        return self.num_held - self.num_needed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class PageFigures:
    """The pages of an engine's pool (the dummy page aside) by who holds them: the figures that `MemoryReport` draws.

    An owner is a live chunk or a request. The prefix index is none: a page that it holds alone is `idle`, and goes to whoever needs one.
    `runs` is the tree of the owners' pages, and of those the index leads to, each run behind its parent; a page stands twice in it only
    where a gap brought it behind other pages. `page_owners[page]` are the owners of a page.
    """

    page_size: int  # tokens
    page_bytes: int  # of one page, over all layers, its frame included
    owners: tuple[PageOwner, ...]
    runs: tuple[PageRun, ...]
    page_owners: tuple[tuple[PageOwner, ...], ...]
    idle: frozenset[int]
    num_indexed: int  # pages that the prefix index can find, with and without owners
    frames: FrameReport | None = None  # where layers have windows

    @property
    def num_pages(self) -> int:
        """The pool: `num_used + num_free`."""
        return len(self.page_owners)

    @property
    def num_used(self) -> int:
        """Pages that are not free: `num_held + num_idle`."""
        return self.num_held + self.num_idle

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, the index included."""
        return self.num_pages - self.num_used

    @property
    def num_idle(self) -> int:
        """Pages that only the index holds: reusable until they are evicted."""
        return len(self.idle)

    @property
    def num_held(self) -> int:
        """Pages with an owner."""
        return sum(map(bool, self.page_owners))

    @property
    def num_chunk(self) -> int:
        """Pages that a chunk holds; requests may hold them too."""
        return len({page for owner in self.owners if owner.kind == "chunk" for page in owner.pages})

    @property
    def num_request(self) -> int:
        """Pages that a request holds; chunks may hold them too."""
        return len({page for owner in self.owners if owner.kind != "chunk" for page in owner.pages})

    @property
    def num_both(self) -> int:
        """Pages that chunks and requests hold: `num_chunk + num_request - num_held`."""
        return self.num_chunk + self.num_request - self.num_held

    @property
    def num_shared(self) -> int:
        """Pages with two owners or more."""
        return sum(len(owners) > 1 for owners in self.page_owners)

    @property
    def num_references(self) -> int:
        """Pages of all owners, counted for each: what they would hold if nothing were shared."""
        return sum(len(owner.pages) for owner in self.owners)

    @property
    def num_saved(self) -> int:
        """`num_references - num_held`: pages that sharing does without."""
        return self.num_references - self.num_held

    @property
    def saved_share(self) -> float:
        """`num_saved / num_references`; 0 where there is no owner."""
        return self.num_saved / max(1, self.num_references)


def ranges(pages: Iterable[int], most: int) -> str:
    """Page numbers, neighbours joined; `...` in the place of what is beyond `most` of them."""
    found: list[list[int]] = []
    for page in pages:
        if found and page == found[-1][1] + 1:
            found[-1][1] = page
        else:
            found.append([page, page])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in found[:most]]
    return ", ".join(shown + ["..."] * (len(found) > most))
