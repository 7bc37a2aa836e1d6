"""Parts of quantised matrices, in memory of their own: ranges of rows, and a range of columns."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from nanovllm.errors import InvalidRequestError
from nanovllm.ops.linear.code_layouts import BLOCK, packed, unpacked
from nanovllm.ops.linear.quantised import QuantisedMatrix, by_group, by_row, cpu_layout, laid_out
from nanovllm.types import Tensor

FINEST = 16  # columns of a group after a cut, at least: with 8 the scales of 4-bit codes would take half as much memory as the codes


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

    Scales that serve several columns are repeated for smaller groups if the range begins or ends between them.

    Args:
        matrix: The matrix.
        first: The first column.
        last: The column after the last one.

    Raises:
        InvalidRequestError: The groups would have fewer than 16 columns, or the columns have another order than the inputs.

    Examples:
        >>> from nanovllm.ops.linear.quantise import quantise
        >>> column_range(quantise(torch.eye(4), "int8"), 1, 3).dequantised(torch.float32)[1].tolist()
        [1.0, 0.0]
    """
    if matrix.order is not None:
        raise InvalidRequestError("a matrix whose columns have an order of their own (desc_act) cannot be cut by columns")
    group = last - first
    if matrix.scales.shape[-1] > 1:
        group = finer(matrix.group, *(at for at in (first, last) if at != matrix.columns))
        matrix = by_group(matrix, group)
        where = slice(first // group, -(-last // group))
        zeros = None if matrix.zeros is None else matrix.zeros[..., where].contiguous()
        matrix = replace(matrix, scales=matrix.scales[..., where].contiguous(), zeros=zeros)
    plain = cpu_layout(matrix)
    if plain.bits == 8:
        codes = plain.codes[..., first:last].contiguous()
    elif first % BLOCK == 0 and (last % BLOCK == 0 or last == matrix.columns):
        codes = plain.codes[..., first // 2 : -(-last // BLOCK) * (BLOCK // 2)].contiguous()
    else:
        codes = packed(unpacked(plain.codes, matrix.columns)[..., first:last])
    own = replace(plain, codes=codes, columns=last - first, group=group)
    return laid_out(own)


def finer(group: int, *cuts: int) -> int:
    """The largest size of groups that divides groups of `group` columns, so that none of some cuts lies inside a group.

    Raises:
        InvalidRequestError: It is less than 16.

    Examples:
        >>> finer(128, 192, 384), finer(128, 256)
        (64, 128)
    """
    found = math.gcd(group, *cuts)
    if found < min(group, FINEST):
        where = " and ".join(f"column {at}" for at in cuts if at)
        raise InvalidRequestError(f"cuts at {where} divide groups of {group} columns into groups of {found}, fewer than {FINEST}")
    return found


def _stacked(values: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    return torch.cat([values[..., first:last, :] for first, last in ranges], -2)
