"""The kernels for quantised matrices compiled for GPUs that need not be there, with the tiles of models' shapes."""

import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from nanovllm.ops.linear.quantise import Kind
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.linear.quantised_tiles import SPLIT_ROWS, few_tile, many_tile, split_tile
from nanovllm.ops.moe.quantised_experts import tiles_of
from nanovllm.ops.moe.tiles import QuantisedFewTiles
from nanovllm.testing.quantised_problems import quantised_problem
from tests.ops.test_kernels_compile import PROCESSORS, Compiled, compiled  # noqa: F401  (a fixture)

pytest.importorskip("triton")
pytestmark = [pytest.mark.compile, pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")]
BF16 = torch.bfloat16
FORMS: list[tuple[Kind, int | None, int, bool, int, bool]] = [
    ("int4", 128, 1, False, 4096, False), ("int4", 32, 1, True, 1024, True), ("fp8", 128, 128, False, 12288, False),
    ("int8", None, 1, False, 1024, True),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_products(compiled: Compiled, form: tuple[Kind, int | None, int, bool, int, bool]) -> None:  # noqa: F811
    from nanovllm.ops.linear import triton_quantised_few, triton_quantised_many, triton_quantised_split

    (kind, group, rows, zeros, width, gated), outputs = form, 512
    matrix = quantised_problem(kind, outputs, width, group=group, rows=rows, zeros=zeros, scales=BF16, gpu=True)
    asm = compiled.capability >= 90
    for count in (1, 2):
        gain = torch.ones(width, dtype=BF16 if count == 1 else torch.float32) if width < 12288 else None
        residual = None if gated else torch.zeros(count, outputs, dtype=BF16)
        x = torch.zeros(count, width, dtype=BF16)
        triton_quantised_few.launch(x, matrix, gain, None, residual, 1e-6, gated, few_tile(matrix, gated), compiled.pdl, asm=asm)
    kernels: tuple[tuple[Any, Any, tuple[int, int]], ...] = (
        (triton_quantised_split.product, split_tile, (1, SPLIT_ROWS)),
        (triton_quantised_many.product, many_tile, (8, 256)),
    )
    for product, tile_of, counts in kernels:
        for count in counts:
            for split in (False,) if gated else (False, True):
                tile = tile_of(matrix, count, gated, PROCESSORS, compiled.memory, split=split)
                product(torch.zeros(count, width, dtype=BF16), matrix, None, gated, tile, compiled.pdl, asm=asm)
    triton_quantised_many.dequantise(matrix, 0, torch.empty(outputs, width, dtype=BF16), asm)
    compiled.check()


@pytest.mark.parametrize("compiled", [90], indirect=True)
@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("kind", "group", "height"), [("fp8", None, 1), ("fp8", 128, 128), ("int8", None, 1), ("int4", 128, 1)])
def test_codes_come_to_tensor_cores_without_byte_loads(
    compiled: Compiled, kind: Kind, group: int | None, height: int, gated: bool, rows: int,  # noqa: F811
) -> None:  # fmt: skip
    """By copies of 16 bytes into shared memory, and `ldmatrix` out of it. Quads have few inputs per step, and scales of their own."""
    from nanovllm.ops.linear import triton_quantised_many

    matrix, x = quantised_problem(kind, 512, 1024, group=group, rows=height, gpu=True), torch.zeros(rows, 1024, dtype=BF16)
    tile = many_tile(matrix, rows, gated, PROCESSORS, compiled.memory)
    triton_quantised_many.product(x, matrix, None, gated, tile, compiled.pdl, asm=True)
    ptx = compiled[0].asm["ptx"]
    assert "cp.async.cg." in ptx and not re.search(r"ld\.shared\.\S*[bu]8 ", ptx)
    assert kind == "int4" or "cp.async.ca." not in ptx
    tiles = tile.outputs // (16 * tile.warps) * tile.depth // 16 * (2 if gated else 1)  # of 16 x 16 elements, for each warp
    assert ptx.count("ldmatrix.sync.aligned.m8n8.x4.shared.b16") == tiles


@pytest.mark.parametrize("compiled", [90], indirect=True)
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("kind", "group"), [("int4", 128), ("int4", 32), ("fp8", None)])
def test_codes_come_to_warps_that_divide_the_inputs(compiled: Compiled, kind: Kind, group: int | None, gated: bool, rows: int) -> None:  # noqa: F811
    """As to those that do not, and nothing is spilled."""
    from nanovllm.ops.linear import triton_quantised_split

    matrix, x = quantised_problem(kind, 8192, 4096, group=group, gpu=True), torch.zeros(rows, 4096, dtype=BF16)
    tile = split_tile(matrix, rows, gated, PROCESSORS, compiled.memory)
    triton_quantised_split.product(x, matrix, None, gated, tile, compiled.pdl, asm=True)
    ptx = compiled[0].asm["ptx"]
    assert "cp.async.cg." in ptx and not re.search(r"ld\.shared\.\S*[bu]8 ", ptx)
    assert ptx.count("ldmatrix") >= tile.outputs // 16 * tile.depth // 16 * (2 if gated else 1)
    assert compiled[0].metadata.shared <= tile.stages * tile.warps * tile.depth * (
        tile.outputs * 2 * (2 if gated else 1) + (8 if rows <= 8 else 16) * matrix.fields * 2
    )


@pytest.mark.parametrize("compiled", [90], indirect=True)
@pytest.mark.parametrize("width", [1032, 12288])
def test_rounded_rows_keep_what_is_not_a_number(compiled: Compiled, width: int) -> None:  # noqa: F811
    """PTX's plain `min` would make a number of it."""
    from nanovllm.ops.linear.triton_rounded_rows import rounded_rows

    rounded_rows(torch.zeros(3, width, dtype=BF16))
    ptx = compiled[0].asm["ptx"]
    assert "min.NaN." in ptx and "min.f32" not in ptx and "cvt.rn.satfinite.e4m3x2.f32" in ptx
    compiled.check()


@pytest.mark.parametrize(("kind", "group"), [("int4", 100), ("fp8", None)])
def test_odd_forms_in_float16(compiled: Compiled, kind: Kind, group: int | None) -> None:  # noqa: F811
    from nanovllm.ops.linear import triton_quantised_many

    matrix = quantised_problem(kind, 77, 331, group=group, zeros=kind != "fp8", gpu=True)
    for count in (1, 100):
        x = torch.zeros(count, 331, dtype=torch.float16)
        tile = many_tile(matrix, count, False, PROCESSORS, compiled.memory)
        triton_quantised_many.product(x, matrix, None, False, tile, compiled.pdl, asm=compiled.capability >= 90)
    triton_quantised_many.dequantise(matrix, 0, torch.empty(77, 331, dtype=torch.float16), compiled.capability >= 90)
    compiled.check()


EXPERTS: list[tuple[Kind, int | None, int, bool]] = [
    ("fp8", 128, 128, False), ("fp8", None, 1, False), ("int8", None, 1, True), ("int4", 128, 1, False), ("int4", 32, 1, True),
    ("int4", 20, 1, False),
]  # fmt: skip


QWEN, MIXTRAL, NARROW = (8, 128, 2048, 768), (2, 8, 4096, 14336), (8, 128, 4096, 192)
ON = [
    (90, *QWEN),
    pytest.param(90, *NARROW, marks=pytest.mark.long),
    pytest.param(86, *NARROW, marks=pytest.mark.long),
    (90, *MIXTRAL),
    (86, *QWEN),
    pytest.param(86, *MIXTRAL, marks=pytest.mark.long),
    pytest.param(80, *QWEN, marks=pytest.mark.long),
    pytest.param(80, *MIXTRAL, marks=pytest.mark.long),
]


@pytest.mark.parametrize("form", EXPERTS)
@pytest.mark.parametrize(("compiled", "k", "num", "width", "inner"), ON, indirect=["compiled"])
def test_experts(compiled: Compiled, k: int, num: int, width: int, inner: int, form: tuple[Kind, int | None, int, bool]) -> None:  # noqa: F811
    """At the sizes of Qwen3-30B-A3B and Mixtral-8x7B, and of Qwen3-235B-A22B on eight GPUs, without memory for the weights."""
    from nanovllm.ops.moe import triton_quantised_experts

    (kind, group, rows, zeros), asm, few = form, compiled.capability >= 90, 0
    gate_up, down = (experts_of_shape(kind, num, *shape, group, rows, zeros) for shape in ((2 * inner, width), (width, inner)))
    for tokens in (1, 8, 48) if inner == 192 else (1, 48, 4096) if group != 20 else (48,):
        tiles = tiles_of(tokens, k, gate_up, down, compiled.memory)
        few += isinstance(tiles, QuantisedFewTiles)
        x, weights = torch.empty(tokens, width, dtype=BF16, device="meta"), torch.empty(tokens, k, device="meta")
        chosen = torch.empty(tokens, k, dtype=torch.int32, device="meta")
        triton_quantised_experts.launch(x, gate_up, down, chosen, weights, "silu", tiles, compiled.pdl, asm)
        triton_quantised_experts.launch(x, gate_up, down, chosen, weights, "silu", tiles, compiled.pdl, asm, x)
    names = {kernel.name.removeprefix("_quantised") for kernel in compiled}
    assert names == {"_sort", "_grouped", "_combine"} | ({"_few_gate_up", "_few_down"} if few else set())
    compiled.check()


def experts_of_shape(kind: Kind, num: int, outputs: int, columns: int, group: int | None, rows: int, zeros: bool) -> QuantisedMatrix:
    one = quantised_problem(kind, rows, columns, group=group, rows=rows, zeros=zeros, scales=BF16, gpu=True)

    def of(each: torch.Tensor, height: int) -> torch.Tensor:
        return torch.empty(num, height, each.shape[1], dtype=each.dtype, device="meta")

    grid = -(-outputs // rows)
    return replace(one, codes=of(one.codes, outputs), scales=of(one.scales, grid), zeros=None if one.zeros is None else of(one.zeros, grid))
