"""Tile configurations of the fused matrix products."""

from dataclasses import dataclass

ROWS = 64  # rows per program
LINE = 64  # numbers of 16 bits in a cache line of L2
MOST_ASKED = 1024  # weights of each output that a program prefetches into L2 before it waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Tile configuration for few rows: outputs per program, warps, and inputs per warp and step on tensor cores (`depth`; 0: unused)."""

    outputs: int
    warps: int
    depth: int = 0


def piece_of(width: int, warps: int) -> int:
    """Return how many of `width` inputs programs without tensor cores load at once: all if they are a power of 2, else 8 of each thread.

    A block of a Triton kernel is a power of 2, so one of all inputs would waste the registers of up to half of them.
    """
    return width if width & (width - 1) == 0 else 256 * warps


@dataclass(frozen=True, slots=True, kw_only=True)
class WideTile:
    """Tile configuration for many rows.

    Its fields are outputs and rows per program, inputs per loop step (`depth`), loop steps in flight (`stages`), parts of the inputs, and
    warps.
    """

    outputs: int = 32
    rows: int = ROWS
    depth: int = 128
    stages: int = 4
    parts: int = 1
    warps: int = 4
