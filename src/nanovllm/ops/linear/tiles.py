"""Tile configurations of the fused matrix products."""

from dataclasses import dataclass

ROWS = 64  # of one program
LINE = 64  # numbers of 16 bits that a line of L2 holds
MOST_ASKED = 1024  # weights of every output that a program asks into L2 before it waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a kernel cuts its work: outputs of a program, warps, and (on tensor cores) inputs that a warp takes in one step."""

    outputs: int
    warps: int
    depth: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WideTile:
    """How a product is cut: outputs and rows of a program, inputs of a step of its loop, steps in flight, parts of the inputs, warps."""

    outputs: int = 32
    rows: int = ROWS
    depth: int = 128
    stages: int = 4
    parts: int = 1
    warps: int = 4
