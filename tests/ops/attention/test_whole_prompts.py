"""Attention of whole prompts without pages: equal to attention over pages, with gradients, and under `vmap`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm.ops.attention.reference import attend
from nanovllm.ops.attention.whole_prompts import attend_prompts


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def by_row(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float, window: int, softcap: float) -> Tensor:
    """The reference of attention over pages, one prompt after another."""
    kv = torch.stack((k, v)).transpose(1, 2)  # 2 K T D
    parts, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        parts.append(attend(q[rows], kv[:, :, rows], scale, window, softcap))
        start += length
    return torch.cat(parts)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 1)]),
    window=st.integers(0, 10),
    softcap=st.sampled_from([0.0, 2.0]),
)
def test_it_is_attention_over_pages(lengths: list[int], heads: tuple[int, int], window: int, softcap: float) -> None:
    (num_heads, num_kv_heads), tokens = heads, sum(lengths)
    q, k, v = (torch.randn(tokens, count, 6, dtype=torch.float64) for count in (num_heads, num_kv_heads, num_kv_heads))
    got = attend_prompts(q, k, v, bounds(lengths), 0.4, window, softcap)
    torch.testing.assert_close(got, by_row(q, k, v, lengths, 0.4, window, softcap))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)])
def test_it_computes_in_float32_and_rounds_once(dtype: torch.dtype, tolerance: float) -> None:
    q, k, v = (torch.randn(7, count, 8).to(dtype) for count in (4, 2, 2))
    got = attend_prompts(q, k, v, bounds([5, 2]), 0.3, 3, 4.0)
    assert got.dtype == dtype
    want = attend_prompts(q.double(), k.double(), v.double(), bounds([5, 2]), 0.3, 3, 4.0)
    assert ((got - want).abs() <= tolerance * (1 + want.abs())).all()


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (2, 3.0)])
def test_its_gradients_are_those_of_finite_differences(window: int, softcap: float) -> None:
    given = [torch.randn(5, count, 2, dtype=torch.float64, requires_grad=True) for count in (2, 1, 1)]
    with torch.enable_grad():
        assert torch.autograd.gradcheck(lambda q, k, v: attend_prompts(q, k, v, bounds([3, 2]), 0.7, window, softcap), given)
        assert torch.autograd.gradgradcheck(lambda q, k, v: attend_prompts(q, k, v, bounds([3, 2]), 0.7, window, softcap), given)


def test_it_runs_under_vmap() -> None:
    q, k, v = torch.randn(3, 5, 4, 6), torch.randn(3, 5, 2, 6), torch.randn(5, 2, 6)
    got = torch.func.vmap(lambda q, k: attend_prompts(q, k, v, bounds([4, 1]), 0.4))(q, k)
    torch.testing.assert_close(got, torch.stack([attend_prompts(q[i], k[i], v, bounds([4, 1]), 0.4) for i in range(3)]))
