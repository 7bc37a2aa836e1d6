"""`Renumbered`: the store through which symmetric memory tells the ranks where it is.

Torch numbers these exchanges from the start of the process. A process that has been in groups before counts further than one that is new,
so the two would wait for each other's keys for ever.
"""

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import Store


class Renumbered(Store):
    """A store whose numbered keys, `name/number/rank`, count from the first one of their name that is used here.

    Whoever gives it to torch keeps it, because torch keeps only the part in C++.

    Args:
        inner: Where the values are.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self._inner, self._first = inner, dict[str, int]()

    def set(self, key: str, value: bytes) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Set the value of a key."""
        self._inner.set(self._own(key), value)  # pyright: ignore[reportArgumentType]

    def get(self, key: str) -> bytes:
        """The value of a key, once there is one."""
        return self._inner.get(self._own(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Wait until all keys have values."""
        own = [self._own(key) for key in keys]
        self._inner.wait(own) if timeout is None else self._inner.wait(own, timeout)

    def _own(self, key: str) -> str:
        name, number, rank = key.rsplit("/", 2) if key.count("/") > 1 else ("", "", "")
        return f"{name}/{int(number) - self._first.setdefault(name, int(number))}/{rank}" if number.isdigit() else key
