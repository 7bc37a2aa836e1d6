"""The engine of an `AsyncLLM`, in a thread of its own. Calls come in, and what a step gives goes out, between two steps.

Two kinds of threads meet here: the engine's thread, and those of the event loops that call. Each value belongs to one of them:

- An `EngineThread` belongs to the engine's thread. Event loops only put functions into its inbox, which it runs between two steps.
- A `Call` belongs to the thread of its event loop. The engine's thread changes it only through `call_soon_threadsafe`, once a step at most.

The inbox is a `SimpleQueue`, because a garbage collection may put a cancellation into it at any place of the program.
"""

import atexit
from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
from immutables import Map

from nanovllm.chunks.offload import relieved, with_room_for
from nanovllm.engine.disk_flush import flush_kv
from nanovllm.engine.failures import as_value
from nanovllm.engine.prompt import Context
from nanovllm.engine.requests import cancel, submit_many
from nanovllm.engine.step import step
from nanovllm.entrypoints.calls import Call, deliver
from nanovllm.entrypoints.llm import sequence_of
from nanovllm.errors import EngineClosedError, EngineDeadError, InvalidRequestError, NanoVLLMError, QueueFullError
from nanovllm.executor.executor import runtime_of
from nanovllm.models.model import Model
from nanovllm.sampling.params import SamplingParams
from nanovllm.sampling.process_logits import LogitsProcessor
from nanovllm.state.device_errors import message_of
from nanovllm.state.engine_state import EngineState

EXIT_SECONDS = 10.0  # that the end of the program waits for the last step
IDLE_SECONDS = 0.2  # without a request, after which KV is written to the disk
BETWEEN_SECONDS = 0.005  # between two pieces of it
FLUSHED = 16 << 20  # bytes of a piece


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
        self._encoding: set[Call] = set()  # calls that have a place, and are not in the inbox yet
        self._queued: set[Call] = set()  # calls in the inbox. Any thread changes these two sets, because their operations are atomic
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

    @contextmanager
    def place_for(self, call: Call) -> Iterator[None]:
        """Keep places for the requests of a call, whose texts the block encodes.

        Raises:
            NanoVLLMError: As `require_room`.
        """
        self.require_room(call.count, sum(other.count for other in self._encoding | self._queued))
        self._encoding.add(call)
        try:
            yield
        finally:
            self._encoding.discard(call)

    def submit(
        self,
        call: Call,
        contexts: list[Context],
        params: list[SamplingParams | None],
        processor: LogitsProcessor | None,
        priorities: list[int] | None = None,
    ) -> None:
        """Queue the requests of a call before the next step. An error reaches the call."""
        self._queued.add(call)
        self._inbox.put(partial(self._submit, call, contexts, params, processor, priorities))
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
        call.error = None  # frames of its traceback hold the call

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

    def require_room(self, count: int, coming: int = 0) -> None:
        """Require that `count` more requests may come in, besides those that are `coming`.

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
        most, there = seqs + self.max_num_waiting, coming + len(state.running) + len(state.waiting)
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
                self._come()()
            if self.refusal is None or (self._draining and not self._idle):
                if not self._idle:
                    self._step()
                return True
            for calls in self._calls.values():
                for request_id in calls:
                    self.state = cancel(self.state, request_id)
            refusal = self.refusal
        except EngineDeadError as error:
            refusal = as_value(error)
        except BaseException as error:
            refusal = _dead(error)
        self._end(refusal)
        return False

    def _come(self) -> Callable[[], None]:
        """What comes in next. While nothing does, KV is written to the disk, if the engine has a folder for it."""
        seconds, flushed = IDLE_SECONDS, runtime_of(self.state).disk is None
        while not flushed:
            try:
                return self._inbox.get(timeout=seconds)
            except Empty:
                seconds, flushed = BETWEEN_SECONDS, True
                with suppress(NanoVLLMError):  # a call outside of this thread may have taken the state
                    flushed = flush_kv(self.state, max_bytes=FLUSHED)
        return self._inbox.get()

    def _end(self, refusal: NanoVLLMError) -> None:
        """Tell all who wait, after KV was written to the disk if the engine has a folder for it and has not failed."""
        if runtime_of(self.state).disk is not None and not isinstance(refusal, EngineDeadError):
            with suppress(NanoVLLMError):
                flush_kv(self.state)
        self.refusal, self.ended = refusal, True
        while not self._inbox.empty():
            self._inbox.get()()
        for call in {call for calls in self._calls.values() for call in calls.values()}:
            self._tell(call.loop, call.fail, self._refused())
        for call in self._watchers:
            self._tell(call.loop, call.end)
        atexit.unregister(self._exit)
        if (mirror := runtime_of(self.state).mirror) is not None:
            mirror.close()

    @property
    def _idle(self) -> bool:
        return not self.state.running and not self.state.waiting

    def _step(self) -> None:
        self.state = relieved(self.state)
        self.state, outputs = step(self.model, self.state)
        ended = [out for out in outputs if out.output is not None]
        for loop, calls in [*self._calls.items()]:
            news = outputs if self._num_streams[loop] else ended
            if news:
                self._tell(loop, deliver, calls, news)
        for out in ended:
            self._forget(out.request_id)
        for loop in [loop for loop in self._calls if loop.is_closed()]:  # nobody waits there
            for call in {*self._calls[loop].values()}:
                self._cancel(call)

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

    def _tell(self, loop: AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
        """Call a function in the thread of an event loop, unless the loop is closed."""
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(function, *args)

    # What event loops ask for.

    def _submit(
        self,
        call: Call,
        contexts: list[Context],
        params: list[SamplingParams | None],
        processor: LogitsProcessor | None,
        priorities: list[int] | None = None,
    ) -> None:
        self._queued.discard(call)
        try:
            self.require_room(call.count)
            asked = {"priorities": priorities, "process_logits": processor}
            self.state = with_room_for(self.state, contexts)
            self.state, call.ids = submit_many(self.model, self.state, contexts, params, **asked)
        except BaseException as error:
            self._fail(call, error, "a call outside of it has taken its state: such calls belong into apply")
            return
        if call.ids:
            self._calls[call.loop] = self._calls.get(call.loop, Map()).update(dict.fromkeys(call.ids, call))
            self._num_streams[call.loop] += call.streamed

    def _apply(self, call: Call, function: Callable[[Model, EngineState], Any]) -> None:
        if call.given_up:
            return
        try:
            if self.refusal is not None:
                raise self._refused()
            result = function(self.model, self.state)
            state, value = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
            if not isinstance(state, EngineState):
                kind = f"a tuple of {len(state)}" if isinstance(state, tuple) else type(state).__name__
                raise InvalidRequestError(f"the function must return the next state, or a pair of it and a result, not {kind}")
            lease = self.state.runtime.lease
            lease.require_alive()
            if state.runtime.lease is not lease:
                raise InvalidRequestError("the function returned a state of another engine")
            if state.epoch != lease.epoch:
                raise InvalidRequestError("the function returned a state that is not the newest: return the state of its last call")
            self.state = state
        except BaseException as error:
            self._fail(call, error, "a function given to apply has lost its state")
            return
        self._tell(call.loop, call.end, value)
        for request_id in [i for calls in self._calls.values() for i in calls if sequence_of(state, i) is None]:
            if (lost := self._forget(request_id)) is not None:
                self._tell(lost.loop, lost.fail, InvalidRequestError(f"a function given to apply cancelled or ended request {request_id}"))

    def _fail(self, call: Call, error: BaseException, blame: str) -> None:
        """End a call with an error.

        Raises:
            EngineDeadError: The newest state is lost, or the device is broken, so that no later call can succeed.
        """
        lease = self.state.runtime.lease
        if self.refusal is not None or (lease.dead is None and self.state.epoch == lease.epoch):
            self._tell(call.loop, call.fail, as_value(error))
            return
        self.refusal = refusal = _dead(error, blame) if lease.dead is None else lease.kill(lease.dead)
        self._tell(call.loop, call.fail, self._refused())
        raise refusal

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


def _dead(error: BaseException, blame: str = "") -> EngineDeadError:
    """The error of an engine that has failed."""
    refusal = EngineDeadError(f"the engine has failed, make a new one: {blame and f'{blame}: '}{type(error).__name__}: {message_of(error)}")
    refusal.__cause__ = as_value(error)
    return refusal
