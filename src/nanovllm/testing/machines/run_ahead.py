"""`AheadMachine`: test an executor that runs decode steps before the engine asks for them."""

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from nanovllm.chunks.handles import truncate
from nanovllm.testing.machines.engine import EngineMachine
from nanovllm.testing.strategies import limits, token_ids


class AheadMachine(EngineMachine):
    """`EngineMachine` over an executor that runs decode steps ahead, as the executor for GPUs does.

    Pools have 16 to 48 tokens in pages of 1 to 4. An extra rule submits requests for the beginning of a chunk. The chunk shares the last
    page of such a request, so a step ahead must not write to it. Checks the invariants of `EngineMachine`.

    Attributes:
        world: The engine and model under test, with their oracle: a `World`. The default is `SymbolicWorld()`.
        max_tokens: The largest number of tokens that a pool has room for.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import AheadMachine, ModelWorld
        >>> class RealModel(AheadMachine):
        ...     world = ModelWorld()
        >>> run_state_machine_as_test(RealModel, settings=settings(max_examples=3, stateful_step_count=3, deadline=None))
    """

    max_tokens = 48

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """Start a fresh engine. Chunks may pin about half of its pool."""
        self.state = self.world.init_state(data.draw(limits(self.max_tokens, 4, min_tokens=16, ahead=(True,))))
        self.most_pinned = max(2, self.state.config.num_pages // 2)

    @rule(ids=token_ids(min_size=3, max_size=8), cut=st.integers(1, 3), steps=st.integers(1, 4), data=st.data())
    def go_on_from_within(self, ids: list[int], cut: int, steps: int, data: st.DataObject) -> None:
        """Submit a request for the beginning of a chunk."""
        length = max(1, len(ids) - cut)
        for chunk in self._prefill(None, ids).values:
            for short in self._new_chunk(self._attempt(lambda whole=chunk: truncate(self.state, whole, length)), ids[:length]).values:
                self._submit(short, [], self._options(data), False)
                self.step(steps)
                self.memory_agrees()
                self._release(short)
            self._release(chunk)
