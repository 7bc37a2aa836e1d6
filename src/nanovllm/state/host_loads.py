"""Pages that come back from host memory: which of them are copied, and the pages and frames of the device that they are copied into.

An owner begins with indexed pages, and new pages follow them. Of an indexed page only the frame is copied, if it has lost it and the owner
needs it. A new page that the owner does not need the frame of gets none.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from nanovllm.state import offload
from nanovllm.state import pool as pools
from nanovllm.state.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What is copied for an owner of pages, as places among its pages.

    Attributes:
        pages: The pages whose KV is copied from host pages, apart from frames.
        frames: The pages whose frames are copied.
    """

    pages: tuple[int, ...]
    frames: tuple[int, ...]

    @property
    def places(self) -> tuple[int, ...]:
        """The pages of which something is copied."""
        return tuple(sorted({*self.pages, *self.frames}))


def copied(pool: Pool, shared: np.ndarray, count: int, retired: int) -> Copied:
    """What must be copied so that an owner has `count` pages, of which it shares the first ones with the index.

    Args:
        pool: The pool.
        shared: The indexed pages.
        count: The number of pages.
        retired: The number of leading pages whose frames the owner does not need.
    """
    fresh, frames = tuple(range(len(shared), count)), pool.frames
    if frames is None:
        return Copied(pages=fresh, frames=())
    lacking = np.flatnonzero(~frames.have(shared[retired:])) + retired
    framed = (*lacking.tolist(), *(place for place in fresh if place >= retired))
    return Copied(pages=() if frames.alone else fresh, frames=framed)


def bring_in(pool: Pool, shared: np.ndarray, held: Seq[int], retired: int) -> tuple[Pool, tuple[int, ...], np.ndarray] | None:
    """Let a new owner begin with indexed pages, and with new ones after them that get the KV of host pages.

    Args:
        pool: The pool of a plan.
        shared: The indexed pages.
        held: The host pages of the shared pages and of those after them. For a shared page whose frame is not copied it may be -1.
        retired: The number of leading pages whose frames the owner does not need.

    Returns:
        The pool, the new pages, and the shared pages that got frames. None if there are too few pages or frames.
    """
    assert pool.host is not None
    what = copied(pool, shared, len(held), retired)
    reads = [held[place] for place in what.places]
    acquired = pools.acquire_with_frames(replace(pool, host=offload.read(pool.host, reads)), shared, retired)
    if acquired is None:
        return None
    taken = pools.allocate(acquired[0], len(held) - len(shared), max(0, retired - len(shared)))
    if taken is None or taken[0].host is None:
        return None
    (pool, fresh), host = taken, taken[0].host
    first, second = pools.addresses(pool, np.concatenate((shared, np.array(fresh, np.int32))))
    of_pages = what.frames if pool.frames is not None and pool.frames.alone else what.pages
    into = [(held[place], first.item(place)) for place in of_pages]
    frames_into = () if second is None else [(held[place], second.item(place)) for place in what.frames]
    return replace(pool, host=offload.load(host, reads, into, frames_into)), fresh, acquired[1]
