"""Ranks that are threads of one process: the double of a process group, for tests and for programs that look at each rank."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch

from nanovllm.config import Mesh
from nanovllm.errors import EngineDeadError
from nanovllm.ops.attention.plan_table import register
from nanovllm.ops.distributed.group import Group, joined, side_by_side, summed, winners_of_pairs
from nanovllm.ops.linear.linear_add_norm import norm_add
from nanovllm.types import Tensor

R = TypeVar("R")
SECONDS = 60.0  # that a rank waits for the others


class Meeting:
    """Where the ranks of one process exchange tensors. A rank that fails ends the waits of all others."""

    def __init__(self, size: int, seconds: float = SECONDS) -> None:
        self.size, self._seconds = size, seconds
        self._barrier, self._places = Barrier(size), list[Tensor | None]([None] * size)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """Give a tensor, and get those of all ranks in their order.

        Raises:
            EngineDeadError: A rank has failed, or did not come in time.
        """
        self._places[rank] = x
        try:
            self._barrier.wait(self._seconds)
            parts = [part for part in self._places if part is not None]
            self._barrier.wait(self._seconds)  # not before all have read
        except BrokenBarrierError as error:
            raise EngineDeadError(f"a rank has gone: the other {self.size - 1} of {self.size} cannot go on") from error
        return parts

    def abort(self) -> None:
        """End all waits, now and later."""
        self._barrier.abort()


class ThreadGroup(Group):
    """One rank of a `Meeting`: the collective operations of a thread."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.size, self.rank, self.meeting = meeting.size, rank, meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors."""
        return summed(self.meeting.exchange(self.rank, x))

    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """The sum of the ranks' tensors, which is taken at once."""
        total = self.all_reduce(x)
        return lambda: total

    def all_reduce_add(self, y: Tensor, x: Tensor, slot: int) -> Tensor:
        """The sum of the ranks' tensors and of `x`."""
        return summed(self.meeting.exchange(self.rank, y), x)

    def all_reduce_add_norm(
        self, parts: Tensor, bias: Tensor | None, x: Tensor, gain: Tensor, eps: float, slot: int
    ) -> tuple[Tensor, Tensor]:
        """The sum of the ranks' tensors and of `x`, and its RMS norm."""
        added = self.all_reduce_add(joined(parts, bias, x.dtype), x, slot)
        return added, norm_add(added, gain, None, eps)

    def gather_columns(self, x: Tensor, width: int) -> Tensor:
        """The ranks' columns side by side."""
        return side_by_side(self.all_gather(x), width)

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors, stacked."""
        return torch.stack(self.meeting.exchange(self.rank, x))

    def winners(self, values: Tensor, ids: Tensor) -> Tensor:
        """The ids of the largest values of all ranks."""
        return winners_of_pairs(values, ids, self.all_gather)

    def require_all(self) -> None:
        """Nothing: failures are raised at once."""

    def give_up(self) -> None:
        """End all waits for other ranks."""
        self.meeting.abort()

    def given_up(self, seconds: float) -> bool:
        """True: waits end at once."""
        return True


def thread_meshes(size: int, seconds: float = SECONDS) -> list[Mesh]:
    """The meshes of `size` ranks that will be threads of this process. See `run_ranks`."""
    meeting = Meeting(size, seconds)
    groups = [ThreadGroup(meeting, rank) for rank in range(size)]
    return [Mesh(size=size, rank=group.rank, group=register(group), owner=group) for group in groups]


def run_ranks(function: Callable[[Mesh], R], size: int, seconds: float = SECONDS) -> list[R]:
    """Run a function as every rank, each in a thread of its own, and return the results in the order of the ranks.

    Args:
        function: What a rank runs, with its mesh.
        size: The number of ranks.
        seconds: How long a rank waits for the others.

    Raises:
        Exception: That of the first rank which failed by itself.

    Examples:
        >>> run_ranks(lambda mesh: mesh.rank, 2)
        [0, 1]
    """
    meshes, failures = thread_meshes(size, seconds), list[BaseException]()

    def run(mesh: Mesh) -> R:
        try:
            return function(mesh)
        except BaseException as error:
            failures.append(error)
            assert isinstance(mesh.owner, ThreadGroup)
            mesh.owner.meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, mesh) for mesh in meshes]
    if failures:
        raise failures[0]
    return [future.result() for future in futures]
