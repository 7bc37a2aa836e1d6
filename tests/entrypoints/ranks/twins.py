"""Two engines in one process: a mirror that makes each call of the first one on the second one, by way of its bytes."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from nanovllm.entrypoints.ranks.calls import called, encoded
from nanovllm.entrypoints.ranks.follower import Repeated
from nanovllm.executor.executor import runtime_of
from nanovllm.models.model import Model
from nanovllm.state.digest import digest
from nanovllm.state.engine_state import EngineState

R = TypeVar("R")
COMPARED = ("request_id", "token_ids", "text", "finish_reason", "logprobs", "entries", "liveness", "provenance", "output", "error", "chunk")


class Twins:
    """The mirror of the first engine. After each call both have the same digest, and the same error or result."""

    def __init__(self, model: Model, first: EngineState, second: EngineState) -> None:
        self.model, self.second, self.inside, self.sent = model, second, False, list[str]()
        runtime_of(first).mirror, runtime_of(second).mirror = self, Repeated()

    def run(self, name: str, call: Callable[[], R], arguments: Mapping[str, Any]) -> R:
        """Make a call on both."""
        if self.inside:
            return call()
        frame = encoded(arguments["state"], name, arguments)
        if frame is None:
            try:
                call()
            except Exception:
                raise
            raise AssertionError(f"{name} did not raise, and was not sent")
        self.inside, error, there, result = True, None, None, None
        try:
            result = call()
        except Exception as raised:
            error = raised
        finally:
            self.inside = False
        try:
            self.second, other = called(self.model, self.second, frame[0], frame[1])
        except Exception as raised:
            there, other = raised, None
        self.sent.append(name)
        assert (type(there), str(there)) == (type(error), str(error)), name
        state = arguments["state"] if error is not None else result[0] if isinstance(result, tuple) else result
        self.same(state)
        if error is not None:
            raise error
        if isinstance(result, tuple):
            assert told(result[1]) == told(other), name
        return result  # pyright: ignore[reportReturnType]

    def same(self, state: Any) -> None:
        """Both engines have the same digests."""
        assert digest(state, whole=True) == digest(self.second, whole=True)
        assert digest(state) == digest(self.second)

    def compare(self, state: Any) -> None:
        """Both have the same state."""
        self.same(state)

    def close(self) -> None:
        """Nothing to end."""


def told(value: Any) -> str:
    """A result without what is each engine's own: times, and the engine's id."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return f"[{', '.join(map(told, value))}]"
    texts = [f"{type(value).__name__}"]
    for name in (
        "request_id",
        "token_ids",
        "text",
        "finish_reason",
        "logprobs",
        "entries",
        "liveness",
        "provenance",
        "output",
        "error",
        "chunk",
    ):
        if hasattr(value, name):
            one = getattr(value, name)
            texts.append(f"{name}={told(one) if name in ('output', 'chunk') else one}")
    return " ".join(texts) if len(texts) > 1 else repr(value)
