"""The lease on KV memory. It makes using a donated value an error."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable
from uuid import uuid4

import torch

from nanovllm.config import RopeConfig
from nanovllm.errors import DonatedStateError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKey:
    """The properties in which a state and its model must agree.

    Attributes:
        fingerprint: The fingerprint of the weights.
        dtype: The dtype of the weights and the KV.
        device: Where they are.
        rope: The rotary embedding, by which keys are rotated.
        places: For each layer its KV pool, and its index in that pool.
    """

    fingerprint: str
    dtype: torch.dtype
    device: torch.device
    rope: RopeConfig
    places: tuple[tuple[int, int], ...]


@dataclass(slots=True, eq=False)
class Lease:
    """Says which state may use the KV memory: the state whose epoch equals the lease's. Mutable on purpose, and owned by the runtime.

    Attributes:
        model: The model that the KV belongs to.
        engine: The engine's id.
        epoch: The epoch of the newest state.
        lost: Pages that a failed call wrote although an older value still relies on their contents. The next call drops them from the
            index.
        dirty: Whether a failed call may have advanced the decode carry.
    """

    model: ModelKey
    engine: str = field(default_factory=lambda: uuid4().hex)
    epoch: int = 0
    lost: frozenset[int] = frozenset()
    dirty: bool = False

    def check(self, epoch: int) -> None:
        """Raise `DonatedStateError` unless `epoch` is the newest."""
        if epoch != self.epoch:
            age = self.epoch - epoch
            raise DonatedStateError(
                f"this state is {age} call{'s' * (age != 1)} old, and its memory was donated to a later call; use the state it returned"
            )

    def advance(self) -> int:
        """Take over the memory, which donates every older state. Returns the new epoch."""
        self.epoch += 1
        self.lost, self.dirty = frozenset(), False
        return self.epoch

    def lose(self, pages: Iterable[int]) -> None:
        """Note that a failed call wrote these pages, and may have advanced the decode carry."""
        self.lost, self.dirty = self.lost.union(pages), True


@runtime_checkable
class Leased(Protocol):
    """The part of a runtime that a state uses: its lease. `executor_of` returns the executor."""

    @property
    def lease(self) -> Lease:
        """Says which state may use the KV memory."""
        ...
