"""The kernel whose codes go from memory to registers: under Triton's interpreter against float64, and compiled without a GPU."""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.ops.linear.quantise import Kind
from nanovllm.ops.linear.quantised_tiles import DirectTile, direct_fits
from nanovllm.testing.quantised_problems import quantised_problem
from tests.ops.linear.test_quantised_kernels import error
from tests.ops.test_kernels_compile import Compiled, compiled  # noqa: F401  (a fixture)

BF16 = torch.bfloat16
FORMS: list[tuple[Kind, dict[str, Any]]] = [
    ("int4", {"group": 128, "scales": BF16}), ("int4", {"group": 128, "zeros": True}), ("int4", {"group": None, "zeros": True}),
    ("fp8", {"group": None}), ("fp8", {"group": 128, "rows": 128}),
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
    outputs, width = 16 if kind == "int4" or not gated or more["group"] is None else 128, 512
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
    ("form", "tile"), [(FORMS[0], DirectTile(outputs=16, depth=2, warps=8)), (FORMS[4], DirectTile(outputs=16, depth=1, warps=8))]
)
def test_registers_suffice(
    compiled: Compiled, name: str, outputs: int, width: int, gated: bool, form: tuple[Kind, dict[str, Any]], tile: DirectTile,  # noqa: F811
    tmp_path: Path,
) -> None:  # fmt: skip
    """Codes are requested before the wait, by 16 bytes, and none go to shared or local memory."""
    from triton import knobs

    from nanovllm.ops.linear import triton_quantised_direct

    (kind, more), rows = form, 1
    one = quantised_problem(kind, 128, width, **more, gpu=True)
    codes, scales = (
        torch.empty(height, each.shape[1], dtype=each.dtype, device="meta")
        for each, height in ((one.codes, outputs), (one.scales, outputs // one.rows))
    )
    matrix = replace(one, codes=codes, scales=scales)
    x, gain = torch.empty(rows, width, dtype=BF16), None if name == "down" else torch.empty(width, dtype=BF16)
    tile = replace(tile, registers=168 if gated else 128)
    triton_quantised_direct.launch(x, matrix, gain, None, None, 1e-6, gated, tile, True, asm=True)
    ptx = compiled[0].asm["ptx"]
    before = ptx[: ptx.index("griddepcontrol.wait")]
    words = tile.depth * (2 if gated else 1) * 8 * (1 if kind == "int4" else 2)
    assert len(re.findall(r"ld\.global[^;]*v4\.b32", before)) >= words // 4
    file = tmp_path / "kernel.cubin"
    file.write_bytes(compiled[0].asm["cubin"])
    told = subprocess.run([knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    assert "STACK:0" in told, told
