"""Attention of prompts by tiles: the cut, and the kernel under Triton's interpreter against plain attention."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.ops.attention.plan_table import PlanMismatchError
from nanovllm.ops.attention.prompt_tiles import TilePlan, cut_tiles, tile_tokens
from nanovllm.ops.attention.reference import prefill_rows

CPU = torch.device("cpu")
ROWS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=6)  # queries, tokens before them


def arrays(rows: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    new, before = np.array(rows, np.int32).T
    return np.concatenate(([0], np.cumsum(new))).astype(np.int32), (new + before).astype(np.int32)


@given(rows=ROWS, tokens=st.sampled_from([1, 8, 64, 128]))
def test_tiles_cover_each_query_once_those_with_most_keys_first(rows: list[tuple[int, int]], tokens: int) -> None:
    cu_seqlens, seq_lens = arrays(rows)
    tiles = cut_tiles(cu_seqlens, seq_lens, tokens)
    seen = [(row, first + i - cu_seqlens[row], before + i) for row, first, count, before in tiles.tolist() for i in range(count)]
    assert sorted(seen) == [(row, i, before + i) for row, (new, before) in enumerate(rows) for i in range(new)]
    assert tiles[:, 2].min() >= 1 and tiles[:, 2].max() <= tokens
    assert (np.diff(tiles[:, 2] + tiles[:, 3]) <= 0).all()


@given(rows=ROWS)
def test_every_batch_within_the_limits_fits(rows: list[tuple[int, int]]) -> None:
    cu_seqlens, seq_lens = arrays(rows)
    plan = TilePlan(len(rows), int(cu_seqlens[-1]), 4, 2, CPU)
    memory = plan.table.data_ptr()
    plan.update(np.array([0, 1], np.int32), np.array([1], np.int32))
    plan.update(cu_seqlens, seq_lens)
    tiles = cut_tiles(cu_seqlens, seq_lens, plan.tokens)
    assert plan.table.data_ptr() == memory and (plan.table[: len(tiles)].numpy() == tiles).all() and not plan.table[len(tiles) :].any()


def test_a_batch_beyond_the_limits_is_refused() -> None:
    plan = TilePlan(2, 10, 4, 2, CPU)
    for rows in ([(1, 0)] * 3, [(11, 0)]):
        with pytest.raises(PlanMismatchError, match="up to 2 rows and 10 queries"):
            plan.update(*arrays(rows))


@pytest.mark.parametrize(("heads", "kv_heads", "tokens"), [(16, 8, 64), (8, 8, 128), (6, 2, 32), (32, 1, 4), (512, 1, 1)])
def test_a_tile_holds_the_heads_of_its_tokens(heads: int, kv_heads: int, tokens: int) -> None:
    assert tile_tokens(heads, kv_heads) == tokens


CASES = [
    ([(1, 0), (5, 3), (40, 0)], 4, 2, 8, 4, {}),
    ([(70, 90), (3, 0)], 4, 2, 16, 16, {}),
    ([(70, 90), (3, 200)], 6, 2, 24, 3, {}),
    ([(150, 10), (1, 63), (1, 64), (2, 63)], 2, 2, 32, 16, {"window": 20}),
    ([(70, 90), (30, 0)], 4, 1, 16, 4, {"window": 1}),
    ([(70, 90), (30, 0)], 2, 1, 16, 4, {"window": 1000, "softcap": 2.0}),
    ([(20, 130)], 4, 2, 16, 4, {"window": 70, "softcap": 0.5}),
]


@pytest.mark.interpret
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "head_dim", "page_size", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_interpreted(
    rows: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, page_size: int, options: dict[str, float], dtype: torch.dtype
) -> None:
    from nanovllm.ops.attention.triton_prompts import attend_tiles

    cu_seqlens, seq_lens = arrays(rows)
    width, extra = -(-int(seq_lens.max()) // page_size), 3
    tables = torch.randperm(len(rows) * width, dtype=torch.int32).view(len(rows), width)
    pages = torch.randn(len(rows) * width, 2, kv_heads, page_size, head_dim).to(dtype)
    for row, seq_len in enumerate(seq_lens.tolist()):  # no kernel may read behind the end of a row
        last, used = tables[row, (seq_len - 1) // page_size], (seq_len - 1) % page_size + 1
        pages[last, :, :, used:] = float("nan")
        pages[tables[row, (seq_len - 1) // page_size + 1 :]] = float("nan")
    count = int(cu_seqlens[-1])
    q = torch.randn(count + extra, 2 * heads, head_dim).to(dtype)[:, :heads]
    plan = TilePlan(len(rows) + 1, count + extra, heads, kv_heads, CPU)
    plan.update(cu_seqlens, seq_lens)
    out = attend_tiles(q, pages, tables, 0.3, plan, **options)
    want = prefill_rows(q[:count], pages, tables, torch.from_numpy(seq_lens), torch.from_numpy(cu_seqlens), 0.3, **options)
    torch.testing.assert_close(out[:count], want, rtol=0, atol=1e-5 if dtype == torch.float32 else 4e-3)
    assert not out[count:].any()
