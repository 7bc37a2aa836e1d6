"""Products with quantised matrices in C: right within rounding, exact where arithmetic can be, and a row's bits depend on no other row."""

import ctypes
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.ops.cpu.build import find_compiler, library
from nanovllm.ops.cpu.native import SOURCE, SYMBOLS, Matrix
from nanovllm.ops.linear import cpu_product
from nanovllm.ops.linear.code_layouts import BLOCK, packed
from nanovllm.ops.linear.cpu_product import cells, fields, product, serves, unsupported
from nanovllm.ops.linear.padded import padded_linear
from nanovllm.ops.linear.quantise import KINDS, Kind, quantise
from nanovllm.ops.linear.quantised import QuantisedMatrix, spread
from nanovllm.ops.linear.quantised_linear import quantised_linear

pytestmark = pytest.mark.skipif(library(SOURCE, SYMBOLS) is None, reason="no C compiler")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def matrices(draw: st.DrawFn, kinds: tuple[Kind, ...] = KINDS) -> QuantisedMatrix:
    """Matrices that C takes: all groups, scales of one and of many rows, zeros, orders, and sizes that fill no vector."""
    seed, rows, columns = draw(st.integers(0, 2**31)), draw(st.integers(1, 70)), draw(st.integers(1, 400))
    kind, random = draw(st.sampled_from(kinds)), torch.Generator().manual_seed(seed)
    group, height = draw(st.sampled_from([32, 64, 96, 128, 256, columns])), draw(st.sampled_from([1, 3, 128]))
    group, made = min(group, columns), quantise(drawn(seed, rows, columns), kind)
    grid = (-(-rows // height), -(-columns // group))
    scales = (torch.rand(grid, generator=random) + 0.5).to(draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])))
    widest = {"int4": 8, "int8": 127, "fp8": 8}[kind]
    zeros = torch.randint(-widest, widest + 1, grid, generator=random).short() if draw(st.booleans()) else None
    order = torch.randperm(columns, generator=random).int() if draw(st.booleans()) else None
    return QuantisedMatrix(codes=made.codes, scales=scales, zeros=zeros, order=order, columns=columns, group=group, rows=height)


def allowed(x: torch.Tensor, matrix: QuantisedMatrix, meant: torch.Tensor) -> torch.Tensor:
    """The error that rounding may make: of inputs by blocks, of float32 sums, of the result."""
    columns = torch.arange(matrix.columns) if matrix.order is None else matrix.order.long()
    parts = replace(matrix, zeros=None).dequantised(torch.float64).abs()  # of codes and zeros
    if matrix.zeros is not None:
        spaced = spread((matrix.zeros * matrix.scales.double()).abs(), matrix.shape, matrix.rows, matrix.group).expand(matrix.shape)
        parts = parts + torch.empty_like(parts).index_copy_(1, columns, spaced)
    blocks = [part.abs().amax(1, keepdim=True).expand_as(part) for part in x.double()[:, columns].split(BLOCK, 1)]
    largest = torch.empty(x.shape, dtype=torch.float64).index_copy_(1, columns, torch.cat(blocks, 1))
    unit, last = (2.0**-31, 2.0**-23) if x.dtype == torch.float32 else (2.0**-14 if matrix.kind == "int4" else 2.0**-15, 2.0**-8)
    of_sums = 2.0**-19 if matrix.kind == "fp8" else 2.0**-21
    return largest @ parts.T * unit + x.double().abs() @ parts.T * of_sums + meant.abs() * last + 1e-30


@given(matrices(), st.integers(0, 2**31), st.integers(1, 70), DTYPES, st.booleans())
@settings(max_examples=150)
def test_products_are_those_of_the_dequantised_matrix(
    matrix: QuantisedMatrix, seed: int, rows: int, dtype: torch.dtype, biased: bool
) -> None:
    x, bias = drawn(seed, rows, matrix.columns).to(dtype), drawn(seed + 1, matrix.shape[0]).to(dtype) if biased else None
    assert serves(x, matrix, bias)
    meant = x.double() @ matrix.dequantised(torch.float64).T + (0 if bias is None else bias.double())
    error = (quantised_linear(x, matrix, bias).double() - meant).abs()
    assert (error <= allowed(x, matrix, meant)).all(), (error / allowed(x, matrix, meant)).max()


@given(st.sampled_from(KINDS), st.integers(0, 2**31), st.integers(1, 20), st.integers(1, 40), st.integers(1, 200), DTYPES)
def test_small_integers_are_multiplied_without_an_error(
    kind: Kind, seed: int, rows: int, height: int, columns: int, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (height, columns), generator=random)
    x = torch.randint(-100, 101, (rows, columns), generator=random)
    kept = packed(codes.to(torch.int8)) if kind == "int4" else codes.float().to(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    matrix = QuantisedMatrix(codes=kept, scales=torch.full((height, 1), 0.25), columns=columns, group=columns)
    meant = (x.float() @ codes.float().T * 0.25).to(dtype)
    assert torch.equal(product(x.to(dtype), matrix, None), meant)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero", [None, -127, 127])
@pytest.mark.parametrize(("kind", "code"), [("int8", -128), ("int8", 127), ("int4", -8), ("int4", 7), ("fp8", -448.0)])
def test_the_largest_codes_and_inputs_do_not_overflow(kind: Kind, code: float, zero: int | None, dtype: torch.dtype) -> None:
    columns = 1000
    kept = torch.full((20, columns), code)
    codes = packed(kept.to(torch.int8)) if kind == "int4" else kept.to(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    zeros = None if zero is None else torch.full((20, 1), zero, dtype=torch.int16)
    matrix = QuantisedMatrix(codes=codes, scales=torch.ones(20, 1), zeros=zeros, columns=columns, group=columns)
    for value in (0.99, -0.99):
        x = torch.full((9, columns), value).to(dtype)
        meant = x.double() @ matrix.dequantised(torch.float64).T
        torch.testing.assert_close(product(x, matrix, None).double(), meant, rtol=2e-6 if dtype == torch.float32 else 2.0**-8, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("power", [-140, -126, -60, 0, 60, 100])
def test_inputs_of_all_magnitudes(kind: Kind, power: int) -> None:
    x, matrix = drawn(0, 3, 256) * 2.0**power, quantise(drawn(1, 33, 256), kind)
    got, meant = product(x, matrix, None).double(), x.double() @ matrix.dequantised(torch.float64).T
    assert ((got - meant).abs() <= meant.abs().max() * 2.0**-20 + 2.0**-136).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_an_input_far_above_the_others_costs_only_its_block(kind: Kind, dtype: torch.dtype) -> None:
    x, matrix = drawn(0, 4, 384).to(dtype), quantise(drawn(1, 40, 384), kind)
    x[1, 200] = 3000.0  # of some activations of language models
    meant = x.double() @ matrix.dequantised(torch.float64).T
    error = (product(x, matrix, None).double() - meant).abs()
    plain = (padded_linear(x, matrix.dequantised(dtype), None).double() - meant).abs()
    assert (error.amax(1) <= 1.5 * plain.amax(1)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", [float("inf"), float("-inf"), float("nan")])
def test_infinities_and_not_a_number_stay_in_their_row(kind: Kind, broken: float) -> None:
    x, matrix = drawn(0, 5, 256), quantise(drawn(1, 40, 256), kind)
    healthy = product(x, matrix, None)
    x[2, 130] = broken
    got = product(x, matrix, None)
    assert not got[2].isfinite().any()
    assert torch.equal(got[[0, 1, 3, 4]], healthy[[0, 1, 3, 4]])


@given(matrices(), st.integers(0, 2**31), st.integers(1, 70), DTYPES, st.data())
@settings(max_examples=60)
def test_bits_of_a_row_depend_on_nothing_else(
    matrix: QuantisedMatrix, seed: int, rows: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    x = drawn(seed, rows, matrix.columns).to(dtype)
    whole = product(x, matrix, None)
    some = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=20)))
    try:
        torch.set_num_threads(data.draw(st.integers(1, 3)))
        assert torch.equal(product(x[some], matrix, None), whole[some])
    finally:
        torch.set_num_threads(1)
    wanted = data.draw(st.integers(1, matrix.shape[0]))
    if matrix.rows == 1:  # nor on the other rows of the matrix
        assert torch.equal(product(x, matrix.row_range(0, wanted), None), whole[:, :wanted])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [896, 1000, 1024, 1025, 1152, 3000, 3072])
@pytest.mark.parametrize("kind", KINDS)
def test_one_row_has_the_bits_that_it_has_among_others_at_any_width(kind: Kind, columns: int, dtype: torch.dtype) -> None:
    """A row by itself has loops of its own, and for int8 they change where a row of codes is longer than 1,024."""
    x, matrix = drawn(0, 3, columns).to(dtype), quantise(drawn(1, 40, columns), kind)
    whole = product(x, matrix, None)
    for row in range(3):
        assert torch.equal(product(x[row : row + 1], matrix, None), whole[row : row + 1])
    meant = x.double() @ matrix.dequantised(torch.float64).T
    assert ((whole.double() - meant).abs() <= allowed(x, matrix, meant)).all()


def test_codes_behind_the_last_column_count_for_nothing() -> None:
    matrix, x = quantise(drawn(0, 20, 100), "int4"), drawn(1, 3, 100)
    filled = matrix.codes.clone()
    filled[:, 36:] |= 0xF0  # columns 100 to 127
    full = QuantisedMatrix(codes=filled, scales=matrix.scales, columns=100, group=matrix.group)
    assert torch.equal(product(x, full, None), product(x, matrix, None))


def test_what_c_does_not_take_goes_the_ordinary_way() -> None:
    matrix, x = quantise(drawn(0, 24, 100), "int8", 33), drawn(1, 3, 100)
    assert unsupported(matrix) == "groups of 33 columns" and not serves(x, matrix, None)
    assert torch.equal(quantised_linear(x, matrix), padded_linear(x, matrix.dequantised(torch.float32), None))
    whole = quantise(drawn(0, 24, 100), "int8")
    for other in (x.half(), x.double()):
        assert not serves(other, whole, None)
        assert torch.equal(quantised_linear(other, whole), padded_linear(other, whole.dequantised(other.dtype), None))
    assert not serves(x[:0], whole, None) and quantised_linear(x[:0], whole).shape == (0, 24)
    wide = QuantisedMatrix(codes=whole.codes, scales=whole.scales.double(), columns=100, group=100)
    assert unsupported(wide) == "scales of float64"
    assert unsupported(quantise(drawn(0, 2, 8, 16), "int8")) == "quantised matrices of shape (2, 8, 16)"


def test_without_a_compiler_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, x = quantise(drawn(0, 24, 100), "int4"), drawn(1, 3, 100)
    monkeypatch.setattr(cpu_product, "library", lambda *_: None)
    assert torch.equal(quantised_linear(x, matrix), padded_linear(x, matrix.dequantised(torch.float32), None))


@pytest.mark.long  # compiles the C file once more for each processor
@pytest.mark.parametrize("flags", [("-march=x86-64",), ("-march=x86-64", "-mavx2", "-mfma"), ()], ids=["sse2", "avx2", "default"])
def test_other_processors_compute_the_same(flags: tuple[str, ...], tmp_path: Path) -> None:
    compiler, made = find_compiler(), tmp_path / "kernels.so"
    machine = os.uname().machine
    if compiler is None or (flags and machine != "x86_64"):
        pytest.skip(f"flags of x86-64 on {machine}")
    if "-mavx2" in flags and "avx2" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("no AVX2")
    subprocess.run([compiler, "-O2", "-fPIC", "-std=gnu11", "-w", *flags, "-shared", str(SOURCE), "-lm", "-o", str(made)], check=True)
    other = ctypes.CDLL(str(made))
    for kind in KINDS:
        for group in (32, 128, 300):
            for rows, dtype in ((1, torch.float32), (1, torch.bfloat16), (13, torch.float32), (13, torch.bfloat16)):
                matrix, x = quantise(drawn(0, 37, 300), kind, group), drawn(1, rows, 300).to(dtype)
                out, room, struct = x.new_empty(rows, 37), cells(rows, matrix), Matrix(*fields(matrix, []))
                other.nanovllm_quantised_linear(
                    ctypes.c_void_p(x.data_ptr()), ctypes.byref(struct), None, ctypes.c_void_p(out.data_ptr()),
                    ctypes.c_void_p(room.data_ptr()), *map(ctypes.c_int64, (rows, 300, 37, dtype == torch.bfloat16, 1)),
                )  # fmt: skip
                loose = {"rtol": 2.0**-7, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
                torch.testing.assert_close(out, product(x, matrix, None), **loose)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_inputs_just_below_a_power_of_two_keep_their_bits(kind: Kind, sign: float) -> None:
    matrix = quantise(drawn(1, 8, 1024), kind)
    for power in (1.0, 2.0, 2.0**20, 2.0**-20):
        below = float(torch.nextafter(torch.tensor(power), torch.tensor(0.0)))
        x = torch.full((1, 1024), sign * below)
        x[:, ::3] = sign * power * (1 - 2.0**-16)
        want = x.double() @ matrix.dequantised(torch.float64).T
        size = x.double().abs() @ matrix.dequantised(torch.float64).abs().T
        assert ((quantised_linear(x, matrix).double() - want).abs() <= 2.0**-22 * size).all()


def test_shapes_that_are_no_product_are_refused() -> None:
    matrix = quantise(drawn(1, 8, 128), "int8")
    wrong = [(torch.ones(2, 3), None), (torch.ones(2, 300), None), (torch.ones(128), None), (torch.ones(2, 3, 128), None)]
    for x, bias in [*wrong, (torch.ones(2, 128), torch.ones(2))]:
        with pytest.raises(ValueError, match=r"cannot be multiplied with a quantised matrix \(8, 128\)"):
            torch.ops.nanovllm.quantised_linear.default(x, matrix.codes, matrix.scales, None, None, bias, 128, 128, 1, False)
    with pytest.raises(ValueError, match=r"has scales \(4, 1\), expected \(8, 1\)"):
        quantised_linear(torch.ones(2, 128), replace(matrix, scales=matrix.scales[:4]))
