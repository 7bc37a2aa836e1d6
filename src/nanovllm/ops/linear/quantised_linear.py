"""`quantised_linear`: the product of activations with a quantised matrix."""

from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.ops.linear import cpu_product, quantised_cuda
from nanovllm.ops.linear.padded import padded_linear
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.types import Float, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define(
    "quantised_linear(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? order, Tensor? bias, int columns, int group, int rows,"
    " bool fp8_activations) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def quantised_linear(
    x: Float[Tensor, "T in_"], weight: QuantisedMatrix, bias: Float[Tensor, "out"] | None = None
) -> Float[Tensor, "T out"]:
    """Compute `x @ weight.T + bias` for a quantised matrix. Activations are rounded only if the matrix asks for it, and only on a GPU.

    Nothing is written in place. Schema: `nanovllm::quantised_linear(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? order,
    Tensor? bias, int columns, int group, int rows, bool fp8_activations) -> Tensor`. The reference dequantises the matrix to the dtype of
    `x` and calls `torch.nn.functional.linear`. On a CPU C computes the product if there is a compiler, `x` is float32 or bfloat16, and
    a group is a multiple of 32 columns or a whole row. Then the bits of a row do not depend on the other rows; else this is as in `linear`.
    On a GPU with Triton, kernels read the codes, in bfloat16 and float16. Both agree with the reference within the rounding of the dtype
    of `x`.

    Args:
        x: The activations, `[T, K]`.
        weight: The matrix, `[N, K]`.
        bias: A bias, `[N]`, or None.

    Returns:
        The product `[T, N]`, in the dtype of `x`.

    Raises:
        ValueError: The shapes are not those of a product.

    Examples:
        >>> from nanovllm.ops.linear.quantise import quantise
        >>> from nanovllm.ops.linear.quantised_linear import quantised_linear
        >>> quantised_linear(torch.tensor([[1.0, 2.0]]), quantise(torch.eye(2), "int8")).tolist()
        [[1.0, 2.0]]
    """
    w = weight
    sizes = w.columns, w.group, w.rows, w.fp8_activations
    return torch.ops.nanovllm.quantised_linear.default(x, w.codes, w.scales, w.zeros, w.order, bias, *sizes)


def plain_linear(x: Tensor, weight: Tensor | QuantisedMatrix, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, over a dequantised copy of a quantised matrix: `torch.func` can transform it with respect to `x`."""
    return F.linear(x, weight.dequantised(x.dtype) if isinstance(weight, QuantisedMatrix) else weight, bias)


@torch.library.register_fake("nanovllm::quantised_linear", lib=_LIBRARY)
def _fake(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None, bias: Tensor | None, columns: int, group: int,
    rows: int, fp8_activations: bool,
) -> Tensor:  # fmt: skip
    _require(x, QuantisedMatrix(codes=codes, scales=scales, zeros=zeros, order=order, columns=columns, group=group, rows=rows), bias)
    return x.new_empty(x.shape[0], codes.shape[0])


def _require(x: Tensor, matrix: QuantisedMatrix, bias: Tensor | None) -> None:
    """Raise `ValueError` for shapes that are not those of a product: kernels read memory by them."""
    if len(matrix.shape) != 2 or x.dim() != 2 or x.shape[1] != matrix.columns or (bias is not None and bias.shape != matrix.shape[:1]):
        given = "" if bias is None else f" and a bias {tuple(bias.shape)}"
        raise ValueError(f"x {tuple(x.shape)}{given} cannot be multiplied with a quantised matrix {tuple(matrix.shape)}")
    grid = -(-matrix.shape[0] // matrix.rows), -(-matrix.columns // matrix.group)
    parts = {"scales": (matrix.scales, grid), "zeros": (matrix.zeros, grid), "order": (matrix.order, (matrix.columns,))}
    for name, (part, shape) in parts.items():
        if part is not None and tuple(part.shape) != shape:
            raise ValueError(f"a quantised matrix {tuple(matrix.shape)} has {name} {tuple(part.shape)}, expected {shape}")


def _product(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None, bias: Tensor | None, columns: int, group: int,
    rows: int, fp8_activations: bool,
) -> Tensor:  # fmt: skip
    sizes: dict[str, Any] = {"columns": columns, "group": group, "rows": rows, "fp8_activations": fp8_activations}
    matrix = QuantisedMatrix(codes=codes, scales=scales, zeros=zeros, order=order, **sizes)
    _require(x, matrix, bias)
    if quantised_cuda.runs(x, matrix, bias):
        return quantised_cuda.product(x, matrix, bias)
    if x.device.type == "cpu" and cpu_product.serves(x, matrix, bias):
        return cpu_product.product(x, matrix, bias)
    weight = matrix.dequantised(x.dtype)
    return padded_linear(x, weight, bias) if x.device.type == "cpu" else F.linear(x, weight, bias)


_LIBRARY.impl("quantised_linear", _product, "CPU")
_LIBRARY.impl("quantised_linear", _product, "CUDA")
