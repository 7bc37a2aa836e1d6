"""The C form of `quantised_linear` (`ops/cpu/quantised.h`): which products it computes, and how it is called.

With int8 and int4 codes, inputs become fixed point: integers of 16 bits for bfloat16 and of 32 bits for float32, with one power of two for
128 columns. All bits of an input count if it is at least a 128th (float32: a 64th) of the largest of its 128 columns; the error of a
smaller one is at most 2^-15 (2^-29) of that largest. With AVX2 alone bfloat16 has 15 bits beside int4 codes: a 64th, and 2^-14. The sums of
products of a group are exact integers.
"""

import ctypes
from types import MappingProxyType

import torch

from nanovllm.ops.cpu.build import library
from nanovllm.ops.cpu.native import CELL, DTYPES, SOURCE, SYMBOLS, Matrix, functions
from nanovllm.ops.linear.code_layouts import BLOCK
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.types import Tensor

KINDS = MappingProxyType({torch.int8: 1, torch.uint8: 2, torch.float8_e4m3fn: 3})  # `enum kinds`; 0 is a matrix that is not quantised
SCALES = MappingProxyType({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2})  # `enum types`
SPAN = 32  # a group of columns must be a multiple of this number, or a whole row


def unsupported(matrix: QuantisedMatrix) -> str:
    """What of a matrix the C functions do not support, in words; empty if they support it. Asked for each matrix at each step."""
    if matrix.codes.dtype not in KINDS:
        return "codes in a GPU's layout"
    grouped = matrix.group % SPAN == 0 or matrix.group >= matrix.columns
    if grouped and matrix.codes.dim() == 2 and matrix.codes.numel() > 0 and matrix.scales.dtype in SCALES:
        return ""
    if len(matrix.shape) != 2 or 0 in matrix.shape:
        return f"quantised matrices of shape {tuple(matrix.shape)}"
    scales = str(matrix.scales.dtype).removeprefix("torch.")
    return f"scales of {scales}" if grouped else f"groups of {matrix.group} columns"


def serves(x: Tensor, matrix: QuantisedMatrix, bias: Tensor | None) -> bool:
    """Whether C computes the product `x @ matrix.T + bias`."""
    return (
        x.dtype in DTYPES
        and x.shape[0] > 0
        and (bias is None or bias.dtype == x.dtype)
        and not unsupported(matrix)
        and library(SOURCE, SYMBOLS) is not None
    )


def product(x: Tensor, matrix: QuantisedMatrix, bias: Tensor | None) -> Tensor:
    """Compute `x @ matrix.T + bias`. `serves` must hold."""
    num_rows, height = x.shape[0], matrix.shape[0]
    rows, out, room = x.contiguous(), x.new_empty(num_rows, height), cells(num_rows, matrix)
    kept: list[Tensor] = []
    functions().nanovllm_quantised_linear(
        ctypes.c_void_p(rows.data_ptr()), ctypes.byref(Matrix(*fields(matrix, kept))),
        None if bias is None else ctypes.c_void_p(address(bias, kept)), *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (out, room)),
        *map(ctypes.c_int64, (num_rows, matrix.columns, height, x.dtype == torch.bfloat16, torch.get_num_threads())),
    )  # fmt: skip
    return out


def fields(matrix: QuantisedMatrix, kept: list[Tensor]) -> tuple[int, ...]:
    """The fields of `Matrix`, by which C reads the matrix. `kept` is that of `address`."""
    codes, scales, zeros, order = matrix.codes, matrix.scales, matrix.zeros, matrix.order
    return (
        address(codes, kept), address(scales, kept), 0 if zeros is None else address(zeros, kept),
        0 if order is None else address(order, kept), KINDS[codes.dtype], SCALES[scales.dtype], matrix.group, matrix.rows,
    )  # fmt: skip


def address(tensor: Tensor, kept: list[Tensor]) -> int:
    """Where C finds the tensor in contiguous memory. A copy that this needs is added to `kept`, which must outlive the call of C."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
        kept.append(tensor)
    return tensor.data_ptr()


def cells(rows: int, *weights: Tensor | QuantisedMatrix) -> Tensor:
    """Memory for the inputs of the widest quantised matrix, as C keeps them."""
    widest = max((weight.columns for weight in weights if isinstance(weight, QuantisedMatrix)), default=0)
    return torch.empty(rows * -(-widest // BLOCK) * CELL, dtype=torch.uint8, device="cpu")
