"""Keys and values in FP8: the quantiser against float64, the layout of pages, and the ops over them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.ops import copy_pages, kv_write, move_kv
from nanovllm.ops.kv_cache.fp8 import (
    FP8,
    LARGEST,
    LEAST,
    MOST,
    PER_LARGEST,
    as_rows,
    head_dim_of,
    numbers,
    quantised,
    read_tokens,
    split,
    stored_width,
    write_rows,
)

ALL_CODES = torch.arange(256, dtype=torch.uint8).view(FP8).double()
CODES = ALL_CODES[ALL_CODES.isfinite()].unique()  # of e4m3, ascending


def pool(layers: int = 2, pages: int = 4, heads: int = 2, size: int = 3, head_dim: int = 8) -> torch.Tensor:
    return torch.zeros(layers, pages, 2, heads, size, stored_width(head_dim, FP8), dtype=torch.uint8).view(FP8)


def nearest(x: torch.Tensor) -> torch.Tensor:
    """The nearest codes of e4m3 to numbers in float64, ties to the code with an even mantissa."""
    at = (x[..., None] - CODES).abs()
    best = at.amin(-1, keepdim=True)
    even = CODES.float().to(FP8).view(torch.uint8) % 2 == 0
    return CODES[torch.where(at == best, 2 - even.int(), 3).argmin(-1)]


@given(st.lists(st.floats(width=32), min_size=1, max_size=16), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_quantised_is_the_nearest_code_of_a_scale_from_the_largest_value(values: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    codes, scale = quantised(x)
    exact = x.float().double().nan_to_num(0.0, MOST, -MOST)
    assert scale.item() == max((exact.abs().max().float() * PER_LARGEST).item(), LEAST)
    divided = (exact.float() / scale).clamp(-LARGEST, LARGEST).double()
    assert torch.equal(codes.double(), nearest(divided))
    back = codes.float() * scale
    assert back.isfinite().all()
    # Half a step of the code: a sixteenth of the number, and for small numbers half of the smallest code.
    bound = torch.maximum(exact.abs() / 16, torch.full_like(exact, scale.item() * 2.0**-10)) * (1 + 1e-5)
    assert ((back.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 2.0**-126, 1e-40, 1e-38, 1e38, math.inf, -math.inf, math.nan])
def test_no_value_gives_nan_or_infinity(value: float) -> None:
    codes, scale = quantised(torch.tensor([[value] * 4, [value, 1.0, 0.0, -1.0]]))
    back = codes.float() * scale
    assert back.isfinite().all() and (scale >= LEAST).all() and (codes.float().abs() <= LARGEST).all()
    if math.isnan(value):
        assert (back[0] == 0).all() and back[1].tolist() == [0.0, 1.0, 0.0, -1.0]
    if math.isinf(value):
        assert (back[0].sign() == math.copysign(1, value)).all() and (back[0].abs() > 0.99 * MOST).all()


def test_the_scale_of_a_head_depends_on_no_other_head() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2, 3, 8) * torch.logspace(-20, 20, 5)[:, None, None, None]
    codes, scale = quantised(x)
    for index in ((0, 0, 0), (4, 1, 2), (2, 1, 0)):
        alone, alone_scale = quantised(x[index])
        assert torch.equal(alone.float(), codes[index].float()) and torch.equal(alone_scale, scale[index])


@pytest.mark.parametrize(("size", "head_dim"), [(1, 4), (3, 8), (16, 64)])
def test_split_is_a_view_of_aligned_codes_and_scales(size: int, head_dim: int) -> None:
    pages = pool(size=size, head_dim=head_dim)
    codes, scales = split(pages)
    assert head_dim_of(pages) == head_dim and codes.shape == (2, 4, 2, 2, size, head_dim) and scales.shape == (2, 4, 2, 2, size, 1)
    codes.view(torch.uint8).fill_(0x38)  # 1.0
    scales.fill_(3.0)
    assert (numbers(pages) == 3.0).all()
    assert codes.data_ptr() == pages.data_ptr() and codes.stride(-2) == head_dim  # codes of tokens follow each other
    whole = pages.view(torch.uint8)
    assert len(whole.unique()) <= 4 and whole.numel() == codes.numel() + 4 * scales.numel()  # nothing between them


def test_kv_write_writes_what_the_quantiser_gives_and_nothing_else() -> None:
    torch.manual_seed(1)
    pages, k, v = pool(), torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    kv_write(pages, 1, k, v, torch.tensor([4, 9], dtype=torch.int32))
    stored = numbers(pages)
    for token, (page, inside) in enumerate([(1, 1), (3, 0)]):
        for part, x in enumerate((k, v)):
            codes, scale = quantised(x[token])
            assert torch.equal(stored[1, page, part, :, inside], codes.float() * scale)
            assert torch.equal(split(pages)[1][1, page, part, :, inside], scale)
    stored[1, 1, :, :, 1] = stored[1, 3, :, :, 0] = 0
    assert (stored == 0).all()


def test_rows_of_tokens_move_between_page_sizes() -> None:
    torch.manual_seed(2)
    source, target = pool(size=3), pool(pages=2, size=7)
    slots = torch.tensor([0, 4, 8, 11], dtype=torch.int32)
    kv_write(source, 0, torch.randn(4, 2, 8), torch.randn(4, 2, 8), slots)
    rows = as_rows(source[0]).flatten(0, 1).view(torch.uint8)[slots.long()].view(FP8)
    there = torch.tensor([13, 2, 1, 6], dtype=torch.int32)
    write_rows(target[1], rows, there)
    for one, other in zip(read_tokens(source[0], slots), read_tokens(target[1], there), strict=True):
        assert torch.equal(one.float(), other.float())


def test_copy_pages_copies_codes_and_scales() -> None:
    torch.manual_seed(3)
    pages = pool()
    kv_write(pages, 0, torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.arange(3, dtype=torch.int32))
    copy_pages(pages, torch.tensor([0], dtype=torch.int32), torch.tensor([2], dtype=torch.int32))
    assert torch.equal(numbers(pages)[:, 2], numbers(pages)[:, 0]) and (numbers(pages)[0, 2] != 0).any()
    assert (numbers(pages)[:, 1] == 0).all()


def test_move_kv_copies_bits_and_rounds_rotated_keys_anew() -> None:
    torch.manual_seed(4)
    pages, k, v = pool(), torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    kv_write(pages, 0, k, v, torch.tensor([0, 1], dtype=torch.int32))
    src, dst, shift = torch.tensor([[0, 1], [6, 7], [0, 5]], dtype=torch.int32)
    inv_freq = torch.tensor([1.0, 0.5, 0.1, 0.01])
    move_kv(pages, src, dst, shift, inv_freq)
    before, after = read_tokens(pages[0], src), read_tokens(pages[0], dst)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[0].float(), other[0].float())  # not shifted: the same bits
        assert torch.equal(one[1, 1].float(), other[1, 1].float())  # values are never rotated
    key = (before[0].float() * before[1])[1, 0]
    angle = 5 * inv_freq
    low, high = key[:, :4], key[:, 4:]
    rotated = torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), -1)
    codes, scale = quantised(rotated)
    assert torch.equal(after[0][1, 0].float(), codes.float()) and torch.equal(after[1][1, 0], scale)
