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


class Node(NamedTuple):
    """A page in the trie: the page before it, its tokens as int32 bytes, and how many pages stand right after it."""

    parent: int
    tokens: bytes
    num_children: int


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


def match(index: PrefixIndex, tokens: np.ndarray) -> list[int]:
    """The pages that hold the longest indexed prefix of `tokens` (int32), in order."""
    size, data, children = index.page_size, np.ascontiguousarray(tokens, np.int32).tobytes(), index.children
    found, parent = [], ROOT
    for start in range(0, len(tokens) // size * size * 4, size * 4):
        page = children.get((parent, data[start : start + size * 4]))
        if page is None:
            break
        found.append(page)
        parent = page
    return found


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
    children, nodes = index.children.mutate(), index.nodes.mutate()
    data = np.ascontiguousarray(tokens[first * size : stop * size], np.int32).tobytes()
    for i in range(first, stop):
        at = (i - first) * size * 4
        page, key = int(pages[i]), data[at : at + size * 4]
        found = children.get((parent, key))
        if found is None and page not in nodes:
            children[parent, key] = page
            nodes[page] = Node(parent, key, 0)
            if parent != ROOT:
                above = nodes[parent]
                nodes[parent] = above._replace(num_children=above.num_children + 1)
            added.append(page)
        elif found != page:
            break
        parent = page
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
