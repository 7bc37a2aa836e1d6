"""The pages of replies: one for the next token of each sequence that has none, and more ahead of need."""

import numpy as np

from nanovllm.engine.draft import Draft, id_of, missing_pages, owed_pages, room_of
from nanovllm.engine.preemption import make_room
from nanovllm.state.pool_sizes import LOOKAHEAD
from nanovllm.state.request import Sequence

EARLY = 2  # steps for which a sequence has pages when it gets more


def place_decode(draft: Draft, decoding: list[Sequence]) -> set[int]:
    """Find room for one token of each decoding sequence; returns the ids of the sequences."""
    needy, size = in_need(draft, decoding), draft.config.page_size
    nothing_to_copy = all(room_of(s, size) <= 0 for s in needy)
    short = nothing_to_copy and draft.give({id_of(s): missing_pages(s, s.num_filled + s.todo, size) for s in needy})
    for sequence in () if short else needy:
        if draft.find(sequence) is not None:
            short = make_room(draft, sequence, sequence.num_filled + sequence.todo) or short
    if short or (may_grow_early(draft) and grows_early(draft, decoding)):
        draft.grew = look_ahead(draft) or short
    return {id_of(s) for s in decoding}


def in_need(draft: Draft, decoding: list[Sequence]) -> list[Sequence]:
    """The sequences that need a page: they have none for their next token, or share a partly filled one."""
    size = draft.config.page_size
    partly = [s for s in decoding if s.num_filled % size and s.todo]
    tails = np.array([s.pages[s.num_filled // size] for s in partly], np.int32)
    shared = {id_of(partly[at]) for at in np.flatnonzero(draft.pool.pages.owners(tails) > 1)}
    return [s for s in decoding if room_of(s, size) <= 0 or (shared and id_of(s) in shared)]


def may_grow_early(draft: Draft) -> bool:
    """Whether sequences may get more pages before they need them: there are some, and no request could begin with them instead.

    An executor discards the step that it already runs if frames change, so they change as late as possible.
    """
    taken = draft.waiting.first() is None or len(draft.running) >= draft.config.max_num_seqs
    return taken and draft.pool.frames is None and spare_pages(draft) > 0


def grows_early(draft: Draft, decoding: list[Sequence]) -> bool:
    """Whether sequences get more pages although none of them needs one in this step.

    They do in the last step after which they have pages for another one: an executor may run that one already, and it finds the places
    of the step after it in the pages that were there. They also do if one decodes for the first time, so that the batch is new anyway.
    """
    size = draft.config.page_size
    left = [room_of(s, size) for s in decoding if lacks_pages(s, size)]
    return min(left, default=0) == EARLY or (bool(left) and any(s.num_generated <= 1 for s in decoding))


def look_ahead(draft: Draft) -> bool:
    """Give decoding sequences more pages than they need now, so that many steps pass before the page tables change again.

    Returns whether one of them got some.

    Idle pages of the index are taken too, because these steps would evict them anyway. They are spared while a preempted request waits,
    because it can reuse its own pages.
    """
    spare, size, wanted = spare_pages(draft), draft.config.page_size, dict[int, int]()
    for sequence in draft.running:
        length = min(sequence.request.max_len, sequence.num_filled + 1 + LOOKAHEAD)
        missing = missing_pages(sequence, length, size)
        if 0 < missing <= spare and sequence.todo == 1 and not sequence.loading:
            wanted[id_of(sequence)], spare = missing, spare - missing
    return draft.give(wanted)


def spare_pages(draft: Draft) -> int:
    """Pages that `look_ahead` may give away."""
    first = draft.waiting.first()
    return draft.pool.spare(only_free=first is not None and first.most_filled > 0) - owed_pages(draft)


def lacks_pages(sequence: Sequence, page_size: int) -> bool:
    """Whether a sequence needs more pages to reach its limit. The KV of the last token is never needed."""
    return sequence.pages.length * page_size < sequence.request.max_len - 1
