"""`FailureMachine`: test that the error of one request touches no other."""

from dataclasses import replace

import tokenizers
import torch
from hypothesis import strategies as st
from hypothesis.stateful import rule
from tokenizers import decoders, models

from nanovllm.errors import RequestFailedError
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.request import StepOutput
from nanovllm.testing.machines.engine import EngineMachine
from nanovllm.testing.machines.engine_driver import Pending, ends
from nanovllm.testing.shadows.memory import expect
from nanovllm.testing.shadows.worlds import SymbolicWorld
from nanovllm.testing.strategies import token_ids
from nanovllm.tokenizer.tokenizer import make_tokenizer


class BrittleDecoder:
    """A decoder of a tokenizer that fails while it is broken."""

    broken = False

    def decode_chain(self, tokens: list[str]) -> list[str]:
        """The tokens as they are."""
        if self.broken:
            raise ValueError(f"{tokens} have no text")
        return tokens


class BrittleWorld(SymbolicWorld):
    """`SymbolicWorld` with a tokenizer whose `decoder` can be broken."""

    def __init__(self, vocab_size: int = 2):
        super().__init__(vocab_size)
        self.decoder = BrittleDecoder()
        backend = tokenizers.Tokenizer(models.WordLevel({str(i): i for i in range(vocab_size)}, unk_token="0"))
        backend.decoder = decoders.Decoder.custom(self.decoder)
        self.model = replace(self.model, tokenizer=make_tokenizer(backend, {}, None))


class FailureMachine(EngineMachine):
    """`EngineMachine` whose tokenizer and whose device memory fail often.

    Some requests have a stop string, which no reply contains. In a step in which no token can be decoded, exactly these requests end with
    an error, and those whose reply ends in this step. The others sample what they sample alone.

    Attributes:
        world: A `BrittleWorld`.
        max_tokens: The largest number of tokens that a pool has room for.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import FailureMachine
        >>> run_state_machine_as_test(FailureMachine, settings=settings(max_examples=2, stateful_step_count=5, deadline=None))
    """

    world: BrittleWorld = BrittleWorld()  # pyright: ignore[reportIncompatibleVariableOverride]

    def _options(self, data: st.DataObject) -> SamplingParams:
        params = super()._options(data)
        return replace(params, stop=("#",)) if data.draw(st.booleans()) else params

    @rule(prompts=st.lists(token_ids(max_size=4), max_size=3), steps=st.integers(0, 3), data=st.data())
    def undecodable_step(self, prompts: list[list[int]], steps: int, data: st.DataObject) -> None:
        """Submit requests for prompts and run steps, then one in which no token can be decoded."""
        self._begin_some(prompts, steps, data)
        self.world.decoder.broken = True
        try:
            self._step()
        finally:
            self.world.decoder.broken = False

    @rule(prompts=st.lists(token_ids(max_size=6), max_size=3), steps=st.integers(0, 3), times=st.integers(1, 6), data=st.data())
    def starved_step(self, prompts: list[list[int]], steps: int, times: int, data: st.DataObject) -> None:
        """Submit requests for prompts and run steps, then one in which the device has no memory after it did its work."""
        self._begin_some(prompts, steps, data)
        self._executor.arm(data.draw(st.integers(0, 1)), True, torch.OutOfMemoryError("planted"), times)
        self._step()
        self._executor.disarm()

    def _begin_some(self, prompts: list[list[int]], steps: int, data: st.DataObject) -> None:
        for ids in prompts:
            self._submit(None, ids, self._options(data), False)
        self.step(steps)

    def _see(self, out: StepOutput, pinned: int) -> None:
        mine = self.pending[out.request_id]
        if self.world.decoder.broken and (out.output is not None or mine.request.sampling.stop):
            expect(out.error is not None, f"request {out.request_id} goes on although its tokens have no text")
        super()._see(out, pinned)

    def _see_error(self, out: StepOutput, mine: Pending, pinned: int) -> None:
        if not isinstance(out.error, RequestFailedError):
            return super()._see_error(out, mine, pinned)
        decoded = bool(mine.request.sampling.stop) or not out.token_ids or ends(mine.request, mine.drawn) is not None
        return expect(self.world.decoder.broken and decoded, f"request {out.request_id} failed without a reason: {out.error}")
