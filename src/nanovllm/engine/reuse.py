"""The KV that a sequence finds and need not run: pages of the prefix index, and after them pages of host memory."""

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from nanovllm.engine.draft import Draft, id_of, missing_pages
from nanovllm.engine.host_pages import load
from nanovllm.state import pool as pools
from nanovllm.state.request import Sequence
from nanovllm.state.sequence_pages import begun


def reusable(draft: Draft, sequence: Sequence) -> tuple[np.ndarray, int]:
    """The pages of the prefix index that a sequence can reuse, and how many of them are outside its windows."""
    if draft.found is None or draft.found[0] is not draft.pool or draft.found[1] is not sequence:
        asked, tokens = sequence.request, sequence.tokens.array()
        draft.found = draft.pool, sequence, pools.reusable(draft.pool, tokens, whole=asked.keep, namespace=asked.namespace)
    return draft.found[2]


def load_more(draft: Draft, came: Collection[int] = ()) -> None:
    """Let the sequences go on whose pages are being copied in, one after the other. Without replies that go on, the rest is copied at once.

    Another sequence may have brought the same pages in meanwhile, so the index is asked first.

    Args:
        draft: The plan, which gets the pages and the copies.
        came: Requests that this step has looked up. If one needs more pages than the step may copy in, it begins in the next step: the
            look-up of a long prompt takes time enough for one.
    """
    for at, sequence in enumerate(draft.running):
        room, size = draft.load_room, draft.config.page_size
        if not sequence.loading or room == 0:
            continue
        if id_of(sequence) in came:
            assert room is not None  # only while replies go on
            if missing_pages(sequence, sequence.loading, size) > room:
                continue
        draft.running[at] = gone_on(draft, sequence)


def gone_on(draft: Draft, sequence: Sequence) -> Sequence:
    """The sequence over pages of the index if they save more than its own, and over pages of host memory after them; counts its tokens.

    Args:
        draft: The plan, which gets the pages and the copies.
        sequence: A sequence that is being admitted, or that runs its prompt.
    """
    matched, retired = reusable(draft, sequence)
    draft.pool, sequence = begun(draft.pool, sequence, matched, retired, draft.config.page_size)
    if draft.pool.host is not None:
        sequence = load(draft, sequence, len(matched))
    filled = min(sequence.num_filled, sequence.tokens.length - 1)  # the last token runs for its logits even if it is filled
    reused = max(0, filled - sequence.most_filled)
    draft.num_reused += reused
    return replace(sequence, most_filled=max(sequence.most_filled, filled), num_cached=sequence.num_cached + reused)
