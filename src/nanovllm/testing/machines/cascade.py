"""Machines over engines that read shared pages once: requests and sessions in turns, and chunks of which some tokens run again."""

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from nanovllm.testing.machines.chunks import ChunkMachine
from nanovllm.testing.machines.engine import EngineMachine
from nanovllm.testing.strategies import limits, token_ids

IDS, STEPS = token_ids(min_size=3, max_size=8), st.integers(2, 5)
TURNS = st.lists(st.sampled_from(["step", "step", "decode", "begin", "commit"]), max_size=8)


class CascadeMachine(EngineMachine):
    """`EngineMachine` with room for rows that share pages; with the symbolic model, each must be read as its plan allows it to be."""

    max_tokens = 60

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """A fresh engine, of which chunks may pin about two thirds."""
        self.state = self.world.init_state(data.draw(limits(self.max_tokens, 4, min_tokens=24, cascade=(True,))))
        self.most_pinned = self.state.config.num_pages * 2 // 3

    @rule(ids=IDS, tails=st.lists(token_ids(min_size=0, max_size=2), min_size=2, max_size=3), steps=STEPS, turns=TURNS, data=st.data())
    def branch(self, ids: list[int], tails: list[list[int]], steps: int, turns: list[str], data: st.DataObject) -> None:
        """Requests that go on from one chunk, each in its way."""
        self._take_turns(ids, tails, steps, turns, data)

    @rule(ids=IDS, count=st.integers(2, 3), steps=STEPS, turns=TURNS, data=st.data())
    def fan_out(self, ids: list[int], count: int, steps: int, turns: list[str], data: st.DataObject) -> None:
        """Requests for the same chunk, whose last page they share until they write to it."""
        self._take_turns(ids, [[]] * count, steps, turns, data)

    def _take_turns(self, ids: list[int], tails: list[list[int]], steps: int, turns: list[str], data: st.DataObject) -> None:
        """Requests over a chunk, and sessions that begin between their steps and go on from it too."""
        options = self._options(data)
        for chunk in self._prefill(None, ids).values:
            for tail in tails:
                self._submit(chunk, tail, options, False)
            for turn in ["step"] * steps + ["begin", *turns]:
                if turn == "begin":
                    rows = [*tails, [0]][: self.state.config.max_num_seqs]  # one more than requests, where that may be
                    self._begin([(chunk, tail) for tail in rows], data.draw(st.integers(1, 4)), options)
                elif turn == "decode" and self.sessions:
                    self._decode(self.sessions[-1], 1)
                elif turn == "commit" and self.sessions:
                    self._release_all(self._commit(len(self.sessions) - 1).values)
                elif self.pending:
                    self._step()
            self._release(chunk)

    def _release_all(self, chunks) -> None:
        for chunk in chunks:
            self._release(chunk)


class CascadeChunkMachine(ChunkMachine):
    """`ChunkMachine` over an engine that reads shared pages once: tokens that run again are rows over the same pages."""

    cascade = (True,)

    @rule(data=st.data(), count=st.integers(3, 4), recompute=st.sampled_from([2, 3, 9]))
    def compose_heads(self, data: st.DataObject, count: int, recompute: int) -> None:
        """Heads of several chunks run again in one batch."""
        self._compose([self._pick(data) for _ in range(count)], recompute)
