"""`AsyncMachine`: tasks of an event loop share an `AsyncLLM` whose thread the machine plays, so that every interleaving can be drawn."""

import asyncio
from asyncio import Task
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast
from unittest.mock import patch

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanovllm.entrypoints.async_llm import AsyncLLM
from nanovllm.entrypoints.calls import deliver
from nanovllm.entrypoints.engine_thread import EngineThread
from nanovllm.entrypoints.llm import LLM, Piece
from nanovllm.errors import EngineClosedError, EngineDeadError, OutOfPagesError, QueueFullError
from nanovllm.models.model import Model
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.invariants import check
from nanovllm.state.request import RequestOutput
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.memory import expect
from tests.entrypoints.counting_executor import CountingExecutor, counted_reply

VOCABULARY = 64
ROUNDS = 400  # of the engine and the loop, after which nobody may wait any more
PROMPTS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5)
WHICH = st.integers(0, 7)


class SteppedAsyncLLM(AsyncLLM):
    """An `AsyncLLM` over a `CountingExecutor`, without a thread: `turn` does what the thread does between two waits."""

    __slots__ = ("executor",)

    def __init__(self, model: Model, *, max_num_waiting: int | None = None, **options: Any) -> None:
        llm, self.executor = LLM(model, **options), CountingExecutor()
        cast(Any, llm.state.runtime).executor = self.executor
        self._engine = EngineThread(llm.model, llm.state, max_num_waiting)

    def turn(self) -> None:
        """Let the engine take in what has come, and run a step."""
        if not self._engine.ended:
            self._engine.turn(wait=False)


@dataclass(slots=True)
class Reader:
    """A task of the machine: what it asked for, and what it got."""

    prompts: list[list[int]]
    max_tokens: int
    streamed: bool = False
    paused: bool = False
    leaving: bool = False
    cancelled: bool = False
    token_ids: list[int] = field(default_factory=list)
    last: Piece | None = None
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    task: Task[Any] | None = None

    @property
    def expected(self) -> list[list[int]]:
        """The whole replies."""
        return [counted_reply(prompt, self.max_tokens, VOCABULARY) for prompt in self.prompts]


class AsyncMachine(RuleBasedStateMachine):
    """Test an `AsyncLLM`: tasks arrive, read slowly, are cancelled and leave their streams, while the engine runs, fails or is closed.

    The engine's thread and the event loop take turns as drawn, in one thread. The pool has six pages of two tokens, so that preemption is
    common.

    Checks that every task gets the reply to its own prompt, whole or its beginning, or an error that it may get; that no task waits for
    ever; that an event loop is called at most once a step; and that all pages return.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import AsyncMachine
        >>> run_state_machine_as_test(AsyncMachine, settings=settings(max_examples=2, stateful_step_count=8, deadline=None))
    """

    model = random_model(
        tiny_config(vocab_size=VOCABULARY, num_layers=1, hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=8)
    )

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.llm: SteppedAsyncLLM | None = None
        self.readers: list[Reader] = []
        self.closers: list[Task[None]] = []
        self.failed = self.shaken = False
        self.limit: int | None = None

    @initialize(max_num_seqs=st.integers(1, 3), max_num_waiting=st.sampled_from([None, 0, 2]), budget=st.sampled_from([3, 64]))
    def begin(self, max_num_seqs: int, max_num_waiting: int | None, budget: int) -> None:
        """Make the engine."""
        self.limit = None if max_num_waiting is None else max_num_seqs + max_num_waiting
        self.llm = SteppedAsyncLLM(
            self.model, num_pages=6, page_size=2, max_num_seqs=max_num_seqs, max_num_waiting=max_num_waiting, max_num_batched_tokens=budget
        )

    @rule(prompts=st.lists(PROMPTS, max_size=3), max_tokens=st.integers(1, 7))
    def generate(self, prompts: list[list[int]], max_tokens: int) -> None:
        """A task calls `generate`."""
        self._arrive(Reader(prompts, max_tokens))

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 7), paused=st.booleans())
    def stream(self, prompt: list[int], max_tokens: int, paused: bool) -> None:
        """A task reads a stream, perhaps with a pause after each piece until it is let go on."""
        self._arrive(Reader([prompt], max_tokens, streamed=True, paused=paused))

    @rule()
    def turn(self) -> None:
        """The engine takes in what has come, and runs a step."""
        assert self.llm is not None
        with patch.object(self.loop, "call_soon_threadsafe", wraps=self.loop.call_soon_threadsafe) as tell:
            self.llm.turn()
        deliveries = [call.args for call in tell.call_args_list if call.args[0] is deliver]
        expect(len(deliveries) <= 1, f"a step called the event loop {len(deliveries)} times")

    @rule()
    def spin(self) -> None:
        """The event loop runs what is ready."""
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    @rule(which=WHICH)
    def cancel(self, which: int) -> None:
        """A task is cancelled."""
        for reader in self._some(which):
            reader.cancelled = True
            assert reader.task is not None
            reader.task.cancel()

    @rule(which=WHICH)
    def leave(self, which: int) -> None:
        """A reader leaves its stream after the next piece."""
        for reader in self._some(which):
            reader.leaving = True

    @rule(which=WHICH, paused=st.booleans())
    def let_go_on(self, which: int, paused: bool) -> None:
        """A reader that pauses goes on."""
        for reader in self._some(which):
            reader.paused = paused
            reader.go_on.set()

    @precondition(lambda self: len(self.readers) > 3 and not self.shaken)
    @rule()
    def run_short(self) -> None:
        """The device runs out of memory once. A request ends with an error if it ran a single token, alone."""
        assert self.llm is not None
        self.shaken = True
        self.llm.executor.before = self._once(torch.OutOfMemoryError)

    @precondition(lambda self: len(self.readers) > 5 and not self.failed)
    @rule()
    def break_down(self) -> None:
        """The device fails."""
        assert self.llm is not None
        self.failed = True
        self.llm.executor.before = self._once(RuntimeError)

    @precondition(lambda self: len(self.readers) > 5)
    @rule(drain=st.booleans())
    def close(self, drain: bool) -> None:
        """A task closes the engine."""
        assert self.llm is not None
        self.closers.append(self.loop.create_task(self.llm.close(drain=drain)))

    @invariant()
    def holds(self) -> None:
        """The state is whole, the queue is bounded, and no task has more than its own reply."""
        if self.llm is None:
            return
        state = self.llm.state
        if not self.failed:
            check(state)
        expect(self.limit is None or len(state.running) + len(state.waiting) <= self.limit, "more requests than the limit")
        for reader in self.readers:
            beginning = reader.expected[0][: len(reader.token_ids)] if reader.streamed else []
            expect(reader.token_ids == beginning, f"a stream read {reader.token_ids}, but its reply is {reader.expected}")

    def teardown(self) -> None:
        """Everybody goes on, and nobody waits in the end."""
        try:
            if self.llm is not None:
                self._finish(self.llm)
        finally:
            for reader in self.readers:
                if reader.task is not None:
                    reader.task.cancel()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    def _finish(self, llm: SteppedAsyncLLM) -> None:
        for reader in self.readers:
            reader.paused = False
            reader.go_on.set()
        tasks = [task for task in [*(reader.task for reader in self.readers), *self.closers] if task is not None]
        for _ in range(ROUNDS):
            if all(task.done() for task in tasks):
                break
            self.turn()
            self.spin()
        for _ in range(4):  # an iterator that nothing refers to is closed by a task of its own
            self.spin()
        waiting = [reader for reader in self.readers if reader.task is not None and not reader.task.done()]
        expect(not waiting and all(task.done() for task in tasks), f"tasks wait for ever: {waiting}")
        for reader in self.readers:
            self._check_end(reader)
        self.turn()
        self.holds()
        if not self.failed:
            expect(not llm.state.running and not llm.state.waiting, "a request is left that nobody waits for")
            expect(llm.state.pool.num_available == llm.state.config.num_pages, "pages are lost")

    def _check_end(self, reader: Reader) -> None:
        task = reader.task
        assert task is not None
        if task.cancelled():
            expect(reader.cancelled, "a task was cancelled that nobody cancelled")
            return
        if (error := task.exception()) is not None:
            allowed = [*([QueueFullError] if self.limit is not None else []), *([EngineClosedError] if self.closers else [])]
            allowed += [*([EngineDeadError] if self.failed else []), *([OutOfPagesError] if self.shaken else [])]
            too_many = self.limit is not None and len(reader.prompts) > self.limit
            expect(too_many or isinstance(error, tuple(allowed)), f"a task got {error!r}")
            return
        if not reader.streamed:
            outputs: list[RequestOutput] = task.result()
            whole = [
                wanted[: len(output.token_ids)] if self.shaken and isinstance(output.error, OutOfPagesError) else wanted
                for output, wanted in zip(outputs, reader.expected, strict=True)
            ]
            expect([output.token_ids for output in outputs] == whole, f"generate returned {outputs}, not {reader.expected}")
        elif not reader.leaving:
            expect(reader.last is not None and reader.last.output is not None, "a stream ended without its last piece")
            expect(reader.token_ids == reader.expected[0], f"a stream lost tokens: {reader.token_ids}, not {reader.expected[0]}")

    def _once(self, error: type[Exception]) -> Callable[[], None]:
        """What the executor calls before its next work: it raises, once."""

        def fail() -> NoReturn:
            assert self.llm is not None
            self.llm.executor.before = lambda: None
            raise error("planted")

        return fail

    def _arrive(self, reader: Reader) -> None:
        reader.task = self.loop.create_task(self._read(reader) if reader.streamed else self._generate(reader))
        self.readers.append(reader)

    async def _generate(self, reader: Reader) -> Any:
        assert self.llm is not None
        return await self.llm.generate(reader.prompts, self._params(reader))

    async def _read(self, reader: Reader) -> None:
        assert self.llm is not None
        async for piece in self.llm.stream(reader.prompts[0], self._params(reader)):
            reader.token_ids, reader.last = [*reader.token_ids, *piece.token_ids], piece
            if reader.leaving:
                break
            while reader.paused:
                reader.go_on.clear()
                await reader.go_on.wait()

    def _params(self, reader: Reader) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=reader.max_tokens, ignore_eos=True)

    def _some(self, which: int) -> list[Reader]:
        """The reader that a number means, among those whose task has not ended."""
        living = [reader for reader in self.readers if reader.task is not None and not reader.task.done()]
        return [living[which % len(living)]] if living else []
