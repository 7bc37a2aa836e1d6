"""Machines for engines with cascade attention, which reads pages that several rows share once for all of them."""

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from nanovllm.testing.machines.chunks import ChunkMachine
from nanovllm.testing.machines.engine import EngineMachine
from nanovllm.testing.strategies import limits, token_ids

IDS, STEPS = token_ids(min_size=3, max_size=8), st.integers(2, 5)
TURNS = st.lists(st.sampled_from(["step", "step", "decode", "begin", "commit"]), max_size=8)


class CascadeMachine(EngineMachine):
    """`EngineMachine` with cascade attention on and more rows that share pages.

    Pools have 24 to 60 tokens in pages of 1 to 4. Extra rules submit requests that continue one chunk and begin decode sessions over the
    same chunk between their steps. Checks the invariants of `EngineMachine`. The symbolic model reads pages only as the attention plan
    says, so a wrong plan gives wrong numbers.

    Attributes:
        world: The engine and model under test, with their oracle: a `World`. The default is `SymbolicWorld()`.
        max_tokens: The largest number of tokens that a pool has room for.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import CascadeMachine, ModelWorld
        >>> class RealModel(CascadeMachine):
        ...     world = ModelWorld()
        >>> run_state_machine_as_test(RealModel, settings=settings(max_examples=3, stateful_step_count=3, deadline=None))
    """

    max_tokens = 60

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """Start a fresh engine. Chunks may pin about two thirds of its pool."""
        frames = None if self.num_frames is None else st.integers(*self.num_frames)
        self.state = self.world.init_state(data.draw(limits(self.max_tokens, 4, min_tokens=24, cascade=(True,), num_frames=frames)))
        self.most_pinned = self.state.config.num_pages * 2 // 3

    @rule(ids=IDS, tails=st.lists(token_ids(min_size=0, max_size=2), min_size=2, max_size=3), steps=STEPS, turns=TURNS, data=st.data())
    def branch(self, ids: list[int], tails: list[list[int]], steps: int, turns: list[str], data: st.DataObject) -> None:
        """Submit requests that continue one chunk with different tokens."""
        self._take_turns(ids, tails, steps, turns, data)

    @rule(ids=IDS, count=st.integers(2, 3), steps=STEPS, turns=TURNS, data=st.data())
    def fan_out(self, ids: list[int], count: int, steps: int, turns: list[str], data: st.DataObject) -> None:
        """Submit equal requests for one chunk. They share its last page until they write to it."""
        self._take_turns(ids, [[]] * count, steps, turns, data)

    def _take_turns(self, ids: list[int], tails: list[list[int]], steps: int, turns: list[str], data: st.DataObject) -> None:
        """Run requests over a chunk, and begin decode sessions over the same chunk between their steps."""
        options = self._options(data)
        for chunk in self._prefill(None, ids).values:
            for tail in tails:
                self._submit(chunk, tail, options, False)
            for turn in ["step"] * steps + ["begin", *turns]:
                if turn == "begin":
                    rows = [*tails, [0]][: self.state.config.max_num_seqs]  # one more row than requests, if the engine allows it
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
    """`ChunkMachine` with cascade attention on: tokens of composed chunks that run again are rows over shared pages.

    Samples and invariants are those of `ChunkMachine`. An extra rule composes three or four chunks and runs their first tokens again in
    one batch.

    Attributes:
        world: The engine and model under test, with their oracle: a `ModelWorld` or a `SymbolicWorld` (the default).

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import CascadeChunkMachine
        >>> class LongContexts(CascadeChunkMachine):
        ...     max_tokens = 96
        >>> run_state_machine_as_test(LongContexts, settings=settings(max_examples=3, stateful_step_count=5, deadline=None))
    """

    cascade = (True,)

    @rule(data=st.data(), count=st.integers(3, 4), recompute=st.sampled_from([2, 3, 9]))
    def compose_heads(self, data: st.DataObject, count: int, recompute: int) -> None:
        """Compose chunks so that the first tokens of several chunks run again in one batch."""
        self._compose([self._pick(data) for _ in range(count)], recompute)
