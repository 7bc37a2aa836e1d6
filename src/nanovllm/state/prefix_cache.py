"""`PrefixIndex`: finds full pages of exact KV by their tokens. Persistent: a look-up never changes it.

It is a radix tree whose nodes (class `Run`) are pages in a row. The key of a node is the page before it, with the tokens of its first page.
All tokens of a node are compared, so a page is found by exact comparison of its whole prefix, not by a hash. Instead of a page before it,
the first page of a prefix has a root: a negative number, one for each namespace. Two namespaces share no page.

The index owns one reference to each of its pages. A page without another owner is idle and may be evicted, the page that is idle for
longest first. Nodes give their pages back from the end, so leaves go first. Two kinds of owners hold a page without the pages before it: a
chunk with a gap, and a sequence with its own copies of these. A page leaves the index together with all pages after it, because a look-up
could no longer reach them.

Functions work on many pages at once with array operations. Only slow paths go from page to page.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from immutables import Map

from nanovllm.errors import BrokenInvariantError
from nanovllm.state.array import IntArray

ROOT = -1  # of namespace 0; that of namespace n is ROOT - n
NO_PAGES = np.empty(0, np.int32)
NEAR = 1024  # pages that an eviction examines together


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A radix-tree node: pages that entered the index by one call, each after the one before it, the first after `parent`.

    Pages that left the index were always the last ones of their node.
    """

    parent: int
    tokens: np.ndarray
    pages: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixIndex:
    """Finds full pages of exact KV by their tokens and all tokens before them.

    A value never changes: each call returns a new one. The index owns one reference to each of its pages. A page is idle if the index is
    its only owner; idle pages may be evicted.

    Attributes:
        page_size: Tokens per page.
        heads: The first page of a radix-tree node, by the page before it and the tokens of the first page.
        runs: The radix-tree nodes by their first page.
        run_of: For each page the first page of its node; -1 if it is not indexed.
        place_of: For each page its place in its node.
        num_children: For each page the number of nodes that follow it.
        idle: Groups of pages that became idle at the same time, by time. The first page of a group is evicted first.
        idle_since: For each page the time at which it became idle; -1 if it is not idle.
        num_idle: The number of idle pages.
        oldest: A time before which no group is in `idle`.
        now: The time of the next group.

    Examples:
        >>> tokens = list(range(100, 132))
        >>> state, chunk = nv.prefill(model, state, tokens)
        >>> state = nv.release(state, chunk)
        >>> state.prefix
        PrefixIndex(2 pages, 2 of them idle)
    """

    page_size: int
    heads: Map[tuple[int, bytes], int]
    runs: Map[int, Run]
    run_of: IntArray
    place_of: IntArray
    num_children: IntArray
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
        """Return which of several pages are indexed.

        Args:
            pages: The pages, int32.

        Returns:
            A bool array of the same shape.

        Raises:
            IndexError: The pool has no such page.

        Examples:
            >>> state.prefix.contains(np.array([0, 1], np.int32)).tolist()
            [False, False]
        """
        return self.run_of.get(pages) >= 0

    def before(self, page: int) -> int:
        """Return the page whose tokens come right before those of an indexed page.

        Args:
            page: An indexed page.

        Returns:
            The page before it, or a negative number if it is the first page of a prefix: -1 less its namespace.

        Raises:
            KeyError: The page is not indexed.

        Examples:
            >>> state, chunk = nv.prefill(model, state, list(range(100, 132)))
            >>> state = nv.release(state, chunk)
            >>> [state.prefix.before(page) for page in state.prefix.pages()]
            [-1, 0]
        """
        run, place = self.runs[self.run_of[page]], self.place_of[page]
        return int(run.pages[place - 1]) if place else run.parent

    def pages(self) -> list[int]:
        """Return all indexed pages. The cost grows with the pool.

        Returns:
            The pages in ascending order.

        Examples:
            >>> state, chunk = nv.prefill(model, state, list(range(100, 132)))
            >>> state = nv.release(state, chunk)
            >>> state.prefix.pages()
            [0, 1]
        """
        return np.flatnonzero(self.run_of.copy() >= 0).tolist()

    def idle_pages(self) -> list[int]:
        """Return all pages that could be evicted. The cost grows with their number.

        Returns:
            The pages in the order of eviction.

        Examples:
            >>> state, chunk = nv.prefill(model, state, list(range(100, 132)))
            >>> state = nv.release(state, chunk)
            >>> state.prefix.idle_pages()
            [1, 0]
        """
        return [page for time in sorted(self.idle) for page in self.idle[time].tolist()]


def init_prefix(num_pages: int, page_size: int) -> PrefixIndex:
    """An empty index for `num_pages` pages of `page_size` tokens."""
    return PrefixIndex(
        page_size=page_size, heads=Map(), runs=Map(), run_of=IntArray.full(num_pages, -1), place_of=IntArray.full(num_pages),
        num_children=IntArray.full(num_pages), idle=Map(), idle_since=IntArray.full(num_pages, -1, np.int64), num_idle=0, oldest=0, now=0,
    )  # fmt: skip


def match(index: PrefixIndex, tokens: np.ndarray, root: int = ROOT) -> np.ndarray:
    """The pages (int32) of the longest indexed prefix of `tokens` (int32), in order. Costs one look-up per radix-tree node on the way."""
    return follow(index, root, tokens)


def follow(index: PrefixIndex, page: int, tokens: np.ndarray) -> np.ndarray:
    """The indexed pages (int32) that hold `tokens` (int32) right after an indexed page, or after a root, as many as there are."""
    size, tokens = index.page_size, np.ascontiguousarray(tokens, np.int32)
    parts, run, place = [NO_PAGES], None, 0
    if page >= 0:  # in the middle of a node, the next page has no key of its own
        run, place = index.runs[index.run_of[page]], index.place_of[page] + 1
    while True:
        if run is not None:
            alike = _num_alike(run.tokens[place * size :], tokens) // size
            parts.append(run.pages[place : place + alike])
            page, tokens = int(run.pages[place + alike - 1]), tokens[alike * size :]
        head = index.heads.get((page, tokens[:size].tobytes())) if len(tokens) >= size else None
        if head is None:
            return np.concatenate(parts)
        run, place = index.runs[head], 0


def _num_alike(a: np.ndarray, b: np.ndarray) -> int:
    """The number of leading values that are equal."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    return int(differs.argmax()) if differs.any() else count


def insert(index: PrefixIndex, tokens: np.ndarray, pages: np.ndarray, root: int = ROOT) -> tuple[PrefixIndex, np.ndarray]:
    """Index the full pages of a sequence whose pages are `pages`, except those whose tokens another page already holds.

    Equal tokens have equal KV, so the sequence's other pages follow the page that the index has. A sequence that begins with a page of
    another namespace is not indexed.

    Returns:
        The index, and its new pages, for which the caller adds the index's reference.
    """
    size = index.page_size
    stop = min(len(tokens) // size, len(pages))
    if stop and (start := pages.item(0)) in index and index.before(start) != root:
        return index, NO_PAGES
    known = index.contains(pages[:stop])
    first = stop if known.all() else int(known.argmin())
    if first == stop:
        return index, NO_PAGES
    parent = int(pages[first - 1]) if first else root
    if len(others := follow(index, parent, tokens[first * size : stop * size])):
        first, parent = first + len(others), int(others[-1])
        if first == stop:
            return index, NO_PAGES
    run = Run(
        parent=parent,
        tokens=np.array(tokens[first * size : stop * size], np.int32),
        pages=np.array(pages[first:stop], np.int32),
    )
    head, num_children = int(run.pages[0]), index.num_children
    if parent >= 0:
        num_children = _add(num_children, parent, 1)
    index = _replace(
        index,
        heads=index.heads.set((parent, run.tokens[:size].tobytes()), head),
        runs=index.runs.set(head, run),
        run_of=index.run_of.put(run.pages, head),
        place_of=index.place_of.put(run.pages, np.arange(len(run.pages), dtype=np.int32)),
        num_children=num_children,
    )
    return index, run.pages


def swap(index: PrefixIndex, old: np.ndarray, new: np.ndarray) -> PrefixIndex:
    """Replace indexed pages by pages that are not indexed. Both must hold the exact KV of the same tokens.

    The pages after the old ones stay in the index. The cost grows with the number of nodes if a node follows one of the old pages.

    Raises:
        BrokenInvariantError: An old page is not indexed, or a new page is.
    """
    if not index.contains(old).all() or index.contains(new).any():
        raise BrokenInvariantError(f"pages {old[:8]} are to leave the index, and {new[:8]} to take their places")
    index, to = set_busy(index, old), dict(zip(old.tolist(), new.tolist(), strict=True))
    touched = dict.fromkeys(index.run_of.get(old).tolist())
    if index.num_children.get(old).any():
        children = _children(index)
        touched.update(dict.fromkeys(head for page in to for head in children.get(page, ())))
    heads, runs = index.heads, index.runs
    place_of = index.place_of.put(new, index.place_of.get(old))
    num_children = index.num_children.put(new, index.num_children.get(old)).put(old, 0)
    run_of = index.run_of.put(old, -1)
    for head in touched:
        run = runs[head]
        pages = np.array([to.get(page, page) for page in run.pages.tolist()], np.int32)
        moved = Run(to.get(run.parent, run.parent), run.tokens, pages)
        first, tokens = pages.item(0), run.tokens[: index.page_size].tobytes()
        heads = heads.delete((run.parent, tokens)).set((moved.parent, tokens), first)
        runs, run_of = runs.delete(head).set(first, moved), run_of.put(pages, first)
    return _replace(index, heads=heads, runs=runs, run_of=run_of, place_of=place_of, num_children=num_children)


def set_idle(index: PrefixIndex, pages: np.ndarray) -> PrefixIndex:
    """Mark pages that only the index owns now. Each is given once, in the order in which they may be evicted."""
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


def idle_from(index: PrefixIndex, start: tuple[int, int], due: int, most: int, limit: int) -> tuple[np.ndarray, tuple[int, int], bool]:
    """Pages that are among the first ones to be evicted, from some place in the order of eviction on.

    Args:
        index: The index.
        start: The place: a time, and the last page before it of the group of this time, or -1. If the group has lost the page, the place is
            its beginning.
        due: The number of pages that count as the first ones. Of a group that is partly among them, more pages may be returned.
        most: The largest number of pages to return.
        limit: At least `due`. No page is returned that is not among so many first ones.

    Returns:
        The pages (int32) in the order of eviction, the place after them, and whether there are more such pages.
    """
    since, parts, count, (time, page) = index.idle_since.copy(), [NO_PAGES], 0, start
    before = int(np.count_nonzero((since >= 0) & (since < time)))
    group = index.idle.get(time, NO_PAGES)
    if len(at := np.flatnonzero(group == page)):
        before, group = before + at.item() + 1, group[at.item() + 1 :]
    most = min(most, limit - before)
    while time < index.now and before + count < due and count < most:
        parts.append(group[: most - count])
        count += len(parts[-1])
        if len(parts[-1]) < len(group):
            page = parts[-1].item(-1)  # `most` ends the loop
        else:
            time, page = time + 1, -1
            group = index.idle.get(time, NO_PAGES)
    return np.concatenate(parts), (time, page), time < index.now and before + count < due


def set_busy(index: PrefixIndex, pages: np.ndarray) -> PrefixIndex:
    """Take pages that have another owner again out of the order of eviction; pages that were not idle are ignored."""
    times = index.idle_since.get(pages)
    idle, num_idle = index.idle, index.num_idle
    times = times[times >= 0]
    if not len(times):
        return index
    since = index.idle_since.put(pages, -1)
    for time in _distinct(times):
        group = idle[time]
        left = group[since.get(group) >= 0]
        num_idle -= len(group) - len(left)
        idle = idle.set(time, left) if len(left) else idle.delete(time)
    return _replace(index, idle=idle, idle_since=since, num_idle=num_idle)


def evict(index: PrefixIndex, count: int) -> tuple[PrefixIndex, np.ndarray]:
    """Remove the `count` pages that have been idle for longest, or as many as there are.

    Pages after them leave the index too, even if they have another owner. Those are not free once the index's reference is released.

    Returns:
        The index, and all pages that left it, whose reference the caller releases.
    """
    evicted, wanted = [NO_PAGES], max(0, index.num_idle - count)
    if index.num_idle <= wanted:
        return index, NO_PAGES
    index, due = _longest_idle(index, index.num_idle - wanted)
    children: dict[int, list[int]] | None = None  # computed at most once: pages that leave the index do not return
    while len(due):
        near = due[:NEAR]
        leaves = near[: _num_leaves(index, near)]
        if len(leaves):
            doomed = leaves
        else:
            children = _children(index) if children is None else children
            doomed = _with_descendants(index, due[:1].tolist(), children)
        index = _unlink(index, doomed)
        evicted.append(doomed)
        due = due[index.contains(due)][: index.num_idle - wanted]  # pages after the evicted ones may have been idle, but not yet due
    return index, np.concatenate(evicted)


def _longest_idle(index: PrefixIndex, count: int) -> tuple[PrefixIndex, np.ndarray]:
    """The `count` pages to evict next, in order, and the index, which remembers where to look for the next ones."""
    time = index.oldest
    while time not in index.idle:
        time += 1
    index, parts = _replace(index, oldest=time), []
    while count > 0:
        pages = index.idle.get(time, NO_PAGES)[:count]
        parts.append(pages)
        count, time = count - len(pages), time + 1
    return index, np.concatenate(parts)


def _num_leaves(index: PrefixIndex, pages: np.ndarray) -> int:
    """How many of these pages, from the first one on, have no page after them once the pages before them in this order are gone."""
    of, places, counts = index.run_of.get(pages), index.place_of.get(pages), index.num_children.get(pages)
    starts = np.flatnonzero((of[1:] != of[:-1]) | (places[1:] != places[:-1] - 1)) + 1
    left: dict[int, int] = {}  # how many pages a node keeps
    gone: dict[int, int] = {}  # how many of the nodes after a page are gone
    branching = dict.fromkeys(np.flatnonzero(counts).tolist())
    for start, stop in pairwise([0, *starts.tolist(), len(pages)]):
        head = of.item(start)
        run = index.runs[head]
        if places.item(start) + 1 != left.get(head, len(run.pages)):
            return start
        for at in range(start, stop) if branching else ():
            if at in branching and gone.get(pages.item(at), 0) != counts.item(at):
                return at
        left[head] = places.item(stop - 1)
        if not left[head]:
            gone[run.parent] = gone.get(run.parent, 0) + 1
    return len(pages)


def forget(index: PrefixIndex, pages: frozenset[int]) -> tuple[PrefixIndex, np.ndarray]:
    """Remove given pages and all pages after them, whatever their age. Returns the index and every page that left it.

    For pages whose KV a failed step lost. The cost grows with the number of nodes.
    """
    lost = [page for page in pages if page in index]
    if not lost:
        return index, NO_PAGES
    doomed = _with_descendants(index, lost, _children(index))
    return _unlink(index, doomed), doomed


def _children(index: PrefixIndex) -> dict[int, list[int]]:
    """For each page the first pages of the nodes that follow it."""
    children: dict[int, list[int]] = {}
    for head, run in index.runs.items():
        children.setdefault(run.parent, []).append(head)
    return children


def _with_descendants(index: PrefixIndex, pages: Iterable[int], children: dict[int, list[int]]) -> np.ndarray:
    """The pages and all pages after them, sorted. `children` may name nodes that are gone."""
    doomed, left = set[int](), list(pages)
    while left:
        page = left.pop()
        if page in doomed or page not in index:
            continue
        for other in index.runs[index.run_of[page]].pages[index.place_of[page] :].tolist():
            doomed.add(other)
            left.extend(children.pop(other, ()))
    return np.array(sorted(doomed), np.int32)


def _unlink(index: PrefixIndex, pages: np.ndarray) -> PrefixIndex:
    """The index without these pages, which include all pages after them."""
    index = set_busy(index, pages)
    heads, runs, num_children, of = index.heads, index.runs, index.num_children, index.run_of.get(pages)
    for head in _distinct(of):
        run = runs[head]
        left = len(run.pages) - int(np.count_nonzero(of == head))
        if left:
            runs = runs.set(head, Run(run.parent, _first(run.tokens, left * index.page_size), _first(run.pages, left)))
            continue
        runs, heads = runs.delete(head), heads.delete((run.parent, run.tokens[: index.page_size].tobytes()))
        if run.parent >= 0:
            num_children = _add(num_children, run.parent, -1)
    return _replace(index, heads=heads, runs=runs, num_children=num_children, run_of=index.run_of.put(pages, -1))


def _first(values: np.ndarray, count: int) -> np.ndarray:
    """The first values, copied if they are less than half of the array that holds them."""
    memory = values if values.base is None else values.base
    return values[:count].copy() if 2 * count < len(memory) else values[:count]


def _add(counts: IntArray, page: int, more: int) -> IntArray:
    return counts.put(np.array([page], np.int32), counts[page] + more)


def _distinct(values: np.ndarray) -> list[int]:
    """The distinct values in order of appearance; fast if neighbours are mostly equal."""
    changes = (values[1:] != values[:-1]).nonzero()[0] + 1
    return list(dict.fromkeys([values.item(0), *values[changes].tolist()]))


def _replace(index: PrefixIndex, **changes) -> PrefixIndex:
    old = {name: getattr(index, name) for name in PrefixIndex.__dataclass_fields__}
    return PrefixIndex(**{**old, **changes})
