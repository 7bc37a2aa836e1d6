"""The numbered invariants of an engine, and `check`, which holds a state to them.

`INVARIANTS` is the one list: the errors of `check`, the messages of the machines in `nanovllm.testing` and the page
`docs/explanation/invariants.md` quote it, and a test holds the page to it.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import no_type_check

import numpy as np

from nanovllm.errors import BrokenInvariantError, InvalidRequestError
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.offload import HostPages
from nanovllm.state.pages import PageState, free_pages
from nanovllm.state.pool import Pool
from nanovllm.state.prefix_cache import ROOT, PrefixIndex, match
from nanovllm.state.request import Sequence
from nanovllm.state.vector import IntVector
from nanovllm.state.window_frames import Frames

INVARIANTS: Mapping[int, str] = MappingProxyType(
    {
        1: "The reference count of a page equals the number of references to it from live chunks, requests and the prefix index.",
        2: "Every page of the pool is either free or referenced, never both and never neither.",
        3: "A page is written only by its one owner; requests that join it in the same step read it after that.",
        4: "The prefix index finds a page only by the whole prefix that it was filled with: no KV is shared after a token that differs.",
        5: "A `PageState`, `PrefixIndex` or `Chunk` never changes after it was made, whatever is called later.",
        6: "Every admitted request ends, whatever the size of the pool; once all handles are released, all pages are available again.",
        7: "A step runs at least one token of each request that it schedules, and no request has more tokens than its pages hold.",
        8: "On a CPU a reply does not depend on the rest of the batch; an exact chunk gives the logits of a full prefill, up to rounding.",
        9: "Tokens run plus tokens reused equal tokens needed, plus those run again after preemption, plus those run ahead and discarded.",
        10: "No page with approximate KV can be found in the prefix index.",
        11: "Idle pages are the pages that only the prefix index owns; they are evicted in the order in which they became idle.",
        12: "In a model with windows, each page that a chunk or a window of a request still needs has a sliding-window page of its own.",
        13: "Requests run in order of rank, then of arrival, at most `max_num_seqs` of them, and no request both runs and waits.",
        14: "A chunk fits its pages, and its label is exact if and only if all its tokens are exact.",
        15: "Only the newest state of an engine can be used; a state that an earlier call donated is refused.",
        16: "A page of host memory is found by one prefix at most, and holds the KV with which the last page of this prefix was filled.",
        17: "A live chunk is either on the device or in host memory, where it owns a page for each of its pages that nothing replaces.",
    }
)

# The names that `check` gives to parts of an invariant.
NUMBERS: Mapping[str, int] = MappingProxyType(
    {
        "reference counts": 1,
        "partition": 2,
        "index": 4,
        "capacity": 7,
        "sequences": 7,
        "stats": 9,
        "exact index": 10,
        "idle pages": 11,
        "eviction order": 11,
        "frames": 12,
        "needs": 12,
        "spare frames": 12,
        "windows": 12,
        "order": 13,
        "limits": 13,
        "chunk": 14,
        "provenance": 14,
        "lease": 15,
        "host pages": 16,
        "host order": 16,
        "moved chunks": 17,
    }
)


def broken(number: int, detail: str, name: str = "") -> str:
    """The message that says how an invariant is broken, and quotes it.

    Args:
        number: The invariant's number in `INVARIANTS`.
        detail: The values that break it.
        name: Which part of it is broken, where it has named parts.

    Returns:
        One line that begins with the number.

    Examples:
        >>> broken(3, "page 5 has 2 owners").split(";")[0]
        'invariant 3: page 5 has 2 owners. It says: A page is written only by its one owner'
    """
    part = f", '{name}'" if name else ""
    return f"invariant {number}{part}: {detail}. It says: {INVARIANTS[number]}"


def check(state: EngineState) -> None:
    """Check every invariant that can be read off a state. The time grows with the pool; no device memory is read.

    Invariants 3, 5, 6 and 8 are about calls, not about one state: the machines of `nanovllm.testing` look for them.

    Args:
        state: The newest state of an engine.

    Raises:
        BrokenInvariantError: An invariant does not hold. The message has its number, its sentence and the values that break it.
        DonatedStateError: The state was donated to a later call.
        InvalidRequestError: `state` is not an `EngineState`.

    Examples:
        >>> import nanovllm as nv
        >>> model = nv.load_model("tiny", device="cpu")
        >>> state, chunk = nv.prefill(model, nv.init_state(model, num_pages=8), "Once upon a time,")
        >>> nv.check(state)
    """
    if not isinstance(state, EngineState):
        raise InvalidRequestError(f"state must be an EngineState, not {type(state).__name__}")
    size = state.config.page_size
    lease = state.runtime.lease
    _require(state.epoch <= lease.epoch, "lease", f"epoch {state.epoch} is ahead of the lease's {lease.epoch}")
    lease.check(state.epoch)
    sequences = [*state.running, *state.waiting, *state.kept.values(), *(s for v in state.sessions.values() for s in v.sequences)]
    owners = Counter(page for s in sequences for page in s.pages)
    owners.update(page for chunk in state.chunks.values() for page in chunk.pages)
    needs = Counter(page for s in sequences for page in s.pages.array(s.retired).tolist())
    needs.update(page for chunk in state.chunks.values() for page in chunk.pages)
    check_pool(state.pool, owners, needs)
    _require(
        state.config.num_frames == (state.pool.frames.num_frames if state.pool.frames else 0), "frames", "the number of frames changed"
    )
    for sequence in sequences:
        _check_sequence(sequence, size, state.config.num_pages)
        _check_retired(sequence, size, 0 if state.pool.frames is None else state.pool.frames.window)
        if not sequence.provenance.exact:
            _check_exact(state, sequence.tokens, sequence.pages, sequence.exact_len)
    moved = {} if state.pool.host is None else dict(state.pool.host.moved)
    dead = [liveness for liveness in moved if liveness not in state.chunks]
    _require(not dead, "moved chunks", f"chunks {dead[:8]} are in host memory and not live")
    for chunk in state.chunks.values():
        held = len(chunk.pages) if chunk.liveness not in moved else len(moved[chunk.liveness].pages)
        _require(len(chunk) > 0 and held == pages_for(len(chunk), size), "chunk", f"{chunk!r} does not fit its pages")
        _require(chunk.liveness not in moved or not len(chunk.pages), "moved chunks", f"{chunk!r} is in host memory and has pages")
        _require(all(at < len(chunk) for at, _ in chunk.gaps), "chunk", f"{chunk!r} has gaps {chunk.gaps}")
        labelled = chunk.provenance.exact == (chunk.num_exact == len(chunk))
        _require(labelled, "provenance", f"{chunk!r} counts {chunk.num_exact} exact tokens")
        if not chunk.provenance.exact and len(chunk.pages):
            _check_exact(state, chunk.tokens, chunk.pages, chunk.num_exact)
    ids, turns = [s.request.request_id for s in state.running], [s.request.turn for s in state.running]
    _require(all(a < b for a, b in pairwise(turns)), "order", f"running requests {ids} are not in order of rank and arrival")
    _require(not set(ids) & set(state.waiting.items), "order", "a request is both waiting and running")
    _require(len(ids) <= state.config.max_num_seqs, "limits", f"{len(ids)} requests run and max_num_seqs={state.config.max_num_seqs}")
    first, turns = min((s.request.turn for s in state.waiting.items.values()), default=None), state.waiting.turns
    head = None if turns is None else turns.least
    _require(first == head, "order", f"the turn of the request that waits first is {first} and the queue's is {head}")
    _require(all(v >= 0 for v in vars_of(state.stats)), "stats", f"a counter is negative: {state.stats}")


def check_pool(pool: Pool, owners: Counter[int], needs: Counter[int] | None = None) -> None:
    """Check the invariants of pages, index and frames.

    Args:
        pool: The pool.
        owners: For each page how many owners it has other than the index.
        needs: For each page how many of these need its frame. None: all.
    """
    expected = Counter(owners)
    indexed, idle_pages = pool.prefix.pages(), set(pool.prefix.idle_pages())
    expected.update(indexed)
    _check_pages(pool.pages, expected)
    check_prefix(pool.prefix)
    for page in indexed:
        idle, alone = page in idle_pages, pool.pages.refcount(page) == 1
        _require(idle == alone, "idle pages", f"page {page} is {'idle' if idle else 'not idle'} and has {pool.pages.refcount(page)} owners")
    if pool.frames is not None:
        _check_frames(pool.frames, pool.pages, owners if needs is None else needs)
    if pool.host is not None:
        check_host(pool.host)


def _check_frames(frames: Frames, pages: PageState, needed: Counter[int]) -> None:
    frame_of, needs, spare = frames.frame_of.copy(), frames.needs.copy(), frames.spare.pages()
    for page in needed.keys() | set(np.flatnonzero(needs).tolist()):
        counted, real = int(needs[page]), needed[page]
        _require(counted == real, "needs", f"the frame of page {page} counts {counted} needs and has {real}")
        _require(counted == 0 or frame_of[page] >= 0, "needs", f"page {page} is needed and has no frame")
    with_frame = np.flatnonzero(frame_of >= 0).tolist()
    held = frame_of[with_frame].tolist()
    _require(len(set(held)) == len(held), "frames", f"two pages have one of the frames {sorted(held)[:8]}")
    _check_pages(frames.used, Counter(held))
    free = [page for page in with_frame if pages.refcount(page) == 0]
    _require(not free, "frames", f"pages {free[:8]} are free and have frames")
    _require(len(spare) == len(set(spare)) == frames.spare.count, "spare frames", f"{frames.spare.count} counted, {spare[:8]} listed")
    expected = {page for page in with_frame if needs[page] == 0}
    _require(set(spare) == expected, "spare frames", f"pages {sorted(set(spare) ^ expected)[:8]} are spare and needed, or neither")
    since = np.flatnonzero(frames.spare.since.copy() >= 0).tolist()
    _require(set(since) == expected, "spare frames", "the groups and the times of their pages disagree")
    oldest, now = frames.spare.oldest, frames.spare.now
    _require(
        all(oldest <= time < now for time in frames.spare.groups), "spare frames", f"some became spare outside the times {oldest} ... {now}"
    )


def check_host(host: HostPages) -> None:
    """Check the invariants of host memory that can be read off its values, between two calls."""
    _require(host.moves is None, "host pages", "the copies of a plan were not made")
    by_key, key_of = dict(host.by_key), dict(host.key_of)
    _require(len(by_key) == len(key_of), "host pages", f"{len(by_key)} prefixes lead to {len(key_of)} host pages")
    wrong = [at for key, at in by_key.items() if key_of.get(at) != key]
    _require(not wrong, "host pages", f"host pages {wrong[:8]} are found by a prefix that is not theirs")
    kept = {at for moved in host.moved.values() for at in moved.pages}
    bare = sorted(at for at in host.bare if at not in key_of or at in kept)
    _require(not bare, "host pages", f"host pages {bare[:8]} lack frames that chunks need, or hold nothing")
    reading = {} if host.disk is None else dict(host.disk.reading)
    both = sorted((key_of.keys() | kept) & reading.keys())
    _require(not both, "host pages", f"host pages {both[:8]} are used and read")
    framed = {} if host.disk is None else dict(host.disk.framed)
    alone = sorted(framed.keys() - reading.keys())
    _require(not alone, "host pages", f"frames are read into host pages {alone[:8]} without their pages")
    reads = Counter((key, at in framed) for at, key in reading.items())
    twice = [key.hex()[:8] for (key, _), count in reads.items() if count > 1]
    _require(not twice, "host pages", f"prefixes {twice[:8]} are read twice")
    _require(not host.held, "moved chunks", f"host pages {host.held[:8]} are held after the call that gave them up")
    owners = Counter([*key_of, *reading])
    owners.update(at for moved in host.moved.values() for at in moved.pages)
    _check_pages(host.used, owners)
    listed, ages = host.ages.pages(), host.ages
    _require(len(listed) == len(set(listed)) == ages.count, "host order", f"{ages.count} host pages counted, {listed[:8]} listed")
    _require(
        set(listed) == set(key_of) - kept,
        "host order",
        f"host pages {sorted(set(listed) ^ (set(key_of) - kept))[:8]} are used or replaceable, not both",
    )
    since = set(np.flatnonzero(ages.since.copy() >= 0).tolist())
    _require(since == set(listed), "host order", "the groups and the times of their host pages disagree")
    _require(all(ages.oldest <= time < ages.now for time in ages.groups), "host order", f"a time is not in {ages.oldest} ... {ages.now}")


def vars_of(value: object) -> list[int]:
    """The values of a slotted dataclass of numbers."""
    return [getattr(value, name) for name in getattr(value, "__dataclass_fields__", ())]


def _check_pages(pages: PageState, expected: Counter[int]) -> None:
    counts = pages.refcounts
    for page in expected.keys() | counts.keys():
        counted, real = counts.get(page, 0), expected[page]
        _require(counted == real, "reference counts", f"page {page} counts {counted} owners and has {real}")
    free = free_pages(pages)
    _require(len(free) == pages.num_free, "partition", f"{len(free)} pages are listed free and {pages.num_free} have no owner")
    _require(len(free) == len(set(free)), "partition", "a page is listed free twice")
    held = set(counts)
    _require(not held & set(free), "partition", f"pages {sorted(held & set(free))[:8]} are both free and held")
    _require(held | set(free) == set(range(pages.num_pages)), "partition", "free and held pages are not the whole pool")


def check_prefix(index: PrefixIndex) -> None:
    """Check the invariants of the prefix index by itself."""
    size = index.page_size
    _require(len(index.heads) == len(index.runs), "index", f"{len(index.heads)} keys lead to {len(index.runs)} nodes")
    children = Counter(run.parent for run in index.runs.values())
    keys = dict(index.heads.items())
    for head, run in index.runs.items():
        pages, parts = run.pages.tolist(), [part.tobytes() for part in np.split(run.tokens, range(size, len(run.tokens), size))]
        _require(len(pages) > 0 and pages[0] == head, "index", f"the node of page {head} has pages {pages[:8]}")
        _require(len(run.tokens) == size * len(pages), "index", f"{len(pages)} pages are indexed with {len(run.tokens)} tokens")
        _require(run.parent <= ROOT or run.parent in index, "index", f"page {head} follows {run.parent}, which is not indexed")
        _require(keys.get((run.parent, parts[0])) == head, "index", f"the key of page {head} does not lead to it")
        for place, page in enumerate(pages):
            noted = index.run_of[page], index.place_of[page]
            _require(noted == (head, place), "index", f"page {page} is at {place} of the node of {head} and says {noted}")
            counted, real = index.num_children[page], children[page]
            _require(counted == real, "index", f"page {page} counts {counted} nodes after it and has {real}")
        for page, part in zip(pages, parts[1:], strict=False):
            _require((page, part) not in keys, "index", f"two pages with the same tokens come after page {page}")
    indexed, in_nodes = index.pages(), sum(len(run.pages) for run in index.runs.values())
    _require(len(indexed) == in_nodes, "index", f"{len(indexed)} pages are indexed and the nodes have {in_nodes}")
    _check_idle(index, set(indexed))


def _check_idle(index: PrefixIndex, indexed: set[int]) -> None:
    since, idle = index.idle_since.copy(), index.idle_pages()
    _require(len(idle) == len(set(idle)) == index.num_idle, "eviction order", f"{index.num_idle} pages are idle and {idle[:8]} listed")
    _require(set(idle) == set(np.flatnonzero(since >= 0).tolist()), "eviction order", "the groups and the times of their pages disagree")
    _require(indexed.issuperset(idle), "eviction order", f"pages {sorted(set(idle) - indexed)[:8]} are idle and not indexed")
    for time, pages in index.idle.items():
        within = len(pages) > 0 and index.oldest <= time < index.now
        _require(within, "eviction order", f"{len(pages)} pages are idle since {time}, not {index.oldest} ... {index.now}")
        _require((since[pages] == time).all(), "eviction order", f"pages in the group of time {time} note another time")


def _check_exact(state: EngineState, tokens: IntVector, pages: IntVector, num_exact: int) -> None:
    """Check that the index does not find pages after the first `num_exact` tokens by these tokens.

    It may find them by the tokens of their prefill.
    """
    index = state.prefix
    root = min(index.before(pages[0]), ROOT) if pages.length and pages[0] in index else ROOT
    pairs = list(zip(pages, match(index, tokens.array(), root).tolist(), strict=False))[num_exact // state.config.page_size :]
    approximate = [page for page, indexed in pairs if page == indexed]
    _require(not approximate, "exact index", f"approximate pages {approximate} are in the prefix index")


def _check_sequence(sequence: Sequence, page_size: int, num_pages: int) -> None:
    name, pages, filled, length = f"request {sequence.request.request_id}", list(sequence.pages), sequence.num_filled, len(sequence.tokens)
    _require(len(pages) == len(set(pages)), "sequences", f"{name} lists a page twice: {pages}")
    _require(all(0 <= page < num_pages for page in pages), "sequences", f"{name} has a page outside the pool: {pages}")
    _require(0 <= filled <= length, "sequences", f"{name} has {filled} of {length} tokens filled")
    _require(filled <= len(pages) * page_size, "capacity", f"{name} has {filled} tokens in {len(pages)} pages")
    _require(length <= sequence.request.max_len, "capacity", f"{name} has {length} tokens of {sequence.request.max_len}")
    _require(sequence.num_generated >= 0, "sequences", f"{name} has fewer tokens than its prompt")


def _check_retired(sequence: Sequence, page_size: int, window: int) -> None:
    """Check that no token still to run sees pages whose frames a sequence gave up. The last token of a filled context may run again."""
    seen = max(0, min(sequence.num_filled, len(sequence.tokens) - 1) - window + 1) if window else 0
    name = f"request {sequence.request.request_id}"
    _require(0 <= sequence.retired * page_size <= seen, "windows", f"{name} retired {sequence.retired} pages and sees token {seen}")
    _require(not sequence.retired or not sequence.request.keep, "windows", f"{name} is kept and has retired pages")


@no_type_check  # called for every page: run-time checks would cost more than all else
def _require(holds: bool, name: str, detail: str) -> None:
    if not holds:
        raise BrokenInvariantError(broken(NUMBERS[name], detail, name))
