"""Products with a quantised matrix on a GPU: which kernel multiplies how many rows.

One or two rows with a matrix of 8 bits are summed in float32 if this is faster (`SPLIT_FROM`). All others are multiplied on tensor cores
by kernels that convert the codes they read. Above `FUSED_ROWS` rows each program would repeat too much of the conversion, so the
matrix is dequantised in pieces and torch multiplies. If the matrix asks for it, the activations of more than `scaled_product.ROWS` rows are
rounded to FP8, and torch multiplies codes.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from nanovllm.errors import BrokenInvariantError
from nanovllm.ops.backends import dependent_launch, on_hopper, own_kernels, processors, shared_memory
from nanovllm.ops.cuts import CutError
from nanovllm.ops.linear import scaled_product
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.linear.quantised_tiles import (
    FUSED_ROWS,
    SCRATCH,
    SPLIT_ROWS,
    DirectTile,
    FewTile,
    ManyTile,
    SplitTile,
    gates_alone,
    given_tile,
)
from nanovllm.types import Float, Tensor

ALIGNED = 128  # rows of the pieces of a matrix that is dequantised are a multiple of this number


def runs(x: Tensor, weight: QuantisedMatrix, *others: Tensor | None) -> bool:
    """Return whether the kernels can multiply: codes are laid out for a GPU, and tensors contiguous.

    Kernels read weights before earlier kernels have ended, so a weight must not be a copy.
    """
    weights = (weight.codes, weight.scales, weight.zeros, weight.order, *others)
    readable = weight.in_gpu_layout and all(each is None or each.is_contiguous() for each in weights)
    return own_kernels(x.device, x.dtype) and len(x) > 0 and readable


def in_order(x: Float[Tensor, "B K"], weight: QuantisedMatrix) -> tuple[Float[Tensor, "B K"], QuantisedMatrix]:
    """Gather the inputs in the order of the codes' columns. Returns them with the matrix that needs no order."""
    if weight.order is None:
        return x.contiguous(), weight
    return x.index_select(1, weight.order), replace(weight, order=None)


def _limits(device: torch.device) -> tuple[int, int]:
    return processors(device), shared_memory(device)


def norm_product(
    x: Float[Tensor, "B K"],
    weight: QuantisedMatrix,
    gain: Float[Tensor, "K"] | None,
    bias: Float[Tensor, "out"] | None,
    residual: Float[Tensor, "B N"] | None,
    eps: float,
    gated: bool,
    act: str,
    cut: Sequence[int] = (),
) -> Float[Tensor, "B N"]:
    """Compute what `norm_linear` computes, if `runs`: in one launch if the kernel for few rows multiplies. `cut` is for `given_tile`."""
    from nanovllm.ops.linear import triton_many_rows, triton_quantised_few

    new = dependent_launch(x.device)
    if len(x) <= SPLIT_ROWS and weight.order is None and not (gated and (bias is not None or residual is not None)):
        hopper = on_hopper(x.device, x.dtype) and (gain is None or gain.dtype == x.dtype)
        tile = given_tile(cut, weight, len(x), gated, *_limits(x.device), hopper=hopper)
        residual = None if residual is None else residual.contiguous()
        if isinstance(tile, DirectTile):
            return _direct(x.contiguous(), weight, gain, bias, residual, eps, gated, tile, act)
        if isinstance(tile, FewTile):
            return triton_quantised_few.launch(x.contiguous(), weight, gain, bias, residual, eps, gated, tile, new, act, new)
    if gain is not None:
        x = triton_many_rows.norm_add(x.contiguous(), gain, None, eps, new)
    y = product(x, weight, bias, gated, act, cut)
    return y if residual is None else y + residual


def product(
    x: Float[Tensor, "B K"],
    weight: QuantisedMatrix,
    bias: Float[Tensor, "out"] | None,
    gated: bool = False,
    act: str = "silu",
    cut: Sequence[int] = (),
) -> Float[Tensor, "B N"]:
    """Compute `x @ weight.T + bias`, or `act(gate) * up` of such a product, if `runs`. `cut` is for `given_tile`."""
    from nanovllm.ops.linear import triton_many_rows, triton_quantised_few

    x, weight = in_order(x, weight)
    new, alone = dependent_launch(x.device), gated and bias is None and gates_alone(weight, len(x))  # then one launch does all
    if _by_torch(x, weight):
        y = _of_many_rows(x, weight, bias)
        return triton_many_rows.gate(y, new, act) if gated else y
    tile = given_tile(cut, weight, len(x), alone, *_limits(x.device), hopper=on_hopper(x.device, x.dtype))
    if isinstance(tile, FewTile):
        y = triton_quantised_few.launch(x, weight, None, bias, None, 0.0, alone, tile, new, act, new)
    else:
        y = _on_tensor_cores(x, weight, bias, alone, tile, act)
        y = y if tile.parts == 1 else triton_many_rows.summed(y, bias, x.dtype, new)
    return triton_many_rows.gate(y, new, act) if gated and not alone else y


def product_add_norm(
    x: Float[Tensor, "B K"],
    weight: QuantisedMatrix,
    bias: Float[Tensor, "M"] | None,
    residual: Float[Tensor, "B M"],
    gain: Float[Tensor, "M"],
    eps: float,
    inner: Float[Tensor, "M"] | None,
    cut: Sequence[int] = (),
) -> tuple[Float[Tensor, "B M"], Float[Tensor, "B M"]]:
    """Compute what `linear_add_norm` computes, if `runs`. `cut` is for `given_tile`."""
    from nanovllm.ops.linear import triton_many_rows

    x, weight = in_order(x, weight)
    new = dependent_launch(x.device)
    if _by_torch(x, weight):
        parts, bias = _of_many_rows(x, weight, bias).unsqueeze(0), None
    else:
        tile = given_tile(cut, weight, len(x), False, *_limits(x.device), split=True, hopper=on_hopper(x.device, x.dtype))
        if isinstance(tile, FewTile):
            raise BrokenInvariantError(f"{tile} is for products without a norm behind them")
        parts = _on_tensor_cores(x, weight, bias, False, tile)
        if tile.parts == 1:
            parts, bias = parts.unsqueeze(0), None
    return triton_many_rows.sum_norm(parts, bias, residual.contiguous(), gain, eps, new, inner)


def _on_tensor_cores(
    x: Tensor, weight: QuantisedMatrix, bias: Tensor | None, gated: bool, tile: ManyTile | SplitTile | DirectTile, act: str = "silu"
) -> Float[Tensor, "*parts B N"]:
    """The product, or the sums of several parts in float32, by the kernel of the tile."""
    from nanovllm.ops.linear import triton_quantised_many, triton_quantised_split

    new = dependent_launch(x.device)
    if isinstance(tile, DirectTile):
        return _direct(x, weight, None, bias, None, 0.0, gated, tile, act)
    if isinstance(tile, SplitTile):
        return triton_quantised_split.product(x, weight, bias, gated, tile, new, act, new)
    return triton_quantised_many.product(x, weight, bias, gated, tile, new, act, new)


def _direct(
    x: Tensor, weight: QuantisedMatrix, gain: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float, gated: bool,
    tile: DirectTile, act: str = "silu",
) -> Float[Tensor, "B N"]:  # fmt: skip
    """The product by the kernel whose codes go from memory to registers. Raises `CutError` if it has no form for this GPU or dtype."""
    from nanovllm.ops.linear import triton_quantised_direct

    if not on_hopper(x.device, x.dtype) or (gain is not None and gain.dtype != x.dtype):
        raise CutError(f"{tile} is for bfloat16 on GPUs of compute capability 9.0")
    return triton_quantised_direct.launch(x, weight, gain, bias, residual, eps, gated, tile, True, act, True)


def _by_torch(x: Tensor, weight: QuantisedMatrix) -> bool:
    """Whether torch multiplies so many rows."""
    return len(x) > (scaled_product.ROWS if weight.fp8_activations else FUSED_ROWS)


def _of_many_rows(x: Float[Tensor, "B K"], weight: QuantisedMatrix, bias: Float[Tensor, "out"] | None) -> Float[Tensor, "B out"]:
    return scaled_product.product(x, weight, bias) if weight.fp8_activations else by_dequantising(x, weight, bias)


def by_dequantising(
    x: Float[Tensor, "B K"], weight: QuantisedMatrix, bias: Float[Tensor, "out"] | None, scratch: int = SCRATCH
) -> Float[Tensor, "B out"]:
    """Compute `x @ weight.T + bias` by torch, over at most `scratch` bytes of dequantised rows at a time. The matrix has no order."""
    from nanovllm.ops.linear import triton_quantised_many

    outputs, columns = weight.shape
    height = max(ALIGNED, scratch // (columns * x.element_size()) // ALIGNED * ALIGNED)
    rows = torch.empty(min(height, outputs), columns, dtype=x.dtype, device=x.device)
    new = x.device.type == "cuda" and dependent_launch(x.device)
    if outputs <= height:
        triton_quantised_many.dequantise(weight, 0, rows, new)
        return F.linear(x, rows, bias)
    y = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    for first in range(0, outputs, height):
        last = min(first + height, outputs)
        triton_quantised_many.dequantise(weight, first, rows[: last - first], new)
        torch.mm(x, rows[: last - first].T, out=y[:, first:last])
    return y if bias is None else y.add_(bias)
