"""The functions of an engine that front ends call by name, between two steps."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from nanovllm.errors import InvalidRequestError
from nanovllm.models.model import Model
from nanovllm.state.engine_state import EngineState


def figures(model: Model, state: EngineState, **_: Any) -> tuple[EngineState, dict[str, Any]]:
    """How much runs and waits, which pages are in use, and the counts of `stats`."""
    pool = state.pool
    return state, {
        "running": len(state.running),
        "waiting": len(state.waiting),
        "num_pages": state.config.num_pages,
        "free_pages": pool.num_free,
        **asdict(state.stats),
    }


CALLS: Mapping[str, Callable[..., tuple[EngineState, Any]]] = MappingProxyType({"figures": figures})


def call(model: Model, state: EngineState, name: str, arguments: dict[str, Any]) -> tuple[EngineState, Any]:
    """Call a function by its name.

    Raises:
        InvalidRequestError: There is no such function.
        NanoVLLMError: Whatever the function raises.
    """
    if name not in CALLS:
        raise InvalidRequestError(f"{name!r} is none of the engine's functions: {', '.join(CALLS)}")
    return CALLS[name](model, state, **arguments)
