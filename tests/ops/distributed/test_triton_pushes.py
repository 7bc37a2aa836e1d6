"""The launches that sum small tensors over ranks, in Triton's interpreter: one after another in one process, and in several at once."""

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.ops.distributed.group import summed
from nanovllm.ops.distributed.shared_memory import END, NUM_ROWS, PIECE, PIECE_PLACES, PIECE_TURNS, PIECES, ROW, ROW_PLACES, Shared
from nanovllm.ops.elementwise.norm_rope import rms_norm

pytestmark = pytest.mark.interpret
FLOATS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
dtypes = st.sampled_from(list(FLOATS))


@pytest.fixture(autouse=True, scope="module")
def few_tries() -> Iterator[None]:
    """A wait in vain ends soon."""
    import triton.language as tl

    from nanovllm.ops.distributed import triton_pushes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_pushes, "SPINS", tl.constexpr(3000))
        yield


class Ranks:
    """Memory of several ranks of one process, of which each runs its launch alone: what the others will push lies there before."""

    def __init__(self, size: int) -> None:
        self.size, self.memories = size, [torch.full((END - PIECE_PLACES,), 255, dtype=torch.uint8) for _ in range(size)]
        for memory in self.memories:
            memory[PIECE_TURNS - PIECE_PLACES :].zero_()
        self.peers = tuple(memory.data_ptr() - PIECE_PLACES for memory in self.memories)  # only what comes from there on is used
        self.failed, self.turns = torch.zeros(1, dtype=torch.int32), {PIECE: [0] * (PIECES // PIECE), ROW: [0] * NUM_ROWS}

    def shared(self, rank: int) -> Shared:
        memory, table = self.memories[rank], torch.tensor(self.peers)
        return Shared(rank=rank, size=self.size, memory=memory, table=table, peers=self.peers, failed=self.failed, handle=None)

    def place(self, rank: int, program: int, source: int, place: int) -> torch.Tensor:
        """Where a program finds what another rank pushes in this turn."""
        first = (0 if place == PIECE else ROW_PLACES - PIECE_PLACES) + (
            (2 * program + self.turns[place][program]) * self.size + source
        ) * place
        return self.memories[rank][first : first + place]

    def run(self, launch: Callable[[Shared, int], Any], pieces: list[list[torch.Tensor]], place: int) -> list[Any]:
        """Run a launch as each rank. `pieces` are what the programs of each rank push."""
        found, images = [], [[piece.contiguous().view(torch.uint8).flatten() for piece in own] for own in pieces]
        self.failed.zero_()
        for rank in range(self.size):
            self.memories[rank][: PIECE_TURNS - PIECE_PLACES] = 255  # as it is, unless an example has failed
            for source in range(self.size):
                for program, image in enumerate(images[source]):
                    if source != rank:
                        self.place(rank, program, source, place)[: len(image)] = image
            found.append(launch(self.shared(rank), rank))
            assert self.empty(rank), "a rank has taken all"
            for other in range(self.size):
                for program, image in enumerate(images[rank]):
                    if other != rank:
                        there = self.place(other, program, rank, place)
                        assert torch.equal(there[: len(image)], image), "what a rank pushes is what the others wait for"
                        there[: len(image)] = 255
        assert all(self.empty(rank) for rank in range(self.size)), "no rank pushes anything else"
        for program in range(len(pieces[0])):
            self.turns[place][program] ^= 1
        assert not self.failed.item()
        return found

    def empty(self, rank: int) -> bool:
        """Whether all places of a rank are empty."""
        return bool((self.memories[rank][: PIECE_TURNS - PIECE_PLACES].view(torch.int64) == -1).all())


GROUPS = {size: Ranks(size) for size in (2, 3, 4, 8)}  # one for all examples: places are empty after each


def tensors(seed: int, size: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """A tensor for each rank, with infinities, zeros and every kind of NaN in some places."""
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(size):
        y = torch.randn(count, generator=generator).to(dtype)
        at = torch.randint(0, count, (6,), generator=generator)
        for value, index in zip((float("inf"), -float("inf"), float("nan"), 0.0, -0.0), at, strict=False):
            y[index] = value
        y.view(FLOATS[dtype])[at[5]] = -1  # the empty word
        found.append(y)
    return found


def pushed_of(y: torch.Tensor) -> torch.Tensor:
    """What is pushed of a tensor: no element has all bits set."""
    bits = y.view(FLOATS[y.dtype])
    return torch.where(bits == -1, torch.iinfo(bits.dtype).max, bits).view(y.dtype)


def assert_sum(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The interpreter cuts bits off where a GPU rounds to bfloat16."""
    torch.testing.assert_close(found, expected, rtol=2.0**-7 if found.dtype == torch.bfloat16 else 0, atol=0, equal_nan=True)


@given(seed=st.integers(0, 10**6), size=st.sampled_from(list(GROUPS)), dtype=dtypes, count=st.integers(1, 700), adds=st.booleans())
@settings(deadline=None, max_examples=40)
def test_sums(seed: int, size: int, dtype: torch.dtype, count: int, adds: bool) -> None:
    from nanovllm.ops.distributed.triton_pushes import pushed

    ys, ranks = tensors(seed, size, count, dtype), GROUPS[size]
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype) if adds else None
    pieces = [list(pushed_of(y).split(PIECE // y.element_size())) for y in ys]
    found = ranks.run(lambda shared, rank: pushed(ys[rank], x, shared, False), pieces, PIECE)
    for one in found:
        assert torch.equal(one.view(FLOATS[dtype]), found[0].view(FLOATS[dtype])), "all ranks have the same bits"
        assert_sum(one, summed(ys, x))


@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from(list(GROUPS)),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    rows=st.integers(1, 3),
    width=st.sampled_from([8, 100, 640]),
    parts=st.integers(1, 2),
    biased=st.booleans(),
)
@settings(deadline=None, max_examples=30)
def test_sums_and_norms(seed: int, size: int, dtype: torch.dtype, rows: int, width: int, parts: int, biased: bool) -> None:
    """The interpreter cannot multiply numbers in bfloat16."""
    from nanovllm.ops.distributed.triton_pushes import pushed_norm

    ranks, generator = GROUPS[size], torch.Generator().manual_seed(seed)
    given = [torch.randn(parts, rows, width, generator=generator).to(dtype if parts == 1 else torch.float32) for _ in range(size)]
    if parts == 1:
        given[0].view(FLOATS[dtype])[0, -1, -1] = -1
    bias, x = torch.randn(width, generator=generator).to(dtype) if biased else None, torch.randn(rows, width, generator=generator).to(dtype)
    gain = torch.rand(width, generator=generator).to(dtype) + 0.5
    sums = [
        one.float().sum(0) if bias is None else bias + one[0].float() + one[1:].sum(0).float() for one in given
    ]  # in the order of the kernel
    ys = [total.to(dtype) for total in sums]
    found = ranks.run(
        lambda shared, rank: pushed_norm(given[rank], bias, x, gain, 1e-6, shared, False), [list(pushed_of(y)) for y in ys], ROW
    )
    for added, normed in found:
        assert_sum(added, summed(ys, x))
        torch.testing.assert_close(normed, rms_norm(added, gain, 1e-6), rtol=2e-2, atol=2e-2, equal_nan=True)
        assert all(torch.equal(a.view(FLOATS[dtype]), b.view(FLOATS[dtype])) for a, b in zip((added, normed), found[0], strict=True))


def test_a_host_that_gives_up_ends_the_wait() -> None:
    from nanovllm.ops.distributed.triton_pushes import pushed, pushed_norm

    ranks, y = Ranks(2), torch.ones(1, 16)
    ranks.failed.fill_(1)
    pushed(y, None, ranks.shared(0), False)
    pushed_norm(y.unsqueeze(0), None, y, y[0], 1e-6, ranks.shared(0), False)
    assert ranks.failed.item() == 1


PROGRAM = """
    import sys, time
    from pathlib import Path
    import torch
    from nanovllm.ops.distributed.group import summed
    from nanovllm.ops.distributed.shared_memory import END, PIECE_PLACES, Shared
    from nanovllm.ops.distributed.triton_pushes import pushed, pushed_norm

    folder, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    memories = [torch.from_file(f"{folder}/{one}", True, END - PIECE_PLACES, dtype=torch.uint8) for one in range(size)]
    peers, failed = tuple(memory.data_ptr() - PIECE_PLACES for memory in memories), torch.zeros(1, dtype=torch.int32)
    shared = Shared(rank=rank, size=size, memory=memories[rank], table=torch.tensor(peers), peers=peers, failed=failed, handle=None)
    Path(f"{folder}/ready{rank}").touch()
    while not all(Path(f"{folder}/ready{one}").exists() for one in range(size)):
        time.sleep(0.01)
    same = torch.Generator().manual_seed(5)
    for call in range(60):
        count, norms, late = 8 * int(torch.randint(1, 200, (), generator=same)), call % 3 == 2, call % size == rank
        ys, x = torch.randn(size, 1, count, generator=same), torch.randn(1, count, generator=same)
        time.sleep(0.02 if late and call % 5 else 0.0)
        found = pushed_norm(ys[rank][None], None, x, x[0], 1e-6, shared, False)[0] if norms else pushed(ys[rank], x, shared, False)
        assert torch.equal(found, summed(list(ys), x)), (rank, call)
    print("good", failed.item())
"""


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_at_the_same_time(size: int, tmp_path: Path) -> None:
    """Processes over the same memory, of which each is late now and then."""
    ranks = Ranks(size)
    for rank, memory in enumerate(ranks.memories):
        (tmp_path / str(rank)).write_bytes(memory.numpy().tobytes())
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), str(rank), str(size)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        ended = [process.communicate(timeout=600) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [told for told, _ in ended] == ["good 0\n"] * size, ended[0][1] + ended[-1][1]
