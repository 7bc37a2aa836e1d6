"""Parts of quantised matrices, in memory of their own: ranges of rows, and a range of columns."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from nanovllm.errors import InvalidRequestError
from nanovllm.ops.linear.code_layouts import BLOCK, packed, unpacked
from nanovllm.ops.linear.quantised import QuantisedMatrix, by_row, cpu_layout, laid_out
from nanovllm.types import Tensor

# Columns of a group after a cut, at least. Scales of 16 columns take a quarter as much memory as 4-bit codes, and zeros as much again.
FINEST = 16


def row_ranges(matrix: QuantisedMatrix, ranges: Sequence[tuple[int, int]]) -> QuantisedMatrix:
    """Some ranges of rows of a matrix `[..., N, K]`, stacked.

    Scales that serve several rows are repeated for each row if a range begins or ends between them.

    Args:
        matrix: The matrix.
        ranges: First and last (exclusive) row of each range.

    Examples:
        >>> from nanovllm.ops.linear.quantise import quantise
        >>> row_ranges(quantise(torch.eye(4), "int8"), [(0, 1), (2, 3)]).dequantised(torch.float32).tolist()
        [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]
    """
    if any(first % matrix.rows or last % matrix.rows for first, last in ranges):
        matrix = by_row(matrix)
    of_scales = [(first // matrix.rows, last // matrix.rows) for first, last in ranges]
    codes = _stacked(matrix.codes.view(torch.uint8), ranges).view(matrix.codes.dtype)
    zeros = None if matrix.zeros is None else _stacked(matrix.zeros, of_scales)
    return replace(matrix, codes=codes, scales=_stacked(matrix.scales, of_scales), zeros=zeros)


def column_range(matrix: QuantisedMatrix, first: int, last: int) -> QuantisedMatrix:
    """The columns from `first` to `last` (exclusive) of a matrix `[..., N, K]`, laid out for its device.

    If the range begins or ends inside a group of columns with one scale, the groups become smaller, and their scales are repeated. Equal
    parts of a matrix have groups of one size.

    Args:
        matrix: The matrix.
        first: The first column.
        last: The column after the last one.

    Raises:
        InvalidRequestError: The groups would become smaller than 16 columns, or the columns have another order than the inputs.

    Examples:
        >>> from nanovllm.ops.linear.quantise import quantise
        >>> column_range(quantise(torch.eye(4), "int8"), 1, 3).dequantised(torch.float32)[1].tolist()
        [1.0, 0.0]
    """
    if matrix.order is not None:
        raise InvalidRequestError("a matrix whose columns have an order of their own (desc_act) cannot be cut by columns")
    if (first, last) == (0, matrix.columns):
        return laid_out(matrix)
    plain, group = cpu_layout(matrix), last - first
    codes, scales, zeros = plain.codes, plain.scales, plain.zeros
    if plain.bits == 8:
        codes = codes[..., first:last].contiguous()
    else:
        start, stop = first // BLOCK, -(-last // BLOCK)
        codes = codes[..., start * BLOCK // 2 : stop * BLOCK // 2].contiguous()  # whole blocks
        if first % BLOCK or (last % BLOCK and last != matrix.columns):
            codes = packed(unpacked(codes, last - start * BLOCK)[..., first - start * BLOCK :])
    if scales.shape[-1] > 1:
        group = finer(matrix.group, first, last)
        of_groups = torch.arange(first, last, group, device=matrix.device) // matrix.group
        scales, zeros = scales.index_select(-1, of_groups), None if zeros is None else zeros.index_select(-1, of_groups)
    return laid_out(replace(plain, codes=codes, scales=scales, zeros=zeros, columns=last - first, group=group))


def finer(group: int, first: int, last: int) -> int:
    """The largest size of groups into which a range of columns cuts groups of `group` columns.

    Raises:
        InvalidRequestError: It is less than 16, and less than `group`.

    Examples:
        >>> finer(128, 192, 384), finer(128, 128, 256)
        (64, 128)
    """
    found = math.gcd(group, first, last)
    if found < min(group, FINEST):
        raise InvalidRequestError(f"columns {first} to {last} cut groups of {group} columns into groups of {found}, fewer than {FINEST}")
    return found


def _stacked(values: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    return torch.cat([values[..., first:last, :] for first, last in ranges], -2)
