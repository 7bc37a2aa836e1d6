"""`Mirror`: what repeats the calls with an engine's states on other ranks."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

R = TypeVar("R")


@runtime_checkable
class Mirror(Protocol):
    """Repeats calls on the other ranks of an engine, in the order of the calls."""

    def run(self, name: str, call: Callable[[], R], arguments: Mapping[str, Any]) -> R:
        """Make a call here, and let the other ranks make the same one. Calls inside of it are only made here.

        Args:
            name: The name of the function.
            call: The call.
            arguments: Its arguments by name; those called `model` and `state` are each rank's own.

        Raises:
            InvalidRequestError: An argument cannot be sent to other ranks.
            EngineDeadError: A rank has ended, or the ranks differ.
            Exception: What the call raises.
        """
        ...

    def compare(self, state: Any) -> None:
        """Raise `EngineDeadError` unless all ranks hold the same state, `state`, which is the newest here."""
        ...

    def require_alive(self) -> None:
        """Raise `EngineDeadError` if a rank has ended, also while no call is made."""
        ...

    def close(self) -> None:
        """End the other ranks."""
        ...
