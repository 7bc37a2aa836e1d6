"""The small steps of a decode batch against the same written out with Python's numbers."""

import math

import pytest
import torch

from nanovllm.ops.elementwise.decode_rows import capped_logits, next_places, rotary_angles
from nanovllm.ops.elementwise.norm_rope import soft_cap

SPEED = 1e4 ** (-torch.arange(6) / 6)
BATCHES = [(1, 1, 4), (3, 5, 1), (9, 2, 16), (255, 3, 4), (256, 3, 4), (257, 3, 4)]  # rows, pages of a row, page size


def batch(rows, width, page_size):
    """Rows of any length that their pages hold, full ones among them; some have ended."""
    torch.manual_seed(rows)
    tables = torch.randperm(rows * width).view(rows, width).int()
    lens = torch.randint(1, width * page_size + 1, (rows,), dtype=torch.int32)
    lens[::3] = width * page_size
    return lens + 100, lens, tables, (torch.rand(rows) < 0.7).int(), rows * width + 1, page_size


@pytest.mark.parametrize(("rows", "width", "page_size"), BATCHES)
def test_where_the_next_token_goes(rows, width, page_size):
    positions, lens, tables, active, num_pages, _ = given = batch(rows, width, page_size)
    found = list(zip(*(part.tolist() for part in next_places(*given)), strict=True))
    for b, (position, n, moved) in enumerate(zip(positions.tolist(), lens.tolist(), active.tolist(), strict=True)):
        row = [*tables[b].tolist(), num_pages - 1]
        index = n - 1 + moved
        slot = row[index // page_size] * page_size + index % page_size
        assert found[b] == (position + moved, slot, min(n + moved, width * page_size))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_angles(dtype):
    positions = [0, 1, 17, 4000]
    cos, sin = rotary_angles(torch.tensor(positions, dtype=dtype), SPEED, 1.5)
    for t, position in enumerate(positions):
        angles = [position * speed for speed in SPEED.tolist()]
        want = [[1.5 * math.cos(a) for a in angles * 2]], [[sign * 1.5 * math.sin(a) for sign in (-1, 1) for a in angles]]
        torch.testing.assert_close((cos[t], sin[t]), tuple(map(torch.tensor, want)), rtol=0, atol=1e-3)


@pytest.mark.interpret
@pytest.mark.parametrize(("rows", "width", "page_size"), BATCHES)
def test_places_interpreted(rows, width, page_size):
    """Rows on either side of the 256 of a program; tables may be wider than what is read of them."""
    from nanovllm.ops.elementwise import triton_decode_rows

    positions, lens, tables, *rest = batch(rows, width, page_size)
    for some in (tables, torch.nn.functional.pad(tables, (0, 2), value=-1)[:, :width]):
        got, want = triton_decode_rows.next_places(positions, lens, some, *rest), next_places(positions, lens, some, *rest)
        assert all(map(torch.equal, got, want))


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 17])
@pytest.mark.parametrize("half", [1, 6, 8])
def test_angles_interpreted(half, tokens, dtype):
    """Tokens on either side of the eight of a program."""
    from nanovllm.ops.elementwise import triton_decode_rows

    positions, speed = torch.randint(0, 5000, (tokens,), dtype=dtype), 1e4 ** (-torch.arange(half) / half)
    torch.testing.assert_close(
        triton_decode_rows.rotary_angles(positions, speed, 1.5), rotary_angles(positions, speed, 1.5), rtol=0, atol=1e-6
    )


def test_logits_are_capped() -> None:
    logits = torch.tensor([[0.0, 1.5, -1.5, 400.0, -400.0, torch.inf]])
    want = torch.tensor([[2.5 * math.tanh(value / 2.5) for value in logits[0].tolist()]])
    torch.testing.assert_close(capped_logits(logits, 2.5), want)
    assert capped_logits(logits, 0.0) is logits


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore:.*overflow encountered in exp2")
@pytest.mark.parametrize(("rows", "vocab"), [(1, 5), (3, 1000), (2, 1024), (0, 7)])
def test_capped_logits_interpreted(rows: int, vocab: int) -> None:
    from nanovllm.ops.elementwise import triton_decode_rows

    logits = (torch.randn(rows, vocab) * 50).half()
    torch.testing.assert_close(triton_decode_rows.capped_logits(logits, 30.0), soft_cap(logits, 30.0), rtol=2**-10, atol=1e-4)
    big = logits * 1000  # infinite ones too
    torch.testing.assert_close(triton_decode_rows.capped_logits(big, 30.0), soft_cap(big, 30.0), rtol=2**-10, atol=1e-4)
