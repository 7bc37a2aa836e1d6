"""Pages that a request finds in host memory: they are copied into new pages of the device, if that is faster than running their tokens.

The prefix index keeps the full pages of a preempted request as long as it can. Its last page, which is partly filled, goes to host memory
at once, so that no token runs again.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from nanovllm.engine.draft import Draft
from nanovllm.state import offload
from nanovllm.state import pool as pools
from nanovllm.state.prefix_keys import key_of
from nanovllm.state.request import Sequence


def load(draft: Draft, sequence: Sequence, num_matched: int) -> Sequence:
    """Let a sequence go on with pages from host memory. They enter the index, so later requests share them.

    A partly filled page of the sequence is replaced by the whole one.

    Args:
        draft: The plan, which gets the new pages and the copies.
        sequence: The sequence, over the pages with which it begins or goes on.
        num_matched: The pages that the prefix index has for its tokens.

    Returns:
        The sequence with more tokens filled; the same one if host memory has none of them, or if running them is faster.
    """
    pool, size = draft.pool, draft.config.page_size
    held, host = sequence.num_filled // size, pool.host
    if host is None or not len(host.by_key) or num_matched > held:
        return sequence
    if sequence.num_exact < sequence.num_filled:
        return sequence
    tokens, namespace = sequence.tokens.array(), sequence.request.namespace
    found = offload.find(host, tokens, held, size, namespace)
    filled = (held + len(found)) * size
    most = min(sequence.most_filled, len(tokens) - 1)  # of a request that was preempted
    if filled < most < filled + size and (at := host.by_key.get(key_of(tokens[:most], namespace))) is not None:
        found, filled = [*found, at], most
    num_tokens = min(filled, len(tokens) - 1) - sequence.num_filled  # the last token runs in any case
    if not offload.worth_loading(num_tokens, len(found) * host.page_bytes, host.rates):
        return sequence
    taken = pools.allocate(replace(pool, host=offload.read(host, found)), len(found))
    if taken is None or taken[0].host is None:
        return sequence
    pool, fresh = taken
    draft.taken.note(pool, fresh)
    pool = replace(pool, host=offload.load(taken[0].host, found, fresh))
    longer = sequence.with_pages(sequence.pages.truncate(held).extend(fresh), filled)
    pool = pools.release(pool, sequence.pages.array(held))
    draft.pool = pools.insert(pool, tokens[: longer.num_filled], longer.pages.array(), namespace)
    return longer


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
    draft.pool = replace(draft.pool, host=offload.keep(host, np.array([page], np.int32), [key]))
