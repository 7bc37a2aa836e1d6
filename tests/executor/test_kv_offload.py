"""Copies between pages and host pages: bits come back, in any order, through stages of any size, as late as the stream likes."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from immutables import Map

from nanovllm.errors import OutOfPagesError
from nanovllm.executor import pinned_memory
from nanovllm.executor.copy_streams import CopiesAtOnce
from nanovllm.executor.kv_offload import HostMemory, Landing
from nanovllm.state.kv_cache import KVState
from nanovllm.state.offload import Moves
from nanovllm.testing.shadows.late_copies import LateCopies

PAGES, HOST = 6, 8
PAGE_BYTES = 2 * 2 * 1 * 4 * 8 * 4


def random_pages() -> torch.Tensor:
    return torch.randn(2, PAGES, 2, 1, 4, 8)


@settings(deadline=None, max_examples=60)
@given(
    stage=st.integers(1, 4),
    late=st.booleans(),
    lands=st.booleans(),
    rounds=st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, HOST - 1), st.integers(0, PAGES - 1)), max_size=6),
            st.lists(st.tuples(st.integers(0, HOST - 1), st.integers(0, PAGES - 1)), max_size=6, unique_by=lambda pair: pair[1]),
            st.lists(st.integers(0, HOST - 1), max_size=4, unique=True),
        ),
        max_size=5,
    ),
)
def test_every_page_gets_the_bits_that_its_host_page_was_given(stage, late, lands, rounds):
    """Each round copies out, then in, and then all pages are written, as the next step would do. With `lands`, the last pages come late.

    Copies of some host pages have begun before, whether the round wants them or not.
    """
    pool = random_pages()
    memory = HostMemory(KVState(pools=(pool,)), HOST, LateCopies if late else None, stage_bytes=stage * PAGE_BYTES)
    held: dict[int, torch.Tensor] = {}
    for out, into, early in rounds:
        begun = memory.begin([at for at in early if at in held][: memory.num_at_once])
        for at, page in dict(out).items():
            held[at] = pool[:, page].clone()
        there = tuple((at, page) for at, page in into if at in held)
        landing = Landing() if lands else None
        memory.move(KVState(pools=(pool,)), Moves(out=Map(dict(out)), into=there), landing, begun)
        if landing is not None:
            assert len(landing.left) == min(4, -(-len(there) // stage))
            landing.land()
        for at, page in there:
            assert torch.equal(pool[:, page], held[at])
        pool.copy_(random_pages())
    memory.synchronize()
    for at, image in held.items():
        assert torch.equal(memory.images[0][at], image)


PAIRS = st.lists(st.tuples(st.integers(0, HOST - 1), st.integers(0, PAGES - 1)), max_size=6)


@settings(deadline=None, max_examples=60)
@given(
    stage=st.integers(1, 4),
    late=st.booleans(),
    rounds=st.lists(st.tuples(PAIRS, PAIRS, PAIRS, st.sets(st.integers(0, PAGES - 1))), max_size=6),
)
def test_copies_ahead_have_the_bits_of_before_the_pages_are_written(stage, late, rounds):
    """Each round copies ahead, then out and in, and then writes some pages, of which it tells before."""
    pool = random_pages()
    kv, memory = KVState(pools=(pool,)), HostMemory(KVState(pools=(pool,)), HOST, LateCopies if late else None, stage * PAGE_BYTES)
    held: dict[int, torch.Tensor] = {}
    for ahead, out, into, written in rounds:
        memory.move_ahead(kv, Moves(out=Map(dict(ahead))))
        held |= {at: pool[:, page].clone() for at, page in dict(ahead).items()}
        held |= {at: pool[:, page].clone() for at, page in dict(out).items()}
        there = {page: at for at, page in into if at in held}
        memory.move(kv, Moves(out=Map(dict(out)), into=tuple((at, page) for page, at in there.items())))
        for page, at in there.items():
            assert torch.equal(pool[:, page], held[at])
        memory.let_write([*written])
        pool[:, [*written]] = random_pages()[:, [*written]]
    memory.wait(memory.marks())
    for at, image in held.items():
        assert torch.equal(memory.images[0][at], image)


def test_a_page_that_is_copied_ahead_waits_only_for_its_own_copies():
    pool = random_pages()
    kv, memory = KVState(pools=(pool,)), HostMemory(KVState(pools=(pool,)), HOST, LateCopies, stage_bytes=PAGE_BYTES)
    before = pool.clone()
    memory.move_ahead(kv, Moves(out=Map({page: page for page in range(4)})))
    memory.let_write([1])
    pool.zero_()
    memory.synchronize()
    assert torch.equal(memory.images[0][:2], before[:, :2].transpose(0, 1)) and not memory.images[0][2:4].any()


@pytest.mark.parametrize("first", ["_outward", "_aside"])
@pytest.mark.parametrize("ahead", ["first", "last"])
def test_a_host_page_has_what_was_copied_last_whichever_stream_runs_first(ahead, first):
    pool = random_pages()
    kv, memory = KVState(pools=(pool,)), HostMemory(KVState(pools=(pool,)), HOST, LateCopies, stage_bytes=PAGE_BYTES)
    one, other = Moves(out=Map({3: 0})), Moves(out=Map({3: 1}))
    if ahead == "first":
        memory.move(memory.move_ahead(kv, one), other)
    else:
        memory.move_ahead(memory.move(kv, one), other)
    getattr(memory, first).synchronize()
    memory.synchronize()
    assert torch.equal(memory.images[0][3], pool[:, 1])


@pytest.mark.parametrize("stage", [1, 2, 4])
@pytest.mark.parametrize("late", [False, True])
def test_pages_that_are_copied_out_and_in_are_gathered_first(stage, late):
    """Each page of the first four goes out and gets the KV of another one."""
    pool = random_pages()
    memory = HostMemory(KVState(pools=(pool,)), HOST, LateCopies if late else None, stage_bytes=stage * PAGE_BYTES)
    first = pool[:, :4].clone()
    memory.move(KVState(pools=(pool,)), Moves(out=Map({page: page for page in range(4)})))
    pool.copy_(random_pages())
    second = pool[:, :4].clone()
    memory.move(KVState(pools=(pool,)), Moves(out=Map({4 + page: page for page in range(4)}), into=tuple((at, 3 - at) for at in range(4))))
    assert torch.equal(pool[:, :4], first.flip(1))
    memory.synchronize()
    assert torch.equal(memory.images[0][4:], second.transpose(0, 1))


@pytest.mark.parametrize("stage", [1, 3, 8])
@pytest.mark.parametrize("late", [False, True])
def test_frames_with_a_pool_of_their_own_go_through_the_same_stages(stage, late):
    """An image of a frame has three times the bytes of that of a page, so that a stage holds fewer of them."""
    pages, frames = random_pages(), torch.randn(6, 4, 2, 1, 4, 8)
    kv, before = KVState(pools=(pages, frames)), (pages.clone(), frames.clone())
    memory = HostMemory(kv, HOST, LateCopies if late else None, stage_bytes=stage * PAGE_BYTES)
    memory.move(kv, Moves(out=Map((7 - page, page) for page in range(PAGES)), frames_out=Map((2 + at, at) for at in range(4))))
    pages.zero_()
    frames.zero_()
    memory.move(kv, Moves(into=tuple((7 - page, page) for page in range(1, PAGES)), frames_into=((3, 0), (2, 1))))
    assert torch.equal(pages[:, 1:], before[0][:, 1:]) and not pages[:, 0].any()
    assert torch.equal(frames[:, :2], before[1][:, :2].flip(1)) and not frames[:, 2:].any()
    memory.synchronize()
    assert torch.equal(memory.images[1][2:6], before[1].transpose(0, 1)) and memory.num_pages == HOST


@pytest.mark.parametrize(("into", "out", "again"), [
    (((4, 0), (6, 2), (5, 1)), {}, [[6]]),  # what has begun is not copied again
    (((4, 0), (6, 2)), {}, [[4], [6]]),  # host page 5 is not wanted any more
    (((4, 0), (5, 1)), {5: 3}, [[4], [5]]),  # it has another content
    (((4, 0), (5, 1), (4, 2)), {}, [[4], [4], [5]]),  # two pages want it
    (((4, 0), (5, 1)), {0: 4, 1: 5, 2: 0}, [[4], [5]]),  # page 0 waits for a stage
])  # fmt: skip
def test_copies_that_have_begun_are_used_if_they_fit(into, out, again, monkeypatch):
    pool, copied = random_pages(), list[list[int]]()
    kv, memory = KVState(pools=(pool,)), HostMemory(KVState(pools=(pool,)), HOST, LateCopies, stage_bytes=PAGE_BYTES)
    memory.move(kv, Moves(out=Map({4 + at: at for at in range(4)})))
    begun, before = memory.begin([5, 4]), pool.clone()
    fetch = memory._fetch
    monkeypatch.setattr(memory, "_fetch", lambda memory, held, stage: copied.append([*held]) or fetch(memory, held, stage))
    memory.move(kv, Moves(out=Map(out), into=into), begun=begun)
    assert sorted(copied) == again
    for at, page in into:
        assert torch.equal(pool[:, page], before[:, out[at] if at in out else at - 4])


class Watched(CopiesAtOnce):
    """Copies whose marks of the engine's stream are numbered, and that note what they wait for."""

    def __init__(self) -> None:
        self.done, self._count = list[Any](), count()

    def run(self, copy: Callable[[], None]) -> None:
        self.done.append("copy")
        copy()

    def engine_mark(self) -> Any:
        return next(self._count)

    def hold(self, mark: Any) -> None:
        self.done.append(mark)


def test_a_stage_is_filled_only_after_it_was_scattered():
    """Six pages go through four stages. What begins then goes to the first two, which were scattered last and before that."""
    pool = random_pages()
    kv, memory = KVState(pools=(pool,)), HostMemory(KVState(pools=(pool,)), HOST, Watched, stage_bytes=PAGE_BYTES)
    inward = memory._inward
    assert isinstance(inward, Watched)
    memory.move(kv, Moves(into=tuple((at, at) for at in range(PAGES))))
    assert [each for each in inward.done if each is not None] == ["copy"] * 4 + [0, "copy", 1, "copy"]
    del inward.done[:]
    memory.begin([0, 1, 2])
    assert [each for each in inward.done if each is not None] == [4, "copy", 5, "copy", 2, "copy"]


def test_copies_out_do_not_wait_for_copies_that_have_begun():
    pool = random_pages()
    kv, memory = KVState(pools=(pool,)), HostMemory(KVState(pools=(pool,)), HOST, LateCopies, stage_bytes=PAGE_BYTES)
    memory.move(kv, Moves(out=Map({4: 4})))
    memory.synchronize()
    assert isinstance(memory._outward, LateCopies) and isinstance(memory._inward, LateCopies)
    begun = memory.begin([4])
    memory.move(kv, Moves(out=Map({0: 0}), into=((4, 1),)), Landing(), begun)
    memory._outward.synchronize()
    assert memory._inward._made <= begun.before[1] and torch.equal(memory.images[0][0], pool[:, 0])


@pytest.mark.parametrize("ahead", [False, True])
def test_copies_begin_after_those_that_write_their_host_pages(ahead):
    pool = random_pages()
    kv, memory = KVState(pools=(pool,)), HostMemory(KVState(pools=(pool,)), HOST, LateCopies, stage_bytes=PAGE_BYTES)
    (memory.move_ahead if ahead else memory.move)(kv, Moves(out=Map({4: 0})))
    memory.move(kv, Moves(into=((4, 1),)), begun=memory.begin([4]))
    assert torch.equal(pool[:, 1], pool[:, 0])


def test_neighbouring_host_pages_are_one_copy(monkeypatch):
    pool, copies = random_pages(), []
    memory = HostMemory(KVState(pools=(pool,)), HOST)
    real = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, source, **more: copies.append(len(to)) or real(to, source, **more))
    memory.move(KVState(pools=(pool,)), Moves(out=Map({4: 0, 2: 1, 3: 5, 7: 2})))
    assert copies[-2:] == [3, 1]


def test_a_machine_without_the_memory_refuses(monkeypatch):
    def none(*_):
        raise MemoryError

    pool = random_pages()
    monkeypatch.setattr(pinned_memory.np, "empty", none)
    with pytest.raises(OutOfPagesError, match="host_kv_gib needs"):
        HostMemory(KVState(pools=(pool,)), HOST)
