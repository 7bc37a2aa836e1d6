"""`MatrixFormat`: how a checkpoint stores one quantised matrix. Each format is a file of its own."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from nanovllm.errors import CheckpointError
from nanovllm.ops.linear.code_layouts import packed
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.types import Tensor

SCALES = ("F32", "F16", "BF16")  # dtypes of scales, in the spelling of safetensors
STORED = {
    "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "F64": torch.float64,
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
LARGEST_SCALE = 2.0**67  # a GPU's kernels multiply scales of FP8 codes by 2^60 (`ops/linear/triton_codes.py`)


class PartError(CheckpointError):
    """A tensor of a matrix has values that it cannot have. `suffix` is the end of the tensor's name, as in `MatrixFormat.parts`."""

    def __init__(self, suffix: str, why: str):
        super().__init__(why)
        self.suffix = suffix


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One tensor of a stored matrix: the shapes and dtypes that it may have, and whether it must be there."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    needed: bool = True
    read: bool = True  # whether the matrix depends on it


@runtime_checkable
class MatrixFormat(Protocol):
    """How a checkpoint stores a matrix `[N, K]` of a module, in tensors whose names are the module's name and a suffix."""

    @property
    def summary(self) -> str:
        """The format in a few words, such as `"int4 in groups of 128"`."""
        ...

    @property
    def bits(self) -> int:
        """Bits of a code: 4 or 8."""
        ...

    def parts(self, rows: int, columns: int) -> Mapping[str, Part]:
        """The tensors of a matrix `[rows, columns]` by suffix.

        Raises:
            CheckpointError: The format cannot store a matrix of this shape.
        """
        ...

    def matrix(self, rows: int, columns: int, parts: Mapping[str, Tensor], dtype: torch.dtype) -> QuantisedMatrix:
        """The matrix of these tensors for a model in `dtype`. Their shapes and dtypes are those of `parts`; optional ones may be missing.

        Raises:
            PartError: The values of a tensor cannot be those of a matrix.
        """
        ...


def sealed(matrix: QuantisedMatrix, scale: str, dtype: torch.dtype) -> QuantisedMatrix:
    """The matrix, if all that it stands for is a finite number.

    Args:
        matrix: The matrix. Codes of fp8 are stored as `weight`.
        scale: The suffix of its scales.
        dtype: The dtype of the model.

    Raises:
        PartError: A scale is not finite or above `LARGEST_SCALE`, or its product with the largest code is not finite in `dtype`; or it
            is 0 for codes that are not, or an fp8 code is NaN.
    """
    scales, codes = matrix.scales, matrix.codes  # a scale may be negative: AutoRound stores such scales of symmetric codes
    largest = {torch.float8_e4m3fn: 448, torch.uint8: 8, torch.int8: 128}[codes.dtype] * (1 if matrix.zeros is None else 2)
    limit = torch.finfo(dtype).max / largest
    valid = scales.abs() <= min(limit, LARGEST_SCALE, torch.finfo(scales.dtype).max)  # false for NaN
    if not valid.all():
        found, over = scales[~valid][0], ""
        if found.isfinite() and found.abs() > limit:
            code = f"{largest}, the largest code{'' if matrix.zeros is None else ' minus zero point'}"
            over = f", whose product with {code}, is not finite in {str(dtype).removeprefix('torch.')}"
        raise PartError(scale, f"a scale is {found}{over}: the file is damaged, or the tool that quantised it overflowed")
    if codes.dtype == torch.float8_e4m3fn and ((codes.view(torch.uint8) & 0x7F) == 0x7F).any():
        raise PartError("weight", "a code is NaN")
    if (scales == 0).any():
        lost = replace(matrix, scales=(scales == 0).to(scales.dtype))
        if lost.dequantised(torch.float32).any():
            raise PartError(scale, "a scale is 0 for weights that are not")
    return matrix


def ordered(codes: Tensor, groups: Tensor, group: int, suffix: str) -> tuple[Tensor, Tensor | None]:
    """Codes whose columns are sorted by their groups, and the order; None where they already are.

    Args:
        codes: int8 `[N, K]`.
        groups: The group of each column, int32 `[K]`.
        group: Columns of a group.
        suffix: The suffix of `groups`.

    Raises:
        PartError: A group has not `group` columns; the last one may have fewer.
    """
    columns = codes.shape[1]
    wanted = torch.arange(columns, device=groups.device, dtype=groups.dtype) // group
    if torch.equal(groups, wanted):
        return codes, None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], wanted):
        raise PartError(suffix, f"it does not put {group} columns into each group")
    return codes[:, order], order.to(torch.int32)


def integers(
    codes: Tensor, bits: int, scales: Tensor, zeros: Tensor | None, order: Tensor | None, group: int, scale: str, dtype: torch.dtype
) -> QuantisedMatrix:
    """The matrix of signed codes, int8 `[N, K]`, packed if they have 4 bits. `scale` is the suffix of the scales; see `sealed`."""
    kept = packed(codes) if bits == 4 else codes
    return sealed(
        QuantisedMatrix(
            codes=kept.contiguous(),
            scales=scales.contiguous(),
            zeros=None if zeros is None or not zeros.any() else zeros.to(torch.int16).contiguous(),
            order=order,
            columns=codes.shape[1],
            group=group,
        ),
        scale,
        dtype,
    )


def fields(words: Tensor, bits: int, dim: int) -> Tensor:
    """The fields of `bits` bits of int32 words, lowest first, along an axis that grows by 32 / `bits`: uint8, from 0 to 2^bits - 1."""
    words = words.movedim(dim, -1)
    each = torch.empty((*words.shape, 32 // bits), dtype=torch.uint8, device=words.device)
    for place in range(32 // bits):
        each[..., place] = (words >> (bits * place)) & (2**bits - 1)
    return each.flatten(-2).movedim(-1, dim)


def signed(fields: Tensor, bits: int) -> Tensor:
    """Fields from 0 to 2^bits - 1, minus 2^(bits - 1), as int8."""
    return fields.bitwise_xor(128).view(torch.int8) if bits == 8 else fields.to(torch.int8) - 2 ** (bits - 1)
