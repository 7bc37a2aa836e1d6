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
