"""`PrefixIndex`: full pages of exact KV by the tokens they hold. Persistent; a look-up never changes it.

A trie whose nodes are pages. The key of a page is (page of the tokens before, its own tokens), so it commits to the whole prefix by
exact comparison, not by a hash. The index owns one reference to each of its pages. A page that nobody else holds is `idle` and may be
evicted, the one idle for longest first. Runs give their pages back deepest first, so leaves go first; only a chunk with a gap holds a
page without those before it. A page leaves the index together with all behind it, because a look-up could not reach them.
"""

from bisect import bisect
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from immutables import Map

from ..errors import BrokenInvariantError

ROOT = -1


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Pages that entered the index by one call, each behind the one before: a look-up compares their tokens in one go.

    The pages of a run that are still indexed are its first ones: those whose node names this very run.
    """

    tokens: np.ndarray
    pages: np.ndarray


class Node(NamedTuple):
    """A page in the trie: the page before it, its tokens as int32 bytes, how many pages stand right after it, and its place in a run."""

    parent: int
    tokens: bytes
    num_children: int
    run: Run
    place: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixIndex:
    """`children[parent, tokens]` is a page; `nodes[page]` the way back. `idle` and `idle_since` order the evictable pages by age."""

    page_size: int
    children: Map[tuple[int, bytes], int]
    nodes: Map[int, Node]
    idle: Map[int, int]  # time -> page
    idle_since: Map[int, int]  # page -> time
    oldest: int  # no entry of `idle` is older
    now: int

    def __contains__(self, page: int) -> bool:
        return page in self.nodes

    def __repr__(self) -> str:
        return f"PrefixIndex({len(self.nodes)} pages, {self.num_idle} of them idle)"

    @property
    def num_idle(self) -> int:
        """Pages that could be evicted."""
        return len(self.idle)


def init_prefix(page_size: int) -> PrefixIndex:
    """An empty index for pages of `page_size` tokens."""
    return PrefixIndex(page_size=page_size, children=Map(), nodes=Map(), idle=Map(), idle_since=Map(), oldest=0, now=0)


def match(index: PrefixIndex, tokens: np.ndarray) -> np.ndarray:
    """The pages (int32) that hold the longest indexed prefix of `tokens` (int32), in order. Costs a look-up for each run on the way."""
    size, tokens = index.page_size, np.ascontiguousarray(tokens, np.int32)
    found, depth, parent = [np.empty(0, np.int32)], 0, ROOT
    while (depth + 1) * size <= len(tokens):
        page = index.children.get((parent, tokens[depth * size : (depth + 1) * size].tobytes()))
        if page is None:
            break
        pages = _follow(index, page, tokens[depth * size :])
        found.append(pages)
        depth, parent = depth + len(pages), int(pages[-1])
    return np.concatenate(found)


def _follow(index: PrefixIndex, page: int, tokens: np.ndarray) -> np.ndarray:
    """The pages from `page` on, of the run that it stands in, that hold `tokens`; it holds the first of them."""
    size, nodes = index.page_size, index.nodes
    run, place = nodes[page].run, nodes[page].place
    pages, held = run.pages[place:], run.tokens[place * size :]
    count = min(len(held), len(tokens))
    differs = held[:count] != tokens[:count]
    alike = int(differs.argmax()) if differs.any() else count

    def gone(at: int) -> bool:
        node = nodes.get(int(pages[at]))
        return node is None or node.run is not run

    return pages[: bisect(range(alike // size), False, key=gone)]


def insert(index: PrefixIndex, tokens: np.ndarray, pages: np.ndarray, start: int) -> tuple[PrefixIndex, list[int]]:
    """Index full pages `start ...` of a run whose pages are `pages`; returns the pages that are new and need the index's reference.

    Stops at a page whose tokens another page holds already, or whose predecessor is not indexed: behind it the run's own pages are
    not what a look-up would find.
    """
    size = index.page_size
    stop = min(len(tokens) // size, len(pages))
    added: list[int] = []
    if start >= stop:
        return index, added
    parent = ROOT if start == 0 else int(pages[start - 1])
    if parent != ROOT and parent not in index.nodes:
        return index, added
    # A page is indexed only behind all before it, so the first one that is not is found by halving.
    first = bisect(range(start, stop), False, key=lambda i: int(pages[i]) not in index.nodes) + start
    if first == stop:
        return index, added
    parent = parent if first == start else int(pages[first - 1])
    run = Run(np.array(tokens[first * size : stop * size], np.int32), np.array(pages[first:stop], np.int32))
    data, width = run.tokens.tobytes(), size * run.tokens.itemsize
    if (parent, data[:width]) in index.children:
        return index, added
    children, nodes = index.children.mutate(), index.nodes.mutate()
    if parent != ROOT:
        above = nodes[parent]
        nodes[parent] = above._replace(num_children=above.num_children + 1)
    for place, page in enumerate(run.pages.tolist()):
        if page in nodes:
            break
        key = data[place * width : (place + 1) * width]
        children[parent, key] = page
        nodes[page] = Node(parent, key, 1, run, place)
        added.append(page)
        parent = page
    nodes[parent] = nodes[parent]._replace(num_children=0)
    return _replace(index, children=children.finish(), nodes=nodes.finish()), added


def set_idle(index: PrefixIndex, pages: list[int]) -> PrefixIndex:
    """Mark pages that only the index holds now, in the order in which they may be evicted."""
    if not pages:
        return index
    idle, since, now = index.idle.mutate(), index.idle_since.mutate(), index.now
    for page in pages:
        if page in since:
            raise BrokenInvariantError(f"page {page} is idle already")
        idle[now], since[page] = page, now
        now += 1
    return _replace(index, idle=idle.finish(), idle_since=since.finish(), now=now)


def set_busy(index: PrefixIndex, pages: list[int]) -> PrefixIndex:
    """Take pages that somebody holds again out of the order of eviction; pages that were not idle are passed over."""
    if not pages:
        return index
    idle, since = index.idle.mutate(), index.idle_since.mutate()
    for page in pages:
        time = since.pop(page, None)
        if time is not None:
            del idle[time]
    return _replace(index, idle=idle.finish(), idle_since=since.finish())


def evict(index: PrefixIndex, count: int) -> tuple[PrefixIndex, list[int]]:
    """Forget the `count` pages (or as many as there are) that have been idle for longest; returns what left the index, for release.

    Pages behind them that somebody still holds leave it too: after their release they are not free.
    """
    evicted: list[int] = []
    if count <= 0 or not index.idle:
        return index, evicted
    time, wanted = index.oldest, max(0, len(index.idle) - count)
    children, nodes = index.children.mutate(), index.nodes.mutate()
    idle, since = index.idle.mutate(), index.idle_since.mutate()
    while len(idle) > wanted:
        page = idle.get(time)
        time += 1
        if page is None:
            continue
        doomed = [page]
        if nodes[page].num_children:
            doomed = sorted(other for other in _with_those_behind(index.nodes, {page}) if other in nodes)
        _unlink(children, nodes, idle, since, doomed)
        evicted.extend(doomed)
    index = _replace(index, children=children.finish(), nodes=nodes.finish(), idle=idle.finish(), idle_since=since.finish(), oldest=time)
    return index, evicted


def forget(index: PrefixIndex, pages: frozenset[int]) -> tuple[PrefixIndex, list[int]]:
    """Forget given pages and all that stands behind them, whatever their age; returns every page that is no longer indexed.

    For pages whose KV was lost by a failed step: linear in the size of the index.
    """
    lost = {page for page in pages if page in index.nodes}
    if not lost:
        return index, []
    doomed = sorted(_with_those_behind(index.nodes, lost))
    children, nodes = index.children.mutate(), index.nodes.mutate()
    idle, since = index.idle.mutate(), index.idle_since.mutate()
    _unlink(children, nodes, idle, since, doomed)
    return _replace(index, children=children.finish(), nodes=nodes.finish(), idle=idle.finish(), idle_since=since.finish()), doomed


def _with_those_behind(nodes, pages: set[int]) -> set[int]:
    """The pages and all that stand behind them."""
    behind: dict[int, list[int]] = {}
    for page, node in nodes.items():
        behind.setdefault(node.parent, []).append(page)
    found, left = set(pages), list(pages)
    while left:
        new = [page for page in behind.get(left.pop(), ()) if page not in found]
        found.update(new)
        left.extend(new)
    return found


def _unlink(children, nodes, idle, since, pages: list[int]) -> None:
    """Take pages out of the open maps; all that stands behind them is among them."""
    for page in pages:
        node = nodes.pop(page)
        del children[node.parent, node.tokens]
        above = nodes.get(node.parent)
        if above is not None:
            nodes[node.parent] = above._replace(num_children=above.num_children - 1)
        time = since.pop(page, None)
        if time is not None:
            del idle[time]


def _replace(index: PrefixIndex, **changes) -> PrefixIndex:
    old = {name: getattr(index, name) for name in PrefixIndex.__dataclass_fields__}
    return PrefixIndex(**{**old, **changes})
