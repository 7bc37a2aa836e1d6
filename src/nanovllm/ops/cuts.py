"""Cuts: how a kernel divides its work, as the few integers that a custom op takes. Empty: the kernel's own default.

The kernels' files say what the integers of each mean, and which of them divide its shapes and fit into a program.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import TypeVar

from nanovllm.errors import NanoVLLMError

Cut = tuple[int, ...]
T = TypeVar("T")


class CutError(NanoVLLMError):
    """A kernel was given a cut that does not divide its work, or does not fit into a program."""


def named(kind: type[T], cut: Sequence[int]) -> T:
    """The dataclass of integers that a cut spells, in the order of its fields. Raises `CutError` for another number of them."""
    names = [field.name for field in fields(kind)]  # pyright: ignore[reportArgumentType]
    if len(cut) != len(names):
        raise CutError(f"cut {tuple(cut)} has {len(cut)} numbers, a {kind.__name__} has {len(names)}: {', '.join(names)}")
    return kind(**dict(zip(names, cut, strict=True)))


def powers_of_two(*values: int) -> bool:
    """Whether all are 1, 2, 4 and so on, as sizes of blocks and numbers of warps must be."""
    return all(value >= 1 and value & (value - 1) == 0 for value in values)
