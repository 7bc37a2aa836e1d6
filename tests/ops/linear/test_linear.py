"""`linear`: right, and on a CPU a row's bits do not depend on the other rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm.ops.linear.linear import linear


def close_to_exact(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    epsilon = torch.finfo(y.dtype).eps
    torch.testing.assert_close(y.double(), exact, rtol=2 * epsilon, atol=1e-6 * x.shape[1] + epsilon)


sizes = st.one_of(st.integers(1, 40).map(lambda n: 16 * n), st.sampled_from([1024, 1040, 2048, 3072]))


@given(
    num_rows=st.integers(1, 70),
    num_in=sizes,
    num_out=sizes,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bias=st.booleans(),
    data=st.data(),
)
@settings(max_examples=150)
def test_rows_do_not_depend_on_each_other(
    num_rows: int, num_in: int, num_out: int, dtype: torch.dtype, bias: bool, data: st.DataObject
) -> None:
    torch.manual_seed(num_rows * num_in * num_out)
    x, weight = torch.randn(num_rows, num_in).to(dtype), torch.randn(num_out, num_in).to(dtype)
    b = torch.randn(num_out).to(dtype) if bias else None
    y = linear(x, weight, b)
    close_to_exact(y, x, weight, b)
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=40))
    assert torch.equal(linear(x[rows], weight, b), y[rows])


@given(num_rows=st.integers(1, 20), num_in=st.integers(1, 70), num_out=st.integers(1, 70))
def test_odd_sizes_are_right(num_rows: int, num_in: int, num_out: int) -> None:
    torch.manual_seed(num_rows * num_in * num_out)
    x, weight, bias = torch.randn(num_rows, num_in), torch.randn(num_out, num_in), torch.randn(num_out)
    close_to_exact(linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_stay_theirs(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 40).to(dtype), torch.randn(24, 40).to(dtype)
    assert linear(x, weight).dtype == dtype
    close_to_exact(linear(x, weight), x, weight, None)


@pytest.mark.compile
def test_op_passes_opcheck() -> None:
    torch.library.opcheck(torch.ops.nanovllm.linear.default, (torch.randn(5, 512), torch.randn(24, 512), torch.randn(24)))
