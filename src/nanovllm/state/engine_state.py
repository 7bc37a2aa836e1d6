"""`EngineState`: everything of one engine that changes, and the lease that makes a donated value an error to use."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from dataclasses import replace as _replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from immutables import Map

from nanovllm.config import EngineConfig, RopeConfig
from nanovllm.errors import DonatedStateError
from nanovllm.state.chunk import Chunk
from nanovllm.state.kv_cache import KVState
from nanovllm.state.pages import PageState
from nanovllm.state.pool import Pool
from nanovllm.state.prefix_cache import PrefixIndex
from nanovllm.state.request import Queue, Sequence
from nanovllm.state.steady import Steady
from nanovllm.types import register_value

if TYPE_CHECKING:
    from nanovllm.executor.executor import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Tokens since the engine began. run = prefill + decode = needed - reused + rerun + discarded."""

    prefill_tokens: int = 0  # prompt tokens run
    decode_tokens: int = 0  # reply tokens run
    reused_tokens: int = 0  # prompt tokens whose KV was there already
    rerun_tokens: int = 0  # of those run: run before, lost to preemption
    discarded_tokens: int = 0  # of those run: ahead, then not used
    probed_tokens: int = 0  # beside those run: through the first layers alone, to choose what is to run
    preemptions: int = 0

    def add(self, **more: int) -> "Stats":
        """The counters with some increased."""
        return _replace(self, **{name: getattr(self, name) + count for name, count in more.items()})


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Session:
    """Sequences between `begin` and `commit`, with the pages reserved for `room` steps of each."""

    sequences: tuple[Sequence, ...]
    room: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineState:
    """Donated by every call that takes it. `running` is in order of arrival; `chunks` are the live handles by liveness token.

    As a pytree its leaves are the KV memory; the rest is structure.

    `loaded` names the sequences whose rows stand in the runtime's decode carry, in order; None when it has to be loaded anew.
    """

    config: EngineConfig
    kv: KVState
    pool: Pool
    running: tuple[Sequence, ...] | Steady = ()
    waiting: Queue = field(default_factory=Queue)
    chunks: Map[int, Chunk] = field(default_factory=Map)
    sessions: Map[int, Session] = field(default_factory=Map)
    stats: Stats = field(default_factory=Stats)
    next_id: int = 0
    kept: Map[int, Sequence] = field(default_factory=Map)  # ended, their pages not given up yet
    loaded: Any = None
    epoch: int = 0
    runtime: "Runtime"

    def __repr__(self) -> str:
        pages, stale = self.pool.pages, self.epoch != self.runtime.lease.epoch
        requests = len(self.running) + len(self.waiting) + len(self.kept) + sum(len(s.sequences) for s in self.sessions.values())
        used = f"{pages.num_pages - pages.num_free} of {pages.num_pages} pages used"
        told = f"{used}, {len(self.chunks)} chunk{'s' * (len(self.chunks) != 1)}, {requests} request{'s' * (requests != 1)}"
        return f"EngineState({told}, epoch {self.epoch}{', donated' if stale else ''})"

    @property
    def pages(self) -> PageState:
        """Owners of the pages."""
        return self.pool.pages

    @property
    def prefix(self) -> PrefixIndex:
        """The index of reusable pages."""
        return self.pool.prefix


def windowed_pools(state: EngineState) -> tuple[bool, ...]:
    """Of each KV pool whether it is that of layers with a window, and found by frames."""
    frames = state.pool.frames
    return (False,) if frames is None else (True,) if frames.alone else (False, True)


register_value(EngineState, static=tuple(name for name in EngineState.__dataclass_fields__ if name != "kv"))
