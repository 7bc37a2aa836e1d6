"""The engine of an `AsyncLLM`, in a thread of its own. Calls come in, and what a step gives goes out, between two steps.

Two kinds of threads meet here: the engine's thread, and those of the event loops that call. Each value belongs to one of them:

- An `EngineThread` belongs to the engine's thread. Event loops only put functions into its inbox, which it runs between two steps.
- A `Call` belongs to the thread of its event loop. The engine's thread changes it only through `call_soon_threadsafe`, once a step at most.

The inbox is a `SimpleQueue`, because a garbage collection may put a cancellation into it at any place of the program.
"""

import asyncio
import atexit
from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from immutables import Map

from nanovllm.engine.prompt import Context
from nanovllm.engine.requests import cancel, submit_many
from nanovllm.engine.step import step
from nanovllm.entrypoints.llm import sequence_of
from nanovllm.errors import EngineClosedError, EngineDeadError, InvalidRequestError, NanoVLLMError, QueueFullError
from nanovllm.models.model import Model
from nanovllm.sampling.params import SamplingParams
from nanovllm.sampling.process_logits import LogitsProcessor
from nanovllm.state.engine_state import EngineState
from nanovllm.state.request import StepOutput

EXIT_SECONDS = 10.0  # that the end of the program waits for the last step


class Call:
    """What an event loop waits for: requests that were submitted together, a function, or the end of the engine.

    Attributes:
        count: The number of results to wait for.
        streamed: Whether every token wakes the one who waits.
        loop: The event loop.
        ids: The ids of the requests, noted and read by the engine's thread.
        token_ids: Tokens that nobody has read yet, of a streamed call.
        results: Results by request id.
        error: What to raise instead.
        given_up: Whether nobody waits any more.
        waiter: The future that somebody waits for, or None.
    """

    __slots__ = ("count", "error", "given_up", "ids", "loop", "results", "streamed", "token_ids", "waiter")

    def __init__(self, count: int, *, streamed: bool = False) -> None:
        self.count, self.streamed, self.loop = count, streamed, asyncio.get_running_loop()
        self.ids: list[int] = []
        self.token_ids: list[int] = []
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


class EngineThread:
    """An engine and the thread in which it runs. `turn` and methods with an underscore run in this thread, the others in any.

    Attributes:
        model: The model.
        state: The newest state.
        max_num_waiting: The number of requests beyond `max_num_seqs` that may be in the engine. None: any number.
        refusal: Why no further request is taken, or None.
        ended: Whether the thread has run its last step. What is put into the inbox from now on may stay there.
    """

    def __init__(self, model: Model, state: EngineState, max_num_waiting: int | None) -> None:
        self.model, self.state, self.max_num_waiting = model, state, max_num_waiting
        self.refusal: NanoVLLMError | None = None
        self.ended = False
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._calls: dict[AbstractEventLoop, Map[int, Call]] = {}  # by request id: those that have not ended
        self._num_streams = Counter[AbstractEventLoop]()
        self._watchers: list[Call] = []  # they wait for the end of the thread
        self._draining = True  # whether an end waits for the requests that were taken
        self._thread = Thread(target=self._run, name="nanovllm engine", daemon=True)

    # Called by event loops. `ended` is read after `put`: the thread sets it before it empties the inbox for the last time.

    def start(self) -> None:
        """Start the thread. It ends with `close`, or with the program."""
        if self.model.device.type == "cuda":  # a thread begins with the first GPU
            self._inbox.put(partial(torch.cuda.set_device, self.model.device))
        atexit.register(self._exit)
        self._thread.start()

    def submit(self, call: Call, contexts: list[Context], params: list[SamplingParams | None], processor: LogitsProcessor | None) -> None:
        """Queue the requests of a call before the next step. An error reaches the call."""
        self._inbox.put(partial(self._submit, call, contexts, params, processor))
        self.require_running()

    def apply(self, call: Call, function: Callable[[Model, EngineState], Any]) -> None:
        """Call a function with the model and the state before the next step."""
        self._inbox.put(partial(self._apply, call, function))
        self.require_running()

    def cancel(self, call: Call) -> None:
        """Cancel the requests of a call that have not ended, before the next step."""
        call.given_up = True
        if len(call.results) < call.count:  # also after an error of one of them
            self._inbox.put(partial(self._cancel, call))

    def close(self, call: Call | None = None, *, drain: bool = False) -> None:
        """Take no more requests, and end the thread: now, or (`drain`) after the last request. `call` then gets a result."""
        self._inbox.put(partial(self._close, call, drain))
        if self.ended and call is not None:
            call.end()

    def require_running(self) -> None:
        """Require that the thread has not ended.

        Raises:
            EngineClosedError: It was closed.
            EngineDeadError: It has failed.
        """
        if self.ended:
            raise self._refused()

    def require_room(self, count: int) -> None:
        """Require that `count` more requests may come in.

        Raises:
            QueueFullError: Too many requests wait.
            InvalidRequestError: They are too many even for an idle engine.
            EngineClosedError: The engine was closed.
            EngineDeadError: The engine has failed.
        """
        if self.refusal is not None:
            raise self._refused()
        if self.max_num_waiting is None:
            return
        state, seqs = self.state, self.state.config.max_num_seqs
        most, there = seqs + self.max_num_waiting, len(state.running) + len(state.waiting)
        if there + count > most:
            limit = f"this engine takes at most {most} requests at a time (max_num_seqs={seqs}, max_num_waiting={self.max_num_waiting})"
            if count > most:
                raise InvalidRequestError(f"{count} prompts in one call: {limit}")
            raise QueueFullError(f"no room for {count} more besides the {there} that run or wait: {limit}; try again later")

    def _refused(self) -> NanoVLLMError:
        """The refusal as an exception of its own, because many may raise it."""
        assert self.refusal is not None
        error = type(self.refusal)(*self.refusal.args)
        error.__cause__ = self.refusal.__cause__
        return error

    # The thread.

    def _run(self) -> None:
        while self.turn():
            pass

    def turn(self, *, wait: bool = True) -> bool:
        """Take in what has come, and run a step. With nothing to run, `wait` for something. Returns False after the last round."""
        try:
            while not self._inbox.empty() or (wait and self._idle and self.refusal is None):
                self._inbox.get()()
            if self.refusal is None or (self._draining and not self._idle):
                if not self._idle:
                    self._step()
                return True
            for calls in self._calls.values():
                for request_id in calls:
                    self.state = cancel(self.state, request_id)
            refusal = self.refusal
        except EngineDeadError as error:
            refusal = error
        except BaseException as error:
            refusal = EngineDeadError(f"the engine has failed, make a new one: {type(error).__name__}: {error}")
            refusal.__cause__ = error
        self._end(refusal)
        return False

    def _end(self, refusal: NanoVLLMError) -> None:
        """Tell all who wait."""
        self.refusal, self.ended = refusal, True
        while not self._inbox.empty():
            self._inbox.get()()
        for call in {call for calls in self._calls.values() for call in calls.values()}:
            self._tell(call.loop, call.fail, self._refused())
        for call in self._watchers:
            self._tell(call.loop, call.end)
        atexit.unregister(self._exit)

    @property
    def _idle(self) -> bool:
        return not self.state.running and not self.state.waiting

    def _step(self) -> None:
        self.state, outputs = step(self.model, self.state)
        ended = [out for out in outputs if out.output is not None]
        for loop, calls in [*self._calls.items()]:
            news = outputs if self._num_streams[loop] else ended
            if news and not self._tell(loop, deliver, calls, news):
                for call in {*calls.values()}:
                    self._cancel(call)
        for out in ended:
            self._forget(out.request_id)

    def _forget(self, request_id: int) -> Call | None:
        """Remove a request that has ended. Returns its call, or None if no call waits for it."""
        for loop, calls in self._calls.items():
            if (call := calls.get(request_id)) is not None:
                self._calls[loop] = calls.delete(request_id)
                self._num_streams[loop] -= call.streamed
                if len(calls) == 1:
                    del self._calls[loop], self._num_streams[loop]
                return call
        return None

    def _tell(self, loop: AbstractEventLoop, function: Callable[..., None], *args: Any) -> bool:
        """Call a function in the thread of an event loop. Returns False if the loop is closed, so that nobody waits there."""
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return False
        return True

    # What event loops ask for.

    def _submit(self, call: Call, contexts: list[Context], params: list[SamplingParams | None], processor: LogitsProcessor | None) -> None:
        try:
            self.require_room(call.count)
            self.state, call.ids = submit_many(self.model, self.state, contexts, params, process_logits=processor)
        except BaseException as error:
            self._tell(call.loop, call.fail, error)
            return
        self._calls[call.loop] = self._calls.get(call.loop, Map()).update(dict.fromkeys(call.ids, call))
        self._num_streams[call.loop] += call.streamed

    def _apply(self, call: Call, function: Callable[[Model, EngineState], Any]) -> None:
        if call.given_up:
            return
        try:
            if self.refusal is not None:
                raise self._refused()
            result = function(self.model, self.state)
            state, value = result if isinstance(result, tuple) else (result, None)
            if not isinstance(state, EngineState):
                raise InvalidRequestError(
                    f"the function must return the next state, or a pair of it and a result, not {type(state).__name__}"
                )
            self.state = state
        except BaseException as error:
            self._tell(call.loop, call.fail, error)
            return
        self._tell(call.loop, call.end, value)
        for request_id in [i for calls in self._calls.values() for i in calls if sequence_of(state, i) is None]:
            if (lost := self._forget(request_id)) is not None:
                self._tell(lost.loop, lost.fail, InvalidRequestError(f"a function given to apply cancelled or ended request {request_id}"))

    def _cancel(self, call: Call) -> None:
        for request_id in call.ids:
            if not self.ended and self._forget(request_id) is not None:
                self.state = cancel(self.state, request_id)

    def _close(self, call: Call | None, drain: bool) -> None:
        self.refusal = self.refusal or EngineClosedError("this AsyncLLM was closed: make a new one")
        self._draining = self._draining and drain
        if call is not None:
            self._watchers.append(call)

    def _exit(self) -> None:
        self.close()
        self._thread.join(EXIT_SECONDS)
