"""`check`: every invariant of an engine's state, stated as code."""

from collections import Counter
from itertools import pairwise
from typing import no_type_check

from .errors import BrokenInvariantError, InvalidRequestError
from .state.engine_state import EngineState
from .state.kv import pages_for
from .state.pages import PageState, free_pages
from .state.pool import Pool
from .state.prefix import ROOT, PrefixIndex, match
from .state.request import Sequence
from .state.vector import IntVector


def check(state: EngineState) -> None:
    """Raise `BrokenInvariantError` naming the invariant that does not hold, `DonatedStateError` for an old state.

    Linear in the pool; reads no device memory.
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
    check_pool(state.pool, owners)
    for sequence in sequences:
        _check_sequence(sequence, size, state.config.num_pages)
        if not sequence.provenance.exact:
            _check_exact(state, sequence.tokens, sequence.pages, sequence.exact_len)
    for chunk in state.chunks.values():
        _require(len(chunk) > 0 and len(chunk.pages) == pages_for(len(chunk), size), "chunk", f"{chunk!r} does not fit its pages")
        _require(all(at < len(chunk) for at, _ in chunk.gaps), "chunk", f"{chunk!r} has gaps {chunk.gaps}")
        labelled = chunk.provenance.exact == (chunk.num_exact == len(chunk))
        _require(labelled, "provenance", f"{chunk!r} counts {chunk.num_exact} exact tokens")
        if not chunk.provenance.exact:
            _check_exact(state, chunk.tokens, chunk.pages, chunk.num_exact)
    ids = [s.request.request_id for s in state.running]
    _require(all(a < b for a, b in pairwise(ids)), "order", f"running requests {ids} are not in order of arrival")
    _require(not set(ids) & set(state.waiting.items), "order", "a request is both waiting and running")
    _require(len(ids) <= state.config.max_num_seqs, "limits", f"{len(ids)} requests run and max_num_seqs={state.config.max_num_seqs}")
    first = min(state.waiting.items, default=state.waiting.head)
    _require(first == state.waiting.head, "order", f"request {first} waits first and the queue's head is {state.waiting.head}")
    _require(all(v >= 0 for v in vars_of(state.stats)), "stats", f"a counter is negative: {state.stats}")


def check_pool(pool: Pool, owners: Counter[int]) -> None:
    """The invariants of pages and index, given the references that others than the index hold (page -> number)."""
    expected = Counter(owners)
    expected.update(pool.prefix.nodes.keys())
    _check_pages(pool.pages, expected)
    _check_prefix(pool.prefix)
    for page in pool.prefix.nodes:
        idle, alone = page in pool.prefix.idle_since, pool.pages.refcount(page) == 1
        _require(idle == alone, "idle pages", f"page {page} is {'idle' if idle else 'not idle'} and has {pool.pages.refcount(page)} owners")


def vars_of(value: object) -> list[int]:
    """The fields of a slotted dataclass of numbers."""
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


def _check_prefix(index: PrefixIndex) -> None:
    _require(len(index.children) == len(index.nodes), "index", f"{len(index.children)} keys lead to {len(index.nodes)} pages")
    children = Counter(node.parent for node in index.nodes.values())
    for page, node in index.nodes.items():
        _require(index.children.get((node.parent, node.tokens)) == page, "index", f"the key of page {page} does not lead to it")
        _require(node.parent == ROOT or node.parent in index.nodes, "index", f"page {page} follows {node.parent}, which is not indexed")
        _require(len(node.tokens) == 4 * index.page_size, "index", f"page {page} is indexed with {len(node.tokens) // 4} tokens")
        _require(node.num_children == children[page], "index", f"page {page} counts {node.num_children} children and has {children[page]}")
        run, place, size = node.run, node.place, index.page_size
        same = run.pages[place] == page and run.tokens[place * size : (place + 1) * size].tobytes() == node.tokens
        _require(same, "index", f"page {page} is indexed with other tokens than its run has at {place}")
        before = index.nodes.get(node.parent)
        follows = place == 0 or (before is not None and before.run is run and before.place == place - 1)
        _require(follows, "index", f"page {page} stands at {place} of a run and not behind the page before it")
    _require({p: t for t, p in index.idle.items()} == dict(index.idle_since.items()), "eviction order", "its two directions disagree")
    for page, since in index.idle_since.items():
        _require(index.oldest <= since < index.now, "eviction order", f"page {page} is idle since {since}, before {index.oldest}")
        _require(page in index.nodes, "eviction order", f"page {page} is idle and not indexed")


def _check_exact(state: EngineState, tokens: IntVector, pages: IntVector, num_exact: int) -> None:
    """Pages behind the first `num_exact` tokens are not found by these tokens; they may be by those that they were filled with."""
    pairs = list(zip(pages, match(state.prefix, tokens.array()).tolist(), strict=False))[num_exact // state.config.page_size :]
    found = [page for page, indexed in pairs if page == indexed]
    _require(not found, "exact index", f"approximate pages {found} are in the prefix index")


def _check_sequence(sequence: Sequence, page_size: int, num_pages: int) -> None:
    name, pages, filled, length = f"request {sequence.request.request_id}", list(sequence.pages), sequence.num_filled, len(sequence.tokens)
    _require(len(pages) == len(set(pages)), "sequences", f"{name} lists a page twice: {pages}")
    _require(all(0 <= page < num_pages for page in pages), "sequences", f"{name} has a page outside the pool: {pages}")
    _require(0 <= filled <= length, "sequences", f"{name} has {filled} of {length} tokens filled")
    _require(filled <= len(pages) * page_size, "capacity", f"{name} has {filled} tokens in {len(pages)} pages")
    _require(length <= sequence.request.max_len, "capacity", f"{name} has {length} tokens of {sequence.request.max_len}")
    _require(sequence.num_generated >= 0, "sequences", f"{name} has fewer tokens than its prompt")


@no_type_check  # called for every page: run-time checks would cost more than all else
def _require(holds: bool, name: str, detail: str) -> None:
    if not holds:
        raise BrokenInvariantError(f"invariant '{name}': {detail}")
