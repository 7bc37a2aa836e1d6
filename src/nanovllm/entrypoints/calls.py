"""`Call`: what a task of an event loop waits for while the engine of an `AsyncLLM` runs in its thread."""

import asyncio
from typing import Any

from immutables import Map

from nanovllm.state.logprobs import TokenLogprobs
from nanovllm.state.request import StepOutput


class Call:
    """What an event loop waits for: requests that were submitted together, a function, or the end of the engine.

    Attributes:
        count: The number of results to wait for.
        streamed: Whether every token wakes the one who waits.
        loop: The event loop.
        ids: The ids of the requests, noted and read by the engine's thread.
        token_ids: Tokens that nobody has read yet, of a streamed call.
        logprobs: Their log-probabilities, or None if nobody asked for them, or all were read.
        results: Results by request id.
        error: What to raise instead.
        given_up: Whether nobody waits any more.
        waiter: The future that somebody waits for, or None.
    """

    __slots__ = ("count", "error", "given_up", "ids", "logprobs", "loop", "results", "streamed", "token_ids", "waiter")

    def __init__(self, count: int, *, streamed: bool = False) -> None:
        self.count, self.streamed, self.loop = count, streamed, asyncio.get_running_loop()
        self.ids: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.results: dict[int, Any] = {}
        self.error: BaseException | None = None
        self.given_up = False
        self.waiter: asyncio.Future[None] | None = None

    @property
    def complete(self) -> bool:
        """Whether all results are there, or an error."""
        return self.error is not None or len(self.results) == self.count

    async def news(self) -> None:
        """Wait until all results are there or, in a streamed call, unread tokens. Raises the error that ended the call."""
        while not self.complete and not self.token_ids:
            self.waiter = self.loop.create_future()
            await self.waiter
        if self.error is not None:
            raise self.error

    def add(self, out: StepOutput) -> None:
        """Take what a step gave for one request."""
        if self.streamed:
            self.token_ids.extend(out.token_ids)
            if (logprobs := out.logprobs) is not None:
                self.logprobs = [] if self.logprobs is None else self.logprobs
                self.logprobs.extend(logprobs)
        if out.output is not None:
            self.results[out.request_id] = out.output
        if self.streamed or self.complete:
            self._wake()

    def end(self, result: Any = None) -> None:
        """Take the only result of a call that is no request."""
        self.results[0] = result
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        self.error = error
        self._wake()

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


def deliver(calls: Map[int, Call], outputs: list[StepOutput]) -> None:
    """Give the calls of an event loop, by request id, what a step gave. Runs in the loop's thread, while the engine runs the next step."""
    for out in outputs:
        if (call := calls.get(out.request_id)) is not None:
            call.add(out)
