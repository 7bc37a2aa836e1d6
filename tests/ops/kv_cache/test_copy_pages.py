"""`copy_pages` copies whole pages in every layer and touches nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.ops import copy_pages

PAGES = 8


@settings(deadline=None, max_examples=40)
@given(st.permutations(range(PAGES)), st.integers(0, PAGES // 2), st.data())
def test_pages_are_copied_in_all_layers(order, n, data):
    dst, rest = order[:n], order[n:]
    src = [data.draw(st.sampled_from(rest)) for _ in dst]  # one page may have several copies
    pages = torch.randn(3, PAGES, 2, 2, 4, 8)
    want = pages.clone()
    for s, d in zip(src, dst, strict=True):
        want[:, d] = pages[:, s]
    memory = pages.data_ptr()
    assert copy_pages(pages, torch.tensor(src, dtype=torch.int32), torch.tensor(dst, dtype=torch.int32)) is None
    assert torch.equal(pages, want)
    assert pages.data_ptr() == memory


def test_a_page_outside_the_pool_is_refused():
    pages = torch.zeros(1, 3, 2, 1, 4, 8)
    with pytest.raises(IndexError):
        copy_pages(pages, torch.tensor([0], dtype=torch.int32), torch.tensor([3], dtype=torch.int32))


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "page_size", "head_dim"), [(1, 1, 12), (2, 16, 64), (3, 16, 43), (2, 16, 128)])
def test_the_kernel_interpreted(kv_heads, page_size, head_dim, dtype):
    """Pages of less than a block of 4,096 numbers, of one, a little more, and two."""
    from nanovllm.ops.kv_cache import triton_kv

    pages = torch.randn(2, PAGES, 2, kv_heads, page_size, head_dim).to(dtype)
    want = pages.clone()
    for src, dst in (([], []), ([3], [0]), ([1, 1, 7], [4, 6, 2])):
        pairs = [torch.tensor(ids, dtype=torch.int32) for ids in (src, dst)]
        copy_pages(want, *pairs)
        triton_kv.copy_pages(pages, *pairs)
        assert torch.equal(pages, want)
