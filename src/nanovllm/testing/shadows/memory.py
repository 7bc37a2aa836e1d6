"""Shadows of the engine's values and of the KV memory, in plain Python."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, no_type_check

import numpy as np

from nanovllm.errors import BrokenInvariantError
from nanovllm.state.chunk import Chunk
from nanovllm.state.invariants import broken
from nanovllm.state.offload import HostPages
from nanovllm.state.pages import PageState, free_pages
from nanovllm.state.pool import Pool
from nanovllm.state.prefix_cache import ROOT, PrefixIndex
from nanovllm.state.request import Queue
from nanovllm.state.request import Sequence as Running
from nanovllm.state.steady import Steady
from nanovllm.state.vector import IntVector
from nanovllm.state.window_frames import Frames


class ShadowMismatchError(AssertionError):
    """The engine and its shadow model disagree."""


@no_type_check  # called for every slot: run-time checks would cost more than all else
def expect(holds: bool, what: str, *, invariant: int | None = None) -> None:
    """Raise `ShadowMismatchError` unless `holds`.

    Args:
        holds: What must be true.
        what: The values that were found.
        invariant: The number, in `nanovllm.state.invariants.INVARIANTS`, of the invariant that they break; the message then quotes it.
    """
    if not holds:
        raise ShadowMismatchError(what if invariant is None else broken(invariant, what))


@no_type_check
def freeze(value: Any) -> Any:
    """Return the content of a persistent value as plain immutable Python. A later result is equal if and only if nothing changed."""
    match value:
        case IntVector():
            return tuple(value.array().tolist())
        case PageState():
            return value.num_pages, frozenset(value.refcounts.items()), tuple(free_pages(value))
        case PrefixIndex():
            runs = frozenset((head, r.parent, tuple(r.tokens.tolist()), tuple(r.pages.tolist())) for head, r in value.runs.items())
            arrays = (value.run_of, value.place_of, value.num_children, value.idle_since)
            idle = frozenset((time, tuple(pages.tolist())) for time, pages in value.idle.items())
            maps = (frozenset(value.heads.items()), runs, idle, *(tuple(a.copy().tolist()) for a in arrays))
            return (*maps, value.num_idle, value.oldest, value.now)
        case Pool():
            return freeze(value.pages), freeze(value.prefix), value.frames and freeze(value.frames), value.host and freeze(value.host)
        case HostPages():
            ages = tuple(value.ages.pages()), tuple(value.ages.since.copy().tolist())
            moves = value.moves and tuple(frozenset(pairs.items()) for pairs in (value.moves.out, value.moves.frames_out))
            moves = moves and (*moves, value.moves.into, value.moves.frames_into, value.moves.reads)
            reads = value.disk and (value.disk.reading, value.disk.framed, value.disk.waits)
            disk = value.disk and (*(frozenset(each.items()) for each in reads), value.disk.now)
            keys = frozenset(value.by_key.items()), frozenset(value.key_of.items()), frozenset(value.bare)
            return freeze(value.used), *keys, ages, moves, frozenset(value.moved.items()), value.held, value.ahead, value.behind, disk
        case Frames():
            spare = value.spare
            arrays = tuple(tuple(a.copy().tolist()) for a in (value.frame_of, value.needs, spare.since))
            return freeze(value.used), arrays, tuple(spare.pages()), spare.count, spare.oldest, spare.now
        case Chunk():
            parts = (freeze(value.tokens), freeze(value.pages), value.provenance, value.num_exact, value.gaps)
            return (*parts, value.fingerprint, value.engine, value.liveness)
        case Running():
            return freeze(value.tokens), freeze(value.pages), value.num_filled, value.most_filled, value.retired
        case Queue():
            return tuple((s.request.request_id, freeze(s)) for s in value), value.turns, value.num_turns
        case list() | tuple() | Steady():
            return tuple(freeze(part) for part in value)
        case _:
            raise TypeError(f"cannot freeze a {type(value).__name__}")


@dataclass(slots=True)
class KeptValues:
    """Old values with their content at that time (invariant 5). Only the `limit` newest values are kept."""

    limit: int = 12
    kept: list[tuple[Any, Any]] = field(default_factory=list)

    def keep(self, value: Any) -> None:
        """Remember a value and its content."""
        self.kept.append((value, freeze(value)))
        del self.kept[: -self.limit]

    def require_unchanged(self) -> None:
        """Raise `ShadowMismatchError` if the content of an old value has changed since it was kept."""
        for value, before in self.kept:
            expect(freeze(value) == before, f"an old {type(value).__name__} changed from {before} to {freeze(value)}", invariant=5)


@dataclass(slots=True)
class ShadowPages:
    """Counts the owners of each page in a dict."""

    num_pages: int
    owners: dict[int, int] = field(default_factory=dict)

    @property
    def free(self) -> set[int]:
        """The pages without an owner."""
        return set(range(self.num_pages)) - set(self.owners)

    def add(self, pages: Iterable[int]) -> None:
        """Add an owner to each page."""
        for page in pages:
            self.owners[page] = self.owners.get(page, 0) + 1

    def remove(self, pages: Iterable[int]) -> None:
        """Remove an owner from each page."""
        for page in pages:
            self.owners[page] -= 1
            if not self.owners[page]:
                del self.owners[page]

    def copy(self) -> "ShadowPages":
        """Return an independent copy."""
        return ShadowPages(self.num_pages, dict(self.owners))


@dataclass(slots=True)
class ShadowIndex:
    """The prefix index as a dict from token prefixes of whole pages to pages. `idle` lists idle pages in the order of eviction."""

    page_size: int
    pages: dict[tuple[int, ...], int] = field(default_factory=dict)
    idle: list[int] = field(default_factory=list)

    def keys(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """Return every prefix of whole pages."""
        size = self.page_size
        return [tuple(tokens[: end * size]) for end in range(1, len(tokens) // size + 1)]

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Return the pages of the longest indexed prefix."""
        matched = []
        for key in self.keys(tokens):
            if key not in self.pages:
                break
            matched.append(self.pages[key])
        return matched

    def insert(self, tokens: Sequence[int], held: Sequence[int]) -> list[int]:
        """Index the pages of a run whose prefix is not indexed yet, and return them."""
        added = [(key, page) for key, page in zip(self.keys(tokens), held, strict=False) if key not in self.pages]
        self.pages.update(added)
        return [page for _, page in added]

    def drop(self, page: int) -> None:
        """Forget one page."""
        self.pages = {key: other for key, other in self.pages.items() if other != page}
        self.idle = [other for other in self.idle if other != page]

    def with_descendants(self, lost: Iterable[int]) -> set[int]:
        """Return the given indexed pages and all pages whose prefix contains one of them."""
        keys = [key for key, page in self.pages.items() if page in set(lost)]
        return {page for key, page in self.pages.items() if any(key[: len(k)] == k for k in keys)}


@dataclass(slots=True)
class ShadowMemory:
    """The KV memory as a dict: each slot maps to the tokens that its KV was computed from, its own token included."""

    page_size: int
    slots: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def copy_pages(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole pages at the same time, like the op `copy_pages`."""
        pairs, before = list(pairs), dict(self.slots)
        targets = [target for _, target in pairs]
        expect(len(set(targets)) == len(targets), f"two copies into one page: {pairs}")
        expect(not set(targets) & {source for source, _ in pairs}, f"a page is both read and written by the copies {pairs}")
        for source, target in pairs:
            for offset in range(self.page_size):
                self.slots[target, offset] = before.get((source, offset), ())

    def run(self, tokens: np.ndarray, pages: Sequence[int], start: int, count: int) -> None:
        """Run tokens `start ... start + count - 1`: their slots are written, then all slots up to the last are read and checked."""
        self.write(tokens, pages, start, count)
        self.require(tokens, pages, start + count)

    def write(self, tokens: np.ndarray, pages: Sequence[int], start: int, count: int) -> None:
        """Write the slots of tokens `start ... start + count - 1`."""
        run = tuple(tokens.tolist())
        for at in range(start, start + count):
            self.slots[pages[at // self.page_size], at % self.page_size] = run[: at + 1]

    def require(self, tokens: np.ndarray, pages: Sequence[int], count: int) -> None:
        """Raise `ShadowMismatchError` unless the slots of the first `count` tokens contain the KV that a prefill of them writes."""
        run = tuple(tokens.tolist())
        for at in range(count):
            place = (pages[at // self.page_size], at % self.page_size)
            expect(self.slots.get(place) == run[: at + 1], f"slot {place} holds {self.slots.get(place)}, not {run[: at + 1]}", invariant=4)


def indexed_runs(index: PrefixIndex) -> list[tuple[tuple[int, ...], int]]:
    """Return every indexed page with all tokens up to its end. Raises `BrokenInvariantError` if the index lacks an earlier page."""
    runs = []
    for page in index.pages():
        parts, at = list[np.ndarray](), page
        while at > ROOT:
            if at not in index:
                raise BrokenInvariantError(f"page {page} is indexed after page {at}, which is not indexed")
            start = index.place_of[at] * index.page_size
            parts.append(index.runs[index.run_of[at]].tokens[start : start + index.page_size])
            at = index.before(at)
        runs.append((tuple(np.concatenate(parts[::-1]).tolist()), page))
    return runs
