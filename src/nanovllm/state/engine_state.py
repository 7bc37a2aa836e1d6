"""`EngineState`: everything in one engine that changes from call to call."""

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from immutables import Map

from nanovllm.config import EngineConfig
from nanovllm.state.chunk import Chunk
from nanovllm.state.expected_reply import EXPECTED_REPLY
from nanovllm.state.html import card
from nanovllm.state.kv_cache import KVState
from nanovllm.state.lease import Leased
from nanovllm.state.pages import PageState
from nanovllm.state.pool import Pool
from nanovllm.state.prefix_cache import PrefixIndex
from nanovllm.state.request import Queue, Sequence
from nanovllm.state.steady import Steady
from nanovllm.types import brief_fields, register_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counts of tokens since the engine was made.

    The counts keep one identity: `prefill_tokens + decode_tokens = needed - reused_tokens + rerun_tokens + discarded_tokens`. Here `needed`
    are the prompt and reply tokens that run once in an engine without reuse, preemption and run-ahead. `score` needs each context with its
    continuation, except for the continuation's last token.

    Attributes:
        prefill_tokens: Tokens of prompts and of scored continuations that were run.
        decode_tokens: Reply tokens that were run.
        reused_tokens: Prompt tokens whose KV was found in memory, or that prompts of one step or one call share, and which were not run.
        rerun_tokens: Tokens that were run again because preemption lost their KV.
        discarded_tokens: Tokens of decode steps that ran ahead and were not used.
        probed_tokens: Tokens run through the first layers only, to choose which tokens to recompute. No other count includes them.
        preemptions: How many times a running request lost its pages.
        memory_shortages: How many times a step ran out of device memory.
        offloaded_tokens: Tokens whose KV was copied to host memory.
        loaded_tokens: Tokens whose KV was copied from host memory. Those of them that a prompt needed are in `reused_tokens` too.
        read_tokens: Tokens whose KV was read from the disk into host memory.

    Examples:
        >>> state, chunk = nv.prefill(model, state, "Once upon a time")
        >>> state.stats.prefill_tokens, state.stats.decode_tokens
        (4, 0)
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    reused_tokens: int = 0
    rerun_tokens: int = 0
    discarded_tokens: int = 0
    probed_tokens: int = 0
    preemptions: int = 0
    memory_shortages: int = 0
    offloaded_tokens: int = 0
    loaded_tokens: int = 0
    read_tokens: int = 0

    def add(self, **more: int) -> "Stats":
        """Return the counts with some of them increased.

        Args:
            **more: By how much to increase each named count.

        Returns:
            New counts; the old ones do not change.

        Examples:
            >>> nv.Stats().add(prefill_tokens=4).prefill_tokens
            4
        """
        counts = {name: getattr(self, name) for name in self.__slots__}
        for name, count in more.items():
            counts[name] += count
        return Stats(**counts)


@runtime_checkable
class Committable(Protocol):
    """Refuses the carries of a session after its end."""

    committed: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Session:
    """The sequences between `begin` and `commit`.

    Attributes:
        sequences: One for each row.
        room: The number of decode steps for which each has pages.
        lease: What all carries of the session refer to.
    """

    sequences: tuple[Sequence, ...]
    room: int
    lease: Committable

    def __repr__(self) -> str:
        return brief_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineState:
    """Donated by every call that takes it, except for calls that only read. Everything in one engine that changes.

    `init_state` makes the first state, and each call returns the next one. Only the newest state can be used. As a pytree its leaves are
    the KV memory; the rest is structure.

    Attributes:
        config: The engine's limits, such as `num_pages` and `max_num_seqs`.
        kv: The KV memory.
        pool: The pages with their owners, and the prefix index.
        running: The running sequences, in order of their turns: by priority with ageing, then by arrival.
        waiting: The waiting sequences, in the same order.
        chunks: The live chunks by their `liveness` number.
        sessions: The sequences between `begin` and `commit`, by session number.
        stats: Counts of tokens run, reused and discarded.
        next_id: The number that the next request, chunk or session gets.
        kept: Sequences that have ended but still hold their pages.
        loaded: The ids of the sequences in the executor's decode carry, in order. None if the carry must be loaded again.
        token_budget: The most tokens of a step while device memory is short; None: `config.max_num_batched_tokens`.
        num_steps: How many steps the engine has run.
        gather_until: The number of steps up to which a few requests wait for others, so that their prompts run in one step.
        expected_reply: How long a reply is expected to become, in tokens, if its limit is not nearer; learned from those that ended.
        epoch: How many calls had taken over the memory when this state was made.
        runtime: The parts that cannot be values: the lease on the memory, and the executor.

    Examples:
        >>> newer, chunk = nv.prefill(model, state, "Once upon a time")
        >>> newer
        EngineState(1 of 64 pages used, 1 chunk, 0 requests, epoch 1)
        >>> state
        EngineState(0 of 64 pages used, 0 chunks, 0 requests, epoch 0, donated)
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
    kept: Map[int, Sequence] = field(default_factory=Map)
    loaded: Any = None
    token_budget: int | None = None
    num_steps: int = 0
    gather_until: int = 0
    expected_reply: int = EXPECTED_REPLY
    epoch: int = 0
    runtime: Leased

    def __repr__(self) -> str:
        pages, stale = self.pool.pages, self.epoch != self.runtime.lease.epoch
        requests = len(self.running) + len(self.waiting) + len(self.kept) + sum(len(s.sequences) for s in self.sessions.values())
        used = f"{pages.num_pages - pages.num_free} of {pages.num_pages} pages used"
        parts = f"{used}, {len(self.chunks)} chunk{'s' * (len(self.chunks) != 1)}, {requests} request{'s' * (requests != 1)}"
        return f"EngineState({parts}, epoch {self.epoch}{', donated' if stale else ''})"

    def _repr_html_(self) -> str:
        pages, stale = self.pool.pages, self.epoch != self.runtime.lease.epoch
        figures = [
            ("pages used", f"{pages.num_pages - pages.num_free:,} of {pages.num_pages:,}"),
            ("tokens per page", self.config.page_size),
            ("chunks", len(self.chunks)),
            ("requests", f"{len(self.running)} running, {len(self.waiting)} waiting"),
            ("prompt tokens", f"{self.stats.prefill_tokens:,} run, {self.stats.reused_tokens:,} reused"),
            ("reply tokens", f"{self.stats.decode_tokens:,} run"),
            ("epoch", f"{self.epoch}{', donated: use the newest state' if stale else ''}"),
        ]
        return card("EngineState", figures)

    @property
    def pages(self) -> PageState:
        """The number of owners of each page, and the free pages.

        Examples:
            >>> state.pages.num_free
            64
        """
        return self.pool.pages

    @property
    def prefix(self) -> PrefixIndex:
        """The index that finds reusable pages by their tokens.

        Examples:
            >>> state.prefix
            PrefixIndex(0 pages, 0 of them idle)
        """
        return self.pool.prefix


def windowed_pools(state: EngineState) -> tuple[bool, ...]:
    """Return for each KV pool whether it belongs to layers with a sliding window, so that frames address it instead of pages."""
    frames = state.pool.frames
    return (False,) if frames is None else (True,) if frames.alone else (False, True)


register_value(EngineState, static=tuple(name for name in EngineState.__dataclass_fields__ if name != "kv"))
