"""The functions of an engine that front ends call by name, between two steps."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from nanovllm.entrypoints.server import chunk_calls
from nanovllm.entrypoints.server.held import Held
from nanovllm.entrypoints.server.memory_calls import memory
from nanovllm.entrypoints.server.scores import score_and_follow, score_prompts
from nanovllm.errors import InvalidRequestError

Call = Callable[..., tuple[Held, Any]]


def figures(held: Held) -> tuple[Held, dict[str, Any]]:
    """How much runs and waits, which pages are in use, and the counts of `stats`."""
    state = held.state
    return held, {
        "running": len(state.running),
        "waiting": len(state.waiting),
        "num_pages": state.config.num_pages,
        "free_pages": state.pool.num_free,
        **asdict(state.stats),
    }


def measured(held: Held, *, http: list[Any] | None = None) -> tuple[Held, dict[str, Any]]:
    """What `EngineMetrics` has measured, after a front end's answers were added."""
    held.metrics.add_http(http or [])
    return held, held.metrics.figures(held.state, sum(map(len, held.named.spaces.values())))


def answered(held: Held, *, http: list[Any]) -> tuple[Held, None]:
    """Add a front end's answers."""
    held.metrics.add_http(http)
    return held, None


CALLS: Mapping[str, Call] = MappingProxyType(
    {
        "figures": figures,
        "measured": measured,
        "answered": answered,
        "memory": memory,
        "score_prompts": score_prompts,
        "score_and_follow": score_and_follow,
        **chunk_calls.CALLS,
    }
)


def call(held: Held, name: str, arguments: dict[str, Any]) -> tuple[Held, Any]:
    """Call a function by its name. A function that changes the state and then fails returns its error, with the next state.

    Raises:
        InvalidRequestError: There is no such function.
        NanoVLLMError: Whatever the function raises. The state is then as it was.
    """
    if name not in CALLS:
        raise InvalidRequestError(f"{name!r} is none of the engine's functions: {', '.join(CALLS)}")
    return CALLS[name](held, **arguments)
