"""Pages that a request finds in host memory: they are copied into new pages of the device, if that is faster than running their tokens."""

from dataclasses import replace

from nanovllm.engine.draft import Draft
from nanovllm.state import offload
from nanovllm.state import pool as pools
from nanovllm.state.request import Sequence


def load(draft: Draft, sequence: Sequence, num_matched: int) -> Sequence:
    """Let a sequence that is being admitted go on with pages from host memory. They enter the index, so later requests share them.

    Args:
        draft: The plan, which gets the new pages and the copies.
        sequence: The sequence, over the pages with which it begins.
        num_matched: The pages that the prefix index has for its tokens.

    Returns:
        The sequence with more tokens filled; the same one if host memory has none of them, or if running them is faster.
    """
    pool, size = draft.pool, draft.config.page_size
    held, host = sequence.num_filled // size, pool.host
    if host is None or not len(host.by_key) or num_matched > held:
        return sequence
    if sequence.num_filled % size or sequence.pages.length != held or sequence.num_exact < sequence.num_filled:
        return sequence
    tokens, namespace = sequence.tokens.array(), sequence.request.namespace
    found = offload.find(host, tokens, held, size, namespace)
    num_tokens = min(len(found) * size, len(tokens) - 1 - sequence.num_filled)  # the last token runs in any case
    if not offload.worth_loading(num_tokens, len(found) * host.page_bytes, host.rates):
        return sequence
    taken = pools.allocate(replace(pool, host=offload.read(host, found)), len(found))
    if taken is None or taken[0].host is None:
        return sequence
    pool, fresh = taken
    draft.taken.note(pool, fresh)
    pool = replace(pool, host=offload.load(taken[0].host, found, fresh))
    longer = sequence.with_pages(sequence.pages.extend(fresh), sequence.num_filled + len(found) * size)
    draft.pool = pools.insert(pool, tokens[: longer.num_filled], longer.pages.array(), namespace)
    return longer
