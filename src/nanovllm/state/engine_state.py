"""`EngineState`: everything of one engine that changes, and the lease that makes a donated value an error to use."""

from dataclasses import dataclass, field
from dataclasses import replace as _replace
from typing import Any

from immutables import Map

from nanovllm.config import EngineConfig
from nanovllm.state.chunk import Chunk
from nanovllm.state.kv_cache import KVState
from nanovllm.state.lease import Leased
from nanovllm.state.pages import PageState
from nanovllm.state.pool import Pool
from nanovllm.state.prefix_cache import PrefixIndex
from nanovllm.state.request import Queue, Sequence
from nanovllm.state.steady import Steady
from nanovllm.types import register_value


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
    runtime: Leased

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
