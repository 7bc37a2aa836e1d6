"""Rank 0: it starts the other ranks, sends them every call, and compares the states."""

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from nanovllm.entrypoints.ranks.calls import encoded
from nanovllm.entrypoints.ranks.channel import Kind, Outcome
from nanovllm.entrypoints.ranks.followers import GRACE, Followers, died
from nanovllm.entrypoints.ranks.settings import STARTING, Settings, begun, build
from nanovllm.errors import EngineDeadError, NanoVLLMError
from nanovllm.executor.distributed import opened_store
from nanovllm.executor.executor import executor_of, runtime_of
from nanovllm.executor.graph_executor import GraphExecutor
from nanovllm.models.model import Model
from nanovllm.state.device_errors import message_of
from nanovllm.state.digest import digest
from nanovllm.state.engine_state import EngineState

R = TypeVar("R")
QUEUED = frozenset(("submit", "submit_many", "cancel", "release", "step"))  # calls that no comparison follows by itself
ASKED = 2.0  # seconds in which a rank tells why it could not start


class Leader:
    """Sends the calls of one engine to its other ranks. Calls of several threads run one after the other."""

    __slots__ = ("__weakref__", "_followers", "_inside", "_lock", "_steps")

    def __init__(self, followers: Followers) -> None:
        """Begin with ranks that are ready."""
        self._followers, self._inside, self._steps = followers, False, 0
        self._lock = threading.RLock()
        weakref.finalize(self, followers.close)

    def run(self, name: str, call: Callable[[], R], arguments: Mapping[str, Any]) -> R:
        """Make a call on all ranks."""
        with self._lock:
            if self._inside:
                return call()
            followers, state = self._followers, arguments["state"]
            followers.require_alive()
            frame = encoded(state, name, arguments)
            if frame is None:
                return call()
            self._steps += name == "step"
            report = followers.settings.compared == 1 or name not in QUEUED
            report = report or (name == "step" and self._steps % followers.settings.compared == 0)
            self._inside, followers.busy = True, True
            followers.number += 1
            try:
                try:
                    followers.broadcast(Kind.CALL, frame[0], report=report, files=frame[1])
                except BaseException:
                    followers.fail(f"call {followers.number} was sent to the other ranks in part")
                    raise
                try:
                    result = call()
                except BaseException as error:
                    self._raised(state, error, asked=report)
                    raise
                after: Any = result[0] if isinstance(result, tuple) else result
                if report:
                    self._compared(self._outcome(after), followers.settings.rank_timeout)
                else:
                    self._require_none_failed()
                return result
            finally:
                self._inside, followers.busy = False, False

    def compare(self, state: EngineState) -> None:
        """Raise `EngineDeadError` unless all ranks hold the same state, `state`, which is the newest here."""
        with self._lock:
            self._followers.require_alive()
            if not self._inside and state.epoch == state.runtime.lease.epoch:
                self._followers.broadcast(Kind.REPORT)
                self._compared(self._outcome(state), self._followers.settings.rank_timeout)

    def require_alive(self) -> None:
        """Raise `EngineDeadError` if a rank has ended."""
        self._followers.require_alive()

    def close(self) -> None:
        """End the other ranks."""
        self._followers.close()

    def _outcome(self, state: EngineState, error: BaseException | None = None) -> Outcome:
        found = digest(state, whole=self._followers.settings.whole).hex()
        told = {} if error is None else {"error": type(error).__name__, "message": message_of(error)}
        return Outcome(number=self._followers.number, digest=found, **told)

    def _compared(self, own: Outcome, seconds: float, blame: str = "") -> None:
        """End the engine unless the newest call has ended alike on all ranks.

        Raises:
            EngineDeadError: It has not, or a rank is gone.
        """
        outcomes = self._followers.outcomes(own.number, seconds, blame)
        if any((one.digest, one.error) != (own.digest, own.error) for one in outcomes):
            told = ", ".join(f"rank {rank}: {one.told()}" for rank, one in enumerate([own, *outcomes]))
            self._followers.fail(f"the ranks differ after call {own.number}: {told}")
            self._followers.require_alive()

    def _raised(self, state: EngineState, error: BaseException, *, asked: bool) -> None:
        """Compare the ranks after a call that raised here.

        Raises:
            EngineDeadError: It has not raised the same everywhere.
        """
        own = self._outcome(state, error)
        try:
            if not asked:
                self._followers.broadcast(Kind.REPORT)
            seconds = min(GRACE, self._followers.settings.rank_timeout)
            self._compared(own, seconds, f"call {own.number} failed on rank 0: {own.told()}")
        except EngineDeadError as dead:
            if isinstance(error, Exception):
                raise dead from error

    def _require_none_failed(self) -> None:
        self._followers.require_alive()
        for one in self._followers.all:
            if (failed := one.failed) is not None:
                self._followers.fail(f"call {failed[0].number} failed on rank {one.rank} alone: {failed[0].told()}")
                self._followers.require_alive()


def start(settings: Settings) -> tuple[Model, EngineState]:
    """Start the other ranks, and make the model and the engine of this one. Calls with its states are made on all ranks.

    Raises:
        NanoVLLMError: As `load_model` and `init_state`, on any rank.
        EngineDeadError: A rank has ended, or the engines differ.
    """
    followers = Followers(settings)
    try:
        if late := followers.wait(lambda one: one.hello, STARTING):
            raise died(followers.dead or f"rank {late[0].rank} has not started in {STARTING:g} seconds")
        store = opened_store() if settings.grouped else None
        followers.broadcast(Kind.GO, b"" if store is None else str(store.port).encode())
        model, state = build(settings, 0, store, lambda mesh: setattr(followers, "mesh", mesh))
        followers.lease = state.runtime.lease
        if isinstance(executor := executor_of(state), GraphExecutor):
            followers.free = executor.free  # the executor does not refer to the leader, whose end calls this
        own = Outcome(number=0, digest=begun(state, whole=settings.whole))
        if any(one.digest != own.digest for one in followers.outcomes(0, STARTING)):
            raise died("the ranks have made different engines")
        followers.ready = True
        runtime_of(state).mirror = Leader(followers)
    except BaseException as error:
        if isinstance(error, EngineDeadError) or not isinstance(error, NanoVLLMError):
            until = time.monotonic() + ASKED  # an error of a collective operation comes before the reason
            while followers.dead is None and time.monotonic() < until:
                time.sleep(ASKED / 10)
        refusal = followers.refusal
        cause = followers.dead
        followers.close()
        if isinstance(error, NanoVLLMError) and not isinstance(error, EngineDeadError):
            raise
        if refusal is not None:
            raise refusal from error
        if isinstance(error, Exception) and cause is not None and not isinstance(error, EngineDeadError):
            raise died(cause) from error
        raise
    return model, state
