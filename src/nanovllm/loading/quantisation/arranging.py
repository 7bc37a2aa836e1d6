"""From the quantised matrices of a checkpoint to a parameter: stacked, per expert, and with the rows of rotated heads moved."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from nanovllm.models.common.params import ParamInfo, as_kept
from nanovllm.ops.linear.quantised import QuantisedMatrix, by_row, joined, laid_out
from nanovllm.types import Tensor


def arranged(info: ParamInfo, stored: Sequence[QuantisedMatrix | Tensor], dtype: torch.dtype) -> QuantisedMatrix | Tensor:
    """The parameter that `info` describes, from its matrices in the order of `info.sources`, laid out for its device.

    It is dequantised to `dtype` if its matrices cannot be one: some are not quantised, their formats or orders differ, or channels of its
    inputs are padded.
    """
    whole = None if info.columns or info.transposed or info.offset else _whole(info, stored)
    if whole is not None:
        return laid_out(whole)
    flat = [(each.dequantised(dtype) if isinstance(each, QuantisedMatrix) else each.to(dtype)).flatten() for each in stored]
    return as_kept(info, torch.cat(flat))


def _whole(info: ParamInfo, stored: Sequence[QuantisedMatrix | Tensor]) -> QuantisedMatrix | None:
    matrices = [each for each in stored if isinstance(each, QuantisedMatrix)]
    if len(matrices) < len(stored):
        return None
    if len(info.shape) == 3:
        each = len(matrices) // info.shape[0]
        experts = [joined(matrices[first : first + each]) for first in range(0, len(matrices), each)]
        whole = [expert for expert in experts if expert is not None]
        return joined(whole, 0) if len(whole) == len(experts) else None
    matrix = joined(matrices)
    return matrix if matrix is None or not info.channels else _moved(info, by_row(matrix))


def _moved(info: ParamInfo, matrix: QuantisedMatrix) -> QuantisedMatrix:
    """The matrix with its rows as `as_kept` moves them. Rows of padding have codes and scales of zero."""
    rows = sum(math.prod(shape[:-1]) for shape in info.source_shapes)
    numbers = torch.arange(1, rows + 1, device=matrix.device)
    places = as_kept(replace(info, shape=(info.shape[0], 1)), numbers).view(-1)
    at, empty = (places - 1).clamp_min(0), (places == 0)[:, None]

    def moved(values: Tensor) -> Tensor:
        return values[at].masked_fill(empty, 0)

    codes = matrix.codes.view(torch.uint8)  # no arithmetic on fp8
    zeros = None if matrix.zeros is None else moved(matrix.zeros)
    return replace(matrix, codes=moved(codes).view(matrix.codes.dtype), scales=moved(matrix.scales), zeros=zeros)
