"""`mirrored`: calls with a state that all ranks of an engine make. A rank is a process with a part of the model, and a state of its own."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from nanovllm.config import Mesh
from nanovllm.errors import InvalidRequestError
from nanovllm.executor.distributed import gathered
from nanovllm.executor.executor import Runtime
from nanovllm.state.digest import digest
from nanovllm.state.engine_state import EngineState
from nanovllm.state.lease import NEW_ENGINE

P = ParamSpec("P")
R = TypeVar("R")
COMPARED = 64  # steps between two comparisons of the states of all ranks


def mirrored(function: Callable[P, R]) -> Callable[P, R]:
    """Let the other ranks of an engine, if it has some, repeat the outermost call of a function that takes and returns a state.

    `entrypoints/ranks/calls.py` lists the functions. A function outside of it that calls `commit_state` would leave the other ranks behind.
    """
    name, signature = function.__name__, inspect.signature(function)
    place = list(signature.parameters).index("state")

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        state: Any = args[place] if len(args) > place else options.get("state")
        runtime = state.runtime if isinstance(state, EngineState) else None
        if not isinstance(runtime, Runtime) or runtime.mirror is None:
            return function(*args, **options)
        try:
            arguments = signature.bind(*args, **options).arguments
        except TypeError:
            return function(*args, **options)  # which raises the same, or explains an unknown keyword
        return runtime.mirror.run(name, functools.partial(function, *args, **options), arguments)

    return call


def calling_mesh(state: EngineState) -> Mesh | None:
    """The mesh of ranks whose programs make this call themselves. None without one, and if other ranks only repeat calls."""
    mirror = state.runtime.mirror if isinstance(state.runtime, Runtime) else None
    return None if mirror is not None else state.runtime.lease.model.mesh


def require_one_caller(state: EngineState) -> None:
    """Require a call that one program makes, and not each rank's.

    Raises:
        InvalidRequestError: Every rank calls a store, whose files they would change under one another.
    """
    if isinstance(state, EngineState) and calling_mesh(state) is not None:
        raise InvalidRequestError("a ChunkStore is for one program: with ranks of torchrun use save_chunk and load_chunk")


def require_alike(mesh: Mesh | None, state: EngineState) -> None:
    """Compare the states of ranks whose programs call the engine themselves, every `COMPARED` steps. Rank 0 compares those of its mirror.

    Raises:
        EngineDeadError: They differ. It is raised on all ranks.
    """
    if mesh is None or state.num_steps % COMPARED or (isinstance(state.runtime, Runtime) and state.runtime.mirror is not None):
        return
    found = gathered(mesh, digest(state))
    if len({*found}) > 1:
        told = ", ".join(f"rank {rank}: state {one.hex()[:8]}" for rank, one in enumerate(found))
        raise state.runtime.lease.kill(f"the ranks differ after step {state.num_steps}: {told}", NEW_ENGINE)


def require_no_mirror(state: EngineState, what: str) -> None:
    """Require an engine whose calls are not repeated on other ranks.

    Raises:
        InvalidRequestError: They are.
    """
    if isinstance(state.runtime, Runtime) and state.runtime.mirror is not None:
        why = "its steps are the caller's own, which the other ranks of this engine cannot repeat"
        raise InvalidRequestError(f"{what}: {why}: run the whole program on every rank, with torchrun")
