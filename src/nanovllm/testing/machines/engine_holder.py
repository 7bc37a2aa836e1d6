"""The engine that a machine holds, and what is kept of its past: values that must not change, states and chunks that must be refused."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine

from nanovllm.errors import NanoVLLMError
from nanovllm.executor.executor import executor_of
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState, windowed_pools
from nanovllm.testing.shadows.memory import KeptValues, expect, freeze
from nanovllm.testing.shadows.worlds import FlakyExecutor
from nanovllm.testing.strategies import Limits

SMALLEST = Limits(num_pages=2, page_size=1, max_model_len=2, max_num_seqs=1, max_num_batched_tokens=1)


class EngineHolder(RuleBasedStateMachine):
    """One engine of `world`, the last states and chunks that are over, and values of any age."""

    world: ClassVar[Any]  # a `World`: a subclass says which it needs

    def __init__(self) -> None:
        super().__init__()
        self.state: EngineState = self.world.init_state(SMALLEST)
        self.stale: list[EngineState] = []
        self.dead: list[Chunk] = []
        self.most_pinned = 0
        self.needed = 0  # tokens whose KV was needed by what is over
        self.kept = KeptValues()

    @property
    def _executor(self) -> FlakyExecutor:
        executor = executor_of(self.state)
        assert isinstance(executor, FlakyExecutor)
        return executor

    def _replaced(self, before: EngineState) -> None:
        """A call put another state in the place of this one."""
        self.stale = [*self.stale[-3:], before]

    def _released(self, chunk: Chunk) -> None:
        """A chunk was released."""
        self.dead = [*self.dead[-3:], chunk]

    def _refused(self, error: type[NanoVLLMError], call: Callable[[], Any]) -> None:
        before = freeze(self.state.pool)
        try:
            call()
        except error as raised:
            expect(bool(str(raised)), f"{error.__name__} says nothing")
        else:
            expect(False, f"{error.__name__} was to be raised")
        expect(freeze(self.state.pool) == before, "a refused call changed the pool")


def room_of(state: EngineState) -> int:
    """Pages that can have KV in all layers."""
    return min(state.config.num_pages, state.config.num_frames or state.config.num_pages)


def kv_bytes(state: EngineState, chunk: Chunk) -> bytes:
    """The KV of a chunk's tokens."""
    at, size, held, frames, parts = np.arange(len(chunk)), state.config.page_size, chunk.pages.array(), state.pool.frames, []
    for pool, framed in zip(state.kv.pools, windowed_pools(state), strict=True):
        table = frames.of(held) if framed and frames is not None else held
        parts.append(pool.numpy()[:, table[at // size], :, :, at % size].tobytes())
    return b"".join(parts)
