"""`move_kv` copies the bits of values, turns keys as a rotary embedding would, and touches nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.config import RopeConfig
from nanovllm.models.common.layers import inverse_frequencies, rope_angles
from nanovllm.ops import move_kv
from nanovllm.ops.elementwise.norm_rope import apply_rope

SLOTS, SIZE, HEADS, DIM = 24, 4, 2, 8
ROPE = RopeConfig(theta=10000.0)
SPEED = inverse_frequencies(ROPE, DIM)


def rotated(keys: torch.Tensor, positions: torch.Tensor, rope: RopeConfig = ROPE) -> torch.Tensor:
    return apply_rope(keys, *rope_angles(positions, inverse_frequencies(rope, keys.shape[-1]), rope))


def by_slot(pages: torch.Tensor) -> torch.Tensor:
    """[L, slots, 2, K, D]"""
    return pages.permute(0, 1, 4, 2, 3, 5).flatten(1, 2)


@given(st.permutations(range(SLOTS)), st.integers(0, SLOTS // 2), st.data())
@settings(max_examples=60)
def test_tokens_move_and_nothing_else_changes(order: list[int], count: int, data: st.DataObject) -> None:
    dst, free = order[:count], order[count:]
    src = [data.draw(st.sampled_from(free)) for _ in dst]
    shift = data.draw(st.lists(st.integers(-5000, 5000), min_size=count, max_size=count))
    pages = torch.randn(3, SLOTS // SIZE, 2, HEADS, SIZE, DIM)
    before, memory = pages.clone(), pages.data_ptr()
    move_kv(pages, *(torch.tensor(x, dtype=torch.int32) for x in (src, dst, shift)), SPEED)
    old, new = by_slot(before), by_slot(pages)
    for s, d, by in zip(src, dst, shift, strict=True):
        assert torch.equal(new[:, d, 1], old[:, s, 1])
        turned = rotated(old[:, s, 0], torch.full((3,), by))
        torch.testing.assert_close(new[:, d, 0], turned, rtol=1e-5, atol=1e-5)
        if by == 0:
            assert torch.equal(new[:, d, 0], old[:, s, 0])
    rest = [slot for slot in range(SLOTS) if slot not in dst]
    assert torch.equal(new[:, rest], old[:, rest])
    assert pages.data_ptr() == memory


@pytest.mark.parametrize(
    "rope",
    [
        ROPE,
        RopeConfig(theta=500.0, kind="linear", factor=2.5),
        RopeConfig(theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
        RopeConfig(theta=1e4, kind="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.1386),
    ],
    ids=lambda rope: rope.kind,
)
@pytest.mark.parametrize(("here", "there"), [(0, 700), (700, 3), (41, 42)])
def test_a_moved_key_is_the_key_of_its_new_position(rope: RopeConfig, here: int, there: int) -> None:
    plain = torch.randn(5, HEADS, 16)
    pages = torch.zeros(1, 4, 2, HEADS, SIZE, 16)
    view = by_slot(pages)
    pages.permute(0, 1, 4, 2, 3, 5)[0, 0, :, 0] = rotated(plain, torch.full((5,), here), rope)[:4]
    ints = torch.arange(4, dtype=torch.int32)
    move_kv(pages, ints, ints + 8, torch.full((4,), there - here, dtype=torch.int32), inverse_frequencies(rope, 16))
    view = by_slot(pages)
    torch.testing.assert_close(view[0, 8:12, 0], rotated(plain, torch.full((5,), there), rope)[:4], rtol=1e-4, atol=2e-4)


def test_a_slot_outside_the_pool_is_refused() -> None:
    pages, one = torch.zeros(1, 3, 2, 1, 4, 8), torch.tensor([0], dtype=torch.int32)
    with pytest.raises(IndexError):
        move_kv(pages, one, one + 12, one, SPEED)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kv_heads", "page_size", "head_dim", "count"),
    [(1, 1, 24, 1), (3, 1, 12, 5), (2, 4, 8, 15), (1, 16, 32, 16), (8, 4, 6, 17), (2, 4, 8, 37)],
)
def test_the_kernel_interpreted(kv_heads: int, page_size: int, head_dim: int, count: int, dtype: torch.dtype) -> None:
    """Counts on either side of the 16 tokens of a program."""
    from nanovllm.ops.kv_cache import triton_kv

    pages = torch.randn(2, 40, 2, kv_heads, page_size, head_dim).to(dtype)
    order = torch.randperm(40 * page_size).int()
    src, dst, shift = order[:count], order[count : 2 * count], torch.randint(-50, 50, (count,), dtype=torch.int32)
    shift[0] = 0
    want, speed = pages.clone(), inverse_frequencies(ROPE, head_dim)
    move_kv(want, src, dst, shift, speed)
    triton_kv.move_kv(pages, src, dst, shift, speed)
    one_rounding = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(pages, want, rtol=one_rounding, atol=one_rounding)
    assert torch.equal(pages[:, :, 1], want[:, :, 1])
    alike = [slot for slot in range(40 * page_size) if slot not in dst[shift != 0].tolist()]
    assert torch.equal(by_slot(pages)[:, alike], by_slot(want)[:, alike])
