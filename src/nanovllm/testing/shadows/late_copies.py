"""Copies between the device and host memory that are made as late as they may be, and that fail when a machine says so."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nanovllm.executor.kv_offload import Begun, HostMemory, Landing
from nanovllm.state.kv_cache import KVState
from nanovllm.state.offload import Moves
from nanovllm.testing.shadows.worlds import FlakyExecutor


class LateCopies:
    """A stream whose copies are made only when the engine waits for them, in their order. The engine's own work is done at once.

    A stage that is filled again, or a page that is read, without waiting for its copy is then certain to have wrong content.
    """

    def __init__(self) -> None:
        self._left = list[Callable[[], None]]()
        self._made = 0

    def run(self, copy: Callable[[], None]) -> None:
        """Remember a copy."""
        self._left.append(copy)

    def note_use(self, memory: torch.Tensor) -> None:
        """A stage is never freed before its copies."""

    def mark(self) -> Any:
        """This stream, and the number of its copies so far."""
        return self, self._made + len(self._left)

    def engine_mark(self) -> None:
        """Nothing to wait for: the engine's work has been done."""

    def hold(self, mark: Any) -> None:
        """Let later copies be made after those before a mark of another stream."""
        if mark is not None:
            stream, _ = mark
            self.run(lambda: stream.hold_engine(mark))

    def hold_engine(self, mark: Any) -> None:
        """Make the copies before a mark."""
        while self._made < mark[1]:
            self._made += 1
            self._left.pop(0)()

    def synchronize(self) -> None:
        """Make all copies."""
        self.hold_engine(self.mark())

    def wait(self, mark: Any) -> None:
        """Make the copies before a mark."""
        self.hold_engine(mark)

    def passed(self, mark: Any) -> bool:
        """Whether the copies before a mark were made."""
        return self._made >= mark[1]


class FlakyHostMemory(HostMemory):
    """Host memory with three streams of `LateCopies`, whose moves are device calls of a `FlakyExecutor`, so that they may fail."""

    def __init__(self, kv: KVState, num_pages: int, executor: FlakyExecutor) -> None:
        super().__init__(kv, num_pages, LateCopies, stage_bytes=1)  # a stage has one page
        self._executor = executor

    def move(self, kv: KVState, moves: Moves, landing: Landing | None = None, begun: Begun | None = None) -> KVState:
        """Copy pages out, then in, or raise `PlantedError`."""
        return self._executor._run(lambda: super(FlakyHostMemory, self).move(kv, moves, landing, begun))

    def begin(self, held: Sequence[int]) -> Begun:
        """Begin copies, or raise `PlantedError`. These copies take no memory of the device, so they never run out of it."""
        if isinstance(self._executor.error, torch.OutOfMemoryError):
            return super().begin(held)
        return self._executor._run(lambda: super(FlakyHostMemory, self).begin(held))

    def move_ahead(self, kv: KVState, moves: Moves) -> KVState:
        """Copy pages ahead, or raise `PlantedError`. These copies take no memory of the device, so they never run out of it."""
        if isinstance(self._executor.error, torch.OutOfMemoryError):
            return super().move_ahead(kv, moves)
        return self._executor._run(lambda: super(FlakyHostMemory, self).move_ahead(kv, moves))
