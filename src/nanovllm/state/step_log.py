"""`StepLog`: the results of steps over the same rows, as arrays. Adding a step is cheap and never changes an older value."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Results = tuple[np.ndarray | None, ...]  # the arrays of one step, each [rows, ...]: tokens, log-probabilities, and the most probable tokens
_FIRST = 16  # steps for which there is memory at first


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLog:
    """The first `length` steps in arrays that several values share. Adding writes after every older value's end, or into a copy.

    Attributes:
        arrays: For each result `[capacity, columns, ...]`, or None.
        used: One number: how many steps the arrays hold.
        length: The number of steps of this value.
        columns: The column of each row. None: the row itself.
    """

    arrays: Results
    used: list[int]
    length: int
    columns: np.ndarray | None = None

    @staticmethod
    def of(results: Results) -> "StepLog":
        """The log of one step."""
        arrays = tuple([None if each is None else np.empty((_FIRST, *each.shape), each.dtype) for each in results])
        return StepLog(arrays=arrays, used=[0], length=0).append(results)

    def fits(self, results: Results) -> bool:
        """Whether a step has the results that this log holds, of the same shapes."""
        pairs = zip(self.arrays, results, strict=True)
        return all(b is None if a is None else b is not None and a.shape[2:] == b.shape[1:] for a, b in pairs)

    def append(self, results: Results) -> "StepLog":
        """The log with one more step, which must fit."""
        arrays, used, length = self.arrays, self.used, self.length
        if used[0] != length or any(len(array) == length for array in arrays if array is not None):
            arrays, used = tuple([None if each is None else _longer(each, length) for each in arrays]), [length]
        columns = slice(None) if self.columns is None else self.columns
        for array, result in zip(arrays, results, strict=True):
            if array is not None:
                array[length, columns] = result
        used[0] = length + 1
        return StepLog(arrays=arrays, used=used, length=length + 1, columns=self.columns)

    def keep(self, rows: np.ndarray) -> "StepLog":
        """The log of some rows."""
        return replace(self, columns=self._columns(rows))

    def of_rows(self, rows: np.ndarray) -> Results:
        """The results of some rows, as copies `[steps, rows, ...]`."""
        columns = self._columns(rows)
        return tuple([None if each is None else each[: self.length, columns] for each in self.arrays])

    def tokens(self, row: int, start: int = 0) -> list[int]:
        """The tokens of one row after the first `start` steps."""
        assert self.arrays[0] is not None
        return self.arrays[0][start : self.length, self._columns(row)].tolist()

    def _columns(self, rows: Any) -> Any:
        return rows if self.columns is None else self.columns[rows]


def _longer(array: np.ndarray, length: int) -> np.ndarray:
    """A copy of the first `length` steps, with memory for as many more."""
    longer = np.empty((max(_FIRST, 2 * length), *array.shape[1:]), array.dtype)
    longer[:length] = array[:length]
    return longer
