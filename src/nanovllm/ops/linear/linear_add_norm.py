"""`linear_add_norm` (a projection, a residual and norms), `norm_add` (a norm), and tile configurations for products of many rows."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from nanovllm.ops.backends import dependent_launch, own_kernels, processors, shared_memory
from nanovllm.ops.cuts import Cut, CutError, named, powers_of_two
from nanovllm.ops.elementwise.norm_rope import rms_norm
from nanovllm.ops.linear.linear import linear
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.linear.quantised_fused import quantised_linear_add_norm
from nanovllm.ops.linear.tiles import ROWS, WideTile
from nanovllm.types import Float, Tensor

MOST = 256  # with more rows, cuBLAS (torch's own product) is as fast
BY_LIBRARY: Cut = (0,)  # the cut that selects cuBLAS
SUMS = 128  # sums in the registers of one thread, at most; programs of more than 8 warps have fewer registers per thread
PARTS = 8  # parts of the inputs, at most
SHALLOW = 64  # inputs per loop step of programs that share a multiprocessor with others
FEW_ROWS = 16  # rows whose programs have fewer rows, and more loads in flight
MEASURED = 4096  # width of the narrowest model whose parts on several GPUs were measured
MOST_STAGES = 10
DEEPEST = 4096  # with more inputs per program, and more rows than one program takes, cuBLAS is faster
_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")


_LIBRARY.define(
    "linear_add_norm(Tensor x, Tensor weight, Tensor? bias, Tensor residual, Tensor gain, float eps, int[] cut=[], Tensor? inner=None) "
    "-> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define("norm_add(Tensor x, Tensor gain, Tensor? residual, float eps) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def linear_add_norm(
    x: Float[Tensor, "B K"],
    weight: Float[Tensor, "M K"] | QuantisedMatrix,
    bias: Float[Tensor, "M"] | None,
    residual: Float[Tensor, "B M"],
    gain: Float[Tensor, "M"],
    eps: float,
    *,
    inner: Float[Tensor, "M"] | None = None,
    cut: Sequence[int] = (),
) -> tuple[Float[Tensor, "B M"], Float[Tensor, "B M"]]:
    """Compute `y = residual + (x @ weight.T + bias)` and its RMS norm, rounded where the plain functions round.

    Args:
        x: Inputs of the projection, `[B, K]`.
        weight: Weights of the projection, `[M, K]`. `cut` does not apply to a quantised matrix.
        bias: Added to the product, `[M]`, or None.
        residual: Added to the result, `[B, M]`.
        gain: Weight of the final norm, `[M]`.
        eps: Added to the mean square in the norms.
        inner: If given, weight of an RMS norm that is applied to the product before the residual is added.
        cut: Tile configuration for `given_wide_tile`, with a quantised matrix for `quantised_tiles.given_tile`; the plain functions
            ignore it.

    Returns:
        `y` and its norm, `[B, M]` each.

    Raises:
        CutError: `cut` does not fit the kernel.
    """
    if isinstance(weight, QuantisedMatrix):
        return quantised_linear_add_norm(x, weight, bias, residual, gain, eps, inner, cut)
    return torch.ops.nanovllm.linear_add_norm.default(x, weight, bias, residual, gain, eps, cut, inner)


def norm_add(x: Float[Tensor, "B M"], gain: Float[Tensor, "M"], residual: Float[Tensor, "B M"] | None, eps: float) -> Float[Tensor, "B M"]:
    """Compute `rms_norm`, plus a residual if given, in one launch on a GPU."""
    return torch.ops.nanovllm.norm_add.default(x, gain, residual, eps)


def added_norm(
    y: Float[Tensor, "B M"], residual: Float[Tensor, "B M"], gain: Float[Tensor, "M"], eps: float
) -> tuple[Float[Tensor, "B M"], Float[Tensor, "B M"]]:
    """Compute `residual + y` and its RMS norm, rounded where the plain functions round, in one launch on a GPU."""
    if not gain.is_contiguous() or not own_kernels(y.device, y.dtype):
        added = residual + y
        return added, norm_add(added, gain, None, eps)
    from nanovllm.ops.linear import triton_many_rows

    return triton_many_rows.sum_norm(y.unsqueeze(0), None, residual.contiguous(), gain, eps, dependent_launch(y.device))


@torch.library.register_fake("nanovllm::linear_add_norm", lib=_LIBRARY)
def _fake(x, weight, bias, residual, gain, eps, cut=(), inner=None):
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


def _reference(x, weight, bias, residual, gain, eps, cut=(), inner=None) -> tuple[Tensor, Tensor]:
    added = linear(x, weight, bias)
    y = residual + (added if inner is None else rms_norm(added, inner, eps))
    return y, rms_norm(y, gain, eps)


def _cuda(x, weight, bias, residual, gain, eps, cut=(), inner=None) -> tuple[Tensor, Tensor]:
    # The kernels read weights before they wait for earlier kernels, so a weight must not be a copy that is made here.
    whole = all(t is None or t.is_contiguous() for t in (weight, bias, gain, inner))
    if not whole or not own_kernels(x.device, x.dtype):
        return _reference(x, weight, bias, residual, gain, eps, (), inner)
    from nanovllm.ops.linear import triton_many_rows

    parts, bias = product_in_parts(x, weight, bias, cut)
    return triton_many_rows.sum_norm(parts, bias, residual.contiguous(), gain, eps, dependent_launch(x.device), inner)


def product_in_parts(
    x: Float[Tensor, "B K"], weight: Float[Tensor, "M K"], bias: Float[Tensor, "M"] | None, cut: Sequence[int] = ()
) -> tuple[Float[Tensor, "P B M"], Float[Tensor, "M"] | None]:
    """`x @ weight.T + bias` as parts that are still to be summed, and the bias if it is still to be added.

    One launch serves many rows best if the inputs are divided among its programs, whose sums are then float32. The last argument is that of
    `linear_add_norm`.

    Raises:
        CutError: `cut` does not fit the kernel.
    """
    if not weight.is_contiguous() or not own_kernels(x.device, x.dtype):
        return linear(x, weight, bias).unsqueeze(0), None
    from nanovllm.ops.linear import triton_many_rows

    x, pdl, (outputs, width) = x.contiguous(), dependent_launch(x.device), weight.shape
    tile = given_wide_tile(cut, x.shape[0], outputs, width, False, processors(x.device), shared_memory(x.device), split=True)
    if tile is None:
        return linear(x, weight, bias).unsqueeze(0), None
    if tile.parts == 1:
        return triton_many_rows.product(x, weight, bias, False, tile, pdl).unsqueeze(0), None
    return triton_many_rows.partial_product(x, weight, tile, pdl), bias


@torch.library.register_fake("nanovllm::norm_add", lib=_LIBRARY)
def _fake_add(x, gain, residual, eps):
    return x.new_empty(x.shape)


def _reference_add(x, gain, residual, eps) -> Tensor:
    normed = rms_norm(x, gain, eps)
    return normed if residual is None else residual + normed


def _cuda_add(x, gain, residual, eps) -> Tensor:
    if not gain.is_contiguous() or not own_kernels(x.device, x.dtype):  # as above
        return _reference_add(x, gain, residual, eps)
    from nanovllm.ops.linear import triton_many_rows

    residual = None if residual is None else residual.contiguous()
    return triton_many_rows.norm_add(x.contiguous(), gain, residual, eps, dependent_launch(x.device))


def wide_tile(rows: int, outputs: int, width: int, gated: bool, processors: int, memory: int, *, split: bool = False) -> WideTile | None:
    """Choose the tile configuration that was the fastest of those tried on an H200; None if cuBLAS was faster.

    Each program takes a multiprocessor, so there are at most `processors` programs. Each uses at most `memory` bytes of shared memory.
    Gated products are an exception: several of their programs may run on one multiprocessor, at once or one after another. `split` says
    whether the inputs may be divided between programs.
    """
    blocks = -(-rows // ROWS)
    if (gated and blocks > 1) or rows > MOST:
        return None
    tiles = _tiles(rows, outputs if split else width, gated, split, memory)
    for parts in (4, 3, 2, 1) if split else (1,):
        for tile, places in tiles:
            used = _bytes(tile, gated)
            if used > memory or outputs % tile.outputs or width % (tile.depth * parts) or (blocks > 1 and width > DEEPEST * parts):
                continue
            if outputs // tile.outputs * blocks * parts <= places * processors:
                return replace(tile, parts=parts)
    return None


def _tiles(rows: int, hidden: int, gated: bool, split: bool, memory: int) -> tuple[tuple[WideTile, int], ...]:
    """Return tile configurations of a product, the best first, each with the most programs for a multiprocessor.

    `hidden` is the number of inputs, or of outputs if `split`: of most products the width of the model. Programs of few rows have memory
    for more loads in flight. So they read as fast as the memory allows also if they leave multiprocessors idle.
    """
    wide, narrow, known = WideTile(outputs=64), WideTile(depth=256, stages=3), hidden >= MEASURED
    few = known and rows <= FEW_ROWS
    if split:
        deep = ((WideTile(outputs=64, rows=FEW_ROWS, depth=256), 1),) if few else ()
        return (narrow, 1), *deep, (wide, 1)
    if gated:
        several = WideTile(rows=FEW_ROWS if rows <= 8 else ROWS, depth=SHALLOW)  # run at once on a multiprocessor
        places = memory // _bytes(several, gated)
        if few:
            turns = 2 if hidden > MEASURED else 1  # programs of a multiprocessor, one after another
            deep = ((tile, turns) for tile in _in_flight(WideTile(rows=FEW_ROWS, depth=256), memory, gated, 4))
            pair = WideTile(rows=FEW_ROWS, warps=2)  # two run at once, the others in turn
            return *deep, (wide, 1), (pair if 2 * _bytes(pair, gated) <= memory else several, places)
        more = ((WideTile(stages=5), 1),) if known else ()
        return *more, (WideTile(), 1), (wide, 1), (several, places)
    usual = (WideTile(rows=32, stages=5) if rows <= 32 else narrow, 1), (wide, 1)
    if rows > ROWS or not known:
        return usual
    # The fewer outputs a program has, the more programs there are; with all multiprocessors busy, more outputs are better.
    padded, depth = (FEW_ROWS, 256) if few else (32, 256) if rows <= 32 else (ROWS, 128)
    small = [WideTile(outputs=each, rows=padded, depth=depth) for each in ((16, 32, 64) if few else (16, 32))]
    return *((tile, 1) for one in small for tile in _in_flight(one, memory, gated, MOST_STAGES)), *usual


def _bytes(tile: WideTile, gated: bool) -> int:
    """The bytes of shared memory of a program."""
    return 2 * tile.stages * tile.depth * (tile.rows + tile.outputs * (2 if gated else 1))


def _in_flight(tile: WideTile, memory: int, gated: bool, most: int) -> tuple[WideTile, ...]:
    """The tile configuration with up to `most` loop steps in flight, in 7/8 of the shared memory; none if that is for fewer than 3."""
    stages = min(most, memory * 7 // 8 // _bytes(replace(tile, stages=1), gated))
    return (replace(tile, stages=stages),) if stages >= 3 else ()


def given_wide_tile(
    cut: Sequence[int], rows: int, outputs: int, width: int, gated: bool, processors: int, memory: int, *, split: bool = False
) -> WideTile | None:
    """Return the tile configuration of a cut: that of `wide_tile` if it is empty, None for `BY_LIBRARY`.

    Raises `CutError` if the cut does not fit the product.
    """
    if not cut:
        return wide_tile(rows, outputs, width, gated, processors, memory, split=split)
    if tuple(cut) == BY_LIBRARY:
        return None
    tile = named(WideTile, cut)
    if not wide_fits(tile, outputs, width, gated, memory, split=split):
        raise CutError(
            f"{tile} does not fit a product of {outputs} outputs over {width} inputs{' twice' * gated} in {memory} bytes of memory"
        )
    return tile


def wide_fits(tile: WideTile, outputs: int, width: int, gated: bool, memory: int, *, split: bool) -> bool:
    """Return whether the kernel can use this tile configuration for any number of rows, with `memory` bytes of shared memory."""
    if not powers_of_two(tile.outputs, tile.rows, tile.depth, tile.warps) or min(tile.outputs, tile.rows, tile.depth) < 16:
        return False
    if tile.warps > 16 or not 1 <= tile.parts <= (PARTS if split else 1) or tile.stages < 1:
        return False
    columns = tile.outputs * (2 if gated else 1)
    fits = _bytes(tile, gated) <= memory and tile.rows * columns <= SUMS * 32 * min(tile.warps, 8)
    return fits and outputs % tile.outputs == 0 and width % (tile.depth * tile.parts) == 0


_LIBRARY.impl("linear_add_norm", _reference, "CPU")
_LIBRARY.impl("linear_add_norm", _cuda, "CUDA")
_LIBRARY.impl("norm_add", _reference_add, "CPU")
_LIBRARY.impl("norm_add", _cuda_add, "CUDA")
