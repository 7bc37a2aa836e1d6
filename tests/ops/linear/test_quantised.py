"""Quantised matrices: codes are packed without loss, rounding is to the nearest, and products are those of the dequantised matrix."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.ops.linear.code_layouts import from_quads, packed, quads, unpacked
from nanovllm.ops.linear.linear import linear
from nanovllm.ops.linear.quantise import KINDS, Kind, quantise
from nanovllm.ops.linear.quantised import QuantisedMatrix, by_row, cpu_layout, gpu_layout, joined, laid_out
from nanovllm.ops.linear.quantised_linear import plain_linear, quantised_linear
from nanovllm.ops.moe.experts import experts
from nanovllm.ops.moe.quantised_experts import any_experts, plain_experts

SIZES = st.integers(1, 300)
SEEDS = st.integers(0, 2**31)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def matrices(draw: st.DrawFn) -> QuantisedMatrix:
    """Matrices with everything that the form allows."""
    seed, rows, columns, kind = draw(SEEDS), draw(st.integers(1, 40)), draw(SIZES), draw(st.sampled_from(KINDS))
    group, height = draw(st.integers(1, columns)), draw(st.integers(1, rows))
    made, random = quantise(drawn(seed, rows, columns), kind), torch.Generator().manual_seed(seed)
    grid = (-(-rows // height), -(-columns // group))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    zeros = torch.randint(-8, 9, grid, generator=random).short() if draw(st.booleans()) and kind != "fp8" else None
    order = torch.randperm(columns, generator=random).int() if draw(st.booleans()) else None
    scales = (torch.rand(grid, generator=random) + 0.5).to(dtype)
    return QuantisedMatrix(codes=made.codes, scales=scales, zeros=zeros, order=order, columns=columns, group=group, rows=height)


def by_hand(matrix: QuantisedMatrix) -> torch.Tensor:
    """What a matrix stands for, in float64, one weight at a time."""
    codes = unpacked(matrix.codes, matrix.columns) if matrix.bits == 4 else matrix.codes
    out = torch.zeros(matrix.shape, dtype=torch.float64)
    for n in range(matrix.shape[0]):
        for k in range(matrix.columns):
            at = (n // matrix.rows, k // matrix.group)
            zero = 0 if matrix.zeros is None else int(matrix.zeros[at])
            place = k if matrix.order is None else int(matrix.order[k])
            out[n, place] = (float(codes[n, k]) - zero) * float(matrix.scales[at])
    return out


@given(SEEDS, st.integers(1, 5), SIZES)
def test_packing_loses_nothing(seed: int, rows: int, columns: int) -> None:
    codes = torch.randint(-8, 8, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    stored = packed(codes)
    assert torch.equal(unpacked(stored, columns), codes) and stored.shape == (rows, 64 * -(-columns // 128))
    for k in range(columns):
        byte = stored[:, k // 128 * 64 + k % 64]
        assert torch.equal((byte >> 4 if k % 128 >= 64 else byte & 15).to(torch.int8) - 8, codes[:, k])


@given(SEEDS, st.integers(1, 5), SIZES)
def test_quads_lose_nothing(seed: int, rows: int, columns: int) -> None:
    """Element i of a block has columns 32 apart. The fill of the last block stands for 0."""
    codes = torch.randint(-8, 8, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    stored = quads(packed(codes))
    assert torch.equal(from_quads(stored), packed(codes)) and stored.shape == (rows, 16 * -(-columns // 128))
    elements = stored.view(torch.int16).int()
    for k in range(stored.shape[1] * 8):
        nibbles = (elements[:, k // 128 * 32 + k % 32] >> k % 128 // 32 * 4) & 15
        assert torch.equal(nibbles - 8, codes[:, k].int() if k < columns else torch.zeros(rows, dtype=torch.int32))


@given(matrices())
def test_the_layout_of_a_gpu_loses_nothing(matrix: QuantisedMatrix) -> None:
    """Whatever can be asked of a matrix has the same answer. A pair has the codes of two columns 64 apart."""
    there, (rows, columns) = gpu_layout(matrix), matrix.shape
    assert there.in_gpu_layout and (there.kind, there.bits, there.shape) == (matrix.kind, matrix.bits, matrix.shape)
    assert not matrix.in_gpu_layout and (there.fields, there.width) == (matrix.fields, matrix.width)
    assert there.codes.is_contiguous() and there.codes.view(torch.int16).shape == (rows, there.width)
    assert there.width * there.fields == 128 * -(-columns // 128)
    assert gpu_layout(there) is there and laid_out(matrix) is matrix  # on a CPU
    if matrix.bits == 8:
        bytes_ = there.codes.view(torch.uint8)
        for k in range(columns):
            place = 2 * (k // 128 * 64 + k % 64) + (k % 128 >= 64)
            assert torch.equal(bytes_[:, place], matrix.codes[:, k].view(torch.uint8))
        assert bytes_.count_nonzero() == matrix.codes.view(torch.uint8).count_nonzero()
    for again in (cpu_layout(there), laid_out(there)):
        assert again.codes.dtype == matrix.codes.dtype and again.codes.is_contiguous() and not again.in_gpu_layout
        assert torch.equal(again.codes.view(torch.uint8), matrix.codes.view(torch.uint8))
    meant = matrix.dequantised(torch.float64)
    assert torch.equal(there.dequantised(torch.float64), meant)
    last = (rows - 1) // matrix.rows * matrix.rows
    both = (each.row_range(last, rows).dequantised(torch.float64) for each in (replace(there, order=None), replace(matrix, order=None)))
    assert torch.equal(*both)
    x = drawn(columns, 3, columns)
    torch.testing.assert_close(quantised_linear(x, there), quantised_linear(x, matrix), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@given(SEEDS, SIZES)
def test_experts_are_laid_out_for_a_gpu(kind: Kind, seed: int, columns: int) -> None:
    matrix = quantise(drawn(seed, 3, 5, columns), kind)
    there = gpu_layout(matrix)
    assert there.shape == matrix.shape and torch.equal(there.dequantised(torch.float32), matrix.dequantised(torch.float32))
    assert torch.equal(there[1].dequantised(torch.float32), matrix[1].dequantised(torch.float32))
    assert torch.equal(cpu_layout(there).codes.view(torch.uint8), matrix.codes.view(torch.uint8))
    stacked = joined([gpu_layout(matrix[e]) for e in range(3)], 0)
    assert stacked is not None and torch.equal(stacked.codes.view(torch.uint8), there.codes.view(torch.uint8))


@given(matrices(), SEEDS, st.integers(1, 9))
def test_a_matrix_is_what_its_codes_stand_for(matrix: QuantisedMatrix, seed: int, rows: int) -> None:
    meant, x = by_hand(matrix), drawn(seed, rows, matrix.columns)
    torch.testing.assert_close(matrix.dequantised(torch.float64), meant, rtol=1e-12, atol=0)
    assert torch.equal(matrix.dequantised(torch.bfloat16), matrix.dequantised(torch.float32).to(torch.bfloat16))
    assert torch.equal(by_row(matrix).dequantised(torch.float64), meant)
    bias = drawn(seed + 1, matrix.shape[0])
    product = linear(x, matrix, bias)
    torch.testing.assert_close(product.double(), x.double() @ meant.T + bias.double(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(plain_linear(x, matrix, bias), product, rtol=1e-4, atol=1e-3)
    if matrix.order is None:
        first = matrix.row_range(0, matrix.rows)
        assert torch.equal(first.dequantised(torch.float64), meant[: matrix.rows])


@given(st.sampled_from(KINDS), SEEDS, st.integers(1, 20), SIZES, st.floats(-30, 30))
def test_rounding_is_to_the_nearest_code(kind: Kind, seed: int, rows: int, columns: int, power: float) -> None:
    weight = drawn(seed, rows, columns) * 2.0**power
    matrix = quantise(weight, kind)
    error = (matrix.dequantised(torch.float64) - weight.double()).abs()
    scales = matrix.scales.double().repeat_interleave(matrix.group, 1)[:, :columns]
    allowed = weight.double().abs() / 16 + scales * 2.0**-9 if kind == "fp8" else scales * 0.5
    if kind == "int4":  # a scale that was rounded down to bfloat16 may not reach the largest weight
        allowed = allowed + weight.double().abs() * 2.0**-8
    assert (error <= allowed * (1 + 1e-5)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_zero_and_the_smallest(kind: Kind) -> None:
    assert not quantise(torch.zeros(3, 130), kind).dequantised(torch.float32).any()
    tiny = quantise(torch.full((2, 130), 1e-44), kind)
    assert tiny.scales.isfinite().all() and (tiny.scales > 0).all()


@given(matrices(), st.integers(1, 4))
def test_matrices_are_joined(matrix: QuantisedMatrix, count: int) -> None:
    meant = matrix.dequantised(torch.float64)
    rows, stack = joined([matrix] * count), joined([matrix] * count, 0)
    assert rows is not None and torch.equal(rows.dequantised(torch.float64), torch.cat([meant] * count))
    assert stack is not None and torch.equal(stack.dequantised(torch.float64), torch.stack([meant] * count))
    assert torch.equal(stack[count - 1].dequantised(torch.float64), meant)


def test_matrices_of_two_forms_are_not_joined() -> None:
    weight = drawn(0, 4, 256)
    int4, int8 = quantise(weight, "int4"), quantise(weight, "int8")
    assert joined([int4, int8]) is None and joined([int4, quantise(weight, "int4", 64)]) is None
    assert joined([int4, quantise(drawn(0, 4, 255), "int4")]) is None


@pytest.mark.parametrize("kind", KINDS)
@given(SEEDS, st.integers(1, 12), st.integers(1, 12))
def test_bits_of_a_row_do_not_depend_on_the_other_rows(kind: Kind, seed: int, rows: int, more: int) -> None:
    matrix, x = quantise(drawn(seed, 32, 64), kind), drawn(seed + 1, rows + more, 64)
    assert torch.equal(quantised_linear(x, matrix)[:rows], quantised_linear(x[:rows], matrix))


@pytest.mark.parametrize("kind", KINDS)
@given(SEEDS, st.integers(1, 6))
def test_experts(kind: Kind, seed: int, tokens: int) -> None:
    gate_up, down = drawn(seed, 5, 32, 16), drawn(seed + 1, 5, 16, 16)
    one, two = quantise(gate_up, kind), quantise(down, kind)
    x, weights = drawn(seed + 2, tokens, 16), torch.rand(tokens, 2, generator=torch.Generator().manual_seed(seed))
    chosen = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(seed + t))[:2] for t in range(tokens)])
    meant = experts(x, one.dequantised(torch.float32), two.dequantised(torch.float32), chosen, weights, "silu")
    for made in (any_experts(x, one, two, chosen, weights, "silu"), plain_experts(x, one, two, chosen, weights, "silu")):
        torch.testing.assert_close(made, meant, rtol=1e-4, atol=1e-4)
    assert torch.equal(
        any_experts(x, one, down, chosen, weights, "silu"), experts(x, one.dequantised(torch.float32), down, chosen, weights, "silu")
    )


@pytest.mark.parametrize("kind", ["int8", "int4"])  # opcheck compares tensors of fp8 with functions that do not exist for it
def test_the_ops_obey_their_schemas(kind: Kind) -> None:
    matrix = quantise(drawn(0, 24, 40), kind)
    given_ = (matrix.codes, matrix.scales, None, torch.randperm(40).int(), matrix.columns, matrix.group, 1, False)
    torch.library.opcheck(torch.ops.nanovllm.quantised_linear.default, (drawn(1, 3, 40), *given_[:4], drawn(2, 24), *given_[4:]))
    one, two = quantise(drawn(0, 3, 32, 16), kind), quantise(drawn(1, 3, 16, 16), kind)
    spread = [(each.codes, each.scales, None, None, each.columns, each.group, each.rows) for each in (one, two)]
    torch.library.opcheck(
        torch.ops.nanovllm.quantised_experts.default,
        (drawn(2, 2, 16), *spread[0], *spread[1], torch.tensor([[0, 2], [1, 0]]), torch.ones(2, 2), "silu"),
    )


@pytest.mark.compile
def test_a_product_traces_in_one_graph() -> None:
    matrix, x = quantise(drawn(0, 24, 40), "int4"), drawn(1, 3, 40)
    compiled = torch.compile(lambda x, matrix: linear(x, matrix) * 2, fullgraph=True)
    assert torch.equal(compiled(x, matrix), linear(x, matrix) * 2)


def test_a_product_can_be_differentiated_in_its_input() -> None:
    matrix, x = quantise(drawn(0, 24, 40), "int8"), drawn(1, 3, 40)
    gradient = torch.func.grad(lambda x: plain_linear(x, matrix).sum())(x)
    torch.testing.assert_close(gradient, matrix.dequantised(torch.float32).sum(0).expand(3, -1))
