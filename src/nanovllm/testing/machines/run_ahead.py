"""A machine over an executor that runs steps before they are asked for."""

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from nanovllm.chunks.handles import truncate
from nanovllm.testing.machines.engine import EngineMachine
from nanovllm.testing.strategies import limits, token_ids


class AheadMachine(EngineMachine):
    """`EngineMachine` where steps run ahead, with requests for a part of a chunk, behind which the chunk's own tokens lie."""

    max_tokens = 48

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """A fresh engine, of which chunks may pin about half."""
        self.state = self.world.init_state(data.draw(limits(self.max_tokens, 4, min_tokens=16, ahead=(True,))))
        self.most_pinned = max(2, self.state.config.num_pages // 2)

    @rule(ids=token_ids(min_size=3, max_size=8), cut=st.integers(1, 3), steps=st.integers(1, 4), data=st.data())
    def go_on_from_within(self, ids: list[int], cut: int, steps: int, data: st.DataObject) -> None:
        """A request for the beginning of a chunk."""
        length = max(1, len(ids) - cut)
        for chunk in self._prefill(None, ids).values:
            for short in self._new_chunk(self._attempt(lambda whole=chunk: truncate(self.state, whole, length)), ids[:length]).values:
                self._submit(short, [], self._options(data), False)
                self.step(steps)
                self.memory_agrees()
                self._release(short)
            self._release(chunk)
