"""Layouts of chunks made of chunks, token by token: every slot, every shared page, and the rotation of each key."""

from itertools import count, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.chunks.layout import Layout, gapped, joined, shifted
from nanovllm.state.chunk import EXACT, Chunk, Provenance
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.vector import IntVector

Cell = tuple[int, int, int]  # a token, the slot of its KV, the position that its key was rotated for


def chunk_of(tokens: IntVector, pages: IntVector, num_exact: int, gaps: tuple[tuple[int, int], ...]) -> Chunk:
    how = EXACT if num_exact == len(tokens) else Provenance(operations=("dropped by gap",))
    return Chunk(tokens=tokens, pages=pages, provenance=how, num_exact=num_exact, gaps=gaps, fingerprint="", engine="", liveness=0)


def cells_of(chunk: Chunk, size: int) -> list[Cell]:
    slots = [page * size + within for page in chunk.pages for within in range(size)]
    return list(zip(chunk.token_ids.tolist(), slots, chunk.positions.tolist(), strict=False))


def placed(layout: Layout, before: list[Cell], positions: list[int], size: int, fresh: count) -> Chunk:
    """The chunk of a layout whose tokens were `before` and go to `positions`."""
    new = [next(fresh) for _ in range(layout.num_fresh)]
    pages = IntVector.of([*layout.head.tolist(), *new, *layout.tail.tolist()])
    made = chunk_of(layout.tokens, pages, layout.num_exact, layout.gaps)
    after = cells_of(made, size)
    assert [token for token, _, _ in after] == [token for token, _, _ in before]
    assert [position for _, _, position in after] == positions
    assert len(pages) == pages_for(len(before), size) and len(layout.head) * size <= layout.start
    moved = range(layout.start, layout.start + len(layout.source))
    assert len(layout.shift) == len(moved)
    for at, ((_, old_slot, old_position), (_, slot, position)) in enumerate(zip(before, after, strict=True)):
        if at in moved:
            assert slot // size in new and layout.source[at - layout.start] == old_slot
            assert layout.shift[at - layout.start] == position - old_position
        else:
            assert slot == old_slot and position == old_position
    return made


def dropped(chunk: Chunk, how: str, start: int, stop: int, size: int, fresh: count) -> Chunk:
    """The chunk without a span, its layout checked."""
    cells, positions = cells_of(chunk, size), chunk.positions.tolist()
    if how == "shifted":
        following = count(positions[start - 1] + 1 if start else 0)
        layout, wanted = shifted(chunk, start, stop, size), [*positions[:start], *islice(following, len(cells) - stop)]
    else:
        layout, wanted = gapped(chunk, start, stop, size), positions[:start] + positions[stop:]
        assert (stop - start) % size or layout.num_fresh <= 1
    assert layout.num_exact == min(chunk.num_exact, start)
    return placed(layout, cells[:start] + cells[stop:], wanted, size, fresh)


def whole(num_tokens: int, size: int, numbers: count, fresh: count) -> Chunk:
    """A chunk without gaps, of tokens and pages that no other chunk has."""
    tokens, pages = islice(numbers, num_tokens), islice(fresh, pages_for(num_tokens, size))
    return chunk_of(IntVector.of(list(tokens)), IntVector.of(list(pages)), num_tokens, ())


@pytest.mark.parametrize("how", ["shifted", "gapped"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_second_span_near_a_gap(how: str, size: int) -> None:
    """It ends before the gap, at it, one token before it and after it, or begins there."""
    for start in range(8):
        for stop in range(start + 1, 9):
            fresh = count()
            once = dropped(whole(11, size, count(), fresh), "gapped", 5, 7, size, fresh)
            assert once.gaps == ((5, 2),)
            dropped(once, how, start, stop, size, fresh)


@given(st.data())
def test_every_token_is_where_its_kv_is_taken_to(data):
    size, fresh, numbers = data.draw(st.sampled_from([1, 2, 3])), count(), count()
    chunks = [whole(data.draw(st.integers(1, 9)), size, numbers, fresh)]
    for _ in range(data.draw(st.integers(1, 5))):
        how = data.draw(st.sampled_from(["whole", "joined", "shifted", "gapped", "gapped"]))
        chunk = data.draw(st.sampled_from(chunks))
        if how == "whole":
            chunks.append(whole(data.draw(st.integers(1, 9)), size, numbers, fresh))
        elif how == "joined":
            parts = data.draw(st.lists(st.sampled_from(chunks), min_size=1, max_size=3))
            before = [cell for part in parts for cell in cells_of(part, size)]
            layout = joined(parts, IntVector.of([token for token, _, _ in before]), size)
            chunks.append(placed(layout, before, list(range(len(before))), size, fresh))
        elif len(chunk) > 2:
            start = data.draw(st.integers(0, len(chunk) - 2))
            stop = data.draw(st.integers(start + 1, len(chunk) - 1))
            chunks.append(dropped(chunk, how, start, stop, size, fresh))
