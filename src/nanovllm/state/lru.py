"""`Ages`: pages in the order in which they may be taken. Pages that one call added form a group. Persistent."""

from dataclasses import dataclass

import numpy as np
from immutables import Map

from nanovllm.errors import BrokenInvariantError
from nanovllm.state.array import IntArray

NO_PAGES = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ages:
    """Pages in the order in which they may be taken.

    A value never changes, and the cost of a call does not depend on the number of pages.

    Attributes:
        groups: The pages added by one call, by time. The first page of a group is taken first.
        since: For each page the time of its group; -1 if it is in none.
        count: The number of pages in all groups.
        oldest: A time before which there is no group.
        now: The time of the next group.
    """

    groups: Map[int, np.ndarray]
    since: IntArray
    count: int
    oldest: int  # no time in `groups` is earlier
    now: int

    def pages(self) -> list[int]:
        """All pages, in the order in which they will be taken. The cost grows with their number."""
        return [page for time in sorted(self.groups) for page in self.groups[time].tolist()]


def init_ages(num_pages: int) -> Ages:
    """An empty order of `num_pages` possible pages."""
    return Ages(groups=Map(), since=IntArray.full(num_pages, -1, np.int64), count=0, oldest=0, now=0)


def add(ages: Ages, pages: np.ndarray) -> Ages:
    """Add pages, each given once, in the order in which they may be taken.

    Raises `BrokenInvariantError` for a page that is already in it.
    """
    if not len(pages):
        return ages
    again = ages.since.get(pages) >= 0
    if again.any():
        raise BrokenInvariantError(f"page {pages[again][0]} is spare already")
    time = ages.now
    groups, since = ages.groups.set(time, np.array(pages)), ages.since.put(pages, time)
    return Ages(groups=groups, since=since, count=ages.count + len(pages), oldest=ages.oldest, now=time + 1)


def remove(ages: Ages, pages: np.ndarray) -> Ages:
    """Remove these pages; pages that are not in it are ignored."""
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
    """Remove the `count` pages that were added first, and return them in order. Raises `BrokenInvariantError` if there are fewer."""
    if count > ages.count:
        raise BrokenInvariantError(f"{count} spare pages were wanted and there are {ages.count}")
    time, parts, missing = ages.oldest, [NO_PAGES], count
    while missing:
        pages = ages.groups.get(time, NO_PAGES)[:missing]
        parts.append(pages)
        missing -= len(pages)
        time += 1
    taken = np.concatenate(parts)
    left = remove(ages, taken)
    return Ages(groups=left.groups, since=left.since, count=left.count, oldest=max(ages.oldest, time - 1), now=left.now), taken
