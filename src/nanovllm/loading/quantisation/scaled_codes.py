"""Codes of 8 bits, FP8 or integers, with scales per block, row, group or matrix: DeepSeek-V3, Qwen3-FP8, compressed-tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nanovllm.loading.quantisation.formats import SCALES, Part, sealed
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.types import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledCodes:
    """Codes `weight` `[N, K]` of 8 bits each, multiplied by the scales of blocks of `rows` x `columns`; 0 means the whole side.

    Attributes:
        dtype: `F8_E4M3` or `I8`, the dtype of the codes.
        rows: Rows that a scale serves.
        columns: Columns that a scale serves.
        scale: The suffix of the scales. `weight_scale_inv` multiplies, too.
        zeros: Whether there are zero points, `weight_zero_point`.
    """

    dtype: str = "F8_E4M3"
    rows: int = 1
    columns: int = 0
    scale: str = "weight_scale"
    zeros: bool = False

    @property
    def summary(self) -> str:
        """The format in a few words."""
        name = "fp8" if self.dtype == "F8_E4M3" else "int8"
        if not self.rows:
            return f"{name} with a scale per matrix"
        if self.rows > 1:
            return f"{name} in blocks of {self.rows} x {self.columns}"
        return f"{name} in groups of {self.columns}" if self.columns else f"{name} with a scale per row"

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8

    def parts(self, rows: int, columns: int) -> Mapping[str, Part]:
        """The tensors of a matrix `[rows, columns]` by suffix."""
        down, across = self._grid(rows, columns)
        shapes: tuple[tuple[int, ...], ...] = ((down, across),)
        if across == 1:
            shapes = (*shapes, (down,))
        if down == across == 1:
            shapes = (*shapes, ())
        one = ((), (1,), (rows, 1), (1, 1))
        found = {
            "weight": Part(shapes=((rows, columns),), dtypes=(self.dtype,)),
            self.scale: Part(shapes=shapes, dtypes=SCALES),
            "input_scale": Part(shapes=one, dtypes=SCALES, needed=False, read=False),
            "input_zero_point": Part(shapes=one, dtypes=("I8", "I32"), needed=False, read=False),
        }
        return found | ({"weight_zero_point": Part(shapes=shapes, dtypes=("I8", "I32"), needed=self.zeros)} if self.dtype == "I8" else {})

    def _grid(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // (self.rows or rows)), -(-columns // (self.columns or columns))

    def matrix(self, rows: int, columns: int, parts: Mapping[str, Tensor], dtype: torch.dtype) -> QuantisedMatrix:
        """The matrix of these tensors."""
        grid, zeros = self._grid(rows, columns), parts.get("weight_zero_point")
        return sealed(
            QuantisedMatrix(
                codes=parts["weight"],
                scales=parts[self.scale].view(grid),
                zeros=None if zeros is None or not zeros.any() else zeros.view(grid).to(torch.int16),
                columns=columns,
                group=self.columns or columns,
                rows=self.rows or rows,
            ),
            self.scale,
            dtype,
        )
