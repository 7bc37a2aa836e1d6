"""Who may use a state: `enter` checks it, `guarded` notes what a failed call overwrote, `commit_state` donates the old one."""

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from nanovllm.errors import ForeignChunkError, InvalidRequestError, OutOfPagesError, ReleasedChunkError
from nanovllm.models.model import Model
from nanovllm.state import pool as pools
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.lease import ModelKey
from nanovllm.state.pool import Taken
from nanovllm.state.vector import IntVector
from nanovllm.state.window_frames import pages_with


def require_chunk(chunk: Any, name: str = "chunk") -> None:
    """Raise `InvalidRequestError` for what is no chunk."""
    if not isinstance(chunk, Chunk):
        raise InvalidRequestError(f"{name}={reprlib.repr(chunk)} must be a chunk, not {type(chunk).__name__}")


def require_live(state: EngineState, chunk: Chunk) -> None:
    """Raise unless the chunk is this engine's and not released."""
    require_chunk(chunk)
    if chunk.engine != state.runtime.lease.engine:
        raise ForeignChunkError(f"{chunk!r} belongs to another engine")
    if chunk.liveness not in state.chunks:
        raise ReleasedChunkError(f"{chunk!r} was released")


def enter(state: EngineState, model: Model | None = None) -> EngineState:
    """The state as a call finds it: checked against the lease, and without the pages whose KV an earlier failed call overwrote.

    Raises `DonatedStateError` for an old state, `InvalidRequestError` for another model than the one that `init_state` was given.
    """
    if not isinstance(state, EngineState):
        raise InvalidRequestError(f"state must be an EngineState, not {type(state).__name__}")
    lease = state.runtime.lease
    lease.check(state.epoch)
    if model is not None and model_key(model) != lease.model:
        raise InvalidRequestError(f"model {model.name!r} is not the one this state was made for: its KV would be another's")
    if not lease.dirty:
        return state
    lost, pool, waiting, kept = lease.lost, state.pool, state.waiting, []
    for sequence in (*state.running, *state.waiting):
        if not lost.isdisjoint(sequence.pages):
            pool = pools.release(pool, sequence.pages, sequence.retired)
            waiting = waiting.push(sequence.restart(IntVector.of(), 0))
        elif sequence.request.request_id not in waiting.items:
            kept.append(sequence)
    # The lease stays dirty until a call commits: one that fails again must find the same losses.
    return replace(state, pool=pools.forget(pool, lost), running=tuple(kept), waiting=waiting, loaded=None)


def enter_with(model: Model, state: EngineState) -> EngineState:
    """`enter`, for a call that needs the model. Raises `InvalidRequestError` for what is none, too."""
    require_model(model)
    return enter(state, model)


def require_model(model: Any) -> None:
    """Raise `InvalidRequestError` for what is no model."""
    if not isinstance(model, Model):
        raise InvalidRequestError(f"model={reprlib.repr(model)} must be a Model, which load_model(...) returns, not {type(model).__name__}")


def model_key(model: Model) -> ModelKey:
    """What a state and its model must agree in."""
    config = model.config
    return ModelKey(fingerprint=model.fingerprint, dtype=model.dtype, device=model.device, rope=config.rope, places=config.places)


def commit_state(state: EngineState, **changes) -> EngineState:
    """The state that a call returns; every older one is donated from here on."""
    return replace(state, **changes, epoch=state.runtime.lease.advance())


@contextmanager
def guarded(state: EngineState) -> Iterator[Taken]:
    """Device work of one call up to its commit, which notes what it takes in what this gives. Where it raises, Ctrl-C included, what it
    took over from the index or from preempted sequences, and the decode carry, count as lost for the old state."""
    taken, pool = Taken(), state.pool
    try:
        yield taken
    except BaseException as error:
        overwritten = [] if pool.frames is None else pages_with(pool.frames, taken.frames)
        state.runtime.lease.lose([*(page for page in taken.pages if pool.pages.refcount(page)), *overwritten])
        if isinstance(error, torch.OutOfMemoryError):
            raise OutOfPagesError("the device's memory ran out in the middle of a step; the state is as it was before the call") from error
        raise
