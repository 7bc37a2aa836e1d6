"""Integers packed along K into words of 32 bits, as compressed-tensors stores W4A16 and W8A16 (`pack-quantized`)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nanovllm.loading.quantisation.formats import SCALES, Part, PartError, fields, integers, ordered, signed
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.types import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWords:
    """`weight_packed` int32 `[N, ceil(K * bits / 32)]`: code k of a row is field k, lowest first, stored plus 2^(bits - 1).

    Source: compressed-tensors, `compressors/pack_quantized`. Zero points are packed along N in the same way.

    Attributes:
        bits: 4 or 8.
        group: Columns that a scale serves; 0 means all.
        zeros: Whether there are zero points.
    """

    bits: int
    group: int
    zeros: bool

    @property
    def summary(self) -> str:
        """The format in a few words."""
        return f"int{self.bits} {f'in groups of {self.group}' if self.group else 'with a scale per row'}"

    def parts(self, rows: int, columns: int) -> Mapping[str, Part]:
        """The tensors of a matrix `[rows, columns]` by suffix."""
        each, groups = 32 // self.bits, -(-columns // (self.group or columns))
        return {
            "weight_packed": Part(shapes=((rows, -(-columns // each)),), dtypes=("I32",)),
            "weight_scale": Part(shapes=((rows, groups),), dtypes=SCALES),
            "weight_shape": Part(shapes=((2,),), dtypes=("I64", "I32"), needed=False),
            "weight_zero_point": Part(shapes=((-(-rows // each), groups),), dtypes=("I32",), needed=self.zeros),
            "weight_g_idx": Part(shapes=((columns,),), dtypes=("I32",), needed=False),
        }

    def matrix(self, rows: int, columns: int, parts: Mapping[str, Tensor], dtype: torch.dtype) -> QuantisedMatrix:
        """The matrix of these tensors."""
        shape = parts.get("weight_shape")
        if shape is not None and shape.tolist() != [rows, columns]:
            raise PartError("weight_shape", f"it is {shape.tolist()}, and the config asks for {[rows, columns]}")
        group = self.group or columns
        codes = signed(fields(parts["weight_packed"], self.bits, 1)[:, :columns], self.bits)
        zeros = parts.get("weight_zero_point")
        if zeros is not None:
            zeros = signed(fields(zeros, self.bits, 0)[:rows], self.bits)
        order, groups = None, parts.get("weight_g_idx")
        if groups is not None and not (groups == -1).all():
            codes, order = ordered(codes, groups, group, "weight_g_idx")
        return integers(codes, self.bits, parts["weight_scale"], zeros, order, group, "weight_scale", dtype)
