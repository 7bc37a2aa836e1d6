"""The kernels for quantised matrices under Triton's interpreter: against float64, over every form of a matrix and at the limits."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from nanovllm.ops.linear.linear import linear
from nanovllm.ops.linear.linear_add_norm import linear_add_norm
from nanovllm.ops.linear.norm_linear import norm_linear
from nanovllm.ops.linear.quantise import KINDS, Kind
from nanovllm.ops.linear.quantised import QuantisedMatrix, gpu_layout
from nanovllm.ops.linear.quantised_tiles import (
    FewTile,
    ManyTile,
    few_fits,
    few_tile,
    many_fits,
    many_tile,
    regular,
    scale_form,
    serves_few,
    serves_split,
)
from nanovllm.testing.problems import wide_norm_linear
from nanovllm.testing.quantised_problems import quantised_problem

interpreted = pytest.mark.interpret
quiet = pytest.mark.filterwarnings("ignore:.*overflow encountered in exp")  # of a sigmoid that is 0
ROW: dict[str, Any] = {"group": None}
# Groups of every size that checkpoints have; rows that share scales, with a last block that is cut off; widths that are no power of two.
FORMS: list[tuple[Kind, int, int, dict[str, Any]]] = [
    ("int4", 24, 256, {"group": 128, "scales": torch.bfloat16}), ("int4", 13, 640, {"group": 64, "zeros": True}),
    ("int4", 10, 264, {"group": 32, "zeros": True, "scales": torch.float16}), ("int4", 6, 384, {**ROW, "zeros": True}),
    ("int4", 12, 512, {"group": 256, "spread": 1e4}), ("int4", 7, 200, {"group": 40, "rows": 3, "zeros": True}),
    ("int8", 7, 200, {"group": 40, "rows": 3, "zeros": True}), ("fp8", 12, 640, {"group": 64, "spread": 1e4}),
    ("int8", 24, 256, {**ROW, "spread": 1e4}), ("int8", 14, 264, {"group": 64, "zeros": True}), ("int8", 12, 1032, {**ROW, "zeros": True}),
    ("fp8", 130, 264, {"group": 128, "rows": 128, "scales": torch.bfloat16}), ("fp8", 10, 136, {**ROW, "spread": 1e4}),
]  # fmt: skip
ODD: list[tuple[Kind, int, int, dict[str, Any]]] = [  # served by the kernel for many rows alone
    ("int4", 5, 77, {"group": 10, "rows": 2, "zeros": True}), ("int4", 9, 130, {"group": 100}), ("int8", 13, 263, {"group": 60}),
    ("fp8", 260, 131, {"group": 128, "rows": 128}), ("fp8", 9, 33, ROW),
]  # fmt: skip


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


def block(kind: Kind) -> int:
    """Elements of codes that hold a block of 128 columns: the largest depth of a tile."""
    return 32 if kind == "int4" else 64


def inputs(rows: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows * width)).to(dtype)


def every_code(kind: Kind) -> tuple[QuantisedMatrix, torch.Tensor]:
    """A row for each code that is a number, of equal columns, and the numbers."""
    bits = torch.arange(256).to(torch.uint8)
    codes = bits if kind == "int4" else bits.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    numbers = codes.float()
    codes, numbers = codes[numbers.isfinite()], numbers[numbers.isfinite()]
    if kind == "int4":
        numbers = torch.stack([(bits & 15).float() - 8, (bits >> 4).float() - 8])
    whole = codes.view(torch.uint8)[:, None].repeat(1, 64 if kind == "int4" else 128).view(codes.dtype)
    return gpu_layout(QuantisedMatrix(codes=whole, scales=torch.ones(len(codes), 1), columns=128, group=128)), numbers


@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_converted_exactly(kind: Kind) -> None:
    """By inputs that are 1 in one place: both elements of a word, and all fields of an element."""
    from nanovllm.ops.linear import triton_quantised_few, triton_quantised_many

    matrix, numbers = every_code(kind)
    assert len(matrix.codes) == (254 if kind == "fp8" else 256)
    for dtype in (torch.float16, torch.float32):
        out = torch.empty(matrix.shape, dtype=dtype)
        triton_quantised_many.dequantise(matrix, 0, out)
        assert torch.equal(out, matrix.dequantised(dtype)) and torch.equal(out.signbit(), matrix.dequantised(dtype).signbit())
        for first in (0, 32, 64, 96):
            x = torch.zeros(4, matrix.columns, dtype=dtype)
            x[range(4), range(first, first + 4)] = 1
            want = (numbers[first // 64] if kind == "int4" else numbers).to(dtype).expand(4, -1)
            few = triton_quantised_few.launch(x, matrix, None, None, None, 0.0, False, FewTile(outputs=16, warps=1), False)
            assert torch.equal(few, want)
            many = triton_quantised_many.product(x, matrix, None, False, ManyTile(outputs=64, depth=block(kind), stages=2), False)
            assert torch.equal(many, want)


@interpreted
@quiet
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "gated", "norm", "extras"), [(1, True, True, False), (2, False, True, False), (3, False, False, True)])
def test_few_rows(form: tuple[Kind, int, int, dict[str, Any]], rows: int, gated: bool, norm: bool, extras: bool) -> None:
    """In programs of one warp, whose rows of codes take several steps, and of two."""
    from nanovllm.ops.linear import triton_quantised_few

    kind, outputs, columns, more = form
    outputs += outputs % 2
    matrix, x = quantised_problem(kind, outputs, columns, **more, gpu=True), inputs(rows, columns)
    assert regular(matrix) and (serves_few(matrix, 1) or serves_split(matrix, 1))
    width = outputs // 2 if gated else outputs
    gain = torch.rand(columns) + 0.5 if norm else None
    bias, residual = (torch.randn(width), torch.randn(rows, width)) if extras else (None, None)
    want = wide_norm_linear(x, matrix.dequantised(torch.float64), gain, bias, residual, 1e-6, gated)
    for tile in (FewTile(outputs=4, warps=1), FewTile(outputs=8, warps=2)):
        got = triton_quantised_few.launch(x, matrix, gain, bias, residual, 1e-6, gated, tile, False)
        assert error(got, want) < 1e-4


def product_problem(
    form: tuple[Kind, int, int, dict[str, Any]], rows: int, gated: bool, extras: bool
) -> tuple[QuantisedMatrix, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """A matrix of a form, inputs, a bias with `extras`, and the product in float64."""
    kind, outputs, columns, more = form
    outputs += outputs % 2 if gated else 0
    matrix, x = quantised_problem(kind, outputs, columns, **more, gpu=True), inputs(rows, columns)
    bias = torch.randn(outputs // 2 if gated else outputs) if extras else None
    return matrix, x, bias, wide_norm_linear(x, matrix.dequantised(torch.float64), None, bias, None, 0.0, gated)


@interpreted
@quiet
@pytest.mark.parametrize("form", [*FORMS, *ODD])
@pytest.mark.parametrize(("rows", "gated", "extras"), [(1, False, True), (33, False, False), (17, True, False)])
def test_many_rows(form: tuple[Kind, int, int, dict[str, Any]], rows: int, gated: bool, extras: bool) -> None:
    from nanovllm.ops.linear import triton_quantised_many

    (kind, *_), (matrix, x, bias, want) = form, product_problem(form, rows, gated, extras)
    half, whole = block(kind) // 2, block(kind)
    for tile in (ManyTile(outputs=16, rows=16, depth=half, stages=2), ManyTile(outputs=32, rows=32, depth=whole, stages=2)):
        assert error(triton_quantised_many.product(x, matrix, bias, gated, tile, False), want) < 1e-5
    if not gated and bias is None:
        for parts in (2, 3):
            tile = ManyTile(outputs=16, rows=32, depth=32, stages=2, parts=parts)
            sums = triton_quantised_many.product(x, matrix, None, False, tile, False)
            assert sums.shape[0] == parts and error(sums.sum(0), want) < 1e-5


@interpreted
@pytest.mark.parametrize("form", [*FORMS, *ODD])
def test_a_matrix_is_dequantised(form: tuple[Kind, int, int, dict[str, Any]]) -> None:
    """To the very bits of the reference; and products over it in pieces are those over the whole."""
    from nanovllm.ops.linear import triton_quantised_many
    from nanovllm.ops.linear.quantised_cuda import by_dequantising

    kind, outputs, columns, more = form
    matrix = quantised_problem(kind, outputs, columns, **more, gpu=True)
    for dtype in (torch.float16, torch.float32):
        for first in (0, 3):
            out = torch.full((outputs - first, columns), torch.nan, dtype=dtype)
            triton_quantised_many.dequantise(matrix, first, out)
            assert torch.equal(out, matrix.dequantised(dtype)[first:])
    x, bias = inputs(3, columns), torch.randn(outputs)
    want = wide_norm_linear(x, matrix.dequantised(torch.float64), None, bias, None, 0.0, False)
    for scratch in (0, 1 << 20):  # 128 rows at a time, and all
        assert error(by_dequantising(x, matrix, bias, scratch), want) < 1e-5


@interpreted
@pytest.mark.parametrize("value", [448.0, 2.0**-9, 0.0, -0.0, 1.5 * 2.0**-8])
def test_fp8_at_its_limits(value: float) -> None:
    from nanovllm.ops.linear import triton_quantised_few, triton_quantised_many

    codes = torch.full((16, 128), value).to(torch.float8_e4m3fn)
    x = inputs(2, 128)
    for scale in (2.0**-60, 1.0, 2.0**60):
        matrix = gpu_layout(QuantisedMatrix(codes=codes, scales=torch.full((16, 1), scale), columns=128, group=128))
        want = (x.double().sum(1, keepdim=True) * value * scale).expand(2, 16)
        for got in (
            triton_quantised_few.launch(x, matrix, None, None, None, 0.0, False, FewTile(outputs=4, warps=1), False),
            triton_quantised_many.product(x, matrix, None, False, ManyTile(outputs=16, depth=32, stages=2), False),
        ):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * abs(value) * scale)


@interpreted
@pytest.mark.parametrize(("kind", "code"), [("int8", -128), ("int8", 127), ("int4", -8), ("int4", 7)])
@pytest.mark.parametrize("zero", [None, -8, 8])
def test_integers_at_their_limits(kind: Kind, code: int, zero: int | None) -> None:
    """Sums of summands far larger than the codes are subtracted again."""
    from nanovllm.ops.linear import triton_quantised_few, triton_quantised_many

    like = quantised_problem(kind, 16, 256, group=128)
    stored = torch.full_like(like.codes, (code + 8) * 17 if kind == "int4" else code)
    zeros = None if zero is None else torch.full((16, 2), zero, dtype=torch.int16)
    matrix = gpu_layout(replace(like, codes=stored, zeros=zeros, scales=torch.tensor([[2.0**-30, 2.0**-31]]).repeat(16, 1)))
    x = inputs(2, 256)
    want = x.double() @ matrix.dequantised(torch.float64).T
    limit = 1e-5 * 2.0**-30 * (abs(code - (zero or 0)) + 8) * 16
    for got in (
        triton_quantised_few.launch(x, matrix, None, None, None, 0.0, False, FewTile(outputs=4, warps=1), False),
        triton_quantised_many.product(x, matrix, None, False, ManyTile(outputs=16, depth=32, stages=2), False),
    ):
        assert (got.double() - want).abs().max() <= limit


@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_a_row_do_not_depend_on_the_other_rows(kind: Kind) -> None:
    from nanovllm.ops.linear import triton_quantised_few, triton_quantised_many

    matrix, x = quantised_problem(kind, 24, 256, group=128, gpu=True), inputs(33, 256)
    gain = torch.rand(256) + 0.5
    few = [
        triton_quantised_few.launch(x[:rows], matrix, gain, None, None, 1e-6, True, tile, False)
        for tile in (FewTile(outputs=4, warps=1), FewTile(outputs=16, warps=2))
        for rows in (1, 2, 4)
    ]
    for one, two, four in (few[:3], few[3:]):
        assert torch.equal(one, four[:1]) and torch.equal(two, four[:2])
    tile = ManyTile(outputs=16, rows=16, depth=block(kind), stages=2)
    many = [triton_quantised_many.product(x[:rows], matrix, None, False, tile, False) for rows in (1, 16, 33)]
    assert torch.equal(many[0], many[2][:1]) and torch.equal(many[1], many[2][:16])


@interpreted
@quiet
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gains", [torch.float16, torch.float32])
@pytest.mark.parametrize(("gated", "act"), [(False, "silu"), (True, "silu"), (True, "gelu"), (True, "gelu_tanh")])
def test_few_rows_round_where_the_plain_functions_do(kind: Kind, gains: torch.dtype, gated: bool, act: str) -> None:
    from nanovllm.ops.linear import triton_quantised_few

    matrix, x = quantised_problem(kind, 24, 256, group=128 if kind == "int4" else None, gpu=True), inputs(2, 256, torch.float16)
    gain = (torch.rand(256) + 0.5).to(gains)
    gain[::37] = 9.5
    residual = None if gated else inputs(2, 24, torch.float16)
    tile = FewTile(outputs=16, warps=2) if gains == torch.float32 else FewTile(outputs=4, warps=1)
    got = triton_quantised_few.launch(x, matrix, gain, None, residual, 1e-6, gated, tile, False, act)
    weight = matrix.dequantised(torch.float32)
    normed = norm_linear(x, torch.eye(256, dtype=torch.float16), gain=gain, eps=1e-6)  # rounded as the norm of the plain functions is
    y = torch.nn.functional.linear(normed.float(), weight).half()
    from nanovllm.ops.elementwise.norm_rope import ACTS

    want = ACTS[act](y[:, :12]) * y[:, 12:] if gated else y + residual
    torch.testing.assert_close(got, want, rtol=2**-9, atol=2**-8)
    assert (got == want).double().mean() > 0.7


@interpreted
@quiet
@pytest.mark.parametrize("rows", [1, 5, 20, 40])
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_ops_choose_kernels_that_compute_the_same(kind: Kind, order: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: few rows, some dozens, of which 4-bit products are sums of parts, and more than the kernels take."""
    from nanovllm.ops.linear import quantised_cuda

    matrix, x = quantised_problem(kind, 48, 256, group=64, order=order, gpu=True), inputs(rows, 256)
    gain, bias, residual, norm = torch.rand(256) + 0.5, torch.randn(48), inputs(rows, 48), torch.rand(48)

    def results() -> list[torch.Tensor]:
        found = [norm_linear(x, matrix, gain=gain, eps=1e-6, gated=True), norm_linear(x, matrix, gated=True), linear(x, matrix, bias)]
        found += [norm_linear(x, matrix, bias=bias, residual=residual), norm_linear(x, matrix, gain=gain, bias=bias, eps=1e-6)]
        for inner in (None, norm + 1):
            found += linear_add_norm(x, matrix, bias, residual, norm, 1e-6, inner=inner)
        return found

    want, called = results(), list[str]()
    monkeypatch.setattr(quantised_cuda, "own_kernels", lambda device, dtype: not called.append("asked"))
    monkeypatch.setattr(quantised_cuda, "dependent_launch", lambda device: False)
    monkeypatch.setattr(quantised_cuda, "_limits", lambda device: (132, 200_000))
    monkeypatch.setattr(quantised_cuda, "FUSED_ROWS", 32)
    for got, meant in zip(results(), want, strict=True):
        torch.testing.assert_close(got, meant, rtol=1e-4, atol=2e-4)
    assert len(called) == 7


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_the_references_are_those_of_the_dequantised_matrix(kind: Kind, gated: bool, order: bool) -> None:
    matrix, x = quantised_problem(kind, 24, 136, group=32, order=order), inputs(3, 136)
    weight, gain = matrix.dequantised(torch.float32), torch.rand(136) + 0.5
    more: dict[str, Any] = {} if gated else {"bias": torch.randn(24), "residual": inputs(3, 24)}
    got = norm_linear(x, matrix, gain=gain, eps=1e-6, gated=gated, act="gelu_tanh", **more)
    want = norm_linear(x, weight, gain=gain, eps=1e-6, gated=gated, act="gelu_tanh", **more)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    residual, norm = inputs(3, 24), torch.rand(24) + 0.5
    for inner in (None, torch.rand(24)):
        given = (torch.randn(24), residual, norm, 1e-6)
        for mine, theirs in zip(
            linear_add_norm(x, matrix, *given, inner=inner), linear_add_norm(x, weight, *given, inner=inner), strict=True
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "int4"])  # opcheck compares tensors of fp8 with functions that do not exist for it
def test_the_ops_obey_their_schemas(kind: Kind) -> None:
    m, x, gain = quantised_problem(kind, 24, 40, group=8, order=True), inputs(3, 40), torch.rand(40)
    spread = (m.codes, m.scales, m.zeros, m.order, m.columns, m.group, m.rows, False)
    ops: Any = torch.ops.nanovllm
    torch.library.opcheck(ops.quantised_norm_linear.default, (x, *spread, gain, None, None, 1e-6, True, "silu", []))
    residual, norm = inputs(3, 24), torch.rand(24)
    torch.library.opcheck(ops.quantised_norm_linear.default, (x, *spread, None, torch.rand(24), residual, 1e-6, False, "silu", []))
    torch.library.opcheck(ops.quantised_linear_add_norm.default, (x, *spread, None, residual, norm, 1e-6, None, []))


def test_inputs_are_gathered_in_the_order_of_the_codes() -> None:
    from nanovllm.ops.linear.quantised_cuda import in_order

    matrix, x = quantised_problem("int8", 24, 256, group=128, order=True), inputs(3, 256)
    assert not regular(matrix) and not serves_few(matrix, 1)
    gathered, plain = in_order(x, matrix)
    assert plain.order is None and serves_few(plain, 1)
    torch.testing.assert_close(linear(gathered, plain), linear(x, matrix))


SHAPES = [
    (6144, 4096, False), (4096, 4096, False), (24576, 4096, True), (4096, 12288, False), (151936, 4096, False),
    (4096, 1024, False), (1024, 2048, False), (6144, 1024, True), (1024, 3072, False), (37, 96, False), (64, 14336, False),
]  # fmt: skip


@pytest.mark.parametrize(("outputs", "width", "gated"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [None, 32, 128])
def test_default_tiles_fit(kind: Kind, outputs: int, width: int, gated: bool, group: int | None) -> None:
    """On an H200, an A100 and a small card."""
    matrix = quantised_problem(kind, 2, width, group=group, gpu=True)
    matrix = replace(matrix, codes=torch.empty(outputs, matrix.codes.shape[1], dtype=matrix.codes.dtype, device="meta"))
    tile = few_tile(matrix, gated)
    assert few_fits(tile, matrix, gated) and tile.outputs >= (1 if width > 8192 else 2)
    for memory in (200_000, 158_720, 93_184):
        for rows in (1, 8, 16, 33, 64, 200, 512):
            for split in (False, True) if not gated else (False,):
                many = many_tile(matrix, rows, gated, 132, memory, split=split)
                assert many_fits(many, matrix, gated, memory, split=split) and (split or many.parts == 1)
                assert scale_form(matrix, many.depth) != "spread"
