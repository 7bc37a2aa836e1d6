"""Matrices that AutoAWQ stores in its version `gemm`."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nanovllm.errors import CheckpointError
from nanovllm.loading.quantisation.formats import SCALES, Part, fields, integers, signed
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.types import Tensor

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # for each column of eight, the nibble that holds it


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq:
    """`qweight` int32 `[K, N / 8]`: eight columns of N share a word, in an order of their own. The weight is `(code - zero) * scale`.

    Source: AutoAWQ, `utils/packing_utils.py`.

    Attributes:
        group: Columns of K that a scale serves; 0 means all.
        zeros: Whether there are zero points. Without, the zero is 8.
    """

    group: int
    zeros: bool

    @property
    def summary(self) -> str:
        """The format in a few words."""
        return f"int4 {f'in groups of {self.group}' if self.group else 'with a scale per row'}"

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4

    def parts(self, rows: int, columns: int) -> Mapping[str, Part]:
        """The tensors of a matrix `[rows, columns]` by suffix."""
        groups = -(-columns // (self.group or columns))
        if rows % 8:
            raise CheckpointError(f"{rows} outputs do not fill words of 8 codes")
        return {
            "qweight": Part(shapes=((columns, rows // 8),), dtypes=("I32",)),
            "scales": Part(shapes=((groups, rows),), dtypes=SCALES),
            "qzeros": Part(shapes=((groups, rows // 8),), dtypes=("I32",), needed=self.zeros, read=self.zeros),
        }

    def matrix(self, rows: int, columns: int, parts: Mapping[str, Tensor], dtype: torch.dtype) -> QuantisedMatrix:
        """The matrix of these tensors."""
        zeros = _columns(parts["qzeros"]) if self.zeros else None
        return integers(_columns(parts["qweight"]), 4, parts["scales"].T, zeros, None, self.group or columns, "scales", dtype)


def _columns(words: Tensor) -> Tensor:
    """The codes of words `[X, N / 8]`, minus 8, as int8 `[N, X]`."""
    nibbles = fields(words, 4, 1).unflatten(1, (-1, 8))[..., list(PLACES)]
    return signed(nibbles.flatten(1), 4).T
