"""`PrefixIndex`: full pages of exact KV by the tokens they hold. Persistent; a look-up never changes it.

A trie whose nodes are runs of pages. The key of a run is (page before it, tokens of its first page), and all its tokens are compared, so a
page is found by exact comparison of the whole prefix, not by a hash. The index owns one reference to each of its pages. A page that nobody
else holds is `idle` and may be evicted, the one idle for longest first. Runs give their pages back deepest first, so leaves go first; only
a chunk with a gap holds a page without those before it. A page leaves the index together with all behind it, because a look-up could not
reach them.

What is done to many pages at once is done by array operations: nothing here but a slow path goes from page to page.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from immutables import Map

from nanovllm.errors import BrokenInvariantError
from nanovllm.state.array import IntArray

ROOT = -1
NO_PAGES = np.empty(0, np.int32)
NEAR = 1024  # pages that an eviction looks at together


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Pages that entered the index by one call, each behind the one before, the first behind `parent`; those that left it were the last."""

    parent: int
    tokens: np.ndarray
    pages: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixIndex:
    """`runs` by their first page, to which `heads[parent, tokens of a page]` leads. Of a page, `run_of` is the first page of its run (-1:
    not indexed), `place_of` its place there, `num_behind` the number of runs whose parent it is.

    `idle[time]` are pages that became evictable together, the first of them to go first; `idle_since` is the way back (-1: not idle).
    """

    page_size: int
    heads: Map[tuple[int, bytes], int]
    runs: Map[int, Run]
    run_of: IntArray
    place_of: IntArray
    num_behind: IntArray
    idle: Map[int, np.ndarray]
    idle_since: IntArray
    num_idle: int
    oldest: int  # no time in `idle` is earlier
    now: int

    def __contains__(self, page: int) -> bool:
        return self.run_of[page] >= 0

    def __repr__(self) -> str:
        return f"PrefixIndex({len(self.pages())} pages, {self.num_idle} of them idle)"

    def contains(self, pages: np.ndarray) -> np.ndarray:
        """Which of these pages are indexed."""
        return self.run_of.get(pages) >= 0

    def before(self, page: int) -> int:
        """The page that an indexed one stands right behind, or `ROOT`."""
        run, place = self.runs[self.run_of[page]], self.place_of[page]
        return int(run.pages[place - 1]) if place else run.parent

    def pages(self) -> list[int]:
        """All pages that are indexed; linear in the pool."""
        return np.flatnonzero(self.run_of.copy() >= 0).tolist()

    def idle_pages(self) -> list[int]:
        """All that could be evicted, in this order; linear in their number."""
        return [page for time in sorted(self.idle) for page in self.idle[time].tolist()]


def init_prefix(num_pages: int, page_size: int) -> PrefixIndex:
    """An empty index for `num_pages` pages of `page_size` tokens."""
    return PrefixIndex(
        page_size=page_size, heads=Map(), runs=Map(), run_of=IntArray.full(num_pages, -1), place_of=IntArray.full(num_pages),
        num_behind=IntArray.full(num_pages), idle=Map(), idle_since=IntArray.full(num_pages, -1, np.int64), num_idle=0, oldest=0, now=0,
    )  # fmt: skip


def match(index: PrefixIndex, tokens: np.ndarray) -> np.ndarray:
    """The pages (int32) that hold the longest indexed prefix of `tokens` (int32), in order. Costs a look-up for each run on the way."""
    size, tokens = index.page_size, np.ascontiguousarray(tokens, np.int32)
    found, parent = [NO_PAGES], ROOT
    while len(tokens) >= size:
        head = index.heads.get((parent, tokens[:size].tobytes()))
        if head is None:
            break
        run = index.runs[head]
        alike = _num_alike(run.tokens, tokens) // size
        found.append(run.pages[:alike])
        parent, tokens = int(run.pages[alike - 1]), tokens[alike * size :]
    return np.concatenate(found)


def _num_alike(a: np.ndarray, b: np.ndarray) -> int:
    """How many of the first values are the same."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    return int(differs.argmax()) if differs.any() else count


def insert(index: PrefixIndex, tokens: np.ndarray, pages: np.ndarray, start: int) -> tuple[PrefixIndex, np.ndarray]:
    """Index full pages `start ...` of a run whose pages are `pages`; returns the pages that are new and need the index's reference.

    Stops at a page whose tokens another page holds already, or whose predecessor is not indexed: behind it the run's own pages are
    not what a look-up would find.
    """
    size = index.page_size
    stop = min(len(tokens) // size, len(pages))
    if start >= stop or (start and int(pages[start - 1]) not in index):
        return index, NO_PAGES
    first, stop = _new_pages(index, pages, start, stop)
    if first == stop:
        return index, NO_PAGES
    run = Run(
        parent=int(pages[first - 1]) if first else ROOT,
        tokens=np.array(tokens[first * size : stop * size], np.int32),
        pages=np.array(pages[first:stop], np.int32),
    )
    key = run.parent, run.tokens[:size].tobytes()
    if key in index.heads or key[1] == _behind(index, run.parent):
        return index, NO_PAGES
    head, num_behind = int(run.pages[0]), index.num_behind
    if first:
        num_behind = _add(num_behind, run.parent, 1)
    index = _replace(
        index,
        heads=index.heads.set(key, head),
        runs=index.runs.set(head, run),
        run_of=index.run_of.put(run.pages, head),
        place_of=index.place_of.put(run.pages, np.arange(len(run.pages), dtype=np.int32)),
        num_behind=num_behind,
    )
    return index, run.pages


def _new_pages(index: PrefixIndex, pages: np.ndarray, start: int, stop: int) -> tuple[int, int]:
    """Which of the pages `start ... stop - 1` are not indexed: those in a row from the first one on."""
    known = index.contains(pages[start:stop])
    if known.all():
        return stop, stop
    first = int(known.argmin())
    behind = known[first:]
    return start + first, start + first + int(behind.argmax()) if behind.any() else stop


def _behind(index: PrefixIndex, page: int) -> bytes:
    """The tokens of the page that stands behind this one in the same run; none where there is no such page."""
    if page == ROOT:
        return b""
    start = (index.place_of[page] + 1) * index.page_size
    return index.runs[index.run_of[page]].tokens[start : start + index.page_size].tobytes()


def swap(index: PrefixIndex, old: np.ndarray, new: np.ndarray) -> PrefixIndex:
    """Put pages that are not indexed in the places of others, which leave the index without what stands behind them: both hold the exact KV
    of the same tokens. Linear in the number of runs where one of the old has a run behind it.

    Raises `BrokenInvariantError` for an old page that is not indexed, and for a new one that is.
    """
    if not index.contains(old).all() or index.contains(new).any():
        raise BrokenInvariantError(f"pages {old[:8]} are to leave the index, and {new[:8]} to take their places")
    index, to = set_busy(index, old), dict(zip(old.tolist(), new.tolist(), strict=True))
    touched = dict.fromkeys(index.run_of.get(old).tolist())
    if index.num_behind.get(old).any():
        behind = _runs_behind(index)
        touched.update(dict.fromkeys(head for page in to for head in behind.get(page, ())))
    heads, runs = index.heads, index.runs
    place_of = index.place_of.put(new, index.place_of.get(old))
    num_behind = index.num_behind.put(new, index.num_behind.get(old)).put(old, 0)
    run_of = index.run_of.put(old, -1)
    for head in touched:
        run = runs[head]
        pages = np.array([to.get(page, page) for page in run.pages.tolist()], np.int32)
        moved = Run(to.get(run.parent, run.parent), run.tokens, pages)
        first, tokens = pages.item(0), run.tokens[: index.page_size].tobytes()
        heads = heads.delete((run.parent, tokens)).set((moved.parent, tokens), first)
        runs, run_of = runs.delete(head).set(first, moved), run_of.put(pages, first)
    return _replace(index, heads=heads, runs=runs, run_of=run_of, place_of=place_of, num_behind=num_behind)


def set_idle(index: PrefixIndex, pages: np.ndarray) -> PrefixIndex:
    """Mark pages that only the index holds now, each given once, in the order in which they may be evicted."""
    if not len(pages):
        return index
    again = index.idle_since.get(pages) >= 0
    if again.any():
        raise BrokenInvariantError(f"page {pages[again][0]} is idle already")
    time = index.now
    return _replace(
        index,
        idle=index.idle.set(time, np.array(pages)),
        idle_since=index.idle_since.put(pages, time),
        num_idle=index.num_idle + len(pages),
        now=time + 1,
    )


def set_busy(index: PrefixIndex, pages: np.ndarray) -> PrefixIndex:
    """Take pages that somebody holds again out of the order of eviction; pages that were not idle are passed over."""
    times = index.idle_since.get(pages)
    idle, num_idle = index.idle, index.num_idle
    times = times[times >= 0]
    if not len(times):
        return index
    since = index.idle_since.put(pages, -1)
    for time in _distinct(times):
        held = idle[time]
        left = held[since.get(held) >= 0]
        num_idle -= len(held) - len(left)
        idle = idle.set(time, left) if len(left) else idle.delete(time)
    return _replace(index, idle=idle, idle_since=since, num_idle=num_idle)


def evict(index: PrefixIndex, count: int) -> tuple[PrefixIndex, np.ndarray]:
    """Forget the `count` pages (or as many as there are) that have been idle for longest; returns what left the index, for release.

    Pages behind them that somebody still holds leave it too: after their release they are not free.
    """
    evicted, wanted = [NO_PAGES], max(0, index.num_idle - count)
    if index.num_idle <= wanted:
        return index, NO_PAGES
    index, due = _longest_idle(index, index.num_idle - wanted)
    behind: dict[int, list[int]] | None = None  # found once, if at all: what leaves the index leaves it for good
    while len(due):
        near = due[:NEAR]
        leaves = near[: _num_leaves(index, near)]
        if len(leaves):
            doomed = leaves
        else:
            behind = _runs_behind(index) if behind is None else behind
            doomed = _with_those_behind(index, due[:1].tolist(), behind)
        index = _unlink(index, doomed)
        evicted.append(doomed)
        due = due[index.contains(due)][: index.num_idle - wanted]  # what stood behind may have been idle, and not yet due
    return index, np.concatenate(evicted)


def _longest_idle(index: PrefixIndex, count: int) -> tuple[PrefixIndex, np.ndarray]:
    """The `count` pages that are to be evicted next, in order, and the index that knows where to find them."""
    time = index.oldest
    while time not in index.idle:
        time += 1
    index, found = _replace(index, oldest=time), []
    while count > 0:
        pages = index.idle.get(time, NO_PAGES)[:count]
        found.append(pages)
        count, time = count - len(pages), time + 1
    return index, np.concatenate(found)


def _num_leaves(index: PrefixIndex, pages: np.ndarray) -> int:
    """How many of these pages, from the first one on, have nothing behind them once those before them in this order are gone."""
    of, places, behind = index.run_of.get(pages), index.place_of.get(pages), index.num_behind.get(pages)
    starts = np.flatnonzero((of[1:] != of[:-1]) | (places[1:] != places[:-1] - 1)) + 1
    left: dict[int, int] = {}  # how many of its pages a run keeps
    gone: dict[int, int] = {}  # how many of the runs behind a page are gone
    branching = dict.fromkeys(np.flatnonzero(behind).tolist())
    for start, stop in pairwise([0, *starts.tolist(), len(pages)]):
        head = of.item(start)
        run = index.runs[head]
        if places.item(start) + 1 != left.get(head, len(run.pages)):
            return start
        for at in range(start, stop) if branching else ():
            if at in branching and gone.get(pages.item(at), 0) != behind.item(at):
                return at
        left[head] = places.item(stop - 1)
        if not left[head]:
            gone[run.parent] = gone.get(run.parent, 0) + 1
    return len(pages)


def forget(index: PrefixIndex, pages: frozenset[int]) -> tuple[PrefixIndex, np.ndarray]:
    """Forget given pages and all that stands behind them, whatever their age; returns every page that is no longer indexed.

    For pages whose KV was lost by a failed step: linear in the number of runs.
    """
    lost = [page for page in pages if page in index]
    if not lost:
        return index, NO_PAGES
    doomed = _with_those_behind(index, lost, _runs_behind(index))
    return _unlink(index, doomed), doomed


def _runs_behind(index: PrefixIndex) -> dict[int, list[int]]:
    """The first pages of the runs that stand behind each page."""
    behind: dict[int, list[int]] = {}
    for head, run in index.runs.items():
        behind.setdefault(run.parent, []).append(head)
    return behind


def _with_those_behind(index: PrefixIndex, pages: Iterable[int], behind: dict[int, list[int]]) -> np.ndarray:
    """The pages and all that stand behind them, sorted; `behind` may name runs that are gone."""
    found, left = set[int](), list(pages)
    while left:
        page = left.pop()
        if page in found or page not in index:
            continue
        for other in index.runs[index.run_of[page]].pages[index.place_of[page] :].tolist():
            found.add(other)
            left.extend(behind.pop(other, ()))
    return np.array(sorted(found), np.int32)


def _unlink(index: PrefixIndex, pages: np.ndarray) -> PrefixIndex:
    """The index without these pages, among which is all that stands behind them."""
    index = set_busy(index, pages)
    heads, runs, num_behind, of = index.heads, index.runs, index.num_behind, index.run_of.get(pages)
    for head in _distinct(of):
        run = runs[head]
        left = len(run.pages) - int(np.count_nonzero(of == head))
        if left:
            runs = runs.set(head, Run(run.parent, _first(run.tokens, left * index.page_size), _first(run.pages, left)))
            continue
        runs, heads = runs.delete(head), heads.delete((run.parent, run.tokens[: index.page_size].tobytes()))
        if run.parent != ROOT:
            num_behind = _add(num_behind, run.parent, -1)
    return _replace(index, heads=heads, runs=runs, num_behind=num_behind, run_of=index.run_of.put(pages, -1))


def _first(values: np.ndarray, count: int) -> np.ndarray:
    """The first values, in memory of their own where they are few of those that it holds."""
    held = values if values.base is None else values.base
    return values[:count].copy() if 2 * count < len(held) else values[:count]


def _add(counts: IntArray, page: int, more: int) -> IntArray:
    return counts.put(np.array([page], np.int32), counts[page] + more)


def _distinct(values: np.ndarray) -> list[int]:
    """The different ones of some values, in a time that is best where neighbours are mostly the same."""
    changes = (values[1:] != values[:-1]).nonzero()[0] + 1
    return list(dict.fromkeys([values.item(0), *values[changes].tolist()]))


def _replace(index: PrefixIndex, **changes) -> PrefixIndex:
    old = {name: getattr(index, name) for name in PrefixIndex.__dataclass_fields__}
    return PrefixIndex(**{**old, **changes})
