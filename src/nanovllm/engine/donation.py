"""Donation: `enter` checks a state, `guarded` notes pages that a failed call overwrote, `commit_state` donates the old state."""

import reprlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from nanovllm.engine.mirrored import calling_mesh
from nanovllm.errors import EngineDeadError, ForeignChunkError, InvalidRequestError, NanoVLLMError, OutOfPagesError, ReleasedChunkError
from nanovllm.executor.agreed_memory import SharedShortage
from nanovllm.executor.distributed import left
from nanovllm.models.model import Model
from nanovllm.state import pool as pools
from nanovllm.state.chunk import Chunk
from nanovllm.state.device_errors import chain, fatal, out_of_memory
from nanovllm.state.engine_state import EngineState
from nanovllm.state.lease import NEW_ENGINE, ModelKey
from nanovllm.state.moved_chunks import let_go
from nanovllm.state.pool import Pool, Taken
from nanovllm.state.vector import IntVector
from nanovllm.state.window_frames import pages_with


def require_chunk(chunk: Any, name: str = "chunk") -> None:
    """Require a chunk.

    Raises:
        InvalidRequestError: `chunk` is something else.
    """
    if not isinstance(chunk, Chunk):
        raise InvalidRequestError(f"{name}={reprlib.repr(chunk)} must be a chunk, not {type(chunk).__name__}")


def require_namespace(namespace: object) -> None:
    """Raise `InvalidRequestError` unless a namespace is an integer of at least 0."""
    if isinstance(namespace, bool) or not isinstance(namespace, int) or namespace < 0:
        raise InvalidRequestError(f"namespace={reprlib.repr(namespace)} must be an integer of at least 0")


def require_live(state: EngineState, chunk: Chunk) -> Chunk:
    """Require a chunk of this engine that was not released.

    Returns:
        The chunk with the pages that it has now; without pages if it is in host memory.

    Raises:
        InvalidRequestError: `chunk` is not a chunk.
        ForeignChunkError: The chunk belongs to another engine.
        ReleasedChunkError: The chunk was released.
    """
    require_chunk(chunk)
    if chunk.engine != state.runtime.lease.engine:
        raise ForeignChunkError(f"{chunk!r} belongs to another engine: make a chunk with this engine, or use save_chunk and load_chunk")
    if chunk.liveness not in state.chunks:
        raise ReleasedChunkError(f"{chunk!r} was released: fork it before its release if it is needed longer")
    return state.chunks[chunk.liveness]


def enter(state: EngineState, model: Model | None = None) -> EngineState:
    """The state for a new call: checked against the lease, and without pages whose KV an earlier failed call overwrote.

    Raises:
        DonatedStateError: The state was donated to a later call.
        InvalidRequestError: `state` is not an `EngineState`, or `model` is not the model of `init_state`.
    """
    if not isinstance(state, EngineState):
        raise InvalidRequestError(f"state must be an EngineState, not {type(state).__name__}")
    lease = state.runtime.lease
    lease.check(state.epoch)
    if model is not None and model_key(model) != lease.model:
        raise InvalidRequestError(f"model {model.name!r} is not the model of this state: pass the model that init_state was given")
    # The lease stays dirty until a call commits, because the next call must find the same losses if this one fails.
    return without_host_pages(forgotten(state, lease.lost), lease.lost_host) if lease.dirty else state


def without_host_pages(state: EngineState, lost: frozenset[int]) -> EngineState:
    """The state without trust in some pages of host memory, which a failed call wrote."""
    return replace(state, pool=pools.forget_host(state.pool, lost)) if lost else state


def forgotten(state: EngineState, lost: frozenset[int]) -> EngineState:
    """The state without trust in the KV of some pages: sequences that hold them run again. The decode carry is loaded again."""
    pool, waiting, kept = state.pool, state.waiting, []
    for sequence in (*state.running, *state.waiting):
        if not lost.isdisjoint(sequence.pages):
            pool = pools.release(pool, sequence.pages, sequence.retired)
            waiting = waiting.push(sequence.restart(IntVector.of(), 0))
        elif sequence.request.request_id not in waiting.items:
            kept.append(sequence)
    return replace(state, pool=pools.forget(pool, lost), running=tuple(kept), waiting=waiting, loaded=None)


def enter_with(model: Model, state: EngineState) -> EngineState:
    """`enter` for a call that needs the model.

    Raises:
        InvalidRequestError: `model` is not a `Model`, or not the model of `init_state`.
    """
    require_model(model)
    return enter(state, model)


def require_model(model: Any) -> None:
    """Require a model.

    Raises:
        InvalidRequestError: `model` is something else.
    """
    if not isinstance(model, Model):
        raise InvalidRequestError(f"model={reprlib.repr(model)} must be a Model, which load_model(...) returns, not {type(model).__name__}")


def model_key(model: Model) -> ModelKey:
    """The properties in which a state and its model must agree."""
    config = model.config
    return ModelKey(
        fingerprint=model.fingerprint, dtype=model.dtype, device=model.device, rope=config.rope, num_layers=config.num_layers,
        windows=config.windows, mesh=config.mesh, kv_copies=config.kv_copies,
    )  # fmt: skip


def commit_state(state: EngineState, **changes) -> EngineState:
    """The state that a call returns. From now on every older state is donated.

    Raises:
        DonatedStateError: Another thread's call has donated the state meanwhile, or works with it.
    """
    after = replace(state, **changes, epoch=state.runtime.lease.advance(state.epoch))
    host = after.pool.host
    return replace(after, pool=replace(after.pool, host=let_go(host))) if host is not None and host.held else after


def overwritten(pool: Pool, pages: Seq[int], frames: Seq[int]) -> frozenset[int]:
    """The pages of this pool whose KV is lost if these pages and frames are written."""
    by_frame = [] if pool.frames is None else pages_with(pool.frames, list(frames))
    return frozenset([*(page for page in pages if pool.pages.refcount(page)), *by_frame])


def _require_shared(state: EngineState, error: BaseException) -> None:
    """Require that no other rank waits for this one after it ran out of memory. Rank 0 of a mirror finds that out by itself.

    Raises:
        EngineDeadError: This rank ran out of memory in the middle of a call that the others go on with. They are released.
    """
    mesh = calling_mesh(state)
    if mesh is not None and mesh.size > 1 and not any(isinstance(one, SharedShortage) for one in chain(error)):
        left(mesh)
        raise state.runtime.lease.kill(f"rank {mesh.rank} of {mesh.size} ran out of device memory in a call", NEW_ENGINE) from error


@contextmanager
def guarded(state: EngineState) -> Iterator[Taken]:
    """Guard the device work of one call up to its commit, and yield the record of the pages that it takes.
    Until its end calls of other threads with this state raise `DonatedStateError`.

    If the block raises, Ctrl-C included, the old state loses the decode carry. It also loses the pages that the call took over from the
    index or from preempted sequences.

    Raises:
        OutOfPagesError: The device ran out of memory.
        EngineDeadError: The device is broken, or another rank has gone.
        DonatedStateError: Another thread's call has donated the state meanwhile, or works with it.
    """
    taken, lease = Taken(), state.runtime.lease
    lease.take(state.epoch)
    try:
        yield taken
    except BaseException as error:
        lease.lose(overwritten(state.pool, taken.pages, taken.frames), taken.host_pages)
        if (cause := fatal(error)) is not None:
            raise lease.kill(cause) from error
        if isinstance(error, EngineDeadError):  # also one of another rank, whose later calls would wait in vain
            lease.kill(str(error), NEW_ENGINE)
        if not isinstance(error, NanoVLLMError) and out_of_memory(error):
            _require_shared(state, error)
            raise OutOfPagesError("the device ran out of memory during the call; the state is as it was before") from error
        raise
    finally:
        lease.give_back()
