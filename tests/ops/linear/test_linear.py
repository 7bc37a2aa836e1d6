"""`linear`: right, and on a CPU a row's bits do not depend on the other rows."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm.ops.linear.linear import linear


def close_to_exact(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    epsilon = torch.finfo(y.dtype).eps
    torch.testing.assert_close(y.double(), exact, rtol=2 * epsilon, atol=1e-6 * x.shape[1] + epsilon)


AMX = torch.cpu._is_amx_tile_supported()  # there oneDNN orders products in bfloat16 by the number of rows
sizes = st.one_of(st.integers(1, 40).map(lambda n: 16 * n), st.sampled_from([1024, 1040, 2048, 3072]))


@given(
    num_rows=st.integers(1, 70),
    num_in=sizes,
    num_out=sizes,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bias=st.booleans(),
    capability=st.sampled_from(["AVX2", "AVX512"]),
    data=st.data(),
)
@settings(max_examples=150)
def test_rows_do_not_depend_on_each_other(
    num_rows: int, num_in: int, num_out: int, dtype: torch.dtype, bias: bool, capability: str, data: st.DataObject
) -> None:
    """Whichever way is taken on a processor that is said to have `capability`."""
    torch.manual_seed(num_rows * num_in * num_out)
    x, weight = torch.randn(num_rows, num_in).to(dtype), torch.randn(num_out, num_in).to(dtype)
    b = torch.randn(num_out).to(dtype) if bias else None
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=40))
    assume(max(num_rows, len(rows)) <= 32 or dtype == torch.float32 or capability == "AVX2" or not AMX)
    with patch.object(torch.backends.cpu, "get_cpu_capability", return_value=capability):
        y, again = linear(x, weight, b), linear(x[rows], weight, b)
    close_to_exact(y, x, weight, b)
    assert torch.equal(again, y[rows])


@given(num_rows=st.integers(1, 20), num_in=st.integers(1, 70), num_out=st.integers(1, 70))
def test_odd_sizes_are_right(num_rows: int, num_in: int, num_out: int) -> None:
    torch.manual_seed(num_rows * num_in * num_out)
    x, weight, bias = torch.randn(num_rows, num_in), torch.randn(num_out, num_in), torch.randn(num_out)
    close_to_exact(linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_with_avx2_alone_halves_are_multiplied_in_float32_by_parts(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(5, 4096).to(dtype), torch.randn(700, 4096).to(dtype), torch.randn(700).to(dtype)
    with (
        patch.object(torch.backends.cpu, "get_cpu_capability", return_value="AVX2"),
        patch("torch.nn.functional.linear", wraps=torch.nn.functional.linear) as products,
    ):
        y = linear(x, weight, bias)
    close_to_exact(y, x, weight, bias)
    assert y.dtype == dtype and {call.args[0].dtype for call in products.call_args_list} == {torch.float32}
    assert [len(call.args[1]) for call in products.call_args_list] == ([700] if dtype == torch.float32 else [256, 256, 188])


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
@pytest.mark.parametrize(("length", "dtype"), [(8192, torch.bfloat16), (20000, torch.bfloat16), (9000, torch.float32)])
@pytest.mark.usefixtures("untyped")
def test_a_bias_of_another_length_or_dtype_is_refused(capability: str, length: int, dtype: torch.dtype) -> None:
    """Also one that fits the first parts of the weight."""
    x, weight, bias = torch.ones(3, 128).bfloat16(), torch.ones(9000, 128).bfloat16(), torch.ones(length, dtype=dtype)
    with patch.object(torch.backends.cpu, "get_cpu_capability", return_value=capability), pytest.raises(RuntimeError):
        linear(x, weight, bias)


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
@pytest.mark.usefixtures("untyped")
def test_one_bias_may_serve_all_outputs(capability: str) -> None:
    x, weight = torch.ones(3, 128).bfloat16(), torch.ones(9000, 128).bfloat16()
    with patch.object(torch.backends.cpu, "get_cpu_capability", return_value=capability):
        assert torch.equal(linear(x, weight, torch.ones(1).bfloat16()), linear(x, weight, torch.ones(9000).bfloat16()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_stay_theirs(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 40).to(dtype), torch.randn(24, 40).to(dtype)
    assert linear(x, weight).dtype == dtype
    close_to_exact(linear(x, weight), x, weight, None)


@pytest.mark.compile
def test_op_passes_opcheck() -> None:
    torch.library.opcheck(torch.ops.nanovllm.linear.default, (torch.randn(5, 512), torch.randn(24, 512), torch.randn(24)))
