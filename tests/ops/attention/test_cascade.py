"""Cascade attention on the reference, and its kernels under Triton's interpreter, against plain attention in float64."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.executor.cascade_policy import own_runs, shared_runs
from nanovllm.ops import paged_decode, paged_prefill
from nanovllm.ops.attention import cascade_plan
from nanovllm.ops.attention.cascade import PromptCascade, attend_part, merge, merge_parts
from nanovllm.ops.attention.cascade_plan import FP8_OWN, LEAST_OWN, TILE, CascadePlan, CascadeWorkspace, cut_runs, tiles
from nanovllm.ops.attention.plan_table import PlanMismatchError, UnknownPlanError
from nanovllm.ops.attention.reference import attend, row_kv

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

    def expected(self, q, new, window=0, softcap=0.0):
        bounds = np.concatenate(([0], np.cumsum(new)))
        rows = [
            attend(q[lo:hi], row_kv(self.pages[0], self.on_device[0][b], int(self.lens[b])), self.scale, window, softcap)
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


LIMITS = [(1, 0.0), (3, 0.0), (16, 0.5), (40, 0.0), (1000, 2.0), (0, 0.5)]  # window, softcap


@given(st.integers(1, 9), st.sampled_from([1, 3, 4, 16]), st.sampled_from([1, 2, 3]), st.integers(0, 5), st.sampled_from(LIMITS))
def test_of_a_run_a_row_sees_its_window(rows, page_size, group, seed, limits):
    tree = Tree(rows, page_size, group, seed)
    q = tree.queries(rows)
    for runs in (shared_runs(tree.tables, tree.lens // page_size, tree.counts, always), own_runs(tree.counts)):
        plan = tree.plan(runs)
        out = paged_decode(q, tree.pages, 0, *tree.on_device[:2], tree.scale, plan.handle, *limits)
        torch.testing.assert_close(out, tree.expected(q, np.ones(rows, np.int64), *limits), rtol=0, atol=1e-12)
    q, prompts = tree.queries(int(tree.cu[-1])), PromptCascade()
    prompts.update(tree.lens, tree.cu, shared_runs(tree.tables, (tree.lens - tree.new) // page_size, tree.counts, always), CPU)
    out = paged_prefill(q, tree.pages, 0, *tree.on_device, tree.scale, prompts.handle, None, None, *limits)
    torch.testing.assert_close(out, tree.expected(q, tree.new, *limits), rtol=0, atol=1e-12)


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


@given(
    st.integers(1, 40), st.integers(1, 9), st.integers(1, 60), st.sampled_from([1, 3, 16, 40]), st.integers(0, 3), st.booleans(),
    st.sampled_from([None, FP8_OWN]),
)  # fmt: skip
def test_shares_cover_what_several_rows_read_once(rows, per_item, shares, page_size, seed, shared, least):
    tree = Tree(rows, 4, seed=seed)
    tree.counts += 60 * (np.arange(rows) % 5 == 2)  # planned ahead
    runs = shared_runs(tree.tables, tree.lens // 4, tree.counts, always) if shared else own_runs(tree.counts)
    work = cut_runs(runs, rows, per_item, shares, page_size, least)
    seen, parts = [set() for _ in range(rows)], [set() for _ in range(rows)]
    for row, begin, stop, first, count in work.items.tolist():
        assert 1 <= count <= per_item and begin < stop
        for member, place in zip(work.members[first : first + count].tolist(), work.places[first : first + count].tolist(), strict=True):
            assert member == row or (tree.tables[member, begin:stop] == tree.tables[row, begin:stop]).all()
            assert not seen[member] & set(range(begin, stop))
            seen[member] |= set(range(begin, stop))
            parts[member].add(place)
    assert seen == [set(range(begin)) for begin in work.begins]
    assert parts == [set(range(a, b)) for a, b in pairwise(work.starts.tolist())]
    assert work.bounds[0] == 0 and work.bounds[-1] == len(work.items) and len(work.bounds) == shares + 1
    tiles = [
        sum(-(-(stop - start) * page_size // TILE) for _, start, stop, _, _ in work.items[a:b].tolist()) for a, b in pairwise(work.bounds)
    ]
    if TILE % page_size == 0:
        assert max(tiles) - min(tiles) <= 1
    own = (tree.counts - work.begins) * page_size
    if least is not None:
        assert (own >= 0).all() and own.max() < least + page_size
        return
    assert (own >= 0).all() and own.max() <= max(
        LEAST_OWN + page_size, sum(tiles) * TILE / shares + own.sum() / shares + 2 * TILE * page_size
    )


def test_a_long_row_is_cut_but_for_its_end():
    runs = own_runs(np.array([100, 4, 4000], np.int32))
    work = cut_runs(runs, 3, 8, 16, 16)
    assert work.begins.tolist()[:2] == [0, 0] and work.starts.tolist()[:3] == [0, 0, 0]
    per_share = (4000 - work.begins[2]) * 16
    assert 4000 * 16 / 17 < per_share < 4000 * 16 / 15
    assert len(work.items) == 16


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_few_heads_leave_room_for_every_cut(kv_heads):
    """Many rows in an item, and many shares: the most partial results that sharing one beginning makes."""
    rows, tables = 128, np.zeros((128, 401), np.int32)
    tables[:, 400] = np.arange(128) + 1
    lens = np.full(rows, 6401, np.int32)
    plan = CascadePlan(CascadeWorkspace(rows, kv_heads, 16, CPU), rows, kv_heads, kv_heads, 16, CPU)
    assert plan.update(shared_runs(tables, lens // 16, np.full(rows, 401, np.int32), always))


@pytest.mark.parametrize("short", ["items", "parts"])
def test_runs_without_room_change_nothing(short):
    tree = Tree(9, 4)
    plan = tree.plan(own_runs(tree.counts))
    before, runs = plan.ints.clone(), plan.runs
    if short == "items":
        plan.max_items = 1
    else:
        plan.workspace.num_parts = 8
    assert not plan.update(shared_runs(tree.tables, tree.lens // 4, tree.counts, always))
    assert plan.runs is runs and torch.equal(plan.ints, before)
    q = tree.queries(9)
    got = paged_decode(q, tree.pages, 0, *tree.on_device[:2], tree.scale, plan.handle)
    torch.testing.assert_close(got, tree.expected(q, np.ones(9, np.int64)), rtol=0, atol=1e-12)


def test_fields_lie_at_whole_16_bytes():
    for rows in (1, 3, 33):
        plan = CascadePlan(CascadeWorkspace(rows, 6, 16, CPU), rows, 6, 2, 16, CPU)
        assert all(view.data_ptr() % 16 == plan.ints.data_ptr() % 16 for view in plan.views())


@pytest.mark.parametrize(
    ("head_dim", "dtype", "memory", "shared", "own"),
    [
        (128, torch.bfloat16, 200_000, (64, 4), (32, 3)),  # an H200
        (128, torch.bfloat16, 93_184, (64, 2), (32, 3)),
        (128, torch.bfloat16, 57_344, (64, 1), (32, 3)),
        (256, torch.bfloat16, 93_184, (16, 3), (16, 3)),
        (24, torch.float32, 200_000, (64, 4), (32, 3)),
        (256, torch.float32, 93_184, (16, 1), (16, 2)),
        (512, torch.bfloat16, 57_344, (16, 1), (16, 1)),
        (128, torch.float8_e4m3fn, 200_000, (128, 3), (64, 3)),
        (128, torch.float8_e4m3fn, 93_184, (128, 2), (64, 3)),
        (256, torch.float8_e4m3fn, 93_184, (64, 2), (64, 2)),
    ],
)
def test_tiles_fit_into_shared_memory(head_dim, dtype, memory, shared, own):
    assert [(tile.tokens, tile.stages) for tile in tiles(head_dim, dtype, memory)] == [shared, own]


def test_a_part_without_tokens_weighs_nothing():
    q, kv = torch.randn(3, 4, HEAD_DIM), torch.randn(2, KV_HEADS, 5, HEAD_DIM)
    out, lse = attend_part(q, kv, torch.tensor([5, 0, -7], dtype=torch.int32), 0.3)
    assert torch.isfinite(lse[0]).all() and torch.isneginf(lse[1:]).all() and (out[1:] == 0).all()
    merged = merge(torch.stack((out[0], out[1])), torch.stack((lse[0], lse[1])))
    torch.testing.assert_close(merged, out[0])


def test_a_part_out_of_the_window_weighs_nothing():
    q, kv = torch.randn(3, 4, HEAD_DIM), torch.randn(2, KV_HEADS, 5, HEAD_DIM)
    out, lse = attend_part(q, kv, torch.tensor([7, 8, 30], dtype=torch.int32), 0.3, 3, 0.5)
    assert torch.isfinite(lse[0]).all() and torch.isneginf(lse[1:]).all() and (out[1:] == 0).all()
    torch.testing.assert_close(out[0], kv[1, :, 4].repeat_interleave(2, 0))  # the last token alone


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


def interpreted_decode(tree, runs, shares=None, limits=()):
    """What the kernels make of `runs`, with partial results where memory was not a number before."""
    from nanovllm.ops.attention import triton_cascade

    rows, heads = len(tree.tables), KV_HEADS * tree.group
    space = CascadeWorkspace(rows, heads, tree.head_dim, CPU)
    space.out = torch.full((space.num_parts, heads, tree.head_dim), torch.nan)
    space.lse = torch.full((space.num_parts, heads), torch.nan)
    plan = CascadePlan(space, rows, heads, KV_HEADS, tree.page_size, CPU)
    plan.shares = shares or plan.shares
    plan.sizes = plan._sizes()
    plan.ints = torch.zeros(sum(plan.sizes), dtype=torch.int32)
    assert plan.update(runs)
    q = tree.queries(rows).float()
    got = triton_cascade.cascade_decode(q, tree.pages[0].float(), *tree.on_device[:2], tree.scale, plan, *limits)
    torch.testing.assert_close(got, tree.expected(q.double(), np.ones(rows, np.int64), *limits).float(), rtol=0, atol=1e-5)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("rows", "page_size", "group", "head_dim"),
    [
        (1, 1, 3, 24),
        (3, 16, 2, 16),
        (12, 4, 3, 24),
        (9, 4, 8, 16),
        (20, 1, 1, 32),
        (2, 4, 8, 80),
        (5, 3, 5, 128),
        pytest.param(70, 16, 2, 64, marks=pytest.mark.long),
    ],
)
def test_decode_interpreted(rows, page_size, group, head_dim):
    tree = Tree(rows, page_size, group, head_dim=head_dim)
    for runs in (shared_runs(tree.tables, tree.lens // page_size, tree.counts, always), own_runs(tree.counts)):
        for shares in (1, 3, None):
            interpreted_decode(tree, runs, shares)


@pytest.mark.interpret
@pytest.mark.parametrize("limits", [*LIMITS, (64, 0.0), (65, 30.0)])
@pytest.mark.parametrize(
    ("rows", "page_size", "group", "head_dim"),
    [(3, 16, 2, 16), (12, 4, 3, 24), pytest.param(20, 1, 8, 32, marks=pytest.mark.long), (5, 3, 5, 128)],
)
def test_decode_in_a_window_of_capped_scores_interpreted(rows, page_size, group, head_dim, limits):
    tree = Tree(rows, page_size, group, head_dim=head_dim)
    for runs in (shared_runs(tree.tables, tree.lens // page_size, tree.counts, always), own_runs(tree.counts)):
        interpreted_decode(tree, runs, 3, limits)


@pytest.mark.interpret
@pytest.mark.parametrize("window", [15, 16, 17, 64, 100])
def test_long_rows_in_a_window_interpreted(window, monkeypatch):
    """Parts of a row by itself, of which the window leaves some out."""
    tree = Tree(5, 16, 3, head_dim=24)
    tree.lens[:] = [63, 16, 64, 128, 65]
    for least in (16, 1):
        monkeypatch.setattr(cascade_plan, "LEAST_OWN", least)
        interpreted_decode(tree, own_runs(tree.counts), 16, (window, 0.0))


@pytest.mark.interpret
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 24), (8, 72)])
@pytest.mark.parametrize("lens", [[63, 16, 64, 128, 65], [1, 15, 17, 16, 33]])
def test_lengths_around_a_turn_of_the_loop_interpreted(lens, group, head_dim, monkeypatch):
    """A turn takes 64 keys, or fewer; one program takes a whole row, or a part of it that may not be reached yet."""
    tree = Tree(5, 16, group, head_dim=head_dim)
    assert (np.array(lens) <= tree.counts * 16).all()
    tree.lens[:] = lens  # `on_device` shares its memory
    for least in (512, 16, 1):
        monkeypatch.setattr(cascade_plan, "LEAST_OWN", least)
        interpreted_decode(tree, own_runs(tree.counts), 16)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 16), (3, 24)])
def test_merging_interpreted(heads, head_dim, dtype):
    """Numbers of parts on either side of the 16 of a turn; some parts saw no token, never all of a row."""
    from nanovllm.ops.attention import triton_cascade

    counts = torch.tensor([1, 15, 16, 17, 33])
    starts, num = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(), int(counts.sum())
    outs, lses = torch.randn(num, heads, head_dim).to(dtype), torch.randn(num, heads) * 3
    lses[2::5] = -torch.inf
    lses[starts[4] : starts[4] + 16] = -torch.inf
    for places in (torch.arange(num).int(), ((3 * torch.arange(num) + 1) % num).int()):
        out = torch.empty(len(counts), heads, head_dim, dtype=dtype)
        triton_cascade.merge_into(outs, lses, starts, places, out)
        torch.testing.assert_close(out, merge_parts(outs, lses, starts, places))
