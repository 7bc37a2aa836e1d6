"""The Triton kernels over KV in FP8, under the interpreter, against the plain functions.

The interpreter converts and multiplies as torch does (`interpreted_fp8.py`).
"""

from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.executor.cascade_policy import own_runs, shared_runs
from nanovllm.models.common.layers import inverse_frequencies
from nanovllm.ops import kv_write, move_kv, paged_decode
from nanovllm.ops.attention.cascade import cascade_rows
from nanovllm.ops.attention.cascade_plan import CascadePlan, CascadeWorkspace
from nanovllm.ops.attention.fused_plan import FusedDecodePlan
from nanovllm.ops.attention.prompt_tiles import TilePlan
from nanovllm.ops.attention.reference import prefill_rows
from nanovllm.ops.attention.rope_attend import rope_attend
from nanovllm.ops.kv_cache.fp8 import FP8, numbers, read_tokens, split, stored_width
from nanovllm.testing.models import tiny_config
from nanovllm.testing.problems import attention_problem, fp8_pages
from tests.ops.interpreted_fp8 import convert_as_torch

pytest.importorskip("triton")
CPU = torch.device("cpu")
SHAPES = [(1, 1, 8), (3, 1, 12), (2, 4, 8), (1, 16, 32), (8, 3, 20)]  # key/value heads, page size, head_dim
LIMITS = [(0, 0.0), (7, 0.5), (33, 0.0), (500, 2.0)]  # window, soft cap


@pytest.fixture(autouse=True)
def converting_as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    convert_as_torch(monkeypatch)


def assert_alike(one: torch.Tensor, other: torch.Tensor, rtol: float = 0.0) -> None:
    """The same bytes, or for numbers that differ by `rtol` before they are rounded: codes of which a few differ by one."""
    (codes, scales), (wanted, expected) = split(one), split(other)
    torch.testing.assert_close(scales, expected, rtol=rtol, atol=0)
    off = (codes.float() - wanted.float()).abs()
    assert (off <= (2.0**-9 + wanted.float().abs() / 7 if rtol else 0.0)).all()
    assert (off != 0).float().mean() < 0.02


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "size", "head_dim"), SHAPES)
def test_writing(heads: int, size: int, head_dim: int, dtype: torch.dtype) -> None:
    from nanovllm.ops.kv_cache import triton_kv

    torch.manual_seed(heads)
    pages = torch.zeros(2, 5, 2, heads, size, stored_width(head_dim, FP8), dtype=torch.uint8).view(FP8)
    want = pages.clone()
    kv = torch.randn(5, 2 * heads + 1, head_dim) * torch.logspace(-4, 4, 5)[:, None, None]
    kv[1], kv[2, 0, 0], kv[3, :, 1] = 0, torch.nan, torch.inf
    k, v = kv.to(dtype).split((heads, heads + 1), 1)
    v, slots = v[:, 1:], torch.randperm(5 * size)[:5].int()
    kv_write(want, 1, k, v, slots)
    triton_kv.kv_write(pages[1], k, v, slots)
    assert_alike(pages, want)


@pytest.mark.interpret
@pytest.mark.parametrize(("heads", "size", "head_dim"), SHAPES)
def test_moving(heads: int, size: int, head_dim: int) -> None:
    from nanovllm.ops.kv_cache import triton_kv

    torch.manual_seed(size)
    pages = fp8_pages(torch.randn(2, 40, 2, heads, size, head_dim))
    order, count = torch.randperm(40 * size).int(), 9
    src, dst, shift = order[:count], order[count : 2 * count], torch.randint(-50, 50, (count,), dtype=torch.int32)
    shift[0] = 0
    want, speed = pages.clone(), inverse_frequencies(tiny_config().rope, head_dim)
    move_kv(want, src, dst, shift, speed)
    triton_kv.move_kv(pages, src, dst, shift, speed)
    assert_alike(pages, want, rtol=1e-5)
    for layer in (0, 1):
        for mine, theirs in zip(read_tokens(pages[layer], dst[:1]), read_tokens(want[layer], dst[:1]), strict=True):
            assert torch.equal(mine.float(), theirs.float())
        (mine, scale), (theirs, other) = (read_tokens(each[layer], dst) for each in (pages, want))
        assert torch.equal(mine[:, 1].float(), theirs[:, 1].float()) and torch.equal(scale[:, 1], other[:, 1])


@pytest.mark.interpret
def test_copying() -> None:
    from nanovllm.ops.kv_cache import triton_kv

    pages = fp8_pages(torch.randn(2, 5, 2, 2, 4, 8))
    want = pages.clone().view(torch.uint8)
    want[:, [3, 4]] = want[:, [0, 2]]
    triton_kv.copy_pages(pages.view(torch.uint8), torch.tensor([0, 2], dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32))
    assert torch.equal(pages.view(torch.uint8), want)


@pytest.mark.interpret
@pytest.mark.parametrize(("splits", "stages"), [(4, 0), (1, 3), (2, 2)])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads", "head_dim", "size"),
    [([1, 5, 40, 17], 4, 2, 16, 4), ([33, 8], 3, 1, 24, 8), ([31, 32, 33, 64, 65], 8, 1, 16, 1)],
)
def test_decoding(
    lens: list[int], heads: int, kv_heads: int, head_dim: int, size: int, limits: tuple[int, float], splits: int, stages: int
) -> None:
    from nanovllm.ops.attention import triton_rope_attend

    qkv, q_gain, k_gain, cos, sin, plain, layer, *rest = attention_problem(lens, heads, kv_heads, head_dim, size, True, torch.float32)
    pages = fp8_pages(plain)
    mine, want_pages = pages.clone(), pages.clone()
    want = rope_attend(qkv, q_gain, k_gain, cos, sin, want_pages, layer, *rest, 0, *limits)
    plan = FusedDecodePlan(len(qkv), heads, kv_heads, head_dim, CPU)
    plan.tile, plan.splits, plan.stages = 8, splits, stages
    plan.parts, plan.stats = (torch.full((*like.shape[:2], splits, like.shape[3]), torch.nan) for like in (plan.parts, plan.stats))
    for _ in range(2):
        got = triton_rope_attend.launch(qkv, q_gain, k_gain, cos, sin, mine[layer], *rest, plan, False, *limits)
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
        assert_alike(mine, want_pages, rtol=1e-5)
        assert not plan.counts.any()
    q = triton_rope_attend.write(qkv, q_gain, k_gain, cos, sin, pages[layer], rest[2], rest[4], False, False)
    assert_alike(pages, want_pages, rtol=1e-5)
    got = paged_decode(q, pages, layer, *rest[:2], rest[3], 0, *limits).flatten(1)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tiny", [1.0, 1e-4])
def test_decoding_in_halves(dtype: torch.dtype, tiny: float) -> None:
    """Values so small that float16 has no precision for them beside a weight: the scale is applied in a wider range."""
    from nanovllm.ops.attention import triton_rope_attend

    qkv, q_gain, k_gain, cos, sin, plain, layer, *rest = attention_problem([1, 5, 40, 17], 4, 2, 16, 4, dtype == torch.float16, dtype)
    plain[:, :, 1] *= tiny
    qkv[:, -2 * 16 :] *= tiny
    pages = fp8_pages(plain)
    want = rope_attend(*(t if t is None else t.float() for t in (qkv, q_gain, k_gain)), cos, sin, pages.clone(), layer, *rest, 0)
    got = triton_rope_attend.launch(
        qkv, q_gain, k_gain, cos, sin, pages[layer], *rest, FusedDecodePlan(4, 4, 2, 16, CPU, (16, 1, 0, 4)), False
    )
    torch.testing.assert_close(got.float(), want, rtol=3e-2, atol=3e-2 * tiny)


@pytest.mark.interpret
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize(("dtype", "tiny"), [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.bfloat16, 1e-6), (torch.float16, 1e-3)])
@pytest.mark.parametrize(("rows", "size", "group", "head_dim"), [(3, 16, 2, 16), (12, 4, 3, 24), (5, 3, 5, 128)])
def test_shared_pages(rows: int, size: int, group: int, head_dim: int, dtype: torch.dtype, tiny: float, limits: tuple[int, float]) -> None:
    """Queries, keys and values may be so large or small that products or sums of them are beyond the range of float16."""
    from nanovllm.ops.attention import triton_cascade

    torch.manual_seed(rows)
    kv_heads, width = 2, 9
    plain = torch.randn(rows * width + 1, 2, kv_heads, size, head_dim)
    plain[:, 0] /= tiny
    plain[:, 1] *= tiny
    pages = fp8_pages(plain)
    tables = torch.randperm(rows * width).view(rows, width).int()
    tables[:, :4] = tables[0, :4]  # shared
    lens = torch.randint(4 * size + 1, width * size + 1, (rows,), dtype=torch.int32)
    counts = -(-lens.numpy() // size)
    q = (torch.randn(rows, kv_heads * group, head_dim) * tiny).to(dtype)
    for runs in (shared_runs(tables.numpy(), lens.numpy() // size, counts, lambda _, __: True), own_runs(counts)):
        plan = CascadePlan(CascadeWorkspace(rows, kv_heads * group, head_dim, CPU, fp8=True), rows, kv_heads * group, kv_heads, size, CPU)
        plan.workspace.out = torch.full((plan.workspace.num_parts, kv_heads * group, head_dim), torch.nan)
        plan.workspace.lse = torch.full((plan.workspace.num_parts, kv_heads * group), torch.nan)
        assert plan.update(runs)
        got = triton_cascade.cascade_decode(q, pages, tables, lens, 0.3, plan, *limits)
        want = cascade_rows(q.float(), pages, tables, lens, 0.3, runs, *limits)
        close = 1e-5 if dtype == torch.float32 else 1e-2 if dtype == torch.bfloat16 else 2e-3
        torch.testing.assert_close(got.float(), want, rtol=close, atol=close * tiny)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "size", "options"),
    [
        ([(1, 0), (5, 3), (40, 0)], 4, 2, 8, 4, {}),
        ([(70, 90), (3, 200)], 6, 2, 24, 3, {}),
        ([(150, 10), (1, 63), (1, 64), (2, 63)], 2, 2, 32, 16, {"window": 20}),
        ([(70, 90), (30, 0)], 2, 1, 16, 4, {"window": 1000, "softcap": 2.0}),
    ],
)
def test_prompts(
    rows: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, size: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Rows of new tokens after others."""
    from nanovllm.ops.attention.triton_prompts import attend_tiles

    new, old = np.array(rows, np.int32).T
    cu_seqlens, seq_lens = np.concatenate(([0], new.cumsum())).astype(np.int32), (new + old).astype(np.int32)
    width = -(-int(seq_lens.max()) // size)
    tables = torch.randperm(len(rows) * width, dtype=torch.int32).view(len(rows), width)
    pages = fp8_pages(torch.randn(len(rows) * width, 2, kv_heads, size, head_dim))
    for row, seq_len in enumerate(seq_lens.tolist()):  # no kernel may use what is behind the end of a row
        for part in split(pages):
            bits = part.view(torch.uint8)
            bits[tables[row, (seq_len - 1) // size], :, :, (seq_len - 1) % size + 1 :] = 0x7F
            bits[tables[row, (seq_len - 1) // size + 1 :].long()] = 0x7F
    count = int(cu_seqlens[-1])
    q = torch.randn(count + 3, heads, head_dim).to(dtype)
    plan = TilePlan(len(rows) + 1, count + 3, heads, kv_heads, CPU)
    plan.update(cu_seqlens, seq_lens)
    out = attend_tiles(q, pages, tables, 0.3, plan, **options)
    want = prefill_rows(q[:count], pages, tables, torch.from_numpy(seq_lens), torch.from_numpy(cu_seqlens), 0.3, **options)
    torch.testing.assert_close(out[:count], want, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)
    assert not out[count:].any() and numbers(pages).shape[-1] == head_dim
