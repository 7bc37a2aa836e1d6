"""The kernel whose programs take all rows, under Triton's interpreter against float64, and compiled for a GPU that need not be there."""

import os
import re
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch

from nanovllm.ops.linear import quantised_tiles
from nanovllm.ops.linear.linear import linear
from nanovllm.ops.linear.linear_add_norm import linear_add_norm
from nanovllm.ops.linear.norm_linear import norm_linear
from nanovllm.ops.linear.quantise import KINDS, Kind
from nanovllm.ops.linear.quantised_tiles import RowsTile, rows_fits, rows_tile
from nanovllm.testing.quantised_problems import quantised_problem
from tests.ops.linear.test_quantised_kernels import block, error, every_code, inputs, product_problem, quiet
from tests.ops.test_kernels_compile import Compiled, compiled  # noqa: F401  (a fixture)

interpreted = pytest.mark.interpret
BF16 = torch.bfloat16
ROW: dict[str, Any] = {"group": None}
FORMS: list[tuple[Kind, int, int, dict[str, Any]]] = [
    ("int4", 24, 512, {"group": 128, "scales": torch.bfloat16}), ("int4", 12, 512, {"group": 256, "spread": 1e4, "zeros": True}),
    ("int4", 33, 1024, {"group": 128, "zeros": True, "scales": torch.float16}), ("int4", 6, 512, {**ROW, "zeros": True}),
    ("int8", 24, 512, {**ROW, "spread": 1e4}), ("int8", 14, 512, {"group": 128, "zeros": True}),
    ("fp8", 130, 512, {"group": 128, "rows": 128, "scales": torch.bfloat16}), ("fp8", 40, 512, {**ROW, "spread": 1e4}),
]  # fmt: skip


@interpreted
@quiet
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "gated", "extras"), [(17, True, False), (45, False, True), (70, False, False)])
def test_every_form(form: tuple[Kind, int, int, dict[str, Any]], rows: int, gated: bool, extras: bool) -> None:
    """Steps of half a block and of a whole one, rows of one and of two accumulators, more rows than a program has, and parts."""
    from nanovllm.ops.linear import triton_quantised_rows

    (kind, *_), (matrix, x, bias, want) = form, product_problem(form, rows, gated, extras)
    for tile in (
        RowsTile(outputs=16, rows=64, depth=block(kind), stages=2, warps=4),
        RowsTile(outputs=32, rows=32, tail=16, depth=block(kind) // 2, stages=2, warps=4),
    ):
        assert rows_fits(tile, matrix, gated, 200_000, split=False)
        assert error(triton_quantised_rows.product(x, matrix, bias, gated, tile, False), want) < 1e-5
    if not gated and bias is None:
        tile = RowsTile(outputs=16, rows=32, tail=16, depth=block(kind), stages=2, parts=2, warps=4)
        assert rows_fits(tile, matrix, False, 200_000, split=True)
        sums = triton_quantised_rows.product(x, matrix, None, False, tile, False)
        assert sums.shape[0] == 2 and error(sums.sum(0), want) < 1e-5


@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scales", [BF16, torch.float16, torch.float32])
def test_weights_in_groups_are_rounded_as_dequantised_weights(kind: Kind, scales: torch.dtype) -> None:
    from nanovllm.ops.linear import triton_quantised_rows

    matrix = quantised_problem(kind, 32, 256, group=128, scales=scales, zeros=kind == "int4", gpu=True)
    tile = RowsTile(outputs=32, rows=64, depth=block(kind), stages=2)
    got = triton_quantised_rows.product(torch.eye(256, dtype=torch.float16), matrix, None, False, tile, False)
    assert torch.equal(got.T, matrix.dequantised(torch.float16))


@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_converted_exactly(kind: Kind) -> None:
    """By inputs that are 1 in one place."""
    from nanovllm.ops.linear import triton_quantised_rows

    matrix, numbers = every_code(kind)
    for first in (0, 32, 64, 96):
        x = torch.zeros(4, matrix.columns, dtype=torch.float16)
        x[range(4), range(first, first + 4)] = 1
        want = (numbers[first // 64] if kind == "int4" else numbers).half().expand(4, -1)
        tile = RowsTile(outputs=64, rows=16, depth=block(kind), stages=2)
        assert torch.equal(triton_quantised_rows.product(x, matrix, None, False, tile, False), want)


@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_a_row_do_not_depend_on_the_other_rows(kind: Kind) -> None:
    from nanovllm.ops.linear import triton_quantised_rows

    matrix, x = quantised_problem(kind, 24, 256, group=128, gpu=True), inputs(100, 256)
    tile = RowsTile(outputs=16, rows=32, tail=16, depth=block(kind), stages=2)
    few, all_ = (triton_quantised_rows.product(x[:rows], matrix, None, False, tile, False) for rows in (17, 100))
    assert torch.equal(few, all_[:17])


@interpreted
@quiet
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [20, 70])
def test_the_ops_choose_it(kind: Kind, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default if its rows say so, and by a cut, whose sums of parts and gates are those of the plain functions."""
    from nanovllm.ops.linear import quantised_cuda, triton_quantised_rows

    matrix, x = quantised_problem(kind, 48, 256, group=128, gpu=True), inputs(rows, 256)
    bias, residual, norm = torch.randn(48), inputs(rows, 48), torch.rand(48)

    def results(cut: tuple[int, ...] = (), whole: tuple[int, ...] = ()) -> list[torch.Tensor]:
        found = [norm_linear(x, matrix, gated=True, cut=whole), linear(x, matrix, bias), norm_linear(x, matrix, bias=bias, cut=cut)]
        return [*found, *linear_add_norm(x, matrix, bias, residual, norm, 1e-6, cut=cut)]

    tiles, product = list[RowsTile](), triton_quantised_rows.product

    def noted(*given: Any) -> torch.Tensor:  # the tile is the fifth
        tiles.append(given[4])
        return product(*given)

    want = results()
    monkeypatch.setattr(quantised_cuda, "own_kernels", lambda device, dtype: True)
    monkeypatch.setattr(quantised_cuda, "dependent_launch", lambda device: False)
    monkeypatch.setattr(quantised_cuda, "_limits", lambda device: (2, 200_000))
    monkeypatch.setattr(triton_quantised_rows, "product", noted)
    tile = RowsTile(outputs=16, rows=32, depth=block(kind), stages=2, warps=4)
    for each in (results(astuple(replace(tile, parts=2)), astuple(tile)), results()):
        for got, expected in zip(each, want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert len(tiles) == 3
    monkeypatch.setattr(quantised_tiles, "ALL_ROWS", {kind: range(17, 257)})
    for got, expected in zip(results(), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert len(tiles) == 7 and {each.parts for each in tiles[3:]} == {1, 2}


@pytest.mark.parametrize("kind", KINDS)
def test_default_tiles_fit(kind: Kind) -> None:
    for outputs, columns, gated in ((6144, 4096, False), (4096, 12288, False), (24576, 4096, True), (1024, 1024, True)):
        matrix = quantised_problem(kind, 128, columns, group=128, gpu=True)
        matrix = replace(matrix, codes=matrix.codes.new_empty(outputs, matrix.codes.shape[1]))
        for rows in range(1, 600):
            tile = rows_tile(matrix, rows, gated, 132, 200_000)
            assert rows_fits(tile, matrix, gated, 200_000, split=not gated)
            taken = (tile.rows + tile.tail) * (2 if gated and kind != "int4" and rows > 128 else 1)  # half the rows for each program
            assert taken >= min(rows, 256) and (rows <= 32 or taken * 2 <= rows * 3 or rows > 256)


def test_what_does_not_fit() -> None:
    """Groups that end within a block, an order, columns that do not fill the last block, parts of no whole blocks, and memory."""
    tile = RowsTile()
    wrong: list[tuple[dict[str, Any], int]] = [({"group": 64}, 512), ({"group": 128, "order": True}, 512), (ROW, 520)]
    for more, columns in wrong:
        assert not rows_fits(tile, quantised_problem("fp8", 128, columns, **more, gpu=True), False, 200_000, split=True)
    matrix = quantised_problem("fp8", 128, 384, group=128, gpu=True)
    assert rows_fits(tile, matrix, False, 200_000, split=True) and rows_fits(replace(tile, parts=3), matrix, False, 200_000, split=True)
    for other in (replace(tile, parts=2), replace(tile, rows=96), replace(tile, tail=8), replace(tile, depth=128), replace(tile, stages=0)):
        assert not rows_fits(other, matrix, False, 200_000, split=True)
    assert not rows_fits(replace(tile, parts=3), matrix, True, 200_000, split=False)
    assert not rows_fits(tile, matrix, False, 3 * (128 + 2 * 64) * 128 - 1, split=True)


@pytest.mark.compile
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")
@pytest.mark.parametrize("compiled", [90], indirect=True)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("kind", "group", "height", "zeros"),
    [("fp8", None, 1, False), ("fp8", 128, 128, False), ("int8", None, 1, False), ("int4", 128, 1, False), ("int4", 128, 1, True)],
)
@pytest.mark.parametrize(("rows", "tail"), [(64, 0), (64, 32), (128, 0), (256, 0)])
def test_products_overlap_conversions(
    compiled: Compiled, kind: Kind, group: int | None, height: int, zeros: bool, gated: bool, rows: int, tail: int,  # noqa: F811
) -> None:  # fmt: skip
    """Codes come from shared memory once, to where tensor cores take them, and no step waits for its own products."""
    pytest.importorskip("triton")
    from nanovllm.ops.linear import triton_quantised_rows

    matrix = quantised_problem(kind, 512, 1024, group=group, rows=height, zeros=zeros, scales=BF16, gpu=True)
    depth = block(kind) // (2 if rows == 256 else 1)
    tile = RowsTile(rows=rows, tail=tail, depth=depth, stages=4 if rows == 256 else 3)
    triton_quantised_rows.product(torch.zeros(rows + tail, 1024, dtype=BF16), matrix, None, gated, tile, compiled.pdl, asm=True)
    loop = re.search(r"\n(\$L__BB\w+):(.*?)bra\s+\1;", compiled[0].asm["ptx"], re.S)
    assert loop, "no loop"
    text = loop[2]
    assert text.count("ldmatrix.sync.aligned.m8n8.x4") == depth // 16 and not re.search(r"st\.shared|ld\.shared\.\S*[bu](8|16) ", text)
    assert text.count("wgmma.mma_async") == depth * matrix.fields // 16 * (2 if tail else 1)
    waits = [int(number) for number in re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", text)]
    assert waits and min(waits) > 0
    compiled.check()
