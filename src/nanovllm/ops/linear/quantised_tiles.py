"""Tile configurations of the products with quantised matrices, and the matrices and numbers of rows that each kernel takes.

The numbers are for an H200: 132 multiprocessors, 4.8 TB/s, so that about 32 KB must be on the way to each multiprocessor. A matrix of 4-bit
codes is read in a quarter of the time of bfloat16. `benchmarks/quantised_kernels.py` measures other tile configurations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import ClassVar

from nanovllm.ops.cuts import CutError, named
from nanovllm.ops.linear.code_layouts import BLOCK
from nanovllm.ops.linear.quantised import QuantisedMatrix

SUMMED = 4  # rows of the kernel for few rows, at most: each row is in registers
SUMMED_ROWS = 2  # up to so many rows, it is the default, unless the next one is
SPLIT_ROWS = 16  # of the kernel whose warps divide the inputs, at most
SUMMED_PARTS = 64  # rows up to which parts of a product are summed by a kernel of their own
# The least rows that it multiplies by default, with a matrix of at least `LARGE` bytes of codes, and with a smaller one.
SPLIT_FROM = MappingProxyType({"int4": (1, 1), "int8": (1, 3), "fp8": (2, 3)})
LARGE = 8 << 20
# How many rows the kernel whose codes go from memory to registers multiplies by default.
DIRECT_ROWS = MappingProxyType({"int4": 16, "fp8": 8, "int8": 8})
LONG_INPUTS = 8192  # of a product: then its programs have 8 warps
GATED_ROWS = 64  # with 4-bit codes: above it, a product and its gate are two launches, because a program has no room for two matrices
FUSED_ROWS = 512  # above it, a matrix is dequantised into memory once and torch multiplies
SCRATCH = 32 << 20  # bytes of dequantised weights at once, which stay in an H200's L2
PROGRAMS = 256  # about two for each multiprocessor
WIDEST = 32768  # inputs whose rows fit into the registers of one program
HELD = 32  # registers of a thread for the codes on the way, by default, for each matrix
MOST_HELD = 160  # at most
VECTOR = 8  # bytes of codes that a thread loads at once, so that the inputs that belong to them are loaded by the same thread


@dataclass(frozen=True, slots=True, kw_only=True)
class FewTile:
    """Tile configuration of products of few rows, summed in float32: outputs per program, and warps, which divide the inputs among them."""

    outputs: int
    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyTile:
    """Tile configuration of products on tensor cores.

    Its fields are outputs and rows per program, elements of codes per output and loop step (`depth`), loop steps in flight (`stages`),
    parts of the inputs, and warps.
    """

    outputs: int = 64
    rows: int = 16
    depth: int = 64
    stages: int = 4
    parts: int = 1
    warps: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTile:
    """Tile configuration of products on tensor cores whose warps divide the inputs.

    Its fields are outputs per program, elements of codes per output, warp and loop step (`depth`), loop steps in flight (`stages`), parts
    of the inputs, and warps, which divide a part.
    """

    outputs: int = 32
    depth: int = 32
    stages: int = 4
    parts: int = 1
    warps: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectTile:
    """Tile configuration of products on tensor cores whose codes go from memory to registers.

    Its fields are outputs per program, blocks of codes per output and warp that are on the way at once (`depth`), warps, which divide the
    inputs, and the most registers of a thread, which say how many programs share a multiprocessor.
    """

    outputs: int = 16
    depth: int = 4
    warps: int = 4
    registers: int = 128
    parts: ClassVar[int] = 1  # of the inputs: no kernel has to add sums


Tile = FewTile | ManyTile | SplitTile | DirectTile
# The number of integers of a cut names its kernel.
KERNEL = MappingProxyType({len(fields(kind)): kind for kind in (FewTile, ManyTile, SplitTile, DirectTile)})


def given_tile(
    cut: Sequence[int], matrix: QuantisedMatrix, rows: int, gated: bool, processors: int, memory: int, *, split: bool = False,
    hopper: bool = False,
) -> Tile:  # fmt: skip
    """Return the tile configuration of a cut, which also says which kernel multiplies; that of `usual_tile` if the cut is empty.

    `split` says whether a norm follows, which can also add the sums of programs that divide the inputs, and `hopper` whether the product is
    in bfloat16 on a GPU of compute capability 9.0 or more, where the kernel whose codes go from memory to registers is a default, too.
    Raises `CutError` if no kernel can use the cut.
    """
    if not cut:
        return usual_tile(matrix, rows, gated, processors, memory, split=split, hopper=hopper)
    if len(cut) not in KERNEL:
        raise CutError(f"cut {tuple(cut)} has {len(cut)} numbers, which names none of the kernels of quantised matrices")
    tile = named(KERNEL[len(cut)], cut)
    if not tile_fits(tile, matrix, rows, gated, memory, split=split):
        raise CutError(f"{tile} does not fit a product of {rows} rows with {matrix.kind} {tuple(matrix.shape)} in {memory} bytes of memory")
    return tile


def usual_tile(
    matrix: QuantisedMatrix, rows: int, gated: bool, processors: int, memory: int, *, split: bool = False, hopper: bool = False
) -> Tile:
    """Return the default: the kernel that multiplies so many rows, and its tile configuration. The arguments are those of `given_tile`."""
    if hopper and serves_direct(matrix, rows, gated):
        return direct_tile(matrix, rows, gated)
    if serves_split(matrix, rows):
        return split_tile(matrix, rows, gated, processors, memory, split=split)
    if serves_few(matrix, rows) and not split:
        return few_tile(matrix, gated)
    tile = many_tile(matrix, rows, gated, processors, memory, split=split)
    return tile if split or gated else replace(tile, parts=parts_of_product(matrix, tile, rows, processors))


def tile_fits(tile: Tile, matrix: QuantisedMatrix, rows: int, gated: bool, memory: int, *, split: bool) -> bool:
    """Return whether a kernel can multiply so many rows by this tile configuration, with `memory` bytes of shared memory."""
    match tile:
        case FewTile():
            return rows <= SUMMED and not split and regular(matrix) and few_fits(tile, matrix, gated)
        case SplitTile():
            return split_fits(tile, matrix, rows, gated, memory, split=split)
        case DirectTile():
            return direct_fits(tile, matrix, rows, gated)
        case ManyTile():
            return many_fits(tile, matrix, gated, memory, split=split or not gated)


def gates_alone(matrix: QuantisedMatrix, rows: int) -> bool:
    """Return whether a gated product of so many rows is one launch, in which a program multiplies with both matrices."""
    return matrix.bits == 8 or rows <= GATED_ROWS


def serves_few(matrix: QuantisedMatrix, rows: int) -> bool:
    """Return whether the kernel for few rows is the one that multiplies so many rows with this matrix.

    A vector of codes has to lie in one group, and the inputs in whole vectors. Inputs in another order are gathered before. A sum in
    float32 takes more than 4 instructions per code of 4 bits, a product on tensor cores less than 2.
    """
    return rows <= SUMMED_ROWS and regular(matrix) and not serves_split(matrix, rows)


def serves_split(matrix: QuantisedMatrix, rows: int) -> bool:
    """Return whether the kernel whose warps divide the inputs is the one that multiplies so many rows with this matrix."""
    whole = len(matrix.shape) == 2 and matrix.columns % BLOCK == 0 and scale_form(matrix, BLOCK // matrix.fields) != "spread"
    return SPLIT_FROM[matrix.kind][0 if large(matrix) else 1] <= rows <= SPLIT_ROWS and whole


def serves_direct(matrix: QuantisedMatrix, rows: int, gated: bool) -> bool:
    """Return whether the kernel whose codes go from memory to registers multiplies so many rows with this matrix, where there is one.

    One and two rows of 8-bit codes of a small matrix are faster summed in float32: many small programs end sooner than few large ones.
    """
    if rows > DIRECT_ROWS[matrix.kind] or (serves_few(matrix, rows) and not large(matrix)):
        return False
    tile = direct_tile(matrix, rows, gated)
    on_the_way = tile.depth * tile.warps * (2 if gated and rows > 8 else 1)
    return on_the_way >= 8 and direct_fits(tile, matrix, rows, gated)


def serves_closely(matrix: QuantisedMatrix, rows: int, gated: bool, *, hopper: bool) -> bool:
    """Return whether a kernel multiplies so many rows that also computes the norm of its input and adds a residual."""
    return serves_few(matrix, rows) or (hopper and serves_direct(matrix, rows, gated))


def large(matrix: QuantisedMatrix) -> bool:
    """Return whether reading a matrix takes so long that it counts more than how soon a program has its result."""
    return matrix.shape[0] * matrix.width * 2 >= LARGE


def regular(matrix: QuantisedMatrix) -> bool:
    """Return whether vectors of codes have one scale each."""
    aligned = matrix.columns % VECTOR == 0 and matrix.columns <= WIDEST and matrix.order is None
    return aligned and (matrix.group % VECTOR == 0 or matrix.group >= matrix.columns)


def steps_of(matrix: QuantisedMatrix, warps: int) -> int:
    """Return in how many steps programs of `warps` warps read a row of codes."""
    return -(-matrix.width * 2 // (32 * VECTOR * warps))


def few_fits(tile: FewTile, matrix: QuantisedMatrix, gated: bool) -> bool:
    """Return whether the kernel for few rows can use this tile configuration."""
    if not all(value >= 1 and value & (value - 1) == 0 for value in (tile.outputs, tile.warps)) or tile.warps > 16:
        return False
    return steps_of(matrix, tile.warps) * VECTOR // 4 * tile.outputs * (2 if gated else 1) <= MOST_HELD


def few_tile(matrix: QuantisedMatrix, gated: bool) -> FewTile:
    """Choose the tile configuration for few rows, by what `nanovllm tune` found for Qwen3-0.6B and Qwen3-8B.

    Threads of a small matrix have few codes each, so that a program ends soon. Those of a larger one read a row in at most 4 steps, and
    codes fill `HELD` registers, or fewer where few outputs would leave multiprocessors idle. A program has one output if its row is longer.
    """
    rows = matrix.shape[0] // (2 if gated else 1)
    soon, warps = not gated and not large(matrix), 1
    while warps < (16 if soon else 8) and steps_of(matrix, warps) > (1 if soon else 4 if gated or warps >= 4 else 2):
        warps *= 2
    if soon:
        outputs = 4
    elif not gated and steps_of(matrix, warps) > 4:
        outputs = 1
    else:
        outputs = 1 << max(0, (HELD // (steps_of(matrix, warps) * VECTOR // 4)).bit_length() - 1)
    while outputs > 2 and rows // outputs < PROGRAMS:
        outputs //= 2
    return FewTile(outputs=min(outputs, 16), warps=warps)


def split_fits(tile: SplitTile, matrix: QuantisedMatrix, rows: int, gated: bool, memory: int, *, split: bool) -> bool:
    """Return whether the kernel whose warps divide the inputs can use this tile configuration, with `memory` bytes of shared memory."""
    sizes, span = (tile.outputs, tile.depth, tile.warps), BLOCK // matrix.fields
    if not all(value >= 1 and value & (value - 1) == 0 for value in sizes) or min(tile.outputs, tile.depth) < 16 or tile.warps > 16:
        return False
    if rows > SPLIT_ROWS or tile.depth > span or tile.stages < 1 or not 1 <= tile.parts <= (8 if split else 1):
        return False
    if matrix.columns % (matrix.fields * span * tile.parts * tile.warps) or scale_form(matrix, tile.depth) == "spread":
        return False
    codes = tile.outputs * tile.depth * 2 * (2 if gated else 1)
    inputs = split_columns(rows) * tile.depth * matrix.fields * 2
    return tile.stages * tile.warps * (codes + inputs) <= memory


def direct_fits(tile: DirectTile, matrix: QuantisedMatrix, rows: int, gated: bool) -> bool:
    """Return whether the kernel whose codes go from memory to registers can use this tile configuration.

    The model has to be in bfloat16, and norm weights too.
    """
    powers, outputs = (tile.outputs, tile.warps, tile.depth), matrix.shape[0] // (2 if gated else 1)
    if not all(value >= 1 and value & (value - 1) == 0 for value in powers) or tile.outputs < 16 or tile.warps > 16:
        return False
    if not 32 <= tile.registers <= min(255, 2048 // tile.warps) or tile.registers % 8 not in (0, 7):
        return False
    if len(matrix.shape) != 2 or matrix.order is not None or outputs % tile.outputs:
        return False
    whole = matrix.columns % (BLOCK * tile.depth * tile.warps) == 0 and (matrix.group % BLOCK == 0 or matrix.group >= matrix.columns)
    words = tile.depth * tile.outputs // 16 * (2 if gated else 1) * 8 * (1 if matrix.bits == 4 else 2)
    return whole and rows <= SPLIT_ROWS and words <= MOST_HELD * 4 // 5 and not (gated and matrix.rows > 1 and outputs % matrix.rows)


def direct_tile(matrix: QuantisedMatrix, rows: int, gated: bool) -> DirectTile:
    """Choose the tile configuration for rows that `serves_direct`, by what was measured in whole layers. Its depth divides the inputs.

    Programs have 8 or 16 warps where rows of codes are long or programs are few. Codes of a gate, and more than a few rows of inputs, leave
    fewer registers for codes on the way.
    """
    four, blocks, programs = matrix.bits == 4, matrix.columns // BLOCK, matrix.shape[0] // 16
    if not gated and programs < PROGRAMS // 2:
        tile = DirectTile(depth=1, warps=8 if blocks % 16 else 16, registers=128)
    elif not gated and (matrix.columns >= LONG_INPUTS or (rows <= 2 and programs <= PROGRAMS)):
        tile = DirectTile(depth=4 if four and rows <= 4 else 2, warps=8, registers=128)
    elif gated:
        tile = DirectTile(depth=2 if rows <= 8 else 1, warps=4, registers=168)
    else:
        tile = DirectTile(depth=4 if four and rows <= 8 else 2, warps=4, registers=168)
    while tile.depth > 1 and blocks % (tile.depth * tile.warps):
        tile = replace(tile, depth=tile.depth // 2)
    return tile


def split_columns(rows: int) -> int:
    """Return how many columns the right factor of tensor cores has for so many rows."""
    return 8 if rows <= 8 else 16


def split_tile(matrix: QuantisedMatrix, rows: int, gated: bool, processors: int, memory: int, *, split: bool = False) -> SplitTile:
    """Choose the tile configuration for rows that `serves_split`. `split` says whether the inputs may be divided between programs, too.

    Warps hide one another's latency: about 8 for each multiprocessor, and steps enough for each to have loads on the way. Codes of 8 bits
    take twice the memory, so their programs are smaller. With more than 8 rows of 4-bit codes, sums of several programs cost more than they
    save.
    """
    outputs, span, four = matrix.shape[0] // (2 if gated else 1), BLOCK // matrix.fields, matrix.bits == 4
    steps = matrix.width // span
    height = 32 if four and outputs >= 32 * processors // 2 else 16
    programs, parts = -(-outputs // height), 1
    most, places = (4 if rows <= 8 else 1, 3 * processors) if four else (4, 4 * processors)
    while split and parts < most and 2 * programs * parts < places and steps % (4 * parts * 2) == 0:
        parts *= 2
    warps = 4 if not four or programs * parts >= 2 * processors or (rows > 8 and not split) else 8
    while warps > 1 and steps % (warps * parts):
        warps //= 2
    tile = SplitTile(outputs=height, depth=span, stages=3 if gated and rows > 8 else 4, parts=parts, warps=warps)
    while tile.stages > 1 and not split_fits(tile, matrix, rows, gated, memory, split=split):
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def scale_form(matrix: QuantisedMatrix, depth: int) -> str:
    """Return how the kernel for many rows applies scales with `depth` elements of codes per step.

    `"row"`: once at the end. `"step"`: after each step, one scale per output. `"fields"`: after each step, a scale for each field of an
    element, which are columns apart. `"spread"`: each weight is scaled and rounded before the product, as a dequantised weight is.
    """
    if matrix.scales.shape[-1] == 1:
        return "row"
    group = matrix.group
    if group % depth:
        return "spread"
    return "step" if group % BLOCK == 0 else "fields"


def many_tile(matrix: QuantisedMatrix, rows: int, gated: bool, processors: int, memory: int, *, split: bool = False) -> ManyTile:
    """Choose the tile configuration for many rows, with `memory` bytes of shared memory.

    `split` says whether the inputs may be divided between programs.
    """
    padded = min(128, max(16, 1 << (rows - 1).bit_length()))
    outputs = matrix.shape[0] // (2 if gated else 1)
    depth = BLOCK // matrix.fields
    if matrix.scales.shape[-1] > 1 and matrix.group < depth:
        depth = max(16, 1 << (matrix.group.bit_length() - 1))
    four = matrix.bits == 4
    # 64 outputs per 4 warps, so that no two warps convert the same codes.
    tall = 128 if padded >= (64 if four else 128) and not gated else 64
    warps = 8 if tall == 128 else 4
    parts, least = 1, (4 if four else 12) * depth  # elements of a part, at least
    programs, places = -(-outputs // tall) * -(-rows // padded), processors * (1 if tall == 128 or padded == 128 else 2)
    while split and parts < (8 if four else 4) and 2 * programs * parts <= places and matrix.width // (2 * parts) >= least:
        parts *= 2
    stages = 3 if padded >= (64 if four else 128) else 6 if four or (padded == 64 and not gated and not split) else 4
    tile = ManyTile(outputs=tall, rows=padded, depth=depth, stages=stages, parts=parts, warps=warps)
    if scale_form(matrix, depth) == "spread":  # a scale per weight comes to shared memory too
        tile = replace(tile, outputs=64, rows=min(padded, 64), depth=min(32, depth), stages=2, warps=4)
    while tile.stages > 1 and not many_fits(tile, matrix, gated, memory, split=split):
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def parts_of_product(matrix: QuantisedMatrix, tile: ManyTile, rows: int, processors: int) -> int:
    """Return into how many parts a product that nothing is added to divides its inputs. Their sum takes another launch.

    Some dozens of rows with codes of 4 bits take so few programs of 128 outputs that most multiprocessors would be idle.
    """
    programs = -(-matrix.shape[0] // tile.outputs) * -(-rows // tile.rows)
    if matrix.bits == 8 or rows > SUMMED_PARTS or scale_form(matrix, tile.depth) == "spread":
        return 1
    return 4 if 2 * programs < processors else 2 if programs < processors else 1


def many_fits(tile: ManyTile, matrix: QuantisedMatrix, gated: bool, memory: int, *, split: bool) -> bool:
    """Return whether the kernel for many rows can use this tile configuration, with `memory` bytes of shared memory."""
    sizes = (tile.outputs, tile.rows, tile.depth, tile.warps)
    if not all(value >= 1 and value & (value - 1) == 0 for value in sizes) or min(tile.outputs, tile.rows, tile.depth) < 16:
        return False
    if tile.warps > 16 or tile.stages < 1 or not 1 <= tile.parts <= (8 if split else 1):
        return False
    if tile.depth > BLOCK // matrix.fields:  # a step stays in a block of columns
        return False
    codes = tile.outputs * tile.depth * 2 * (2 if gated else 1)
    return tile.stages * (codes + tile.rows * matrix.fields * tile.depth * 2) <= memory
