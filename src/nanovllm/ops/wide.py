"""`linear_add_norm`: a projection, the residual, and the norm that follows; and how products of many rows are cut on a GPU."""

from dataclasses import dataclass

import torch

from ..types import Float, Tensor
from .backends import dependent_launch, own_kernels, processors, shared_memory
from .linear import linear
from .plain import rms_norm

ROWS = 64  # of one program
MOST = 256  # rows beyond which the library's products are as fast

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define(
    "linear_add_norm(Tensor x, Tensor weight, Tensor? bias, Tensor residual, Tensor gain, float eps) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WideTile:
    """How a product is cut: outputs and rows of a program, inputs of a step of its loop, steps in flight, parts of the inputs, warps."""

    outputs: int = 32
    rows: int = ROWS
    depth: int = 128
    stages: int = 4
    parts: int = 1
    warps: int = 4


def linear_add_norm(
    x: Float[Tensor, "B K"],
    weight: Float[Tensor, "M K"],
    bias: Float[Tensor, "M"] | None,
    residual: Float[Tensor, "B M"],
    gain: Float[Tensor, "M"],
    eps: float,
) -> tuple[Float[Tensor, "B M"], Float[Tensor, "B M"]]:
    """`y = residual + (x @ weight.T + bias)` and `norm(y)`, the RMS norm with a gain. Rounds where the plain functions do."""
    return torch.ops.nanovllm.linear_add_norm.default(x, weight, bias, residual, gain, eps)


@torch.library.register_fake("nanovllm::linear_add_norm", lib=_LIBRARY)
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y = residual + linear(x, weight, bias)
    return y, rms_norm(y, gain, eps)


def _cuda(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    # A copy that makes a weight contiguous would be read before it is waited for.
    whole = all(t is None or t.is_contiguous() for t in (weight, bias, gain))
    if not whole or not own_kernels(x.device, x.dtype):
        return _reference(x, weight, bias, residual, gain, eps)
    from . import triton_wide

    x, residual, pdl = x.contiguous(), residual.contiguous(), dependent_launch(x.device)
    tile = wide_tile(x.shape[0], weight.shape[0], weight.shape[1], False, processors(x.device), shared_memory(x.device), split=True)
    if tile is None:
        parts, bias = linear(x, weight, bias).unsqueeze(0), None
    elif tile.parts == 1:
        parts, bias = triton_wide.product(x, weight, bias, False, tile, pdl).unsqueeze(0), None
    else:
        parts = triton_wide.partial_product(x, weight, tile, pdl)
    return triton_wide.sum_norm(parts, bias, residual, gain, eps, pdl)


def wide_tile(rows: int, outputs: int, width: int, gated: bool, processors: int, memory: int, *, split: bool = False) -> WideTile | None:
    """The cut that was fastest on an H200 among those tried; None where the library's product is.

    Programs take a multiprocessor each, so there are no more than `processors` of them, and `memory` bytes of its shared memory at most.
    `split`: whether the inputs may be cut.
    """
    blocks = -(-rows // ROWS)
    if (gated and blocks > 1) or rows > MOST:
        return None
    for parts in (4, 3, 2, 1) if split else (1,):
        for columns, depth, stages in ((32, 128 if gated else 256, 4 if gated else 3), (64, 128, 4)):
            programs = outputs // columns * blocks * parts
            if 2 * stages * depth * (ROWS + columns * (2 if gated else 1)) > memory:
                continue
            if outputs % columns == 0 and width % (depth * parts) == 0 and programs <= processors:
                return WideTile(outputs=columns, depth=depth, stages=stages, parts=parts)
    return None


_LIBRARY.impl("linear_add_norm", _reference, "CPU")
_LIBRARY.impl("linear_add_norm", _cuda, "CUDA")
