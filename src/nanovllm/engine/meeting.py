"""Requests that run the front of their prompts while the pages behind it are read from the disk: until where they run, and how they go on.

The pages that have come are in host memory like any others. So nothing here has to be exact: if some are missing, because their files were
damaged or host memory was needed, the request runs them. It takes as many pages as there are in a row from its next page on.
"""

from collections.abc import Iterator
from itertools import islice

from nanovllm.engine.draft import Draft, id_of
from nanovllm.engine.reuse import gone_on
from nanovllm.state.disk_reads import Wait
from nanovllm.state.offload import HostPages
from nanovllm.state.prefix_keys import keys_from
from nanovllm.state.request import Sequence
from nanovllm.state.split_reads import least_tokens, tokens_to_meeting


def jump(draft: Draft) -> None:
    """Let the running sequences that have met pages which were read for them go on after these pages."""
    host = draft.pool.host
    if host is None or host.disk is None or not any(wait.stop for wait in host.disk.waits.values()):
        return
    for at, sequence in enumerate(draft.running):
        if _meets(draft, sequence) is not None:
            draft.running[at] = gone_on(draft, sequence)


def tokens_before(draft: Draft, sequence: Sequence) -> int | None:
    """How many tokens a sequence runs until it meets pages that are read for it. None: it meets none."""
    host, size = draft.pool.host, draft.config.page_size
    wait = _wait_of(host, sequence)
    if host is None or wait is None:
        return None
    if (most := tokens_to_meeting(host, wait, sequence.num_filled, size)) is not None or _meets(draft, sequence) is None:
        return most
    # all reads have ended: if the next page is missing, there may be others after it
    place, keys = sequence.num_filled // size, _keys(sequence, size, wait)
    missing = next((count for count, key in enumerate(keys) if key in host.by_key), 0)
    least = least_tokens(host, sequence.num_filled, size)
    return max((place + missing) * size - sequence.num_filled, least) if missing else None


def _meets(draft: Draft, sequence: Sequence) -> Wait | None:
    """What was read for a sequence, if its next page is among these pages."""
    wait = _wait_of(draft.pool.host, sequence)
    next_page = sequence.num_filled // draft.config.page_size
    return wait if wait is not None and sequence.todo > 1 and wait.start <= next_page < wait.stop else None


def _wait_of(host: HostPages | None, sequence: Sequence) -> Wait | None:
    """The pages that are read for a sequence while it runs."""
    wait = None if host is None or host.disk is None else host.disk.waits.get(id_of(sequence))
    return wait if wait is not None and wait.stop else None


def _keys(sequence: Sequence, page_size: int, wait: Wait) -> Iterator[bytes]:
    """The keys of its pages from the next one on, up to the last one that is read for it."""
    place = sequence.num_filled // page_size
    return islice(keys_from(sequence.tokens.array(), place, page_size, sequence.request.namespace), wait.stop - place)
