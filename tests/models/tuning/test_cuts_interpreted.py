"""The kernels by other cuts than their defaults, under Triton's interpreter: every one computes the same."""

import pytest
import torch

from nanovllm.models.tuning.candidates import default_cut, neighbours, starts
from nanovllm.models.tuning.launches import Machine, Work
from nanovllm.ops.attention.fused_plan import FusedDecodePlan
from nanovllm.ops.attention.rope_attend import rope_attend
from nanovllm.ops.cuts import Cut
from nanovllm.ops.linear.linear_add_norm import given_wide_tile, linear_add_norm
from nanovllm.ops.linear.norm_linear import given_tile
from nanovllm.testing.problems import attention_problem, linear_problem, wide_norm_linear

pytestmark = pytest.mark.interpret
MACHINE = Machine(processors=4, memory=60_000)


def tried(work: Work, most: int) -> list[Cut]:
    """The cuts that a search of two steps may come to: so many of them, evenly taken."""
    first = [default_cut(work, MACHINE), *starts(work, MACHINE)]
    found = dict.fromkeys(near for start in first for near in neighbours(work, start, MACHINE))
    cuts = [*dict.fromkeys([*found, *(further for near in found for further in neighbours(work, near, MACHINE))])]
    assert len(cuts) >= 4
    return cuts[:: -(-len(cuts) // most)]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 24, 256), (2, 13, 96), (3, 20, 256), (8, 33, 256), (16, 16, 512)])
def test_products_of_few_rows_by_other_cuts(rows: int, outputs: int, width: int, gated: bool) -> None:
    from nanovllm.ops.linear import triton_few_rows

    given = linear_problem(rows, outputs, width, gated, True, not gated, torch.float32)
    want = wide_norm_linear(*given)
    work = Work(part="qkv", form="few", rows=rows, outputs=outputs, width=width, gated=gated, norm=True)
    for cut in tried(work, 8):
        tile = given_tile(cut, rows, outputs, width, gated, MACHINE.memory)
        torch.testing.assert_close(triton_few_rows.launch(*given, tile, False).double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("rows", "outputs", "width"), [(5, 64, 256), (24, 128, 128), (70, 64, 256)])
def test_products_of_many_rows_by_other_cuts(rows: int, outputs: int, width: int, gated: bool) -> None:
    from nanovllm.ops.linear import triton_many_rows

    x, weight, _, bias, *_ = linear_problem(rows, outputs, width, gated, False, True, torch.float32)
    want = wide_norm_linear(x, weight, None, bias, None, 0.0, gated)
    work = Work(part="qkv", form="many", rows=rows, outputs=outputs, width=width, gated=gated)
    for cut in tried(work, 10):
        tile = given_wide_tile(cut, rows, outputs, width, gated, MACHINE.processors, MACHINE.memory)
        if tile is not None:
            torch.testing.assert_close(triton_many_rows.product(x, weight, bias, gated, tile, False).double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [3, 33])
def test_parts_and_their_sum_by_other_cuts(rows: int) -> None:
    from nanovllm.ops.linear import triton_many_rows

    x, weight, _, bias, residual, eps, _ = linear_problem(rows, 96, 384, False, False, True, torch.float32)
    assert residual is not None
    gain = torch.rand(96) + 0.5
    want, normed = linear_add_norm(x, weight, bias, residual, gain, eps)
    work, parts = Work(part="o", form="sum", rows=rows, outputs=96, width=384), set()
    for cut in tried(work, 100):
        tile = given_wide_tile(cut, rows, 96, 384, False, MACHINE.processors, MACHINE.memory, split=True)
        if tile is not None and tile.parts > 1:
            sums = triton_many_rows.partial_product(x, weight, tile, False)
            y, h = triton_many_rows.sum_norm(sums, bias, residual, gain, eps, False)
            torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(h, normed, rtol=1e-4, atol=1e-4)
            parts.add(tile.parts)
    assert len(parts) > 1


@pytest.mark.parametrize("rows", [2, 5, 20])
def test_attention_by_other_cuts(rows: int) -> None:
    """As a batch of so many rows is cut; twice, because a launch must leave the plan's counters as they were."""
    from nanovllm.ops.attention import triton_rope_attend

    given = attention_problem([1, 64, 65, 150, 17][: min(rows, 5)], 4, 2, 16, 4, True, torch.float32)
    qkv, q_gain, k_gain, cos, sin, pages, layer, *rest = given
    mine = pages.clone()
    want = rope_attend(*given, 0)
    work = Work(part="attend", form="attend", rows=rows, outputs=4, width=16, kv_heads=2)
    for cut in tried(work, 8):
        plan = FusedDecodePlan(rows, 4, 2, 16, torch.device("cpu"), cut)
        plan.parts.fill_(torch.nan)
        for _ in range(2):
            got = triton_rope_attend.launch(qkv, q_gain, k_gain, cos, sin, mine[layer], *rest, plan, False)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(mine, pages)
            assert not plan.counts.any()
