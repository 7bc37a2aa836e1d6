"""`IntArray`: a persistent array of ints that is read and written at many places at once."""

from dataclasses import dataclass
from typing import NamedTuple, Union

import numpy as np

from nanovllm.types import brief


class _Older(NamedTuple):
    """The contents of an older version: the newer version that was made from it, and its own values where the two differ."""

    newer: "IntArray"
    places: np.ndarray
    values: np.ndarray


@dataclass(slots=True, eq=False)
class IntArray:
    """A fixed number of ints. The newest version has the memory; older versions know which values were overwritten.

    Reading and writing the newest version takes time by the number of places, whatever the length. An older version copies the memory when
    it is used again. `_written` counts the places written since the memory was last copied. It never exceeds the length by much, so old
    values stay small.
    """

    _held: Union[np.ndarray, _Older]  # noqa: UP007 (a name in quotes within)
    _written: int = 0

    def __repr__(self) -> str:
        return f"IntArray({brief(self._held) if isinstance(self._held, np.ndarray) else 'older'})"

    @staticmethod
    def full(length: int, value: int = 0, dtype: type[np.integer] = np.int32) -> "IntArray":
        """An array with one value everywhere."""
        return IntArray(np.full(length, value, dtype) if value else np.zeros(length, dtype))

    def __getitem__(self, place: int) -> int:
        if place < 0:
            raise IndexError(f"place {place} of an array")
        return self._memory().item(place)

    def get(self, places: np.ndarray) -> np.ndarray:
        """The values at these places, which are int32. Raises `IndexError` for a place outside the array."""
        return self._memory()[_unsigned(places)]

    def put(self, places: np.ndarray, values: np.ndarray | int) -> "IntArray":
        """The array with other values at these places. If a place is given twice, its two values must be equal.

        Raises `IndexError` for a place outside the array.
        """
        memory, at = self._memory(), _unsigned(places).astype(np.intp)  # as numpy would convert them twice
        before = memory[at]
        if self._written > len(memory):
            memory = memory.copy()
            newer = IntArray(memory)
        else:
            # Stored before the write: if the program is interrupted between the two, both versions still read the old values.
            newer = IntArray(memory, self._written + len(places))
            self._held = _Older(newer, places.copy(), before)
        memory[at] = values
        return newer

    def copy(self) -> np.ndarray:
        """A copy of all ints."""
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
    """Places as unsigned ints, so that negative places are out of range too."""
    if places.dtype != np.int32:
        raise TypeError(f"places must be int32, not {places.dtype}")
    return places.view(np.uint32)
