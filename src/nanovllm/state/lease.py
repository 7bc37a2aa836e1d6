"""The lease on KV memory. It makes using a donated value an error."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable
from uuid import uuid4

import torch

from nanovllm.config import Mesh, RopeConfig, places_of
from nanovllm.errors import DonatedStateError, EngineDeadError

NEW_ENGINE = "make a new engine"  # what to do after the end of a rank, which leaves this process whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKey:
    """The properties in which a state and its model must agree.

    Attributes:
        fingerprint: The fingerprint of the weights.
        dtype: The dtype of the weights and the KV.
        device: Where they are.
        rope: The rotary embedding, by which keys are rotated.
        num_layers: The number of layers.
        windows: Their windows, as in `ModelConfig`.
        mesh: The ranks that run the model; None for one.
        kv_copies: How many ranks have the same KV head.
    """

    fingerprint: str
    dtype: torch.dtype
    device: torch.device
    rope: RopeConfig
    num_layers: int
    windows: tuple[int, ...] = ()
    mesh: Mesh | None = None
    kv_copies: int = 1

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each layer its KV pool, and its index in that pool."""
        return places_of(self.num_layers, self.windows)


@dataclass(slots=True, eq=False)
class Lease:
    """Says which state may use the KV memory: the state whose epoch equals the lease's. Mutable on purpose, and owned by the runtime.

    Attributes:
        model: The model that the KV belongs to.
        engine: The engine's id.
        epoch: The epoch of the newest state.
        lost: Pages that a failed call wrote although an older value still relies on their contents. The next call drops them from the
            index.
        lost_host: Pages of host memory that a failed call wrote.
        dirty: Whether a failed call may have advanced the decode carry.
        dead: The error that broke the device, or None.
        remedy: What to do then.

    A call takes the lease for its work on the device, and every call advances it at its end. Both compare the epoch under one lock, so of
    two threads that use one state, one gets an error and changes nothing.
    """

    model: ModelKey
    engine: str = field(default_factory=lambda: uuid4().hex)
    epoch: int = 0
    lost: frozenset[int] = frozenset()
    lost_host: frozenset[int] = frozenset()
    dirty: bool = False
    dead: str | None = None
    remedy: str = "start a new process"
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _holder: int | None = field(default=None, repr=False)  # the thread whose call works on the device
    _failed: int = field(default=0, repr=False)  # calls that noted losses
    _seen: dict[int, int] = field(default_factory=dict, repr=False)  # `_failed` at each thread's last `check`

    def check(self, epoch: int) -> None:
        """Raise `DonatedStateError` unless `epoch` is the newest, and no other thread works on the device."""
        with self._lock:
            self._seen[threading.get_ident()] = self._failed
            self._require(epoch)

    def take(self, epoch: int) -> None:
        """Let this thread work on the device, after `check`. No other thread passes `check` until `give_back`."""
        with self._lock:
            self._require(epoch)
            self._holder = threading.get_ident()

    def give_back(self) -> None:
        """End the work on the device."""
        self._holder = None

    @property
    def holder(self) -> int | None:
        """The thread whose call works on the device, or None. Of a dead engine: after None, no call will."""
        with self._lock:
            return self._holder

    def advance(self, epoch: int) -> int:
        """Take over the memory, after `check`, which donates every older state. Returns the new epoch."""
        with self._lock:
            self._require(epoch)
            self.epoch += 1
            self.lost, self.lost_host, self.dirty = frozenset(), frozenset(), False
            return self.epoch

    def kill(self, cause: str, remedy: str = "") -> EngineDeadError:
        """Note that the device is broken, unless that is known. Returns the error for the caller, with the first cause."""
        if self.dead is None:
            self.dead, self.remedy = cause, remedy or self.remedy
        return EngineDeadError(f"the engine is dead: {self.dead}. No call with a state of it can succeed: {self.remedy}")

    def require_alive(self) -> None:
        """Raise `EngineDeadError` if the device is broken."""
        if self.dead is not None:
            raise self.kill(self.dead)

    def _require(self, epoch: int) -> None:
        if self.dead is not None:
            raise self.kill(self.dead)
        thread = threading.get_ident()
        if self._holder is not None and self._holder != thread:
            raise DonatedStateError("a call of another thread works with this state: wait for it, and use the state that it returns")
        if self._seen.get(thread, self._failed) != self._failed:
            raise DonatedStateError("a call of another thread with this state has failed meanwhile: call again")
        if epoch != self.epoch:
            age = self.epoch - epoch
            raise DonatedStateError(
                f"this state is {age} call{'s' * (age != 1)} old, and its memory was donated to a later call; use the state it returned"
            )

    def lose(self, pages: Iterable[int], host_pages: Iterable[int] = ()) -> None:
        """Note that a failed call wrote these pages, and pages of host memory, and may have advanced the decode carry."""
        with self._lock:
            self.lost, self.lost_host, self.dirty = self.lost.union(pages), self.lost_host.union(host_pages), True
            self._failed += 1
            self._seen[threading.get_ident()] = self._failed


@runtime_checkable
class Leased(Protocol):
    """The part of a runtime that a state uses: its lease. `executor_of` returns the executor."""

    @property
    def lease(self) -> Lease:
        """Says which state may use the KV memory."""
        ...
