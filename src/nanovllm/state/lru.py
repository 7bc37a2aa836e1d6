"""`Ages`: pages in the order in which they may be taken, those that became so by one call together. Persistent."""

from dataclasses import dataclass

import numpy as np
from immutables import Map

from nanovllm.errors import BrokenInvariantError
from nanovllm.state.array import IntArray

NO_PAGES = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ages:
    """`groups[time]` are pages that came together, the first of them to go first; `since` is the way back (-1: not among them).

    What a call costs does not depend on how many pages there are.
    """

    groups: Map[int, np.ndarray]
    since: IntArray
    count: int
    oldest: int  # no time in `groups` is earlier
    now: int

    def pages(self) -> list[int]:
        """All pages, in the order in which they will be taken; linear in their number."""
        return [page for time in sorted(self.groups) for page in self.groups[time].tolist()]


def init_ages(num_pages: int) -> Ages:
    """None of `num_pages` pages."""
    return Ages(groups=Map(), since=IntArray.full(num_pages, -1, np.int64), count=0, oldest=0, now=0)


def add(ages: Ages, pages: np.ndarray) -> Ages:
    """With more pages, each given once, in the order in which they may be taken. Raises `BrokenInvariantError` for one that is there."""
    if not len(pages):
        return ages
    again = ages.since.get(pages) >= 0
    if again.any():
        raise BrokenInvariantError(f"page {pages[again][0]} is spare already")
    time = ages.now
    groups, since = ages.groups.set(time, np.array(pages)), ages.since.put(pages, time)
    return Ages(groups=groups, since=since, count=ages.count + len(pages), oldest=ages.oldest, now=time + 1)


def remove(ages: Ages, pages: np.ndarray) -> Ages:
    """Without these pages; those that are not there are passed over."""
    times = ages.since.get(pages)
    times = times[times >= 0]
    if not len(times):
        return ages
    since, groups, count = ages.since.put(pages, -1), ages.groups, ages.count
    for time in dict.fromkeys(times.tolist()):
        held = groups[time]
        left = held[since.get(held) >= 0]
        count -= len(held) - len(left)
        groups = groups.set(time, left) if len(left) else groups.delete(time)
    return Ages(groups=groups, since=since, count=count, oldest=ages.oldest, now=ages.now)


def take(ages: Ages, count: int) -> tuple[Ages, np.ndarray]:
    """Without the `count` that were there for longest, and these, in order. Raises `BrokenInvariantError` where there are fewer."""
    if count > ages.count:
        raise BrokenInvariantError(f"{count} spare pages were wanted and there are {ages.count}")
    time, found, missing = ages.oldest, [NO_PAGES], count
    while missing:
        pages = ages.groups.get(time, NO_PAGES)[:missing]
        found.append(pages)
        missing -= len(pages)
        time += 1
    taken = np.concatenate(found)
    left = remove(ages, taken)
    return Ages(groups=left.groups, since=left.since, count=left.count, oldest=max(ages.oldest, time - 1), now=left.now), taken
