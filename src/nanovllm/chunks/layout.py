"""The layout of a chunk made from chunks: which pages it shares, and which slots are copied into fresh pages. Host arrays only."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from nanovllm.state.chunk import Chunk, Gaps, offset_after
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.vector import IntVector


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """The tokens of a new chunk over shared and fresh pages.

    Its pages are `head`, then `num_fresh` fresh pages, then `tail`. The tokens `start ... start + n - 1` are in fresh pages.

    Attributes:
        tokens: All tokens of the chunk.
        head: Shared pages at its beginning.
        num_fresh: The number of fresh pages.
        tail: Shared pages at its end.
        start: The index of the first token in a fresh page.
        source: Slots `[n]` from which the KV of these tokens is copied.
        shift: Positions `[n]` by which their keys rotate.
        num_exact: Leading tokens whose KV is exact.
        gaps: Where positions are left out.
    """

    tokens: IntVector
    head: np.ndarray
    num_fresh: int
    tail: np.ndarray
    start: int
    source: np.ndarray
    shift: np.ndarray
    num_exact: int
    gaps: Gaps = ()


def _slots(chunk: Chunk, page_size: int, start: int = 0, stop: int | None = None) -> np.ndarray:
    """The slots of the tokens `start ... stop - 1` of a chunk."""
    return slots_of(chunk.pages.array(), page_size)[start : len(chunk) if stop is None else stop]


def slots_of(pages: np.ndarray, page_size: int) -> np.ndarray:
    """The slots of whole pages, in order."""
    return (pages[:, None] * np.int32(page_size) + np.arange(page_size, dtype=np.int32)).ravel()


def joined(chunks: Seq[Chunk], tokens: IntVector, page_size: int) -> Layout:
    """The layout of chunks in a row. The first keeps its whole pages and its positions up to its first gap."""
    first, total = chunks[0], len(tokens)
    shared = (first.gaps[0][0] if first.gaps else len(first)) // page_size  # whole pages whose positions do not change
    start = shared * page_size
    slots = slots_of(np.concatenate([chunk.pages.array() for chunk in chunks]), page_size)
    ends = np.cumsum([len(chunk.pages) for chunk in chunks]).tolist()
    firsts = [(end - len(chunk.pages)) * page_size for chunk, end in zip(chunks, ends, strict=True)]
    source = np.concatenate([slots[first : first + len(chunk)] for chunk, first in zip(chunks, firsts, strict=True)])[start:]
    pieces, place = [], 0  # (tokens, rotation of their keys), which is constant between two gaps
    for chunk in chunks:
        for (at, offset), (stop, _) in pairwise(((0, 0), *chunk.gaps, (len(chunk), 0))):
            pieces.append((stop - at, place - offset))
        place += len(chunk)
    counts, shifts = np.array(pieces, np.int32).T
    return Layout(
        tokens=tokens,
        head=first.pages.array(0, shared),
        num_fresh=pages_for(total, page_size) - shared,
        tail=np.empty(0, np.int32),
        start=start,
        source=source,
        shift=np.repeat(shifts, counts)[start:],
        num_exact=first.num_exact,
    )


def shifted(chunk: Chunk, start: int, stop: int, page_size: int) -> Layout:
    """The layout of a chunk without a span, in which later tokens move into the free positions."""
    shared, gaps = start // page_size, tuple(gap for gap in chunk.gaps if gap[0] < start)
    tokens, positions = chunk.tokens.truncate(start).extend(chunk.tokens.array(stop)), chunk.positions
    begin = shared * page_size
    shift = np.zeros(len(tokens) - begin, np.int64)
    shift[start - begin :] = np.arange(start, len(tokens)) + offset_after(gaps) - positions[stop:]
    return Layout(
        tokens=tokens,
        head=chunk.pages.array(0, shared),
        num_fresh=pages_for(len(tokens), page_size) - shared,
        tail=np.empty(0, np.int32),
        start=begin,
        source=np.concatenate((_slots(chunk, page_size, begin, start), _slots(chunk, page_size, stop))),
        shift=shift,
        num_exact=min(chunk.num_exact, start),
        gaps=gaps,
    )


def gapped(chunk: Chunk, start: int, stop: int, page_size: int) -> Layout:
    """The layout of a chunk without a span, in which later tokens keep their positions, and their pages if the span is whole pages."""
    tokens, gone = chunk.tokens.truncate(start).extend(chunk.tokens.array(stop)), stop - start
    before = tuple(gap for gap in chunk.gaps if gap[0] < start)
    here = max((offset for at, offset in chunk.gaps if at <= stop), default=0) + gone
    gaps = (*before, (start, here), *((at - gone, offset + gone) for at, offset in chunk.gaps if at > stop))
    shared, begin = start // page_size, start // page_size * page_size
    if gone % page_size:
        end, tail = len(tokens), chunk.pages.array(0, 0)
    else:  # after the page in which both ends meet, offsets inside pages do not change
        end = min(len(tokens), pages_for(start, page_size) * page_size)
        tail = chunk.pages.array(pages_for(stop, page_size))
    return Layout(
        tokens=tokens,
        head=chunk.pages.array(0, shared),
        num_fresh=pages_for(end, page_size) - shared,
        tail=tail,
        start=begin,
        source=np.concatenate((_slots(chunk, page_size, begin, start), _slots(chunk, page_size, stop, end + gone)))
        if end > begin
        else np.empty(0, np.int64),
        shift=np.zeros(max(0, end - begin), np.int64),
        num_exact=min(chunk.num_exact, start),
        gaps=gaps,
    )
