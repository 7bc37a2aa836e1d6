"""The engine under test, and older values: values that must not change, and states and chunks that must be refused."""

import os
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine

from nanovllm.errors import NanoVLLMError
from nanovllm.executor.executor import executor_of, runtime_of
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState, windowed_pools
from nanovllm.testing.shadows.memory import KeptValues, expect, freeze
from nanovllm.testing.shadows.symbolic import memory_of
from nanovllm.testing.shadows.worlds import FlakyExecutor
from nanovllm.testing.strategies import Limits

SMALLEST = Limits(num_pages=2, page_size=1, max_model_len=2, max_num_seqs=1, max_num_batched_tokens=1)


class EngineHolder(RuleBasedStateMachine):
    """One engine of `world`, its last donated states and released chunks, and old values of any age."""

    world: ClassVar[Any]  # a `World` or `ChunkWorld`, depending on the subclass

    def __init__(self) -> None:
        super().__init__()
        self.state: EngineState = self.world.init_state(SMALLEST)
        self.stale: list[EngineState] = []  # donated states
        self.dead: list[Chunk] = []  # released chunks
        self.most_pinned = 0  # pages that chunks may pin, at most
        self.needed = 0  # tokens whose KV was needed by requests and calls that have ended
        self.kept = KeptValues()

    @property
    def _executor(self) -> FlakyExecutor:
        executor = executor_of(self.state)
        assert isinstance(executor, FlakyExecutor)
        return executor

    def _replaced(self, before: EngineState) -> None:
        """Remember a state that a call has donated."""
        self.stale = [*self.stale[-3:], before]

    def _released(self, chunk: Chunk) -> None:
        """Remember a released chunk."""
        self.dead = [*self.dead[-3:], chunk]

    def _refused(self, error: type[NanoVLLMError], call: Callable[[], Any]) -> None:
        before = freeze(self.state.pool)
        try:
            call()
        except error as raised:
            expect(bool(str(raised)), f"{error.__name__} has no message")
        else:
            expect(False, f"the call should have raised {error.__name__}")
        expect(freeze(self.state.pool) == before, "a refused call changed the pool")


def in_memory() -> str | None:
    """A place for folders that the system keeps in memory, where no write waits for a disk. None: there is none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None


def room_of(state: EngineState) -> int:
    """Return the number of pages that can have KV in all layers at the same time."""
    return min(state.config.num_pages, state.config.num_frames or state.config.num_pages)


def kv_bytes(state: EngineState, chunk: Chunk) -> bytes:
    """Return the KV of a chunk's tokens as bytes: of the pages that it has now, or of its host pages, for which all copies are made."""
    chunk, host = state.chunks.get(chunk.liveness, chunk), state.pool.host
    at, size, pages, frames, parts = np.arange(len(chunk)), state.config.page_size, chunk.pages.array(), state.pool.frames, []
    if host is not None and chunk.liveness in host.moved:
        memory = runtime_of(state).host
        assert memory is not None
        memory.synchronize()
        held = np.array(host.moved[chunk.liveness].pages)[at // size]
        return b"".join(memory_of(images.transpose(0, 1))[:, held, :, :, at % size].tobytes() for images in memory.images)
    for pool, framed in zip(state.kv.pools, windowed_pools(state), strict=True):
        table = frames.of(pages) if framed and frames is not None else pages
        parts.append(memory_of(pool)[:, table[at // size], :, :, at % size].tobytes())
    return b"".join(parts)
