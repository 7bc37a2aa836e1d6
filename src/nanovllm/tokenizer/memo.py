"""`Memo`: what was made from a tokenizer for others, such as compiled grammars, so that it is made once."""

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any


class Memo:
    """The newest values by key. A value never depends on when it was made, so a memo changes how long calls take, and nothing else.

    Any thread may call it. Two threads that ask for the same new value both make it.
    """

    __slots__ = ("_lock", "_most", "_values")

    def __init__(self, most: int) -> None:
        """Keep at most so many values; the one that was used least recently goes first."""
        self._most, self._lock, self._values = most, Lock(), dict[Hashable, Any]()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of a key, made if it is not kept. An exception of `make` is raised, and nothing is kept."""
        with self._lock:
            if key in self._values:
                self._values[key] = found = self._values.pop(key)
                return found
        made = make()
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = made
            while len(self._values) > self._most:
                del self._values[next(iter(self._values))]
        return made
