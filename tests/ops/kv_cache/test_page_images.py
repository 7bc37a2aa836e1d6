"""`gather_pages` and `scatter_pages` copy whole pages of all layers to contiguous images, and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.ops.kv_cache.page_images import gather_pages, scatter_pages

PAGES = 6


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, PAGES - 1), max_size=PAGES, unique=True))
def test_images_hold_pages_of_all_layers(ids):
    pages = torch.randn(3, PAGES, 2, 2, 4, 8)
    images = torch.zeros(len(ids), 3, 2, 2, 4, 8)
    assert gather_pages(pages, int32(ids), images) is None
    for image, page in zip(images, ids, strict=True):
        assert torch.equal(image, pages[:, page])
    other, memory = torch.randn_like(pages), pages.data_ptr()
    want = other.clone()
    for page in ids:
        want[:, page] = pages[:, page]
    assert scatter_pages(other, int32(ids), images) is None
    assert torch.equal(other, want) and pages.data_ptr() == memory


def test_pages_in_fp8_are_copied_bit_by_bit():
    pages = torch.randint(0, 256, (2, PAGES, 2, 1, 4, 12), dtype=torch.uint8).view(torch.float8_e4m3fn)
    images = torch.zeros(2, 2, 2, 1, 4, 12, dtype=torch.uint8).view(torch.float8_e4m3fn)
    gather_pages(pages, int32([4, 1]), images)
    assert torch.equal(images.view(torch.uint8), pages.view(torch.uint8)[:, [4, 1]].transpose(0, 1))
    other = torch.zeros_like(pages.view(torch.uint8)).view(torch.float8_e4m3fn)
    scatter_pages(other, int32([0, 5]), images)
    assert torch.equal(other.view(torch.uint8)[:, [0, 5]], pages.view(torch.uint8)[:, [4, 1]])


def test_a_page_outside_the_pool_is_refused():
    pages, images = torch.zeros(1, 3, 2, 1, 4, 8), torch.zeros(1, 1, 2, 1, 4, 8)
    with pytest.raises(IndexError):
        gather_pages(pages, int32([3]), images)
    with pytest.raises(IndexError):
        scatter_pages(pages, int32([3]), images)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(("kv_heads", "page_size", "head_dim"), [(1, 1, 12), (2, 16, 64), (3, 16, 43), (2, 16, 128)])
def test_the_kernel_interpreted(kv_heads, page_size, head_dim, dtype):
    """Pages of less than a block of 4,096 numbers, of one, a little more, and two."""
    from nanovllm.ops.kv_cache import triton_kv

    shape = (2, kv_heads, page_size, head_dim)
    pages = (100 * torch.randn(2, PAGES, *shape)).to(dtype)
    for ids in ([], [3], [5, 0, 2]):
        images, want = torch.zeros(len(ids), 2, *shape, dtype=dtype), torch.zeros(len(ids), 2, *shape, dtype=dtype)
        gather_pages(pages, int32(ids), want)
        triton_kv.move_images(pages, int32(ids), images, gathered=True)
        assert torch.equal(images, want)
        back, want = torch.zeros_like(pages), torch.zeros_like(pages)
        scatter_pages(want, int32(ids), images)
        triton_kv.move_images(back, int32(ids), images, gathered=False)
        assert torch.equal(back, want)
