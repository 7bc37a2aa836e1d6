"""`linear_add_norm`: a projection, the residual, and the norms about them; `norm_add`: a norm by itself; and how products of many rows are
cut on a GPU."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from nanovllm.ops.backends import dependent_launch, own_kernels, processors, shared_memory
from nanovllm.ops.cuts import Cut, CutError, named, powers_of_two
from nanovllm.ops.elementwise.norm_rope import rms_norm
from nanovllm.ops.linear.linear import linear
from nanovllm.ops.linear.tiles import ROWS, WideTile
from nanovllm.types import Float, Tensor

MOST = 256  # rows beyond which the library's products are as fast
BY_LIBRARY: Cut = (0,)  # the cut that says: the library's product
SUMS = 128  # in the registers of one thread, at most; a program of more than 8 warps has fewer a thread
PARTS = 8  # of the inputs, at most
SHALLOW = 64  # inputs of a step of programs of which a multiprocessor takes several
DEEPEST = 4096  # inputs of a program beyond which the library's product of more rows than one program's is faster
_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")


_LIBRARY.define(
    "linear_add_norm(Tensor x, Tensor weight, Tensor? bias, Tensor residual, Tensor gain, float eps, int[] cut=[], Tensor? inner=None) "
    "-> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define("norm_add(Tensor x, Tensor gain, Tensor? residual, float eps) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def linear_add_norm(
    x: Float[Tensor, "B K"],
    weight: Float[Tensor, "M K"],
    bias: Float[Tensor, "M"] | None,
    residual: Float[Tensor, "B M"],
    gain: Float[Tensor, "M"],
    eps: float,
    *,
    inner: Float[Tensor, "M"] | None = None,
    cut: Sequence[int] = (),
) -> tuple[Float[Tensor, "B M"], Float[Tensor, "B M"]]:
    """`y = residual + (x @ weight.T + bias)` and `norm(y)`, the RMS norm with a gain. Rounds where the plain functions do.

    `inner`: the gain of a norm of the product, which is then added in its place. `cut`: see `given_wide_tile`; plain functions do not
    look at it.
    """
    return torch.ops.nanovllm.linear_add_norm.default(x, weight, bias, residual, gain, eps, cut, inner)


def norm_add(x: Float[Tensor, "B M"], gain: Float[Tensor, "M"], residual: Float[Tensor, "B M"] | None, eps: float) -> Float[Tensor, "B M"]:
    """The RMS norm with a gain, `plain.rms_norm`, plus a residual where there is one, in one launch on a GPU."""
    return torch.ops.nanovllm.norm_add.default(x, gain, residual, eps)


@torch.library.register_fake("nanovllm::linear_add_norm", lib=_LIBRARY)
def _fake(x, weight, bias, residual, gain, eps, cut=(), inner=None):
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


def _reference(x, weight, bias, residual, gain, eps, cut=(), inner=None) -> tuple[Tensor, Tensor]:
    added = linear(x, weight, bias)
    y = residual + (added if inner is None else rms_norm(added, inner, eps))
    return y, rms_norm(y, gain, eps)


def _cuda(x, weight, bias, residual, gain, eps, cut=(), inner=None) -> tuple[Tensor, Tensor]:
    # A copy that makes a weight contiguous would be read before it is waited for.
    whole = all(t is None or t.is_contiguous() for t in (weight, bias, gain, inner))
    if not whole or not own_kernels(x.device, x.dtype):
        return _reference(x, weight, bias, residual, gain, eps, (), inner)
    from nanovllm.ops.linear import triton_many_rows

    x, residual, pdl = x.contiguous(), residual.contiguous(), dependent_launch(x.device)
    outputs, width = weight.shape
    tile = given_wide_tile(cut, x.shape[0], outputs, width, False, processors(x.device), shared_memory(x.device), split=True)
    if tile is None:
        parts, bias = linear(x, weight, bias).unsqueeze(0), None
    elif tile.parts == 1:
        parts, bias = triton_many_rows.product(x, weight, bias, False, tile, pdl).unsqueeze(0), None
    else:
        parts = triton_many_rows.partial_product(x, weight, tile, pdl)
    return triton_many_rows.sum_norm(parts, bias, residual, gain, eps, pdl, inner)


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
    """The cut that was fastest on an H200 among those tried; None where the library's product is.

    Programs take a multiprocessor each, so there are no more than `processors` of them, and `memory` bytes of its shared memory at most;
    but for gated products whose outputs are too many for that, of which it takes several at once.
    `split`: whether the inputs may be cut.
    """
    blocks = -(-rows // ROWS)
    if (gated and blocks > 1) or rows > MOST:
        return None
    for parts in (4, 3, 2, 1) if split else (1,):
        for tile in _tiles(rows, gated, split):
            held = 2 * tile.stages * tile.depth * (tile.rows + tile.outputs * (2 if gated else 1))
            if held > memory or outputs % tile.outputs or width % (tile.depth * parts) or (blocks > 1 and width > DEEPEST * parts):
                continue
            places = processors * (memory // held if tile.depth == SHALLOW else 1)
            if outputs // tile.outputs * blocks * parts <= places:
                return replace(tile, parts=parts)
    return None


def _tiles(rows: int, gated: bool, split: bool) -> tuple[WideTile, ...]:
    """The tiles of all parts of a product, the best first. The last of the gated ones leaves room for others beside it."""
    wide = WideTile(outputs=64)
    if gated:
        return WideTile(), wide, WideTile(rows=16 if rows <= 8 else ROWS, depth=SHALLOW)
    narrow = WideTile(depth=256, stages=3)
    return (WideTile(rows=32, stages=5) if rows <= 32 and not split else narrow), wide


def given_wide_tile(
    cut: Sequence[int], rows: int, outputs: int, width: int, gated: bool, processors: int, memory: int, *, split: bool = False
) -> WideTile | None:
    """The tile that a cut spells, None for `BY_LIBRARY`; what `wide_tile` gives where it is empty. Raises `CutError` where it cannot be."""
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
    """Whether the kernel can cut a product of any number of rows so; `memory` bounds a program's shared memory, in bytes."""
    if not powers_of_two(tile.outputs, tile.rows, tile.depth, tile.warps) or min(tile.outputs, tile.rows, tile.depth) < 16:
        return False
    if tile.warps > 16 or not 1 <= tile.parts <= (PARTS if split else 1) or tile.stages < 1:
        return False
    columns = tile.outputs * (2 if gated else 1)
    held = 2 * tile.stages * tile.depth * (tile.rows + columns) <= memory and tile.rows * columns <= SUMS * 32 * min(tile.warps, 8)
    return held and outputs % tile.outputs == 0 and width % (tile.depth * tile.parts) == 0


_LIBRARY.impl("linear_add_norm", _reference, "CPU")
_LIBRARY.impl("linear_add_norm", _cuda, "CUDA")
_LIBRARY.impl("norm_add", _reference_add, "CPU")
_LIBRARY.impl("norm_add", _cuda_add, "CUDA")
