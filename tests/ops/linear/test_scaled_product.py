"""Activations in FP8: how they are rounded, in which order their codes lie, and what `against` refuses."""

from dataclasses import replace

import pytest
import torch

from nanovllm.ops.linear import scaled_product
from nanovllm.ops.linear.quantise import quantise
from nanovllm.ops.linear.quantised import QuantisedMatrix, by_row, gpu_layout
from nanovllm.testing.quantised_problems import quantised_problem
from tests.ops.interpreted_fp8 import convert_as_torch

BF16 = torch.bfloat16


def inputs(rows: int, width: int) -> torch.Tensor:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(width))
    x[0] = 0  # a row without a largest magnitude
    x[-1] *= 1e4
    return x.to(BF16)


@pytest.mark.interpret
@pytest.mark.parametrize("width", [128, 256, 200, 1032])
def test_rounded_rows_have_the_order_of_paired_codes(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their product with the memory of paired codes, byte by byte, is that of rounded activations with the matrix."""
    from nanovllm.ops.linear.triton_rounded_rows import rounded_rows

    convert_as_torch(monkeypatch)
    x, matrix = inputs(5, width), quantise(torch.randn(16, width, generator=torch.Generator().manual_seed(1)), "fp8")
    codes, scales = rounded_rows(x)
    assert codes.shape == (5, -(-width // 128) * 128) and codes.dtype == torch.float8_e4m3fn
    stored = gpu_layout(matrix).codes.view(torch.float8_e4m3fn)
    got = (codes.double() * scales.double()) @ stored.double().T * matrix.scales.double().T
    torch.testing.assert_close(got, scaled_product.reference(x, matrix, None))


def test_the_reference_is_near_the_plain_product() -> None:
    matrix, x, bias = quantise(torch.randn(32, 256), "fp8"), inputs(6, 256), torch.randn(32)
    want = x.double() @ matrix.dequantised(torch.float64).T + bias
    assert (scaled_product.reference(x, matrix, bias) - want).norm() < 0.04 * want.norm()


@pytest.mark.parametrize(
    ("matrix", "why"),
    [
        (quantise(torch.ones(16, 256), "int8"), "int8"),
        (quantise(torch.ones(16, 256), "int4"), "int4"),
        (quantised_problem("fp8", 256, 256, group=128, rows=128), "serves 128 columns"),
        (quantise(torch.ones(24, 256), "fp8"), "24 outputs"),
        (quantise(torch.ones(32, 256), "fp8"), ""),
        (replace(quantise(torch.ones(32, 256), "fp8"), scales=torch.ones(1, 1), rows=32), ""),
    ],
)
def test_what_can_be_multiplied(matrix: QuantisedMatrix, why: str) -> None:
    said = scaled_product.against(matrix)
    assert why in said and bool(why) == bool(said)
    assert scaled_product.against(by_row(matrix)) == said


def test_a_cpu_has_no_such_products() -> None:
    assert "cpu" in scaled_product.against_device(torch.device("cpu"), BF16)
