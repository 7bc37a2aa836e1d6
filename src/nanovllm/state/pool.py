"""The page pool: `PageState`, `PrefixIndex` and, for layers with a sliding window, `Frames` together; and pages in host memory, if any.

A page that only the index owns counts as available, and so does a frame that nobody needs. The index owns pages, but needs no frames.
Between `planning` and the copies of the plan the KV of evicted pages goes to host memory (`offload.py`). So does that of indexed pages
whose frames are taken for other pages.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from nanovllm.errors import BrokenInvariantError, OutOfPagesError
from nanovllm.state import offload
from nanovllm.state import pages as page_ops
from nanovllm.state import prefix_cache as prefix_ops
from nanovllm.state import window_frames as frame_ops
from nanovllm.state.offload import HostPages
from nanovllm.state.pages import PageState, init_pages
from nanovllm.state.prefix_cache import ROOT, PrefixIndex, init_prefix
from nanovllm.state.prefix_keys import keys_of
from nanovllm.state.vector import Ints, as_array
from nanovllm.state.window_frames import Frames, num_retired, num_served


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """The owners of the pages, and what finds them.

    Attributes:
        pages: The owners of the pages.
        prefix: The index of reusable pages.
        frames: The frames of layers with a sliding window. None: no layer has one.
        host: The pages in host memory. None: no host memory is used.
    """

    pages: PageState
    prefix: PrefixIndex
    frames: Frames | None = None
    host: HostPages | None = None

    @property
    def num_available(self) -> int:
        """The number of pages that an allocation could get, with a frame each: free pages, and pages that only the index owns."""
        count = self.pages.num_free + self.prefix.num_idle
        return count if self.frames is None else min(count, self.frames.num_available)

    @property
    def num_free(self) -> int:
        """The number of pages that an allocation could get, with a frame each, without evicting a page that a later request might reuse."""
        return self.pages.num_free if self.frames is None else min(self.pages.num_free, self.frames.used.num_free)

    def spare(self, *, only_free: bool) -> int:
        """The number of pages that an allocation could get while an eighth of the pool stays available.

        `only_free` leaves out pages that would have to be evicted.
        """
        pages = self.pages.num_free + (0 if only_free else self.prefix.num_idle) - self.pages.num_pages // 8
        if self.frames is None:
            return pages
        return min(pages, (self.frames.used.num_free if only_free else self.frames.num_available) - self.frames.num_frames // 8)


@dataclass(slots=True)
class Taken:
    """The pages that a call takes before it writes, their frames, and the pages of host memory that it writes."""

    pages: list[int] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)
    host_pages: list[int] = field(default_factory=list)

    def note(self, pool: Pool, fresh: Ints, framed: Ints = ()) -> None:
        """Add pages that this pool has just handed out, and the frames of other pages to which it has just given one."""
        fresh = as_array(fresh)
        self.pages.extend(fresh.tolist())
        if pool.frames is not None:
            frames = pool.frames.frame_of.get(np.concatenate((fresh, as_array(framed))))
            self.frames.extend(frames[frames >= 0].tolist())


def too_few(pool: Pool, what: str) -> OutOfPagesError:
    """The error to raise if the pool cannot give the pages that `what` needs."""
    available = f"{pool.num_available} of {pool.pages.num_pages} pages are available"
    if pool.frames is not None:
        available += f", and {pool.frames.num_available} of {pool.frames.num_frames} frames for layers with windows"
    return OutOfPagesError(f"{what}; {available}: release chunks, cancel requests, abandon sessions, or make the pool larger")


def init_pool(num_pages: int, page_size: int, frames: Frames | None = None, host: HostPages | None = None) -> Pool:
    """A pool of free pages, and an empty index."""
    return Pool(pages=init_pages(num_pages), prefix=init_prefix(num_pages, page_size), frames=frames, host=host)


def planning(pool: Pool) -> Pool:
    """The pool at the beginning of a plan: from now on evicted pages are kept in host memory, if there is some. Its copies must be made."""
    return pool if pool.host is None else replace(pool, host=offload.planning(pool.host))


def allocate(pool: Pool, count: int, num_bare: int = 0) -> tuple[Pool, tuple[int, ...]] | None:
    """Take `count` pages, and a frame for each after the first `num_bare`, evicting idle pages if needed.

    Returns None, and changes nothing, if there are too few.
    """
    if count > pool.pages.num_free + pool.prefix.num_idle or (pool.frames and count - num_bare > pool.frames.num_available):
        return None
    if count > pool.pages.num_free:
        prefix, evicted = prefix_ops.evict(pool.prefix, count - pool.pages.num_free)
        pages, given, left = page_ops.give_back(pool.pages, evicted)
        host = kept(pool, _not_kept_yet(pool, given[left == 0]))
        pool = Pool(pages=pages, prefix=prefix, frames=pool.frames and frame_ops.vacate(pool.frames, given[left == 0]), host=host)
    taken = page_ops.allocate(pool.pages, count)
    if taken is None:
        raise BrokenInvariantError(f"{count} pages were promised, {pool.pages.num_free} are free")
    pool, fresh = Pool(pages=taken[0], prefix=pool.prefix, frames=pool.frames, host=pool.host), taken[1]
    return (pool if pool.frames is None else _framed(pool, pool.frames, np.array(fresh[num_bare:], np.int32))), fresh


def kept(pool: Pool, pages: np.ndarray) -> HostPages | None:
    """The host pages of a plan in which indexed pages lose their KV or a part of it, or may do so soon."""
    if pool.host is None or pool.host.moves is None or not len(pages):
        return pool.host
    keys, (first, second) = keys_of(pool.prefix, pages), addresses(pool, pages)
    if pool.frames is not None and pool.frames.alone:  # without its frame a page has no KV
        there = np.flatnonzero(first >= 0)
        first, keys = first[there], [keys[at] for at in there.tolist()]
    return offload.keep(pool.host, first, keys, second)


def addresses(pool: Pool, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Where the KV of pages lies in the first KV pool, and the frames of pages in the second one, if there is one; -1 without a frame."""
    if pool.frames is None:
        return pages, None
    frames = pool.frames.frame_of.get(pages)
    return (frames, None) if pool.frames.alone else (pages, frames)


def acquire(pool: Pool, held: Ints, retired: int = 0) -> Pool:
    """Add an owner to pages that are in use or indexed. The owner needs the frames of the pages from place `retired` on."""
    held = as_array(held)
    if not len(held):
        return pool
    pages, prefix = page_ops.retain(pool.pages, held), prefix_ops.set_busy(pool.prefix, held)
    frames = pool.frames and frame_ops.need(pool.frames, held[retired:])
    return Pool(pages=pages, prefix=prefix, frames=frames, host=pool.host)


def acquire_with_frames(pool: Pool, held: np.ndarray, retired: int) -> tuple[Pool, np.ndarray] | None:
    """Do as `acquire`, and give frames to the pages from place `retired` on that have lost theirs.

    Returns:
        The pool, and the pages that got frames, whose KV must be copied into them. None if there are too few frames.
    """
    if pool.frames is None or (there := pool.frames.have(held[retired:])).all():
        return acquire(pool, held, retired), held[:0]
    bare = held[retired:][~there]
    pool = acquire(pool, held, len(held))
    assert pool.frames is not None
    frames = frame_ops.need(pool.frames, held[retired:][there])
    if len(bare) > frames.num_available:
        return None
    return _framed(pool, frames, bare), bare


def release(pool: Pool, held: Ints, retired: int = 0) -> Pool:
    """Remove an owner from pages in order, which needed the frames of the pages from place `retired` on.

    The last page becomes evictable first. A page that is listed twice loses two owners.
    """
    held = as_array(held)
    backwards = held[::-1]
    if not len(backwards):
        return pool
    pages, given, left = page_ops.give_back(pool.pages, backwards)
    idle = given[(left == 1) & pool.prefix.contains(given)]
    frames = pool.frames
    if frames is not None:
        frames = frame_ops.vacate(frame_ops.retire(frames, held[retired:][::-1]), given[left == 0])
    return Pool(pages=pages, prefix=prefix_ops.set_idle(pool.prefix, idle), frames=frames, host=pool.host)


def retire(pool: Pool, pages: Ints) -> Pool:
    """Note that an owner of each of these pages no longer needs its frame."""
    frames = pool.frames and frame_ops.retire(pool.frames, pages)
    return Pool(pages=pool.pages, prefix=pool.prefix, frames=frames, host=pool.host)


def match(pool: Pool, tokens: np.ndarray, namespace: int = 0) -> np.ndarray:
    """The pages (int32) of the longest indexed prefix of `tokens` in a namespace."""
    return prefix_ops.match(pool.prefix, tokens, ROOT - namespace)


def reusable(pool: Pool, tokens: np.ndarray, *, whole: bool, namespace: int = 0) -> tuple[np.ndarray, int]:
    """The pages of the longest indexed prefix with which a request for `tokens` can begin.

    In layers with a sliding window, all pages that later tokens see must still have frames.

    Args:
        pool: The pool.
        tokens: The tokens of the request, int32.
        whole: Whether the request needs all frames, because it may become a chunk.
        namespace: Whose pages it may share.

    Returns:
        The pages, and the number of leading pages whose frames the request does not need.
    """
    matched, frames = match(pool, tokens, namespace), pool.frames
    if frames is None or not len(matched):
        return matched, 0
    size = pool.prefix.page_size
    count = num_served(frames.have(matched), 0, None if whole else frames.window, len(tokens), size)
    return matched[:count], 0 if whole else num_retired(count * size, len(tokens), frames.window, size)


def insert(pool: Pool, tokens: np.ndarray, held: np.ndarray, namespace: int = 0) -> Pool:
    """Index the full pages of exact KV of these tokens; the index becomes an owner of the new pages.

    If the index has other pages for some of the tokens, the given pages follow these. If fewer of the others have frames, the given pages
    replace them, and the pages after them stay.
    """
    if pool.frames is not None:
        pool = _made_way(pool, pool.frames, tokens, held, namespace)
    prefix, added = prefix_ops.insert(pool.prefix, tokens, held, ROOT - namespace)
    if not len(added):
        return pool
    return Pool(pages=page_ops.retain(pool.pages, added), prefix=prefix, frames=pool.frames, host=pool.host)


def insert_each(pool: Pool, entries: Iterable[tuple[np.ndarray, np.ndarray, int]]) -> Pool:
    """Do as `insert` for each of (tokens, pages, namespace), in a pool without frames."""
    prefix, every = pool.prefix, list[np.ndarray]()
    for tokens, held, namespace in entries:
        prefix, added = prefix_ops.insert(prefix, tokens, held, ROOT - namespace)
        every.append(added)
    added = np.concatenate(every)
    return Pool(pages=page_ops.retain(pool.pages, added), prefix=prefix, host=pool.host) if len(added) else pool


def forget_host(pool: Pool, lost: frozenset[int]) -> Pool:
    """Take pages of host memory whose content was lost out of what requests can find."""
    return pool if pool.host is None or not lost else replace(pool, host=offload.forget(pool.host, lost))


def forget(pool: Pool, lost: frozenset[int]) -> Pool:
    """Take pages whose KV was lost, and all indexed pages after them, out of the index.

    Lost pages that still have an owner lose their frames, which nobody may need.
    """
    prefix, dropped = prefix_ops.forget(pool.prefix, lost)
    pages, given, left = page_ops.give_back(pool.pages, dropped)
    if pool.frames is None:
        return Pool(pages=pages, prefix=prefix, host=pool.host)
    frames = frame_ops.vacate(pool.frames, given[left == 0])
    return Pool(pages=pages, prefix=prefix, frames=frame_ops.vacate(frames, as_array(sorted(lost))), host=pool.host)


def withdraw(pool: Pool, unfilled: frozenset[int]) -> Pool:
    """Take pages that are not filled yet out of the index. They have other owners, and keep their frames."""
    prefix, dropped = prefix_ops.forget(pool.prefix, unfilled)
    pages, _, _ = page_ops.give_back(pool.pages, dropped)
    return Pool(pages=pages, prefix=prefix, frames=pool.frames, host=pool.host)


def _not_kept_yet(pool: Pool, pages: np.ndarray) -> np.ndarray:
    """Those pages of the index that were not kept ahead of their eviction."""
    if pool.host is None or not pool.host.ahead[0] or not len(pages):
        return pages
    since = pool.prefix.idle_since.get(pages)
    return pages[(since < 0) | (since >= pool.host.ahead[0])]


def _framed(pool: Pool, frames: Frames, pages: np.ndarray) -> Pool:
    """The pool in which these pages get frames."""
    lost = frame_ops.overtaken(frames, len(pages)) if pool.host is not None else pages[:0]
    host = kept(pool, lost[pool.prefix.contains(lost)])
    return Pool(pages=pool.pages, prefix=pool.prefix, frames=frame_ops.give(frames, pages), host=host)


def _made_way(pool: Pool, frames: Frames, tokens: np.ndarray, held: np.ndarray, namespace: int) -> Pool:
    """The pool in which these pages replace other indexed pages for the same tokens, if fewer of the others have frames."""
    matched = match(pool, tokens, namespace)[: len(held)]
    places = np.flatnonzero(matched != held[: len(matched)])
    old, new = matched[places], held[places]
    if np.count_nonzero(frames.have(new)) <= np.count_nonzero(frames.have(old)):
        return pool
    prefix = prefix_ops.swap(pool.prefix, old, new)
    pages, given, left = page_ops.give_back(page_ops.retain(pool.pages, new), old)
    return Pool(pages=pages, prefix=prefix, frames=frame_ops.vacate(frames, given[left == 0]), host=pool.host)
