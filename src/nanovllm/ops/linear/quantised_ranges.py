"""Parts of quantised matrices, in memory of their own: ranges of rows, and a range of columns."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from nanovllm.errors import InvalidRequestError
from nanovllm.ops.linear.code_layouts import BLOCK
from nanovllm.ops.linear.quantised import QuantisedMatrix, by_row, cpu_layout, laid_out
from nanovllm.types import Tensor


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

    Args:
        matrix: The matrix.
        first: The first column.
        last: The column after the last one.

    Raises:
        InvalidRequestError: A group of columns with one scale, or a block of 4-bit codes, would be cut; or the columns have another order
            than the inputs.

    Examples:
        >>> from nanovllm.ops.linear.quantise import quantise
        >>> column_range(quantise(torch.eye(4), "int8"), 1, 3).dequantised(torch.float32)[1].tolist()
        [1.0, 0.0]
    """
    if matrix.order is not None:
        raise InvalidRequestError("a matrix whose columns have an order of their own (desc_act) cannot be cut by columns")
    one_scale = matrix.scales.shape[-1] == 1
    if not one_scale and (first % matrix.group or (last % matrix.group and last != matrix.columns)):
        raise InvalidRequestError(f"columns {first} to {last} cut a group of {matrix.group} columns with one scale")
    plain, bits = cpu_layout(matrix), matrix.bits
    if bits == 4 and (first % BLOCK or (last % BLOCK and last != matrix.columns)):
        raise InvalidRequestError(f"columns {first} to {last} cut a block of {BLOCK} codes of 4 bits")
    where = slice(first // 2, -(-last // BLOCK) * (BLOCK // 2)) if bits == 4 else slice(first, last)
    groups = slice(None) if one_scale else slice(first // matrix.group, -(-last // matrix.group))
    own = replace(
        plain,
        codes=plain.codes[..., where].contiguous(),
        scales=plain.scales[..., groups].contiguous(),
        zeros=None if plain.zeros is None else plain.zeros[..., groups].contiguous(),
        columns=last - first,
        group=last - first if one_scale else matrix.group,
    )
    return laid_out(own)


def _stacked(values: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    return torch.cat([values[..., first:last, :] for first, last in ranges], -2)
