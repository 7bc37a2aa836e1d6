"""Chunks in host memory: a live chunk gives up its pages of the device and owns host pages instead, until it is needed again.

A page of exact KV that the prefix index holds has a key, so that it is copied and kept once for all chunks and for later requests. Every
other page is copied for its chunk alone. Host pages that a chunk owns are never replaced.

A call that fails leaves the state before it, in which the chunk is still in host memory. So host pages that a call gives up are *held*
until its commit, and nothing that the same call evicts is copied into them.
"""

from dataclasses import replace
from itertools import islice

import numpy as np

from nanovllm.state import lru, offload
from nanovllm.state import pages as page_ops
from nanovllm.state import pool as pools
from nanovllm.state.chunk import Chunk
from nanovllm.state.host_loads import bring_in
from nanovllm.state.offload import HostPages, Moved
from nanovllm.state.pool import Pool
from nanovllm.state.prefix_cache import ROOT
from nanovllm.state.prefix_keys import keys_from
from nanovllm.state.vector import IntVector


def move_out(pool: Pool, chunk: Chunk) -> Pool | None:
    """The pool of a plan in which a chunk has host pages instead of its pages. None if there are too few host pages."""
    host, pages = pool.host, chunk.pages.array()
    assert host is not None and host.moves is not None
    first, second = (part if part is None else part.tolist() for part in pools.addresses(pool, pages))
    assert first is not None
    namespace, keys = _indexed(pool, chunk, pages)
    known = [host.by_key.get(key) for key in keys]
    host = offload.read(host, [at for at in known if at is not None])  # the chunk owns them, so they are not replaced
    count = len(pages) - len(known) + known.count(None)
    host = offload.replaced(host, count - host.used.num_free)
    taken = page_ops.allocate(host.used, count)
    if taken is None or host.moves is None:
        return None
    free, by_key, key_of, bare = iter(taken[1]), host.by_key, host.key_of, host.bare
    out, frames_out = host.moves.out, host.moves.frames_out
    owned, keyed = list[int](), list[int]()
    for place, page in enumerate(first):
        known_at = known[place] if place < len(known) else None
        at = next(free) if known_at is None else known_at
        owned.append(at)
        if second is not None and (known_at is None or at in bare):  # a chunk needs all of its frames
            frames_out, bare = frames_out.set(at, second[place]), bare.delete(at) if at in bare else bare
        if known_at is not None:
            continue
        out = out.set(at, page)
        if place < len(keys):
            by_key, key_of = by_key.set(keys[place], at), key_of.set(at, keys[place])
            keyed.append(at)
    used = page_ops.retain(taken[0], np.array(keyed, np.int32))
    moved = Moved(pages=tuple(owned), num_keyed=len(keys), namespace=namespace)
    host = replace(
        host, used=used, by_key=by_key, key_of=key_of, bare=bare, moves=replace(host.moves, out=out, frames_out=frames_out),
        moved=host.moved.set(chunk.liveness, moved),
    )  # fmt: skip
    return pools.release(replace(pool, host=host), chunk.pages)


def move_in(pool: Pool, chunk: Chunk) -> tuple[Pool, IntVector, tuple[int, ...], np.ndarray] | None:
    """The pool of a plan in which a chunk owns pages of the device again.

    Pages that the prefix index has are shared; if they have lost their frames, these are copied in. Others are copied in, and enter the
    index if it had them when the chunk was moved out.

    Returns:
        The pool, the pages of the chunk, those of them that were taken, and the others that got frames. None if there are too few pages.
    """
    host, size = pool.host, pool.prefix.page_size
    assert host is not None
    moved = host.moved[chunk.liveness]
    keyed = chunk.tokens.array(0, moved.num_keyed * size)
    shared = pools.match(pool, keyed, moved.namespace)
    done = bring_in(pool, shared, moved.pages, 0)
    if done is None or done[0].host is None:
        return None
    pool, fresh, framed = done
    pages = np.concatenate((shared, np.array(fresh, np.int32)))
    pool = replace(pool, host=given_up(done[0].host, chunk.liveness))
    return pools.insert(pool, keyed, pages[: moved.num_keyed], moved.namespace), IntVector.of(pages), fresh, framed


def share(host: HostPages, old: Chunk, new: Chunk, num_pages: int, page_size: int) -> HostPages:
    """Make a new chunk an owner of the first host pages of another one, which it begins with."""
    moved = host.moved[old.liveness]
    pages = moved.pages[:num_pages]
    num_keyed = min(moved.num_keyed, len(new.tokens) // page_size)
    moved = Moved(pages=pages, num_keyed=num_keyed, namespace=moved.namespace)
    return replace(host, used=page_ops.retain(host.used, pages), moved=host.moved.set(new.liveness, moved))


def given_up(host: HostPages, liveness: int) -> HostPages:
    """The host pages without a chunk, which has come back or was released. They keep their content until the commit of the call."""
    return replace(host, moved=host.moved.delete(liveness), held=(*host.held, *host.moved[liveness].pages))


def let_go(host: HostPages) -> HostPages:
    """The host pages at the commit of a call: those that it gave up may be replaced from now on."""
    if not host.held:
        return host
    used, given, left = page_ops.give_back(host.used, np.array(host.held[::-1], np.int32))
    unread = [at for at, count in zip(given.tolist(), left.tolist(), strict=True) if count == 1 and at in host.key_of]
    return replace(host, used=used, ages=lru.add(host.ages, np.array(unread, np.int32)), held=())


def _indexed(pool: Pool, chunk: Chunk, pages: np.ndarray) -> tuple[int, list[bytes]]:
    """The namespace in which the prefix index holds the first pages of a chunk, and the keys of these pages."""
    size = pool.prefix.page_size
    count = chunk.num_exact // size
    first = pages.item(0)
    if not count or first not in pool.prefix or (root := pool.prefix.before(first)) > ROOT:
        return 0, []
    exact = chunk.tokens.array(0, count * size)
    matched = pools.match(pool, exact, ROOT - root)
    same = matched == pages[: len(matched)]
    count = len(same) if same.all() else int(same.argmin())
    return ROOT - root, list(islice(keys_from(exact, 0, size, ROOT - root), count))
