"""`IntArray`: a persistent array of ints that is read and written at many places at once."""

from dataclasses import dataclass
from typing import NamedTuple, Union

import numpy as np


class _Older(NamedTuple):
    """What a version is that another was made of: the newer one, and what stood at the places where they differ."""

    newer: "IntArray"
    places: np.ndarray
    values: np.ndarray


@dataclass(slots=True, eq=False)
class IntArray:
    """A fixed number of ints. The newest version has the memory; those before it know what was overwritten.

    Reading and writing the newest cost what the places cost, whatever the length. An older one gets memory of its own when it is used
    again. Since the memory was last copied, `_written` places were written: never many more than it has, so old values stay small.
    """

    _held: Union[np.ndarray, _Older]  # noqa: UP007 (a name in quotes within)
    _written: int = 0

    @staticmethod
    def full(length: int, value: int = 0, dtype: type[np.integer] = np.int32) -> "IntArray":
        """One value everywhere."""
        return IntArray(np.full(length, value, dtype) if value else np.zeros(length, dtype))

    def __getitem__(self, place: int) -> int:
        if place < 0:
            raise IndexError(f"place {place} of an array")
        return self._memory().item(place)

    def get(self, places: np.ndarray) -> np.ndarray:
        """What stands at these places, which are int32. Raises `IndexError` for one that is not in the array."""
        return self._memory()[_unsigned(places)]

    def put(self, places: np.ndarray, values: np.ndarray | int) -> "IntArray":
        """The array with other values at these places; where one is given twice, the values are the same. Raises `IndexError` for one that
        is not in the array."""
        memory, at = self._memory(), _unsigned(places).astype(np.intp)  # what numpy would make of them twice
        before = memory[at]
        if self._written > len(memory):
            memory = memory.copy()
            newer = IntArray(memory)
        else:
            # This store comes before the write: interrupted between the two, both versions still read what stood there.
            newer = IntArray(memory, self._written + len(places))
            self._held = _Older(newer, places.copy(), before)
        memory[at] = values
        return newer

    def copy(self) -> np.ndarray:
        """All ints, in memory of the caller's own."""
        return self._memory().copy()

    def _memory(self) -> np.ndarray:
        held = self._held
        if isinstance(held, np.ndarray):
            return held
        changes = []
        while isinstance(held, _Older):
            changes.append(held)
            held = held.newer._held
        memory = held.copy()
        for older in reversed(changes):
            memory[older.places] = older.values
        self._held, self._written = memory, 0
        return memory


def _unsigned(places: np.ndarray) -> np.ndarray:
    """Places of which negative ones are out of range, too."""
    if places.dtype != np.int32:
        raise TypeError(f"places are int32, not {places.dtype}")
    return places.view(np.uint32)
