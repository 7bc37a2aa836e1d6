"""The lease on KV memory, which makes a donated value an error to use."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable
from uuid import uuid4

import torch

from nanovllm.config import RopeConfig
from nanovllm.errors import DonatedStateError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKey:
    """What a state and its model must agree in: the weights, how they are held, and what turns the keys."""

    fingerprint: str
    dtype: torch.dtype
    device: torch.device
    rope: RopeConfig
    places: tuple[tuple[int, int], ...]  # for each layer its KV pool and its index there


@dataclass(slots=True, eq=False)
class Lease:
    """Who may use the KV memory: the state whose epoch is the lease's. Mutable on purpose, owned by the runtime.

    `lost` are pages that a failed call wrote although an older value still counts on what stood there; the next call forgets them.
    """

    model: ModelKey  # the model that the KV belongs to
    engine: str = field(default_factory=lambda: uuid4().hex)
    epoch: int = 0
    lost: frozenset[int] = frozenset()
    dirty: bool = False

    def check(self, epoch: int) -> None:
        """Raise `DonatedStateError` unless `epoch` is the newest."""
        if epoch != self.epoch:
            raise DonatedStateError(
                f"this state is {self.epoch - epoch} call(s) old and its memory was donated to a later one; use the state it returned"
            )

    def advance(self) -> int:
        """Take the memory over: every older state is donated from here on. Returns the new epoch."""
        self.epoch += 1
        self.lost, self.dirty = frozenset(), False
        return self.epoch

    def lose(self, pages: Iterable[int]) -> None:
        """Note that a failed call wrote these pages, and perhaps moved the decode carry on."""
        self.lost, self.dirty = self.lost.union(pages), True


@runtime_checkable
class Leased(Protocol):
    """A state's runtime, as far as a state knows it: it has the lease. `executor_of` gives the executor."""

    @property
    def lease(self) -> Lease:
        """Who may use the KV memory."""
        ...
