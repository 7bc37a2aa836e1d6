"""`IntVector`: a persistent sequence of int32, such as token ids. Appending is cheap and never changes an older value."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from nanovllm.types import brief

Ints = Iterable[int] | np.ndarray
_MIN_CAPACITY = 16


def as_array(values: Ints) -> np.ndarray:
    """Convert ints to int32, without a copy if they are an int32 array or a vector."""
    if isinstance(values, np.ndarray):
        return values if values.dtype == np.int32 else values.astype(np.int32)
    return values.array() if isinstance(values, IntVector) else np.fromiter(values, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class _Buffer:
    """Storage that several vectors share. The first `used[0]` slots are taken; a vector that ends there may append in place."""

    data: np.ndarray
    used: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class IntVector:
    """The first `length` ints of a buffer. Appending writes after every older value's end, or into a copy if that slot is taken."""

    buffer: _Buffer
    length: int

    @staticmethod
    def of(values: Ints = ()) -> "IntVector":
        """A new vector of these ints."""
        source = as_array(values)
        data = np.empty(max(_MIN_CAPACITY, len(source) + len(source) // 4), np.int32)
        data[: len(source)] = source
        return IntVector(_Buffer(data, [len(source)]), len(source))

    def __repr__(self) -> str:
        return f"IntVector({brief(self.array())})"

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not -self.length <= index < self.length:
            raise IndexError(f"index {index} of a vector of {self.length}")
        return self.buffer.data.item(index % self.length)

    def __iter__(self):
        return iter(self.array().tolist())

    def array(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """A read-only view of `[start:stop)`, without a copy."""
        view = self.buffer.data[start : self.length if stop is None else min(stop, self.length)]
        view.flags.writeable = False
        return view

    def copy_to(self, target: np.ndarray) -> None:
        """Write all ints to the beginning of an array. This takes half the time of making a view first."""
        target[: self.length] = self.buffer.data[: self.length]

    def append(self, value: int) -> "IntVector":
        """The vector with one more int."""
        buffer, length = self.buffer, self.length
        if buffer.used[0] == length and length < len(buffer.data):
            buffer.data[length] = value
            buffer.used[0] = length + 1
            return IntVector(buffer, length + 1)
        return self.extend((value,))

    def extend(self, values: Ints) -> "IntVector":
        """The vector with more ints at its end."""
        more, buffer, length = as_array(values), self.buffer, self.length
        end = length + len(more)
        if buffer.used[0] != length or end > len(buffer.data):
            data = np.empty(max(_MIN_CAPACITY, 2 * end), np.int32)
            data[:length] = buffer.data[:length]
            buffer = _Buffer(data, [length])
        buffer.data[length:end] = more
        buffer.used[0] = end
        return IntVector(buffer, end)

    def truncate(self, length: int) -> "IntVector":
        """The first `length` ints, in the same storage."""
        if not 0 <= length <= self.length:
            raise IndexError(f"cannot truncate a vector of {self.length} to {length}")
        return IntVector(self.buffer, length)

    def replace(self, index: int, value: int) -> "IntVector":
        """A copy with one int changed."""
        if not 0 <= index < self.length:
            raise IndexError(f"index {index} of a vector of {self.length}")
        data = np.array(self.buffer.data)
        data[index] = value
        return IntVector(_Buffer(data, [self.length]), self.length)


def joined(parts: Iterable[tuple[IntVector, int, int]]) -> np.ndarray:
    """The ints `[start:stop)` of several vectors in one new array; a part ends early if its vector does."""
    arrays = [vector.buffer.data[start : min(stop, vector.length)] for vector, start, stop in parts]
    return np.concatenate(arrays) if arrays else np.empty(0, np.int32)
