"""Pages that go to host memory before they are evicted, while nobody waits for the copies.

A step that evicts pages which host memory lacks copies them out before it writes into them. So the pages that are evicted next are kept
at the ends of earlier steps, as many as the longest request needs. They stay in the prefix index: a request that finds them copies nothing.
"""

from dataclasses import replace

from nanovllm.state import offload
from nanovllm.state import pool as pools
from nanovllm.state import prefix_cache as prefix_ops
from nanovllm.state.offload import Moves
from nanovllm.state.pool import Pool

SHARE = 4  # at least one of `SHARE` pages is free or kept


def keep_ahead(pool: Pool, longest: int, most: int) -> tuple[Pool, Moves] | None:
    """Keep pages that will be evicted next, until requests can get so many pages as the longest one needs, or a quarter of the pool.

    Free pages count, too, so a pool with many of them copies nothing. At most half of the host pages that may be replaced are used.

    Args:
        pool: The pool between two plans.
        longest: The pages of the longest request.
        most: The largest number of pages to look at.

    Returns:
        The pool and the copies that it needs. None: there is nothing to look at.
    """
    host = pool.host
    if host is None or host.ahead[0] >= pool.prefix.now:
        return None
    half = (host.used.num_free + host.ages.count) // 2
    due = min(max(longest, pool.pages.num_pages // SHARE), half) - pool.num_free
    if due <= 0:
        return None
    pages, place, more = prefix_ops.idle_from(pool.prefix, host.ahead, due, most, half)
    host = pools.kept(pools.planning(pool), pages) if len(pages) else offload.planning(host)
    assert host is not None
    host, moves = offload.settled(replace(host, ahead=place, behind=more))
    return replace(pool, host=host), moves
