"""Cuts: a kernel's tile configuration as a tuple of integers, the form in which a custom op takes it.

An empty cut means the kernel's default. The file of each kernel says what its integers mean, and which values it accepts.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import TypeVar

from nanovllm.errors import NanoVLLMError

Cut = tuple[int, ...]
T = TypeVar("T")


class CutError(NanoVLLMError):
    """A kernel was given a tile configuration (`cut`) that does not divide its work or does not fit into a program."""


def named(kind: type[T], cut: Sequence[int]) -> T:
    """Return a cut as a dataclass of integers, in the order of its fields. Raises `CutError` if the number of integers is wrong."""
    names = [field.name for field in fields(kind)]  # pyright: ignore[reportArgumentType]
    if len(cut) != len(names):
        raise CutError(f"cut {tuple(cut)} has {len(cut)} numbers, but a {kind.__name__} needs {len(names)}: {', '.join(names)}")
    return kind(**dict(zip(names, cut, strict=True)))


def powers_of_two(*values: int) -> bool:
    """Return whether all values are powers of two (1, 2, 4, ...), as sizes of blocks and numbers of warps must be."""
    return all(value >= 1 and value & (value - 1) == 0 for value in values)
