"""`StepLog`: arrays with the results of steps over the same rows, which several values share. A step never changes what they have read."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from nanovllm.types import brief_fields

Results = tuple[Any, ...]  # the arrays of one step, `[rows, ...]`: the tokens, then others or None
_FIRST = 16  # steps for which there is memory at first


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLog:
    """Memory for steps. A value over it knows its number of steps, and for each of its rows the column (None: the row itself).

    Attributes:
        arrays: For each result `[capacity, columns, ...]`, or None.
        used: One number: how many steps the arrays hold.
    """

    arrays: Results
    used: list[int]

    def __repr__(self) -> str:
        return brief_fields(self)

    @staticmethod
    def of(results: Results) -> "StepLog":
        """The log of one step."""
        return StepLog(arrays=tuple([None if each is None else each[None] for each in results]), used=[1])._longer(1)

    def fits(self, results: Results) -> bool:
        """Whether a step has the results that this log holds, of the same shapes."""
        pairs = zip(self.arrays, results, strict=True)
        return all(b is None if a is None else b is not None and a.shape[2:] == b.shape[1:] for a, b in pairs)

    def append(self, length: int, columns: np.ndarray | None, results: Results) -> "StepLog":
        """The log in which a step that fits follows the first `length`: this one if nobody else wrote there, else a copy."""
        log = self if self.used[0] == length < len(self.arrays[0]) else self._longer(length)
        at = length if columns is None else (length, columns)
        for array, result in zip(log.arrays, results, strict=True):
            if array is not None:
                array[at] = result
        log.used[0] = length + 1
        return log

    def results(self, length: int, columns: np.ndarray) -> Results:
        """The results of the first `length` steps in some columns, as copies `[steps, rows, ...]`."""
        return tuple([None if each is None else each[:length, columns] for each in self.arrays])

    def part(self, start: int, length: int, column: int) -> Results:
        """The results of the steps `[start:length)` in one column, `[steps, ...]`."""
        return tuple([None if each is None else each[start:length, column] for each in self.arrays])

    def tokens(self, start: int, length: int, column: int) -> list[int]:
        """The tokens of the steps `[start:length)` in one column."""
        return self.arrays[0][start:length, column].tolist()

    def newest(self, length: int, columns: np.ndarray) -> np.ndarray:
        """The tokens of the last of the first `length` steps in some columns, as a copy."""
        return self.arrays[0][length - 1, columns]

    def _longer(self, length: int) -> "StepLog":
        """A copy of the first `length` steps, with memory for as many more."""

        def longer(array: np.ndarray) -> np.ndarray:
            copy = np.empty((max(_FIRST, 2 * length), *array.shape[1:]), array.dtype)
            copy[:length] = array[:length]
            return copy

        return StepLog(arrays=tuple([None if each is None else longer(each) for each in self.arrays]), used=[length])
