"""Matrices that GPTQ tools store: AutoGPTQ, GPTQModel, and the checkpoints that Qwen publishes."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nanovllm.errors import CheckpointError
from nanovllm.loading.quantisation.formats import SCALES, Part, PartError, fields, integers, ordered, signed
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.types import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq:
    """`qweight` int32 `[K * bits / 32, N]`: code k of a column is field k, lowest first, from 0 to 2^bits - 1.

    The weight is `(code - zero) * scale` of the group `g_idx[k]`. Files of version 1 store `zero - 1` in `qzeros`; files of version 2 store
    `zero`. The label in the config is often wrong for symmetric files, so their zero is always 2^(bits - 1).
    Source: GPTQModel, `utils/model_dequant.py`.

    Attributes:
        bits: 4 or 8.
        group: Columns that a scale serves; 0 means all.
        symmetric: Whether the zero is in the middle.
        version: 1 or 2.
    """

    bits: int
    group: int
    symmetric: bool
    version: int

    @property
    def summary(self) -> str:
        """The format in a few words."""
        return f"int{self.bits} {f'in groups of {self.group}' if self.group else 'with a scale per row'}"

    def parts(self, rows: int, columns: int) -> Mapping[str, Part]:
        """The tensors of a matrix `[rows, columns]` by suffix."""
        each, groups = 32 // self.bits, -(-columns // (self.group or columns))
        if columns % each:
            raise CheckpointError(f"{columns} inputs do not fill words of {each} codes")
        return {
            "qweight": Part(shapes=((columns // each, rows),), dtypes=("I32",)),
            "scales": Part(shapes=((groups, rows),), dtypes=SCALES),
            "qzeros": Part(shapes=((groups, -(-rows // each)),), dtypes=("I32",), needed=not self.symmetric, read=not self.symmetric),
            "g_idx": Part(shapes=((columns,),), dtypes=("I32",), needed=False),
        }

    def matrix(self, rows: int, columns: int, parts: Mapping[str, Tensor], dtype: torch.dtype) -> QuantisedMatrix:
        """The matrix of these tensors."""
        middle, group = 2 ** (self.bits - 1), self.group or columns
        codes = signed(fields(parts["qweight"], self.bits, 0), self.bits).T
        zeros = None
        if not self.symmetric:
            stored = fields(parts["qzeros"], self.bits, 1)[:, :rows]
            if self.version == 1 and (stored == middle).all():
                raise PartError(
                    "qzeros",
                    f"all zero points are {middle}, which version 1 of the format would read as {middle + 1}: "
                    "the file is of version 2, or symmetric, and its quantization_config says otherwise",
                )
            zeros = stored.T.to(torch.int16) + (2 - self.version) - middle
        order, groups = None, parts.get("g_idx")
        if groups is not None:
            codes, order = ordered(codes, groups, group, "g_idx")
        return integers(codes, self.bits, parts["scales"].T, zeros, order, group, "scales", dtype)
