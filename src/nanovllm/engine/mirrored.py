"""`mirrored`: calls with a state that all ranks of an engine make. A rank is a process with a part of the model, and a state of its own."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from nanovllm.errors import InvalidRequestError
from nanovllm.executor.executor import Runtime
from nanovllm.state.engine_state import EngineState

P = ParamSpec("P")
R = TypeVar("R")


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


def require_no_mirror(state: EngineState, what: str) -> None:
    """Require an engine whose calls are not repeated on other ranks.

    Raises:
        InvalidRequestError: They are.
    """
    if isinstance(state.runtime, Runtime) and state.runtime.mirror is not None:
        why = "its steps are the caller's own, which the other ranks of this engine cannot repeat"
        raise InvalidRequestError(f"{what}: {why}: run the whole program on every rank, with torchrun")
