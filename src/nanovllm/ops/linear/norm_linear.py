"""`norm_linear`: a norm, a matrix product of few rows, and an activation or residual, in one launch on a GPU."""

from collections.abc import Sequence

import torch

from nanovllm.ops.backends import dependent_launch, own_kernels, processors, shared_memory
from nanovllm.ops.cuts import CutError, named, powers_of_two
from nanovllm.ops.elementwise.norm_rope import ACTS, rms_norm
from nanovllm.ops.linear.linear import linear
from nanovllm.ops.linear.linear_add_norm import given_wide_tile
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.linear.quantised_fused import quantised_norm_linear
from nanovllm.ops.linear.tiles import Tile, piece_of
from nanovllm.types import Float, Tensor

FEW = 2  # up to so many rows, products too large for tensor-core programs are summed in float32; one row always is
ROWS = 16  # up to so many rows the norm is part of the product; with more, every program would repeat too much of it
WIDEST = 32768  # inputs that fit into the registers of one program
HELD, MOST_HELD = 64, 256  # weights in a thread's registers, by default and at most; the next kernel's programs wait in the other registers
NARROW = 16  # outputs of a program that uses tensor cores
SUMMED = 4  # rows that can be summed in float32 at most: each row is in registers
_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")


_LIBRARY.define(
    "norm_linear(Tensor x, Tensor weight, Tensor? gain, Tensor? bias, Tensor? residual, float eps, bool gated, int[] cut=[], "
    'str act="silu") -> Tensor',
    tags=(torch.Tag.pt2_compliant_tag,),
)


def norm_linear(
    x: Float[Tensor, "B K"],
    weight: Float[Tensor, "out K"] | QuantisedMatrix,
    *,
    gain: Float[Tensor, "K"] | None = None,
    bias: Float[Tensor, "out"] | None = None,
    residual: Float[Tensor, "B N"] | None = None,
    eps: float = 0.0,
    gated: bool = False,
    act: str = "silu",
    cut: Sequence[int] = (),
) -> Float[Tensor, "B N"]:
    """Compute `residual + (norm(x) @ weight.T + bias)`; parts that are None are left out.

    On a GPU this is one launch for few rows, and for many rows if there is neither norm nor residual. The result is rounded to the dtype of
    `x` where the plain functions round: after the norm and its weight, the product, the activation and the residual. If the norm weight is
    wider than `x`, the norm is not rounded before it.

    Args:
        x: Inputs, `[B, K]`.
        weight: Weights, `[out, K]`. A quantised matrix has kernels of its own.
        gain: Weight of an RMS norm of `x`, `[K]`.
        bias: Added to the product, `[out]`.
        residual: Added to the result, `[B, out]`.
        eps: Added to the mean square in the norm.
        gated: Whether `weight` is a gate and an up projection, stacked along axis 0. The result is then `act(gate) * up`, `[B, out / 2]`,
            without bias and residual.
        act: The activation of a gated product, a key of `ACTS`.
        cut: Tile configuration as integers; empty means the default. It is a `Tile` for few rows, and an argument for `given_wide_tile` if
            `goes_wide`. For a quantised matrix it is one for `quantised_tiles.given_tile`. The plain functions ignore it.

    Raises:
        CutError: `cut` does not fit the kernel.
    """
    if isinstance(weight, QuantisedMatrix):
        return quantised_norm_linear(x, weight, gain, bias, residual, eps, gated, act, cut)
    return torch.ops.nanovllm.norm_linear.default(x, weight, gain, bias, residual, eps, gated, cut, act)


@torch.library.register_fake("nanovllm::norm_linear", lib=_LIBRARY)
def _fake(x, weight, gain, bias, residual, eps, gated, cut=(), act="silu"):
    return x.new_empty(x.shape[0], weight.shape[0] // (2 if gated else 1))


def _reference(x, weight, gain, bias, residual, eps, gated, cut=(), act="silu") -> Tensor:
    y = linear(x if gain is None else rms_norm(x, gain, eps), weight, bias)
    if gated:
        gate, up = y.chunk(2, -1)
        return ACTS[act](gate) * up
    return y if residual is None else y + residual


def _cuda(x, weight, gain, bias, residual, eps, gated, cut=(), act="silu") -> Tensor:
    # The kernels read weights before they wait for earlier kernels, so a weight must not be a copy that is made here.
    whole = all(t is None or t.is_contiguous() for t in (weight, gain, bias))
    shape = (x.device, x.dtype, x.shape[0], x.shape[1], gated)
    alone = gain is None and residual is None and not (gated and bias is not None)
    if whole and alone and own_kernels(x.device, x.dtype) and goes_wide(x.shape[0], x.shape[1], gated, shared_memory(x.device)):
        return _wide(x.contiguous(), weight, bias, gated, cut, act)
    if not whole or not serves(*shape):
        return _reference(x, weight, gain, bias, residual, eps, gated, (), act)
    from nanovllm.ops.linear import triton_few_rows

    residual = None if residual is None else residual.contiguous()
    tile = given_tile(cut, x.shape[0], weight.shape[0] // (2 if gated else 1), x.shape[1], gated, shared_memory(x.device))
    pdl = dependent_launch(x.device)
    return triton_few_rows.launch(x.contiguous(), weight, gain, bias, residual, eps, gated, tile, pdl, act)


def _wide(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, cut: Sequence[int], act: str) -> Tensor:
    from nanovllm.ops.linear import triton_many_rows

    pdl = dependent_launch(x.device)
    outputs, width = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    tile = given_wide_tile(cut, x.shape[0], outputs, width, gated, processors(x.device), shared_memory(x.device))
    if tile is not None:
        return triton_many_rows.product(x, weight, bias, gated, tile, pdl, act)
    y = linear(x, weight, bias)
    return triton_many_rows.gate(y, pdl, act) if gated else y


def serves(device: torch.device, dtype: torch.dtype, rows: int, width: int, gated: bool) -> bool:
    """Return whether the kernels can run a product of `rows` rows over `width` inputs; plain torch runs all others."""
    return own_kernels(device, dtype) and fits(rows, width, gated, shared_memory(device))


def goes_wide(rows: int, width: int, gated: bool, memory: int) -> bool:
    """Return whether a product without norm and residual uses the kernel for many rows.

    All products on tensor cores use it. In a layer of few rows such a product has wide weights. A kernel that keeps all of them in
    registers would leave no room for the next kernel. Gated products use it too, because only layers of many tokens have gated products
    without a norm.
    """
    return gated or rows > FEW or not fits(rows, width, gated, memory)


def fits(rows: int, width: int, gated: bool, memory: int) -> bool:
    """Return whether the data of a product fit into a program with `memory` bytes of shared memory."""
    return (rows <= FEW and width <= WIDEST) or _on_tensor_cores(rows, width, gated, memory)


def _on_tensor_cores(rows: int, width: int, gated: bool, memory: int) -> bool:
    return rows <= ROWS and width % (4 * 64) == 0 and _memory(rows, width, gated, NARROW) <= memory


def _memory(rows: int, width: int, gated: bool, outputs: int) -> int:
    """Return the largest number of bytes of shared memory of a program on tensor cores, for its weights and the rows."""
    return 2 * width * (outputs * (2 if gated else 1) + max(8, 1 << (rows - 1).bit_length()))


def tile_of(rows: int, outputs: int, width: int, gated: bool, memory: int) -> Tile:
    """Choose the tile configuration that was the fastest of those tried on an H200, with `memory` bytes of shared memory per program."""
    if rows == 1 or (rows <= FEW and not _on_tensor_cores(rows, width, gated, memory * 3 // 4)):  # a program would use most of the memory
        return _summed_tile(rows, width, 2 if gated else 1)
    depth = next(depth for depth in (256, 128, 64) if width % (4 * depth) == 0)
    wide = not gated and outputs >= 4096 and _memory(rows, width, gated, 2 * NARROW) <= memory // 2
    return Tile(outputs=2 * NARROW if wide else NARROW, warps=4, depth=depth)


def _summed_tile(rows: int, width: int, matrices: int) -> Tile:
    """Choose the tile configuration of products that are summed in float32, with as many rows of weights per output as `matrices`.

    A program also reads its inputs and their norm weights. If there are 8,192 inputs, these have as many bytes as the weights of a program
    with `HELD` of them per thread. So for one row a program has twice as many. For two rows it would leave no room for a second program.
    """
    if width & (width - 1) == 0:
        warps = 2 if width <= 2048 else 4 if width <= 4096 else 8
        held = 2 * HELD if rows == 1 and width == 8192 else HELD
        return Tile(outputs=max(1, 32 * warps * held // width // matrices), warps=warps)
    warps = next((warps for warps in (2, 4) if _padded(width, warps) <= HELD * 32 * warps), 8)
    outputs = HELD * 3 // 2 * 32 * warps // (_padded(width, warps) * matrices)
    return Tile(outputs=1 << max(0, outputs.bit_length() - 1), warps=warps)


def _padded(width: int, warps: int) -> int:
    """Return the inputs of whole pieces, which take registers."""
    piece = piece_of(width, warps)
    return -(-width // piece) * piece


def given_tile(cut: Sequence[int], rows: int, outputs: int, width: int, gated: bool, memory: int) -> Tile:
    """Return the tile configuration of a cut, that of `tile_of` if it is empty. Raises `CutError` if it does not fit."""
    if not cut:
        return tile_of(rows, outputs, width, gated, memory)
    tile = named(Tile, cut)
    if not tile_fits(tile, rows, width, gated, memory):
        raise CutError(f"{tile} does not fit a product of {rows} rows over {width} inputs{' twice' * gated} in {memory} bytes of memory")
    return tile


def tile_fits(tile: Tile, rows: int, width: int, gated: bool, memory: int) -> bool:
    """Return whether a kernel can use this tile configuration, with `memory` bytes of shared memory per program."""
    if not powers_of_two(tile.outputs, tile.warps) or tile.warps > 16:
        return False
    if tile.depth == 0:
        weights = tile.outputs * _padded(width, tile.warps) * (2 if gated else 1)
        return rows <= SUMMED and width <= WIDEST and weights <= MOST_HELD * 32 * tile.warps
    whole = powers_of_two(tile.depth) and tile.depth >= 16 and width % (tile.depth * tile.warps) == 0
    return whole and rows <= ROWS and tile.outputs >= NARROW and _memory(rows, width, gated, tile.outputs) <= memory


_LIBRARY.impl("norm_linear", _reference, "CPU")
_LIBRARY.impl("norm_linear", _cuda, "CUDA")
