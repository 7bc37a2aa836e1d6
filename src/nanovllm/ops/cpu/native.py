"""The C library of the decode step and of products with quantised matrices (`kernels.c`), and matrices as it reads them."""

import ctypes
import functools
from pathlib import Path

import torch

from nanovllm.ops.cpu.build import library

SOURCE = Path(__file__).parent / "kernels.c"
SYMBOLS = ("nanovllm_step", "nanovllm_quantised_linear", "nanovllm_structs_size", "nanovllm_cell_size")
DTYPES = (torch.float32, torch.bfloat16)
CELL = 576  # bytes of `struct cell`: 128 inputs of a row


class Matrix(ctypes.Structure):
    """`struct matrix` of the C files. The fields must have the same order and types."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros", "order")),
        *((name, ctypes.c_int64) for name in ("kind", "scale_type", "group", "rows")),
    )


@functools.cache
def functions() -> ctypes.CDLL:
    """The library. Raises `AssertionError` if it could not be built: ask `library(SOURCE, SYMBOLS)` first."""
    compiled = library(SOURCE, SYMBOLS)
    assert compiled is not None, "the library was not compiled"
    assert compiled.nanovllm_cell_size() == CELL
    return compiled
