"""`QuantisedMatrix`: a weight matrix of 4 or 8 bits per weight, in the one form that all products read.

Every checkpoint format becomes this form while it is loaded. A weight stands for `(code - zero) * scale`. One scale, and one zero if the
format has zeros, serves `group` columns of `rows` rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from nanovllm.ops.linear.code_layouts import BLOCK, from_pairs, from_quads, pairs, quads, unpacked
from nanovllm.types import Tensor, brief_fields, register_value

# The dtypes of codes by kind, and in a GPU's layout: pairs of 8-bit codes, and two quads of 4-bit codes.
CPU_CODES = MappingProxyType({"int4": torch.uint8, "int8": torch.int8, "fp8": torch.float8_e4m3fn})
GPU_CODES = MappingProxyType({"int4": torch.int32, "int8": torch.int16, "fp8": torch.uint16})
KIND_OF = MappingProxyType({dtype: kind for table in (CPU_CODES, GPU_CODES) for kind, dtype in table.items()})
PIECE = 1 << 22  # weights that are dequantised at once, which bounds the float32 copies


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedMatrix:
    """A matrix `[N, K]`, or one per expert `[E, N, K]`, of weights of 4 or 8 bits. As a pytree, its leaves are its tensors.

    The weight of row n and column k of the codes is `(code[n, k] - zero[n // rows, k // group]) * scale[n // rows, k // group]`. In a
    product it is multiplied by input `order[k]`, or by input k without an order.

    4-bit codes lie between -8 and 7. They are stored plus 8, two per byte, in blocks of 128 columns. The last block is filled with codes
    that belong to no column. 8-bit codes lie one after another. This is the layout of a CPU, which C reads.

    The kernels of a GPU read elements of 16 bits, which hold columns of a block of 128: a quad of 4-bit codes holds the columns i, i + 32,
    i + 64 and i + 96, and a pair of 8-bit codes the columns i and i + 64. The last block is filled here as well. `gpu_layout` and
    `cpu_layout` convert a matrix, and `laid_out` chooses by its device. `code_layouts` has the functions of the codes.

    Attributes:
        codes: The weights. In a CPU's layout, int8 or float8_e4m3fn `[..., N, K]`, or 4-bit codes in uint8 `[..., N, 64 * blocks]`, with
            blocks = ceil(K / 128). In a GPU's layout, pairs as int16 (of int8) or uint16 (of fp8) `[..., N, 64 * blocks]`, or quads, two
            in each int32, `[..., N, 16 * blocks]`.
        scales: The scales, `[..., ceil(N / rows), ceil(K / group)]`, in float32, float16 or bfloat16.
        zeros: The zero points, int16, in the shape of `scales`. None: all are 0.
        order: For each column of the codes, the input that it is multiplied by, int32 `[K]`. None: the same column.
        columns: K.
        group: Columns that one scale serves.
        rows: Rows that one scale serves.
        fp8_activations: Whether a GPU rounds the activations of many rows to FP8 before it multiplies (`ops/linear/scaled_product.py`).

    Examples:
        >>> from nanovllm.ops.linear.quantise import quantise
        >>> matrix = quantise(torch.tensor([[-1.0, 0.5], [0.25, 0.125]]), "int8")
        >>> tuple(matrix.shape), matrix.bits
        ((2, 2), 8)
        >>> [round(weight, 2) for weight in matrix.dequantised(torch.float32)[0].tolist()]
        [-1.0, 0.5]
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None
    columns: int
    group: int
    rows: int = 1
    fp8_activations: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code: 4 or 8.

        Returns:
            The number.

        Examples:
            >>> from nanovllm.ops.linear.quantise import quantise
            >>> quantise(torch.ones(2, 128), "int4").bits
            4
        """
        return 4 if self.kind == "int4" else 8

    @property
    def kind(self) -> str:
        """The kind of the codes.

        Returns:
            `"int4"`, `"int8"` or `"fp8"`.

        Examples:
            >>> from nanovllm.ops.linear.quantise import quantise
            >>> quantise(torch.ones(2, 128), "fp8").kind
            'fp8'
        """
        return KIND_OF[self.codes.dtype]

    @property
    def in_gpu_layout(self) -> bool:
        """Whether the kernels of a GPU can read the codes.

        Returns:
            The answer.

        Examples:
            >>> from nanovllm.ops.linear.quantise import quantise
            >>> matrix = quantise(torch.ones(2, 128), "int4")  # on a CPU
            >>> matrix.in_gpu_layout, gpu_layout(matrix).in_gpu_layout
            (False, True)
        """
        return self.codes.dtype == GPU_CODES[self.kind]

    @property
    def fields(self) -> int:
        """The columns whose codes an element of 16 bits holds.

        Returns:
            4 for codes of 4 bits, 2 for codes of 8 bits.

        Examples:
            >>> from nanovllm.ops.linear.quantise import quantise
            >>> quantise(torch.ones(2, 100), "int4").fields
            4
        """
        return 16 // self.bits

    @property
    def width(self) -> int:
        """The elements of 16 bits of a row in a GPU's layout, those that fill the last block included.

        Returns:
            The number.

        Examples:
            >>> from nanovllm.ops.linear.quantise import quantise
            >>> quantise(torch.ones(2, 100), "int4").width
            32
        """
        return -(-self.columns // BLOCK) * (BLOCK // self.fields)

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix that the codes stand for.

        Returns:
            `[N, K]`, or `[E, N, K]` for experts.

        Examples:
            >>> from nanovllm.ops.linear.quantise import quantise
            >>> quantise(torch.ones(2, 100), "int4").shape
            torch.Size([2, 100])
        """
        return torch.Size((*self.codes.shape[:-1], self.columns))

    @property
    def device(self) -> torch.device:
        """The device of the tensors.

        Returns:
            The device of the codes.

        Examples:
            >>> from nanovllm.ops.linear.quantise import quantise
            >>> quantise(torch.ones(2, 100), "int4").device
            device(type='cpu')
        """
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """The bytes of memory of all tensors.

        Returns:
            The number.

        Examples:
            >>> from nanovllm.ops.linear.quantise import quantise
            >>> quantise(torch.ones(2, 128), "int8").nbytes  # and a float32 scale per row
            264
        """
        return sum(each.nbytes for each in (self.codes, self.scales, self.zeros, self.order) if each is not None)

    def __getitem__(self, expert: int) -> "QuantisedMatrix":
        """The matrix of one expert."""
        own: dict[str, Any] = {"codes": self.codes[expert], "scales": self.scales[expert]}
        return replace(self, **own, zeros=None if self.zeros is None else self.zeros[expert])

    def row_range(self, first: int, last: int) -> "QuantisedMatrix":
        """Rows `first` to `last` (exclusive) of the matrix, as views. `first` is a multiple of `rows`.

        Args:
            first: The first row.
            last: The row after the last one.

        Returns:
            The matrix `[last - first, K]`.

        Examples:
            >>> from nanovllm.ops.linear.quantise import quantise
            >>> quantise(torch.ones(4, 128), "int4").row_range(1, 3).shape
            torch.Size([2, 128])
        """
        assert first % self.rows == 0, "a range of rows begins with a row of scales"
        where = slice(first // self.rows, -(-last // self.rows))
        zeros = None if self.zeros is None else self.zeros[..., where, :]
        return replace(self, codes=self.codes[..., first:last, :], scales=self.scales[..., where, :], zeros=zeros)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The matrix that the codes stand for, with its columns in the order of the inputs. Computed in float32, in pieces, then rounded.

        Args:
            dtype: The dtype of the result. float64 computes in float64.

        Returns:
            `[N, K]`, or `[E, N, K]` for experts.

        Examples:
            >>> from nanovllm.ops.linear.quantise import quantise
            >>> quantise(torch.eye(2), "int8").dequantised(torch.float32).tolist()
            [[1.0, 0.0], [0.0, 1.0]]
        """
        if len(self.shape) == 3:
            return torch.stack([self[e].dequantised(dtype) for e in range(self.shape[0])])
        height = max(1, PIECE // self.columns // self.rows) * self.rows
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        for first in range(0, self.shape[0], height):
            last = min(first + height, self.shape[0])
            out[first:last] = self.row_range(first, last)._weights(torch.float64 if dtype == torch.float64 else torch.float32)
        if self.order is None:
            return out
        return torch.empty_like(out).index_copy_(1, self.order.long(), out)

    def _weights(self, wide: torch.dtype) -> Tensor:
        codes = cpu_layout(self).codes
        codes = unpacked(codes, self.columns) if self.bits == 4 else codes
        scales = spread(self.scales, self.shape, self.rows, self.group).to(wide)
        if self.zeros is None:
            return codes.to(wide) * scales
        return (codes.to(wide) - spread(self.zeros, self.shape, self.rows, self.group).to(wide)) * scales

    def __repr__(self) -> str:
        return brief_fields(self)


register_value(QuantisedMatrix, static=("columns", "group", "rows", "fp8_activations"))


def spread(values: Tensor, shape: Sequence[int], rows: int, group: int) -> Tensor:
    """Repeat values per group for each row and column of a matrix `shape`."""
    down = values if rows == 1 else values.repeat_interleave(rows, -2)[..., : shape[-2], :]
    return down.repeat_interleave(group, -1)[..., : shape[-1]] if values.shape[-1] > 1 else down


def gpu_layout(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Lay out a matrix as the kernels of a GPU read it.

    Args:
        matrix: The matrix, in either layout, on any device.

    Returns:
        The same matrix with its codes in quads or pairs, or `matrix` itself if they are.

    Examples:
        >>> from nanovllm.ops.linear.quantise import quantise
        >>> matrix = quantise(torch.ones(2, 100), "int4")
        >>> gpu_layout(matrix).codes.shape, torch.equal(cpu_layout(gpu_layout(matrix)).codes, matrix.codes)
        (torch.Size([2, 16]), True)
    """
    if matrix.in_gpu_layout:
        return matrix
    codes = quads(matrix.codes) if matrix.bits == 4 else pairs(matrix.codes.view(torch.uint8))
    return replace(matrix, codes=codes.view(GPU_CODES[matrix.kind]))


def cpu_layout(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Lay out a matrix as C reads it: the inverse of `gpu_layout`.

    Args:
        matrix: The matrix, in either layout, on any device.

    Returns:
        The same matrix with its codes one after another, or in bytes of two, or `matrix` itself if they are.

    Examples:
        >>> from nanovllm.ops.linear.quantise import quantise
        >>> cpu_layout(gpu_layout(quantise(torch.ones(2, 100), "int8"))).codes.shape
        torch.Size([2, 100])
    """
    if not matrix.in_gpu_layout:
        return matrix
    codes = from_quads(matrix.codes) if matrix.bits == 4 else from_pairs(matrix.codes.view(torch.uint8), matrix.columns)
    return replace(matrix, codes=codes.view(CPU_CODES[matrix.kind]))


def laid_out(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """The matrix in the layout that products on its device read."""
    return gpu_layout(matrix) if matrix.device.type == "cuda" else cpu_layout(matrix)


def joined(parts: Sequence[QuantisedMatrix], dim: int = -2) -> QuantisedMatrix | None:
    """Matrices of one form, stacked along their rows, or along a new first axis for experts (`dim=0`); None if their forms differ.

    Scales of blocks of rows are repeated for each row where a block would cross a border between two matrices.
    """
    first = parts[0]
    if len(parts) == 1 and dim != 0:
        return first
    orders = [each.order for each in parts]
    alike = all(
        (each.codes.dtype, each.columns, each.group, each.zeros is None, each.order is None)
        == (first.codes.dtype, first.columns, first.group, first.zeros is None, first.order is None)
        for each in parts
    )
    if not alike or any(each is not None and not torch.equal(each, orders[0]) for each in orders):  # pyright: ignore[reportArgumentType]
        return None
    if dim != 0 and any(each.rows != first.rows or each.shape[-2] % each.rows for each in parts):
        parts = [by_row(each) for each in parts]
    if dim == 0 and any(each.shape != first.shape or each.rows != first.rows for each in parts):
        return None
    join = torch.stack if dim == 0 else torch.cat
    scales = [each.scales for each in parts]
    wide = scales[0].dtype if len({each.dtype for each in scales}) == 1 else torch.float32
    zeros = [each.zeros for each in parts if each.zeros is not None]
    return replace(
        parts[0],
        codes=join([each.codes for each in parts], dim),
        scales=join([each.to(wide) for each in scales], dim),
        zeros=join(zeros, dim) if zeros else None,
    )


def by_row(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """The same matrix with scales of its own for each row."""
    if matrix.rows == 1:
        return matrix
    height = matrix.shape[-2]
    scales, zeros = (
        None if each is None else each.repeat_interleave(matrix.rows, -2)[..., :height, :].contiguous()
        for each in (matrix.scales, matrix.zeros)
    )
    assert scales is not None
    return replace(matrix, scales=scales, zeros=zeros, rows=1)
