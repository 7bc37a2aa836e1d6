"""`quantise`: rounding a matrix to 4 or 8 bits per weight."""

from typing import Literal

import torch

from nanovllm.ops.linear.code_layouts import packed
from nanovllm.ops.linear.quantised import QuantisedMatrix, laid_out
from nanovllm.types import Tensor

Kind = Literal["fp8", "int8", "int4"]
KINDS: tuple[Kind, ...] = ("fp8", "int8", "int4")
GROUP = 128  # columns that a scale of 4-bit codes serves
LARGEST_FP8 = 448.0  # of float8_e4m3fn
PIECE = 1 << 22  # weights that are rounded at once, which bounds the float32 copies


def quantise(weight: Tensor, kind: Kind, group: int | None = None, *, largest: Tensor | None = None) -> QuantisedMatrix:
    """Round a matrix to the nearest codes, without calibration.

    The scale of 8-bit codes serves a row. It is the row's largest magnitude, divided by 448 for fp8 (e4m3) and by 127 for int8. The scale
    of 4-bit codes serves 128 columns of a row, and is a seventh of their largest magnitude, rounded to bfloat16. Weights are symmetric
    around zero; a group of zeros has the scale 1.

    Args:
        weight: The matrix, `[N, K]` or `[E, N, K]`, in a floating-point dtype.
        kind: `"fp8"`, `"int8"` or `"int4"`.
        group: Columns that a scale serves. None: the whole row for 8 bits, 128 for 4 bits.
        largest: The magnitude that each scale is taken from, `[..., N, groups]`, if the matrix is a part of the columns of a larger one and
            shares scales with other parts. None: the largest in `weight`.

    Returns:
        The quantised matrix, on the device of `weight` and laid out for it. Infinite or NaN weights give scales that are not finite.

    Examples:
        >>> from nanovllm.ops.linear.quantise import quantise
        >>> quantise(torch.tensor([[-2.0, 1.0]]), "fp8").codes.float().tolist()
        [[-448.0, 224.0]]
    """
    columns = weight.shape[-1]
    wide = max(1, columns if group is None and kind != "int4" else min(columns, group or GROUP))
    flat = weight.reshape(-1, columns)
    groups = -(-columns // wide)
    codes = torch.empty(flat.shape, dtype=torch.float8_e4m3fn if kind == "fp8" else torch.int8, device=weight.device)
    scales = torch.empty(len(flat), groups, dtype=torch.bfloat16 if kind == "int4" else torch.float32, device=weight.device)
    height = max(1, PIECE // max(1, columns))
    for first in range(0, len(flat), height):
        at = slice(first, first + height)
        most = None if largest is None else largest.reshape(-1, groups)[at].float()
        codes[at], scales[at] = _rounded(flat[at].float(), kind, wide, groups, scales.dtype, most)
    shape = weight.shape[:-1]
    kept = packed(codes) if kind == "int4" else codes
    codes, scales = kept.view(*shape, kept.shape[-1]), scales.view(*shape, groups)
    return laid_out(QuantisedMatrix(codes=codes, scales=scales, columns=columns, group=wide))


def _rounded(flat: Tensor, kind: Kind, group: int, groups: int, kept: torch.dtype, most: Tensor | None = None) -> tuple[Tensor, Tensor]:
    parts = torch.nn.functional.pad(flat, (0, groups * group - flat.shape[1])).unflatten(1, (groups, group))
    largest = parts.abs().amax(2, keepdim=True) if most is None else most.unsqueeze(2)
    limit = {"fp8": LARGEST_FP8, "int8": 127.0, "int4": 7.0}[kind]
    divisor = largest.new_tensor(limit)  # on a GPU torch multiplies by the inverse of a number, which rounds differently
    scales = torch.where(largest == 0, 1.0, largest / divisor).to(kept)  # that of a NaN is NaN
    scales = torch.where(scales == 0, torch.finfo(kept).tiny, scales)  # a division that underflows
    ratio = parts / scales.float()
    codes = ratio.clamp(-limit, limit) if kind == "fp8" else ratio.round().clamp(-limit - 1, limit)
    codes = codes.to(torch.float8_e4m3fn if kind == "fp8" else torch.int8)
    return codes.flatten(1)[:, : flat.shape[1]], scales.flatten(1)
