"""Planted faults: a request that nobody waits for, a task that nobody wakes, an output that reaches another task."""

from nanovllm.engine.requests import submit_many
from nanovllm.entrypoints import engine_thread
from nanovllm.entrypoints.calls import Call
from nanovllm.entrypoints.engine_thread import EngineThread
from tests.entrypoints.async_machine import AsyncMachine
from tests.property.faults.engine import Fault


def cancels_nothing(cancel):
    def faulty(self, call):
        for request_id in call.ids:
            self._forget(request_id)

    return faulty


def reaches_the_next_call(deliver):
    def faulty(calls, outputs):
        ids = [out.request_id for out in outputs]
        deliver(calls, [out._replace(request_id=other) for out, other in zip(outputs, [*ids[1:], *ids[:1]], strict=True)])

    return faulty


def keeps_the_newest_token(add):
    def faulty(self, out):
        self.token_ids.clear()
        add(self, out)

    return faulty


def fails_silently(fail):
    def faulty(self, error):
        self.error = error

    return faulty


def wakes_only_readers_of_nothing(add):
    def faulty(self, out):
        waiter, self.waiter = self.waiter, self.waiter if not self.results else None
        add(self, out)
        self.waiter = waiter

    return faulty


def takes_any_number(require_room):
    def faulty(self, count, coming=0):
        limit, self.max_num_waiting = self.max_num_waiting, None
        try:
            require_room(self, count, coming)
        finally:
            self.max_num_waiting = limit

    return faulty


def raises_errors_of_requests(step):
    def faulty(model, state):
        state, outputs = step(model, state)
        for out in outputs:
            if out.error is not None:
                raise out.error
        return state, outputs

    return faulty


def submits_in_reverse(submit):
    def faulty(model, state, contexts, params, **options):
        state, ids = submit_many(model, state, contexts[::-1], params[::-1], **options)
        return state, ids

    return faulty


ASYNC_FAULTS = [
    Fault(name=name, machine=AsyncMachine, targets=targets, faulty=faulty, draw=draw)
    for name, targets, faulty, draw in (
        ("a cancelled request runs on", ((EngineThread, "_cancel"),), cancels_nothing, 2),
        ("an output reaches the next call", ((engine_thread, "deliver"),), reaches_the_next_call, 1),
        ("a slow reader misses tokens", ((Call, "add"),), keeps_the_newest_token, 5),
        ("an error wakes nobody", ((Call, "fail"),), fails_silently, 0),
        ("the end of a slow call wakes nobody", ((Call, "add"),), wakes_only_readers_of_nothing, 2),
        ("the queue has no bound", ((EngineThread, "require_room"),), takes_any_number, 0),
        ("a shortage ends the engine", ((engine_thread, "step"),), raises_errors_of_requests, 2),
        ("outputs in reverse", ((engine_thread, "submit_many"),), submits_in_reverse, 4),
    )
]
