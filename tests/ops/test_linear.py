"""`linear` and `pack`: right, and a row's bits do not depend on the other rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm.ops import linear as module
from nanovllm.ops.linear import linear, pack


def close_to_exact(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    epsilon = torch.finfo(y.dtype).eps
    torch.testing.assert_close(y.double(), exact, rtol=2 * epsilon, atol=1e-6 * x.shape[1] + epsilon)


sizes = st.one_of(st.integers(1, 200), st.integers(1, 40).map(lambda n: 16 * n), st.sampled_from([1024, 1040, 2048, 3072]))


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
    y = linear(x, pack(weight), b)
    close_to_exact(y, x, weight, b)
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=40))
    assert torch.equal(linear(x[rows], pack(weight), b), y[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_in", [512, 1024, 1536, 3072])
def test_weights_are_packed_and_rows_stay_equal(dtype: torch.dtype, num_in: int) -> None:
    x, weight = torch.randn(133, num_in).to(dtype), torch.randn(512, num_in).to(dtype)
    packed = pack(weight)
    assert packed.is_mkldnn
    assert pack(packed) is packed
    y = linear(x, packed)
    close_to_exact(y, x, weight, None)
    for rows in (slice(0, 1), slice(40, 47), slice(5, 133)):
        assert torch.equal(linear(x[rows], packed), y[rows])


def test_what_onednn_does_not_know_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(1024, 512)
    for dtype in (torch.float16, torch.float64):
        assert not pack(weight.to(dtype)).is_mkldnn
        assert linear(torch.randn(3, 512).to(dtype), weight.to(dtype)).dtype == dtype
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert pack(weight) is weight


def test_a_refused_layout_leaves_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(weight: Tensor, rows: int) -> Tensor:
        raise RuntimeError("bf16 path needs the cpu support avx512bw, avx512vl and avx512dq")

    monkeypatch.setattr(module, "_reorder", refuse)
    weight = torch.randn(1024, 512)
    assert pack(weight) is weight


@pytest.mark.compile
def test_op_passes_opcheck() -> None:
    op, x = torch.ops.nanovllm.linear.default, torch.randn(5, 512)
    torch.library.opcheck(op, (x, torch.randn(24, 512), torch.randn(24)))
    # The other checks copy their arguments by address, which a packed weight does not have.
    torch.library.opcheck(op, (x, pack(torch.randn(1024, 512)), None), test_utils=("test_aot_dispatch_static", "test_aot_dispatch_dynamic"))
