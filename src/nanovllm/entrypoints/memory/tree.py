"""The radix tree of page paths: owners with the same first pages share a node, and so do prefixes that only the index holds."""

from collections.abc import Sequence as Seq
from itertools import pairwise

import numpy as np

from nanovllm.entrypoints.memory.pages import PageOwner, PageRun, Path
from nanovllm.state.prefix_cache import ROOT, PrefixIndex


def tree(paths: Seq[tuple[Path, PageOwner | None]]) -> tuple[PageRun, ...]:
    """The radix tree of page paths, sorted by pages, each node before its children."""
    order = sorted(paths, key=lambda entry: entry[0])
    runs: list[PageRun] = []
    left: list[tuple[int, int, int, int | None]] = [(0, len(order), 0, None)]  # paths low ... high - 1 share their first `start` pages
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
        while stop < most and first[stop] == last[stop]:  # in sorted order, all paths share the prefix of the first and the last
            stop += 1
        after = low
        while after < high and len(order[after][0]) == stop:
            after += 1
        owners = tuple(owner for _, owner in order[low:high] if owner is not None)
        ends = tuple(owner for _, owner in order[low:after] if owner is not None)
        runs.append(PageRun(pages=first[start:stop], parent=parent, start=start, owners=owners, ends=ends))
        left.append((after, high, stop, len(runs) - 1))
    return tuple(runs)


def idle_paths(index: PrefixIndex) -> list[Path]:
    """Paths through the index, from its root to each idle page that has no idle page after it."""
    idle, paths = index.idle_pages(), []
    above = {index.before(page) for page in idle}
    for page in idle:
        if page not in above:
            path = [page]
            while (before := index.before(path[-1])) > ROOT:
                path.append(before)
            paths.append(tuple(reversed(path)))
    return paths


def path_to(index: PrefixIndex, page: int) -> tuple[np.ndarray, int]:
    """The indexed pages up to a page, in order, and the namespace that they are of."""
    parts = []
    while page >= 0:
        run = index.runs[index.run_of[page]]
        parts.append(run.pages[: index.place_of[page] + 1])
        page = run.parent
    return np.concatenate(parts[::-1]), ROOT - page
