"""Cascade attention on the reference, and its kernels under Triton's interpreter, against plain attention in float64."""

import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.ops import paged_decode, paged_prefill
from nanovllm.ops.cascade import CascadePlan, CascadeWorkspace, PromptCascade, attend_part, merge, merge_parts, split_runs
from nanovllm.ops.plans import PlanMismatchError, UnknownPlanError
from nanovllm.ops.reference import attend, row_kv
from nanovllm.sharing import own_runs, shared_runs

CPU = torch.device("cpu")
KV_HEADS, HEAD_DIM = 2, 8


def always(rows, pages):
    return True


class Tree:
    """Rows of `lens[b]` tokens over pages of one layer; they share a beginning, some a second level. The last `new[b]` are queries."""

    def __init__(self, num_rows, page_size, group=2, seed=0, head_dim=HEAD_DIM):
        rng = np.random.default_rng(seed)
        self.page_size, self.group, self.head_dim = page_size, group, head_dim
        ids = rng.permutation(400).astype(np.int32)
        system, document, rest = ids[:5], ids[5:12], ids[12:]
        self.tables = np.full((num_rows, 20), 400, np.int32)
        self.counts = np.zeros(num_rows, np.int32)
        for b in range(num_rows):
            own = rest[b * 3 : b * 3 + int(rng.integers(1, 4))]
            row = np.concatenate(([], system, document[: 7 * (b % 2)], own) if b != 1 else ([], own)).astype(np.int32)
            self.tables[b, : len(row)], self.counts[b] = row, len(row)
        self.lens = (self.counts * page_size - rng.integers(0, page_size, num_rows)).astype(np.int32)
        self.new = np.minimum(rng.integers(1, 2 * page_size + 2, num_rows), self.lens).astype(np.int32)
        self.new[0] = 1
        torch.manual_seed(seed)
        self.pages = torch.randn(1, 401, 2, KV_HEADS, page_size, head_dim, dtype=torch.float64)
        self.cu = np.concatenate(([0], np.cumsum(self.new))).astype(np.int32)
        self.scale = head_dim**-0.5
        self.on_device = [torch.from_numpy(x) for x in (self.tables, self.lens, self.cu)]

    def queries(self, count):
        return torch.randn(count, KV_HEADS * self.group, self.head_dim, dtype=torch.float64)

    def expected(self, q, new):
        bounds = np.concatenate(([0], np.cumsum(new)))
        rows = [
            attend(q[lo:hi], row_kv(self.pages[0], self.on_device[0][b], int(self.lens[b])), self.scale)
            for b, (lo, hi) in enumerate(pairwise(bounds))
        ]
        return torch.cat(rows)

    def plan(self, runs):
        rows = len(self.tables)
        space = CascadeWorkspace(rows, KV_HEADS * self.group, self.head_dim, CPU)
        plan = CascadePlan(space, rows, KV_HEADS * self.group, KV_HEADS, self.page_size, CPU)
        assert plan.update(runs)
        return plan


@given(st.integers(1, 9), st.sampled_from([1, 3, 4, 16]), st.sampled_from([1, 2, 3]), st.integers(0, 5))
def test_decode_and_prompts_equal_plain_attention(rows, page_size, group, seed):
    tree = Tree(rows, page_size, group, seed)
    q = tree.queries(rows)
    for runs in (shared_runs(tree.tables, tree.lens // page_size, tree.counts, always), own_runs(tree.counts)):
        plan = tree.plan(runs)
        out = paged_decode(q, tree.pages, 0, *tree.on_device[:2], tree.scale, plan.handle)
        torch.testing.assert_close(out, tree.expected(q, np.ones(rows, np.int64)), rtol=0, atol=1e-12)
    q, prompts = tree.queries(int(tree.cu[-1])), PromptCascade()
    prompts.update(tree.lens, tree.cu, shared_runs(tree.tables, (tree.lens - tree.new) // page_size, tree.counts, always), CPU)
    out = paged_prefill(q, tree.pages, 0, *tree.on_device, tree.scale, prompts.handle)
    torch.testing.assert_close(out, tree.expected(q, tree.new), rtol=0, atol=1e-12)


def test_pages_planned_ahead_wait_until_lengths_reach_them():
    tree = Tree(4, 4)
    whole = tree.lens // 4
    counts = tree.counts + 2
    plan = tree.plan(shared_runs(tree.tables, whole, counts, always))
    for grown in range(8):
        lens = torch.minimum(tree.on_device[1] + grown, torch.from_numpy(counts * 4))
        q = tree.queries(4)
        want = paged_decode(q, tree.pages, 0, tree.on_device[0], lens, tree.scale, 0)
        got = paged_decode(q, tree.pages, 0, tree.on_device[0], lens, tree.scale, plan.handle)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 60), st.integers(1, 4), st.integers(0, 3))
def test_items_cover_every_member_and_page_once(rows, per_item, target, min_pages, seed):
    tree = Tree(rows, 4, seed=seed)
    runs = shared_runs(tree.tables, tree.lens // 4, tree.counts, always)
    plan = split_runs(runs, rows, per_item, target, min_pages, 10**6)
    assert plan is not None
    items, starts, members, places = plan
    seen, parts = [set() for _ in range(rows)], [set() for _ in range(rows)]
    for row, begin, stop, first, count in items.tolist():
        assert 1 <= count <= per_item and begin < stop
        for member, place in zip(members[first : first + count].tolist(), places[first : first + count].tolist(), strict=True):
            assert (tree.tables[member, begin:stop] == tree.tables[row, begin:stop]).all()
            assert not seen[member] & set(range(begin, stop))
            seen[member] |= set(range(begin, stop))
            parts[member].add(place)
    assert seen == [set(range(n)) for n in tree.counts]
    assert parts == [set(range(a, b)) for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]
    assert len(items) <= target + len(runs) + sum(-(-len(run.rows) // per_item) for run in runs)


def test_fewer_parts_where_memory_is_short():
    runs = own_runs(np.full(4, 100, np.int32))
    many, few = split_runs(runs, 4, 8, 100, 1, 10**6), split_runs(runs, 4, 8, 100, 1, 40)
    assert many is not None and few is not None
    assert len(many[2]) == 100 and len(few[2]) <= 40
    assert split_runs(runs, 4, 8, 100, 1, 3) is None


def test_a_part_without_tokens_weighs_nothing():
    q, kv = torch.randn(3, 4, HEAD_DIM), torch.randn(2, KV_HEADS, 5, HEAD_DIM)
    out, lse = attend_part(q, kv, torch.tensor([5, 0, -7], dtype=torch.int32), 0.3)
    assert torch.isfinite(lse[0]).all() and torch.isneginf(lse[1:]).all() and (out[1:] == 0).all()
    merged = merge(torch.stack((out[0], out[1])), torch.stack((lse[0], lse[1])))
    torch.testing.assert_close(merged, out[0])


def test_merging_by_a_list_of_parts():
    outs, lses = torch.randn(6, 2, HEAD_DIM), torch.randn(6, 2)
    starts, places = torch.tensor([0, 1, 4], dtype=torch.int32), torch.tensor([5, 0, 2, 3], dtype=torch.int32)
    found = merge_parts(outs, lses, starts, places)
    torch.testing.assert_close(found[0], outs[5])
    weights = torch.softmax(lses[[0, 2, 3]] * np.log(2), 0)[..., None]
    torch.testing.assert_close(found[1], (weights * outs[[0, 2, 3]]).sum(0))


def test_plans_refuse_what_they_were_not_made_for():
    tree = Tree(3, 4)
    plan, prompts = tree.plan(own_runs(tree.counts)), PromptCascade()
    prompts.update(tree.lens, tree.cu, own_runs(tree.counts), CPU)
    q, (tables, lens, cu) = tree.queries(2), tree.on_device
    with pytest.raises(PlanMismatchError, match="2 rows"):
        paged_decode(q, tree.pages, 0, tables[:2], lens[:2], tree.scale, plan.handle)
    with pytest.raises(PlanMismatchError, match="never updated"):
        unready = CascadePlan(plan.workspace, 2, 4, KV_HEADS, 4, CPU)
        paged_decode(q, tree.pages, 0, tables[:2], lens[:2], tree.scale, unready.handle)
    with pytest.raises(PlanMismatchError, match="CascadePlan"):
        paged_decode(q, tree.pages, 0, tables[:2], lens[:2], tree.scale, prompts.handle)
    with pytest.raises(PlanMismatchError, match="2 tokens"):
        paged_prefill(q, tree.pages, 0, tables, lens, cu, tree.scale, prompts.handle)
    handle = plan.handle
    del plan
    with pytest.raises(UnknownPlanError):
        paged_decode(q, tree.pages, 0, tables[:2], lens[:2], tree.scale, handle)


INTERPRETED = """
import sys
import numpy as np
import torch
sys.path.insert(0, {tests!r})
from test_cascade import CPU, KV_HEADS, Tree, always
from nanovllm.ops import triton_attention as kernels
from nanovllm.ops.cascade import CascadePlan, CascadeWorkspace, merge_parts
from nanovllm.sharing import own_runs, shared_runs

for rows, page_size, group, head_dim in ((3, 16, 2, 16), (12, 4, 3, 24), (70, 1, 1, 32)):
    tree = Tree(rows, page_size, group, head_dim=head_dim)
    space = CascadeWorkspace(rows, KV_HEADS * group, head_dim, CPU)
    space.out = torch.full((space.num_parts, KV_HEADS * group, head_dim), torch.nan)
    space.lse = torch.full((space.num_parts, KV_HEADS * group), torch.nan)
    q, pages = tree.queries(rows).float(), tree.pages[0].float()
    want = tree.expected(q.double(), np.ones(rows, np.int64)).float()
    for runs in (shared_runs(tree.tables, tree.lens // page_size, tree.counts, always), own_runs(tree.counts)):
        plan = CascadePlan(space, rows, KV_HEADS * group, KV_HEADS, page_size, CPU)
        assert plan.update(runs)
        got = kernels.cascade_decode(q, pages, *tree.on_device[:2], tree.scale, plan.views(), space, 5)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
outs, lses = torch.randn(40, 3, 24), torch.randn(40, 3)
starts, places = torch.tensor([0, 1, 20, 39], dtype=torch.int32), torch.randperm(40)[:39].int()
out = torch.empty(3, 3, 24)
kernels.merge_into(outs, lses, starts, places, out)
torch.testing.assert_close(out, merge_parts(outs, lses, starts, places))
"""


def test_triton_kernels_under_the_interpreter():
    pytest.importorskip("triton")
    script = INTERPRETED.format(tests=os.path.dirname(__file__))
    run = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
