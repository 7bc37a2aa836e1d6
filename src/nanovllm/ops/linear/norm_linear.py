"""`norm_linear`: a matrix product of few rows with what stands before and after it in a decoder layer, in one launch on a GPU."""

from collections.abc import Sequence

import torch

from nanovllm.ops.backends import dependent_launch, own_kernels, processors, shared_memory
from nanovllm.ops.cuts import CutError, named, powers_of_two
from nanovllm.ops.elementwise.norm_rope import ACTS, rms_norm
from nanovllm.ops.linear.linear import linear
from nanovllm.ops.linear.linear_add_norm import given_wide_tile
from nanovllm.ops.linear.tiles import Tile
from nanovllm.types import Float, Tensor

FEW = 2  # rows up to which products that fill tensor cores' memory are summed in float32, without them; one row always is
ROWS = 16  # up to which the norm is part of the product: beyond, every program would compute too much of it
WIDEST = 16384  # inputs that lie in the registers of one program
HELD, MOST_HELD = 64, 256  # weights in a thread's registers: the next kernel's programs wait in those that are left; and at most
NARROW = 16  # outputs of a program that works on tensor cores
SUMMED = 4  # rows that can be summed in float32 at all: each is held in registers
_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")


_LIBRARY.define(
    "norm_linear(Tensor x, Tensor weight, Tensor? gain, Tensor? bias, Tensor? residual, float eps, bool gated, int[] cut=[], "
    'str act="silu") -> Tensor',
    tags=(torch.Tag.pt2_compliant_tag,),
)


def norm_linear(
    x: Float[Tensor, "B K"],
    weight: Float[Tensor, "out K"],
    *,
    gain: Float[Tensor, "K"] | None = None,
    bias: Float[Tensor, "out"] | None = None,
    residual: Float[Tensor, "B N"] | None = None,
    eps: float = 0.0,
    gated: bool = False,
    act: str = "silu",
    cut: Sequence[int] = (),
) -> Float[Tensor, "B N"]:
    """`residual + (norm(x) @ weight.T + bias)`, where `norm` is the RMS norm with a gain, and what is None is left out.

    One launch for few rows; for many where there is neither norm nor residual (`wide.py` has the rest).

    `gated`: `weight` is a gate and an up projection, stacked along axis 0, and the result is `act(gate) * up`, `[B, out / 2]`; without
    bias and residual. `act` is one of `plain.ACTS`. Rounds to x's dtype where the plain functions do: after the norm, but with a wider gain
    behind the gain alone, the gain, the product, the activation, the residual.

    `cut`: a `Tile` for few rows; where `goes_wide`, what `given_wide_tile` takes; as integers, empty: the default. A kernel that it does
    not fit raises `CutError`; plain functions do not look at it.
    """
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
    # A copy that makes a weight contiguous would be read before it is waited for.
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
    """Whether the kernels can run a product of `rows` rows over `width` inputs; plain torch serves everything else."""
    return own_kernels(device, dtype) and fits(rows, width, gated, shared_memory(device))


def goes_wide(rows: int, width: int, gated: bool, memory: int) -> bool:
    """Whether a product with neither norm nor residual is cut as one of many rows: on tensor cores always, for where a layer of few rows
    asks for one its weights are wide, and a kernel that holds them whole leaves no room for the next; and always gate and up, which
    only layers of many tokens ask for without a norm."""
    return gated or rows > FEW or not fits(rows, width, gated, memory)


def fits(rows: int, width: int, gated: bool, memory: int) -> bool:
    """Whether a product's parts fit into a program with so many bytes of shared memory."""
    return (rows <= FEW and width <= WIDEST) or _on_tensor_cores(rows, width, gated, memory)


def _on_tensor_cores(rows: int, width: int, gated: bool, memory: int) -> bool:
    return rows <= ROWS and width % (4 * 64) == 0 and _memory(rows, width, gated, NARROW) <= memory


def _memory(rows: int, width: int, gated: bool, outputs: int) -> int:
    """Bytes of shared memory, at most, of a program on tensor cores: its weights and the rows."""
    return 2 * width * (outputs * (2 if gated else 1) + max(8, 1 << (rows - 1).bit_length()))


def tile_of(rows: int, outputs: int, width: int, gated: bool, memory: int) -> Tile:
    """The cut that was fastest on an H200 among those tried, by shape; `memory` bounds a program's shared memory, in bytes."""
    if rows == 1 or (rows <= FEW and not _on_tensor_cores(rows, width, gated, memory * 3 // 4)):  # where a program would fill its place
        whole = 1 << (width - 1).bit_length()
        warps = 2 if whole <= 2048 else 4 if whole <= 4096 else 8
        return Tile(outputs=max(1, 32 * warps * HELD // whole // (2 if gated else 1)), warps=warps)
    depth = next(depth for depth in (256, 128, 64) if width % (4 * depth) == 0)
    wide = not gated and outputs >= 4096 and _memory(rows, width, gated, 2 * NARROW) <= memory // 2
    return Tile(outputs=2 * NARROW if wide else NARROW, warps=4, depth=depth)


def given_tile(cut: Sequence[int], rows: int, outputs: int, width: int, gated: bool, memory: int) -> Tile:
    """The tile that a cut spells, `tile_of`'s where it is empty. Raises `CutError` for one that does not fit."""
    if not cut:
        return tile_of(rows, outputs, width, gated, memory)
    tile = named(Tile, cut)
    if not tile_fits(tile, rows, width, gated, memory):
        raise CutError(f"{tile} does not fit a product of {rows} rows over {width} inputs{' twice' * gated} in {memory} bytes of memory")
    return tile


def tile_fits(tile: Tile, rows: int, width: int, gated: bool, memory: int) -> bool:
    """Whether a kernel can cut a product so; `memory` bounds a program's shared memory, in bytes."""
    if not powers_of_two(tile.outputs, tile.warps) or tile.warps > 16:
        return False
    if tile.depth == 0:
        held = (tile.outputs << (width - 1).bit_length()) * (2 if gated else 1)
        return rows <= SUMMED and width <= WIDEST and held <= MOST_HELD * 32 * tile.warps
    whole = powers_of_two(tile.depth) and tile.depth >= 16 and width % (tile.depth * tile.warps) == 0
    return whole and rows <= ROWS and tile.outputs >= NARROW and _memory(rows, width, gated, tile.outputs) <= memory


_LIBRARY.impl("norm_linear", _reference, "CPU")
_LIBRARY.impl("norm_linear", _cuda, "CUDA")
