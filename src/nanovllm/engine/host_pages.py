"""Pages that a request finds in host memory: they are copied into new pages of the device, if that is faster than running their tokens.

The prefix index keeps the full pages of a preempted request as long as it can. Its last page, which is partly filled, goes to host memory
at once, so that no token runs again.

While replies go on, a step copies no more than is copied beside it, and the sequence goes on in the next step (`load_more`). When all its
pages are there, they enter the index, and it runs. So the replies do not wait for the copies.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from nanovllm.engine.draft import Draft
from nanovllm.state import offload
from nanovllm.state import pool as pools
from nanovllm.state.host_loads import bring_in, copied
from nanovllm.state.lru import NO_PAGES
from nanovllm.state.offload import HostPages
from nanovllm.state.pool import Pool
from nanovllm.state.prefix_keys import key_of
from nanovllm.state.request import Sequence
from nanovllm.state.window_frames import num_retired, num_served


def load(draft: Draft, sequence: Sequence, num_matched: int) -> Sequence:
    """Let a sequence go on with pages from host memory. They enter the index, so later requests share them.

    While replies go on, it gets as many pages as the step may still copy in, which may be none. `loading` says up to where others follow.
    A partly filled page of the sequence is replaced by the whole one.

    Args:
        draft: The plan, which gets the new pages and the copies.
        sequence: The sequence, over the pages with which it begins or goes on.
        num_matched: The pages that the prefix index has for its tokens.

    Returns:
        The sequence with more tokens filled; the same one if host memory has none of them, or if running them is faster.
    """
    room, until = None if draft.pool.frames is not None else draft.load_room, sequence.loading
    if until and room == 0:
        return sequence
    sequence = replace(sequence, loading=0) if until else sequence
    pool, size = draft.pool, draft.config.page_size
    held, host = sequence.num_filled // size, pool.host
    until = until if until > sequence.num_filled else 0
    if host is None or not len(host.by_key) or num_matched > held:
        return sequence
    if sequence.num_exact < sequence.num_filled:
        return sequence
    if pool.frames is not None and (sequence.num_filled % size or sequence.pages.length != held):
        return sequence
    tokens, namespace = sequence.tokens.array(), sequence.request.namespace
    shared, found, filled = _longest(pool, host, sequence, held, room if until else None)
    num_tokens = min(filled, len(tokens) - 1) - sequence.num_filled  # the last token runs in any case
    retired = retired_at(pool, sequence, filled)
    behind = max(0, retired - held)  # pages after those of the sequence whose frames it does not need
    what = copied(pool, shared, len(found), behind)
    num_bytes = len(what.pages) * (host.page_bytes - host.frame_bytes) + len(what.frames) * host.frame_bytes
    if num_tokens <= 0 or not (until or offload.worth_loading(num_tokens, num_bytes, host.rates, sequence.num_filled)):
        return sequence
    if room is not None:
        until = until or filled
        if room < len(found):
            pool = replace(pool, host=offload.needed_soon(host, found[room:]))
            found, filled = found[:room], (held + room) * size
        if not found:
            draft.pool = pool
            return replace(sequence, loading=until)
    done = bring_in(pool, shared, found, behind)
    if done is None:
        return sequence if room is None else replace(sequence, loading=until)  # until replies give up their pages
    pool, fresh, framed = done
    draft.taken.note(pool, fresh, framed)
    pool = pools.retire(pool, sequence.pages.array(sequence.retired, max(sequence.retired, min(held, retired))))
    pages = sequence.pages.truncate(held).extend(shared).extend(fresh)
    longer = replace(sequence.with_pages(pages, filled), retired=retired)
    pool = pools.release(pool, sequence.pages.array(held))
    if room is not None:
        draft.load_room, draft.num_loaded = room - len(found), draft.num_loaded + len(found)
        if filled < until:
            draft.pool = pool
            return replace(longer, loading=until)
    draft.pool = pools.insert(pool, tokens[: longer.num_filled], longer.pages.array(), namespace)
    return longer


def retired_at(pool: Pool, sequence: Sequence, num_filled: int) -> int:
    """The number of leading pages whose frames a sequence does not need once so many of its tokens are filled."""
    if pool.frames is None or sequence.request.keep:
        return 0
    return max(sequence.retired, num_retired(num_filled, sequence.tokens.length, pool.frames.window, pool.prefix.page_size))


def _longest(pool: Pool, host: HostPages, sequence: Sequence, held: int, most_found: int | None) -> tuple[np.ndarray, list[int], int]:
    """The longest beginning of a sequence, after its first `held` pages, that is on the device and in host memory.

    Where the index has a page, only its frame may be missing on the device. All frames that the sequence needs after this beginning are on
    the device or in host memory. It looks for at most `most_found` pages.

    Returns:
        Pages of the index, the host pages of these (-1: none) and of those after them, and how many tokens they fill.
    """
    tokens, namespace, size, frames = sequence.tokens.array(), sequence.request.namespace, pool.prefix.page_size, pool.frames
    indexed = pools.match(pool, tokens, namespace)[held:] if frames is not None else NO_PAGES
    found = offload.find(host, tokens, held, size, namespace, len(indexed), most_found)
    have = np.array([at >= 0 and at not in host.bare for at in found], np.bool_)
    count = len(found)
    if frames is not None and count:
        have[: len(indexed)] |= frames.have(indexed)
        window = None if sequence.request.keep else frames.window
        count = num_served(have, held, window, len(tokens), size)
    most = min(sequence.most_filled, len(tokens) - 1)  # of a request that was preempted
    whole = most // size - held  # the full pages before its last one
    last = host.by_key.get(key_of(tokens[:most], namespace)) if most % size and count <= whole <= len(found) else None
    if last is not None and have[max(0, retired_at(pool, sequence, most) - held) : whole].all():
        return indexed[:whole], [*found[:whole], last], most
    return indexed[:count], found[:count], (held + count) * size


def keep_last(draft: Draft, sequence: Sequence, copies: Seq[tuple[int, int]]) -> None:
    """Keep the partly filled last page of a sequence that gives up its pages.

    Args:
        draft: The plan, which gets the copy.
        sequence: The sequence, which still has its pages.
        copies: Pages that the plan would have copied for it. They are not copied any more, so the sources hold the KV.
    """
    host, filled, size = draft.pool.host, sequence.num_filled, draft.config.page_size
    if host is None or not filled % size or sequence.num_exact < filled:
        return
    page = sequence.pages[filled // size]
    page = next((source for source, target in copies if target == page), page)
    key = key_of(sequence.tokens.array(0, filled), sequence.request.namespace)
    first, second = pools.addresses(draft.pool, np.array([page], np.int32))
    draft.pool = replace(draft.pool, host=offload.keep(host, first, [key], second))
