"""Tile configurations of the products with quantised matrices, and the matrices and numbers of rows that each kernel takes.

The numbers are for an H200: 132 multiprocessors, 4.8 TB/s, so that about 32 KB must be on the way to each multiprocessor. A matrix of 4-bit
codes is read in a quarter of the time of bfloat16. `benchmarks/quantised_kernels.py` measures other tile configurations.
"""

from dataclasses import dataclass, replace

from nanovllm.ops.linear.code_layouts import BLOCK
from nanovllm.ops.linear.quantised import QuantisedMatrix

SUMMED = 4  # rows of the kernel for few rows, at most: each row is in registers
SUMMED_ROWS = 2  # up to so many rows, it is the default
FUSED_ROWS = 512  # above it, a matrix is dequantised into memory once and torch multiplies
SCRATCH = 32 << 20  # bytes of dequantised weights at once, which stay in an H200's L2
PROGRAMS = 256  # about two for each multiprocessor
WIDEST = 32768  # inputs whose rows fit into the registers of one program
HELD = 64  # registers of a thread for the codes on the way, by default
MOST_HELD = 160  # at most
VECTOR = 8  # bytes of codes that a thread loads at once, so that the inputs that belong to them are loaded by the same thread


@dataclass(frozen=True, slots=True, kw_only=True)
class FewTile:
    """Tile configuration of products of few rows: outputs per program, and warps, which divide the inputs among them.

    `depth` is the number of elements of codes of an output that a warp takes per step on tensor cores. 0: sums in float32.
    """

    outputs: int
    warps: int
    depth: int = 0


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


def serves_few(matrix: QuantisedMatrix, rows: int) -> bool:
    """Return whether the kernel for few rows can multiply with this matrix.

    A vector of codes has to lie in one group, and the inputs in whole vectors. Inputs in another order are gathered before.
    """
    return rows <= SUMMED_ROWS and regular(matrix)


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
    outputs = tile.outputs * (2 if gated else 1)
    if tile.depth == 0:
        return steps_of(matrix, tile.warps) * VECTOR // 4 * outputs <= MOST_HELD
    width, span = matrix.width, BLOCK // matrix.fields
    whole = tile.outputs >= 16 and width % (tile.depth * tile.warps) == 0 and matrix.columns == matrix.fields * width
    apart = matrix.scales.shape[-1] > 1 and (matrix.group % tile.depth or tile.depth > matrix.group)
    one = tile.depth in (span // 2, span)  # a step stays in a block of columns
    return whole and one and not apart and width * 2 * outputs // (128 * tile.warps) <= MOST_HELD


def few_tile(matrix: QuantisedMatrix, gated: bool) -> FewTile:
    """Choose the tile configuration for few rows.

    4-bit codes go to tensor cores where they fit: a sum in float32 takes more than 4 instructions per code, a product on tensor cores
    less than 3. Otherwise a row of codes is read in at most 4 steps, and codes fill `HELD` registers, or fewer where few outputs would
    leave multiprocessors idle.
    """
    rows = matrix.shape[0] // (2 if gated else 1)
    if matrix.bits == 4 and rows >= 16 * PROGRAMS // 2:
        for warps in (4, 8):
            for depth in (32, 16):
                tile = FewTile(outputs=16, warps=warps, depth=depth)
                if few_fits(tile, matrix, gated):
                    return tile
    warps = 1
    while warps < 8 and steps_of(matrix, warps) > (2 if warps < 4 else 4):
        warps *= 2
    held = steps_of(matrix, warps) * VECTOR // 4 * (2 if gated else 1)
    outputs = 1 << max(0, (HELD // held).bit_length() - 1)
    while outputs > 2 and rows // outputs < PROGRAMS:
        outputs //= 2
    return FewTile(outputs=min(outputs, 16), warps=warps)


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
    warps = 8 if tall == 128 or padded == 128 else 4
    parts, width = 1, matrix.width
    programs = -(-outputs // tall) * -(-rows // padded)
    while split and parts < (8 if four else 4) and programs * parts < 2 * processors and width // (parts * 2) >= 4 * depth:
        parts *= 2
    stages = 3 if padded >= (64 if four else 128) else 6 if four else 4
    tile = ManyTile(outputs=tall, rows=padded, depth=depth, stages=stages, parts=parts, warps=warps)
    if scale_form(matrix, depth) == "spread":  # a scale per weight comes to shared memory too
        tile = replace(tile, outputs=64, rows=min(padded, 64), depth=min(32, depth), stages=2, warps=4)
    while tile.stages > 1 and not many_fits(tile, matrix, gated, memory, split=split):
        tile = replace(tile, stages=tile.stages - 1)
    return tile


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
