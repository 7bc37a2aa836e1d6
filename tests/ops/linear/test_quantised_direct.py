"""The kernel whose codes go from memory to registers: under Triton's interpreter against float64, and compiled without a GPU."""

import os
import re
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.models.tuning.launches import Codes, Machine, Work
from nanovllm.models.tuning.quantised_candidates import default_cut, others, steps, valid
from nanovllm.ops.linear.quantise import Kind
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.linear.quantised_tiles import (
    DIRECT_ROWS,
    SUMMED_ROWS,
    DirectTile,
    direct_fits,
    direct_tile,
    large,
    serves_closely,
    serves_direct,
    usual_tile,
)
from nanovllm.testing.quantised_problems import quantised_problem
from tests.ops.linear.test_quantised_kernels import error
from tests.ops.test_kernels_compile import Compiled, compiled  # noqa: F401  (a fixture)

BF16 = torch.bfloat16
FORMS: list[tuple[Kind, dict[str, Any]]] = [
    ("int4", {"group": 128, "scales": BF16}), ("int4", {"group": 128, "zeros": True}), ("int4", {"group": None, "zeros": True}),
    ("fp8", {"group": None}), ("fp8", {"group": 128, "rows": 128}), ("int8", {"group": None}), ("int8", {"group": 128, "zeros": True}),
]  # fmt: skip
compiles = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")


@pytest.mark.interpret
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("rows", "gated", "norm", "tile"),
    [(1, False, True, DirectTile(depth=2, warps=2)), (2, True, True, DirectTile(depth=2, warps=1)),
     (3, False, False, DirectTile(depth=4, warps=1)), (9, False, True, DirectTile(depth=1, warps=2))],
)  # fmt: skip
def test_every_form(form: tuple[Kind, dict[str, Any]], rows: int, gated: bool, norm: bool, tile: DirectTile) -> None:
    """The second of two turns reads what the first requests. Norm weights are powers of two, so that no product is rounded."""
    from nanovllm.ops.linear import triton_quantised_direct

    kind, more = form
    outputs, width = 128 if gated and more.get("rows") else 16, 512
    matrix = quantised_problem(kind, outputs * (2 if gated else 1), width, **more, gpu=True)
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(BF16)
    gain = (1 + torch.arange(width) % 2).to(BF16) if norm else None
    residual = None if norm else torch.ones(rows, outputs, dtype=BF16)
    assert direct_fits(tile, matrix, rows, gated)
    got = triton_quantised_direct.launch(x, matrix, gain, None, residual, 1e-6, gated, tile, False, dtype=torch.float32)
    wide = x.double()
    if gain is not None:
        wide = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6) * gain.double()
    want = wide @ matrix.dequantised(torch.float64).T
    if gated:
        gate, up = want.chunk(2, 1)
        want = torch.nn.functional.silu(gate) * up
    assert error(got, want if residual is None else want + residual.double()) < 1e-5


SHAPES = [("qkv", 6144, 4096, False), ("gate_up", 24576, 4096, True), ("down", 4096, 12288, False)]


@compiles
@pytest.mark.compile
@pytest.mark.parametrize("compiled", [90], indirect=True)
@pytest.mark.parametrize(("name", "outputs", "width", "gated"), SHAPES)
@pytest.mark.parametrize(
    ("form", "rows"),
    [(FORMS[0], 1), (FORMS[1], 8), (FORMS[0], 8), (FORMS[0], 16), (FORMS[3], 1), (FORMS[4], 8), (FORMS[5], 8)],
    ids=["int4", "zeros", "8", "16", "fp8", "fp8-block", "int8"],
)
def test_registers_suffice(
    compiled: Compiled, name: str, outputs: int, width: int, gated: bool, form: tuple[Kind, dict[str, Any]], rows: int,  # noqa: F811
    tmp_path: Path,
) -> None:  # fmt: skip
    """Codes are requested before the wait, by 16 bytes, and few bytes of a default tile go to local memory."""
    from triton import knobs

    from nanovllm.ops.linear import triton_quantised_direct

    kind, more = form
    one = quantised_problem(kind, 128, width, **more, gpu=True)
    codes, scales = (
        torch.empty(height, each.shape[1], dtype=each.dtype, device="meta")
        for each, height in ((one.codes, outputs), (one.scales, outputs // one.rows))
    )
    matrix = replace(one, codes=codes, scales=scales)
    x, gain = torch.empty(rows, width, dtype=BF16), None if name == "down" else torch.empty(width, dtype=BF16)
    tile = direct_tile(matrix, rows, gated)
    assert serves_direct(matrix, rows, gated)
    triton_quantised_direct.launch(x, matrix, gain, None, None, 1e-6, gated, tile, True, asm=True)
    ptx = compiled[0].asm["ptx"]
    before = ptx[: ptx.index("griddepcontrol.wait")]
    words = tile.depth * (2 if gated else 1) * 8 * (1 if kind == "int4" else 2)
    assert len(re.findall(r"ld\.global[^;]*v4\.b32", before)) >= words // 4
    file = tmp_path / "kernel.cubin"
    file.write_bytes(compiled[0].asm["cubin"])
    told = subprocess.run([knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    assert int(re.findall(r"STACK:(\d+)", told)[0]) <= 32, told


def matrix_of(kind: Kind, outputs: int, columns: int, **more: Any) -> QuantisedMatrix:
    """A matrix of these sizes without codes."""
    return Codes(kind=kind, **{"group": 128 if kind == "int4" else columns, "rows": 1, "zeros": False, **more}).matrix(outputs, columns)


def test_what_it_multiplies_by_default() -> None:
    """The numbers of rows, and the divisions of columns, that were measured, in bfloat16 on a GPU that can run it."""
    square = matrix_of("int4", 4096, 4096)
    assert [serves_direct(square, rows, False) for rows in (1, 16, 17)] == [True, True, False]
    assert serves_direct(matrix_of("int4", 1024, 2048), 1, False) and serves_direct(matrix_of("int4", 24576, 4096, zeros=True), 16, True)
    small = matrix_of("fp8", 4096, 1024)
    assert [serves_direct(small, rows, False) for rows in (1, 2, 3, 8, 9)] == [False, False, True, True, False]
    for wide in (matrix_of("fp8", 4096, 12288), matrix_of("fp8", 4096, 12288, group=128, rows=128), matrix_of("int8", 4096, 12288)):
        assert [serves_direct(wide, rows, False) for rows in (1, 8, 9)] == [True, True, False]
    assert not serves_direct(matrix_of("int4", 37888, 3584), 1, True)  # 28 blocks of columns
    for rows, split in ((1, False), (16, False), (16, True)):
        tiles = [usual_tile(square, rows, False, 132, 200_000, split=split, hopper=hopper) for hopper in (True, False)]
        assert [isinstance(tile, DirectTile) for tile in tiles] == [True, False]
        assert [serves_closely(square, rows, False, hopper=hopper) for hopper in (True, False)] == [True, False]


@pytest.mark.parametrize("columns", [1024, 4096, 5120, 8192, 12288, 25600, 28672])
def test_default_tiles_fit(columns: int) -> None:
    """All blocks of a row are divided evenly, and enough of them are on the way."""
    kinds: list[Kind] = ["int4", "fp8", "int8"]
    for kind, rows, gated, outputs in product(kinds, (1, 2, 4, 8, 9, 16), (False, True), (1024, 4096, 32768)):
        matrix = matrix_of(kind, outputs, columns)
        tile = direct_tile(matrix, rows, gated)
        summed = kind != "int4" and rows <= SUMMED_ROWS and not large(matrix)
        assert direct_fits(tile, matrix, rows, gated) and serves_direct(matrix, rows, gated) is (rows <= DIRECT_ROWS[kind] and not summed)
        assert tile.depth * tile.warps * (2 if gated else 1) >= 8


def test_a_tuner_knows_it() -> None:
    work = Work(
        part="qkv", form="few", rows=8, outputs=6144, width=4096, norm=True, codes=Codes(kind="int4", group=128, rows=1, zeros=False)
    )
    for hopper in (True, False):
        machine = Machine(processors=132, memory=200_000, hopper=hopper)
        assert (default_cut(work, machine) == (16, 4, 4, 168)) is hopper and valid(work, (16, 4, 4, 168), machine) is hopper
        assert ((16, 4, 4, 168) in others(work, machine)) is hopper
    assert {(16, 2, 4, 168), (16, 4, 8, 168), (16, 4, 4, 128)} <= {*steps((16, 4, 4, 168))}
