"""`kv_write` puts each token's heads into its slot and touches nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.ops import kv_write

PAGES = 6


@settings(deadline=None, max_examples=50)
@given(
    st.data(),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(0, 2),
)
def test_each_token_lands_in_its_slot(data, page_size, kv_heads, dtype, layer):
    slots = data.draw(st.lists(st.integers(0, PAGES * page_size - 1), unique=True, max_size=12))
    pages = torch.randn(3, PAGES, 2, kv_heads, page_size, 8, dtype=dtype)
    k, v = torch.randn(2, len(slots), kv_heads, 8, dtype=dtype)
    want = pages.clone()
    for t, slot in enumerate(slots):
        want[layer, slot // page_size, 0, :, slot % page_size] = k[t]
        want[layer, slot // page_size, 1, :, slot % page_size] = v[t]
    memory = pages.data_ptr()
    assert kv_write(pages, layer, k, v, torch.tensor(slots, dtype=torch.int32)) is None
    assert torch.equal(pages, want)
    assert pages.data_ptr() == memory


def test_views_of_a_fused_projection():
    pages = torch.zeros(1, 3, 2, 2, 4, 8)
    qkv = torch.randn(5, (4 + 2 + 2) * 8)
    _, k, v = (part.view(5, -1, 8) for part in qkv.split((32, 16, 16), dim=-1))
    assert not k.is_contiguous()
    slots = torch.tensor([0, 1, 5, 6, 11], dtype=torch.int32)
    kv_write(pages, 0, k, v, slots)
    by_slot = pages[0].permute(0, 3, 1, 2, 4).reshape(12, 2, 2, 8)
    assert torch.equal(by_slot[slots, 0], k)
    assert torch.equal(by_slot[slots, 1], v)


def test_many_writers_of_the_dummy_page_leave_the_rest_alone():
    pages = torch.randn(2, 3, 2, 1, 4, 8)
    before = pages.clone()
    k, v = torch.randn(2, 20, 1, 8)
    kv_write(pages, 1, k, v, torch.full((20,), 2 * 4, dtype=torch.int32))
    assert torch.equal(pages[:, :2], before[:, :2])
    assert torch.equal(pages[0], before[0])
    assert torch.equal(pages[1, 2, :, :, 1:], before[1, 2, :, :, 1:])


def test_a_slot_outside_the_pool_is_refused():
    pages = torch.zeros(1, 3, 2, 1, 4, 8)
    with pytest.raises(IndexError):
        kv_write(pages, 0, torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), torch.tensor([12], dtype=torch.int32))


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "kv_heads", "page_size", "head_dim"), [(0, 1, 4, 8), (1, 1, 1, 12), (5, 8, 1, 16), (7, 3, 4, 24), (33, 2, 16, 8)]
)
def test_the_kernel_interpreted(tokens, kv_heads, page_size, head_dim, dtype):
    from nanovllm.ops.kv_cache import triton_kv

    pages = torch.randn(3, PAGES, 2, kv_heads, page_size, head_dim).to(dtype)
    want, slots = pages.clone(), torch.randperm(PAGES * page_size)[:tokens].int()
    qkv = torch.randn(tokens, 4 * kv_heads, head_dim).to(dtype)
    own, turned = qkv[:, 2 * kv_heads : 3 * kv_heads], torch.randn(head_dim, kv_heads, tokens).to(dtype).permute(2, 1, 0)
    for k, v in ((own, qkv[:, 3 * kv_heads :]), (own, turned), (turned, own)):
        kv_write(want, 1, k, v, slots)
        triton_kv.kv_write(pages[1], k, v, slots)
        assert torch.equal(pages, want)
