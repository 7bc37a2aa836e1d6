"""Cascade attention on a GPU: the kernels against dense attention, captured steps as rows grow, and the engine with and without."""

from typing import Any

import numpy as np
import pytest
import torch

import nanovllm as nv
from nanovllm.entrypoints.cli.bench.graph_timer import captured
from nanovllm.executor.batch import EXTENSION
from nanovllm.executor.cascade_policy import own_runs, shared_runs
from nanovllm.executor.cuda_graphs import extension_sizes
from nanovllm.executor.graph_executor import GraphExecutor
from nanovllm.ops import paged_decode, paged_prefill
from nanovllm.ops.attention import reference
from nanovllm.ops.attention.cascade import PromptCascade
from nanovllm.ops.attention.cascade_plan import CascadePlan, CascadeWorkspace
from nanovllm.ops.attention.flashinfer import AttentionWorkspace
from nanovllm.ops.attention.flashinfer_cascade import FlashInferCascade
from nanovllm.ops.attention.flashinfer_plans import PrefillPlan
from nanovllm.ops.attention.plan_table import PlanMismatchError
from nanovllm.ops.attention.rope_attend import rope_attend
from nanovllm.ops.linear.norm_linear import norm_linear
from nanovllm.testing.shadows.worlds import drain
from tests.gpu.small import TIE, lead, random_prompts, small_model

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # FlashInfer and its needs may warn
CUDA = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
# dtype, head_dim, page_size, query heads a key/value head, key/value heads
SHAPES = [
    (torch.bfloat16, 128, 16, 2, 8),
    (torch.bfloat16, 128, 1, 1, 4),
    (torch.bfloat16, 64, 16, 7, 2),
    (torch.float16, 128, 32, 4, 8),
]
# Pages of more tokens than a tile and of no divisor of it, head_dims that are no power of 2, groups of 5 and of 8
OTHERS = [
    (torch.bfloat16, 256, 16, 2, 2),
    (torch.float32, 24, 4, 3, 2),
    (torch.bfloat16, 80, 128, 5, 2),
    (torch.float16, 96, 3, 8, 1),
]


def always(rows, pages):
    return True


def usual(row):
    return [("system", 600), ("document", 300)][: 1 + row % 2] if row != 1 else []


class Tree:
    """Rows over pages of two layers.

    `prefix(row)` is what a row shares, level by level: names and tokens. As a rule all but one row share 600 tokens, half of them 300
    more. Then come `own` tokens of each row's own, for which there are pages enough to grow by `room`.
    """

    def __init__(self, num_rows, shape, seed=0, room=0, prefix=usual, own=None):
        self.dtype, self.head_dim, self.page_size, self.group, self.kv_heads = shape
        rng, size = np.random.default_rng(seed), self.page_size
        lens = rng.integers(1, 200, num_rows) if own is None else np.array(own)
        pages, num_pages = [], 0
        shared: dict[str, np.ndarray] = {}
        for b in range(num_rows):
            for name, tokens in [*prefix(b), (b, lens[b] + room)]:
                if name not in shared:
                    shared[name] = np.arange(num_pages, num_pages - (-tokens // size), dtype=np.int32)
                    num_pages += len(shared[name])
            pages.append([shared[name] for name, _ in prefix(b)])
        ids = rng.permutation(num_pages).astype(np.int32)
        rows = [ids[np.concatenate((*before, shared[b]))] for b, before in enumerate(pages)]
        self.counts = np.array([len(row) for row in rows], np.int32)
        self.lens = np.array([sum(map(len, before)) * size + lens[b] for b, before in enumerate(pages)], np.int32)
        self.tables = np.full((num_rows, -(-int(self.counts.max()) // 16) * 16), num_pages, np.int32)
        for b, row in enumerate(rows):
            self.tables[b, : len(row)] = row
        torch.manual_seed(seed)
        self.pages = torch.randn(2, num_pages + 1, 2, self.kv_heads, size, self.head_dim, device=CUDA).to(self.dtype)
        self.scale = self.head_dim**-0.5
        self.device_tables, self.device_lens = torch.from_numpy(self.tables).to(CUDA), torch.from_numpy(self.lens).to(CUDA)

    def queries(self, count):
        return torch.randn(count, self.group * self.kv_heads, self.head_dim, device=CUDA).to(self.dtype)

    def expected(self, q, lens, *limits):
        return reference.decode_rows(q.float(), self.pages[1].float(), self.device_tables, lens, self.scale, *limits)

    def plan(self):
        heads = self.group * self.kv_heads
        space = CascadeWorkspace(len(self.tables), heads, self.head_dim, CUDA)
        space.out.fill_(torch.nan)
        space.lse.fill_(torch.nan)
        return CascadePlan(space, len(self.tables), heads, self.kv_heads, self.page_size, CUDA)

    def runs(self):
        return shared_runs(self.tables, self.lens // self.page_size, self.counts, always)

    def close(self, out, want):
        assert out.dtype == self.dtype
        error = (out.float() - want).norm(dim=-1) / want.norm(dim=-1)
        assert error.max() < 3 * TOLERANCE[self.dtype], f"relative error {error.max()}"


@pytest.mark.parametrize("rows", [1, 3, 33, 70])
@pytest.mark.parametrize("shape", [*SHAPES, *OTHERS])
def test_decode_equals_dense_attention(shape, rows):
    tree = Tree(rows, shape)
    q, plan = tree.queries(rows), tree.plan()
    want = tree.expected(q, tree.device_lens)
    for runs in (tree.runs(), own_runs(tree.counts)):
        assert plan.update(runs)
        out = paged_decode(q, tree.pages, 1, tree.device_tables, tree.device_lens, tree.scale, plan.handle)
        tree.close(out, want)
    strided = torch.randn(rows, 3, *q.shape[1:], device=CUDA).to(tree.dtype)
    strided[:, 1] = q
    tree.close(paged_decode(strided[:, 1], tree.pages, 1, tree.device_tables, tree.device_lens, tree.scale, plan.handle), want)


@pytest.mark.parametrize("limits", [(), (300, 5.0)], ids=["all in sight", "in a window"])
def test_replays_follow_lengths_and_other_sharing(limits):
    tree = Tree(12, SHAPES[0], room=64)
    q, lens, plan = tree.queries(12), tree.device_lens.clone(), tree.plan()
    assert plan.update(own_runs(np.ones(12, np.int32)))
    run = lambda: paged_decode(q, tree.pages, 1, tree.device_tables, lens, tree.scale, plan.handle, *limits)  # noqa: E731
    graph, out = captured(run)
    for runs in (tree.runs(), own_runs(tree.counts), tree.runs()):
        lens.copy_(tree.device_lens)
        assert plan.update(runs)
        for _ in range(64):
            graph.replay()
            tree.close(out, tree.expected(q, lens, *limits))
            lens += 1


IN_SIGHT = [(1, 0.0), (40, 5.0), (64, 0.0), (500, 0.0), (700, 5.0), (5000, 0.0), (0, 5.0)]  # window, softcap


@pytest.mark.parametrize("rows", [1, 3, 33, 70])
@pytest.mark.parametrize("shape", [*SHAPES, *OTHERS])
def test_of_what_is_shared_a_row_sees_its_window(shape, rows):
    tree = Tree(rows, shape)
    q, plan = tree.queries(rows) * 3, tree.plan()
    for limits in IN_SIGHT:
        want = tree.expected(q, tree.device_lens, *limits)
        for runs in (tree.runs(), own_runs(tree.counts)):
            assert plan.update(runs)
            out = paged_decode(q, tree.pages, 1, tree.device_tables, tree.device_lens, tree.scale, plan.handle, *limits)
            tree.close(out, want)


TREES: dict[str, dict[str, Any]] = {
    "one row": {"own": [5000]},
    "one token each": {"own": [1] * 9, "prefix": lambda row: []},
    "unequal rows": {"own": [6000, 1, 17, 900, 511, 512, 513, 64, 3000, 2], "prefix": lambda row: []},
    "long rows behind a prefix": {"own": [4000, 1, 16, 2500, 33, 5, 700, 1], "room": 300},
    "few rows, one beginning": {"own": [40, 1], "prefix": lambda row: [("system", 9000)]},
    "five levels": {"own": range(1, 301, 9), "prefix": lambda row: [(f"{i}, {row >> (5 - i)}", 60 + 50 * i) for i in range(5)]},
    "a level more each row": {"own": range(1, 25), "prefix": lambda row: [(f"{i}", 80) for i in range(row)]},
    "more rows than an item takes": {"own": range(1, 131), "prefix": lambda row: [("system", 2000)]},
}


@pytest.mark.parametrize("name", TREES)
def test_trees(name):
    options = TREES[name]
    rows = len(options["own"])
    tree = Tree(rows, SHAPES[0], **options)
    q, plan = tree.queries(rows), tree.plan()
    want = tree.expected(q, tree.device_lens)
    for runs in (tree.runs(), own_runs(tree.counts)):
        assert plan.update(runs)
        out = paged_decode(q, tree.pages, 1, tree.device_tables, tree.device_lens, tree.scale, plan.handle)
        tree.close(out, want)


class Alone:
    """A kernel that nothing runs beside."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, **options):
            torch.cuda.synchronize()
            self.kernel[grid](*args, **options)
            torch.cuda.synchronize()

        return launch


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]])
def test_replays_equal_kernels_that_run_alone(shape, monkeypatch):
    """Layers of a product, the write of k and v and attention, which start before what they read is there: not a bit may differ."""
    from nanovllm.ops.attention import triton_cascade

    tree = Tree(24, shape, own=[*range(1, 300, 13), 3000], room=16)
    heads, width = tree.group * tree.kv_heads, (tree.group + 2) * tree.kv_heads * tree.head_dim
    lens, slots = tree.device_lens, torch.empty(24, dtype=torch.int32, device=CUDA)
    plan, start = tree.plan(), torch.empty(24, width, dtype=tree.dtype, device=CUDA)
    weight = (torch.randn(width, heads * tree.head_dim, device=CUDA) * 1.5 / (heads * tree.head_dim) ** 0.5).to(tree.dtype)
    bias = torch.randn(width, device=CUDA).to(tree.dtype)
    angles = torch.rand(24, 1, tree.head_dim // 2, device=CUDA) * 6
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    pages, kept = tree.pages, tree.pages.clone()

    def layers():
        qkv, outs = start, []
        for i in range(12):  # k and v go where those of the layer before the last went
            found = rope_attend(qkv, None, None, cos, sin, pages, i % 2, tree.device_tables, lens, slots, tree.scale, 0.0, plan.handle)
            outs.append(found)
            qkv = norm_linear(found, weight, bias=bias)
        return outs

    def place():
        last = lens.long() - 1
        page = tree.device_tables.gather(1, (last // tree.page_size)[:, None])[:, 0]
        slots.copy_(page * tree.page_size + last % tree.page_size)

    start.normal_()
    place()
    assert plan.update(own_runs(tree.counts))
    graph, outs = captured(layers)
    launched = triton_cascade._shared, triton_cascade._own
    for turn in range(12):
        assert plan.update(tree.runs() if turn % 3 else own_runs(tree.counts))
        lens.copy_(torch.from_numpy(tree.lens + turn))
        start.normal_()
        place()
        pages.copy_(kept)
        graph.replay()
        got, after = [out.clone() for out in outs], pages.clone()
        pages.copy_(kept)
        for name, kernel in zip(("_shared", "_own"), launched, strict=True):
            monkeypatch.setattr(triton_cascade, name, Alone(kernel))
        for mine, alone in zip(got, layers(), strict=True):
            assert mine.isfinite().all() and torch.equal(mine, alone)
        assert torch.equal(after, pages)
        monkeypatch.undo()


class Prompts:
    """Six rows of a `Tree` that end in `new` tokens, or in a few, which are the queries; what is before them is shared."""

    def __init__(self, shape, new):
        self.tree = tree = Tree(6, shape, room=300)
        counts = np.array([new, 1, new, 3, new, 2], np.int32)
        self.lens = (tree.lens + counts).astype(np.int32)
        self.cu = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        self.q = tree.queries(int(self.cu[-1]))
        self.runs = shared_runs(tree.tables, (self.lens - counts) // tree.page_size, tree.counts, always)
        self.on_device = [torch.from_numpy(x).to(CUDA) for x in (tree.tables, self.lens, self.cu)]
        self.heads = (tree.group * tree.kv_heads, tree.kv_heads, tree.head_dim)
        self.space = AttentionWorkspace(64, *self.heads, CUDA)

    def plan(self, **options):
        return PrefillPlan(self.space, 8, 2000, *self.heads, self.tree.page_size, self.tree.dtype, CUDA, **options)

    def cascade(self, *plans):
        cascade = FlashInferCascade(*plans)
        cascade.update(self.lens, self.cu, self.tree.tables, self.runs)
        return cascade

    def spelled(self):
        """The same in plain torch."""
        spelled = PromptCascade()
        spelled.update(self.lens, self.cu, self.runs, CUDA)
        return spelled

    def attend(self, plan, window=0, softcap=0.0):
        tree = self.tree
        return paged_prefill(self.q, tree.pages, 1, *self.on_device, tree.scale, plan.handle, None, None, window, softcap)

    def expected(self, *limits):
        return reference.prefill_rows(self.q.float(), self.tree.pages[1].float(), *self.on_device, self.tree.scale, *limits)


@pytest.mark.parametrize("new", [1, 20, 300])
@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_equal_plain_prompts(shape, new):
    prompts = Prompts(shape, new)
    assert any(len(run.rows) > 1 for run in prompts.runs)
    want = prompts.expected()
    for plan in (prompts.cascade(prompts.plan(), prompts.plan(causal=False)), prompts.spelled()):
        prompts.tree.close(prompts.attend(plan), want)


@pytest.mark.parametrize("new", [1, 20, 300])
@pytest.mark.parametrize(("shape", "softcap"), [(SHAPES[0], 0.0), ((torch.bfloat16, 256, 16, 2, 4), 5.0)])
def test_prompts_in_windows_equal_plain_prompts(shape, softcap, new):
    """One window that rows outgrow, and one that holds them: then pages are shared all the same."""
    prompts, windows = Prompts(shape, new), (0, 64, 4000)
    own, shared = (prompts.plan(causal=causal, softcap=softcap) for causal in (True, False))
    cascade, spelled = prompts.cascade(own, shared, prompts.plan(windows=windows, softcap=softcap)), prompts.spelled()
    for window in windows:
        want = prompts.expected(window, softcap)
        for plan in (cascade, spelled):
            prompts.tree.close(prompts.attend(plan, window, softcap), want)
    with pytest.raises(PlanMismatchError, match="window 32"):
        prompts.attend(cascade, 32, softcap)
    with pytest.raises(PlanMismatchError, match="window 64"):
        prompts.attend(prompts.cascade(own, shared), 64, softcap)


GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
LIMITS: dict[str, Any] = {"num_pages": 512, "page_size": 16, "max_num_seqs": 12, "max_num_batched_tokens": 256, "max_model_len": 512}


@pytest.fixture(scope="module")
def model() -> nv.Model:
    return small_model()


def logits_of(model: nv.Model, state: nv.EngineState, contexts: list[Any], tokens: list[list[int]]) -> torch.Tensor:
    """The logits of given replies, step by step."""
    state, carry = nv.begin(model, state, contexts, GREEDY, room=len(tokens[0]))
    found = []
    for column in zip(*tokens, strict=True):
        carry, out = nv.decode_step(model.params, carry, model.config, token_ids=torch.tensor(column, dtype=torch.int32, device=CUDA))
        found.append(out.logits.float())
    nv.commit(model, state, carry)
    return torch.stack(found)


def used_cascade(state: nv.EngineState) -> bool:
    executor = state.runtime.executor
    assert isinstance(executor, GraphExecutor)
    return executor._loaded is not None and executor._loaded[0].kind.way == "shared"


def test_the_engine_with_and_without(model: nv.Model) -> None:
    system, document, *own = random_prompts(model, 200, 90, 5, 30, 1, 17, 60)
    results, logits = [], []
    for cascade in (False, True):
        state = nv.init_state(model, cascade=cascade, **LIMITS)
        state, root = nv.prefill(model, state, system)
        state, branch = nv.prefill(model, state, document, after=root)
        contexts = [[branch, own[0]], [branch, own[1]], [root, own[2]], [root, own[3]], own[4]]
        for context in contexts:
            state, _ = nv.submit(model, state, context, GREEDY)
        done, shared = {}, False
        while state.running or state.waiting:
            state, outs = nv.step(model, state)
            shared = shared or used_cascade(state)
            done.update({out.request_id: out.output.token_ids for out in outs if out.output is not None})
        assert shared == cascade
        nv.check(state)
        results.append([done[rid] for rid in sorted(done)])
        logits.append(logits_of(model, state, contexts, results[0]))
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 0 < error < 0.02
    gaps = logits[0].topk(2).values  # [steps, rows, 2]
    for row, (plain, cascaded) in enumerate(zip(*results, strict=True)):
        at = next((i for i, (a, b) in enumerate(zip(plain, cascaded, strict=True)) if a != b), None)
        assert at is None or gaps[at, row, 0] - gaps[at, row, 1] < 0.15, (row, at)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.7, "seed": 5}])
def test_few_prompt_tokens_run_in_a_graph(model: nv.Model, options: dict[str, Any]) -> None:
    system, *own = random_prompts(model, 150, 1, 2, 9, 40, 100)
    params = nv.SamplingParams(max_tokens=6, ignore_eos=True, **options)
    replies = []
    for compile in (False, None):
        state = nv.init_state(model, compile=compile, **LIMITS)
        state, root = nv.prefill(model, state, system)
        before, got = state.stats.prefill_tokens, []
        for tail in own:
            state, gen = nv.generate(model, state, [root, tail], params)
            got.append(gen.token_ids)
        assert state.stats.prefill_tokens - before == sum(map(len, own))
        state, gens = nv.generate_many(model, state, [[root, tail] for tail in own[:4]], params)
        got += [gen.token_ids for gen in gens]
        state, chunk = nv.prefill(model, state, own[2], after=root)  # without a draw
        state, gen = nv.generate(model, state, chunk, params)
        replies.append([*got, gen.token_ids])
        nv.check(state)
    different = [(i, a, b) for i, (a, b) in enumerate(zip(*replies, strict=True)) if a != b]
    if options["temperature"]:
        assert len(different) <= 1, different  # a draw may fall between two bfloat16 roundings
    prompts = [system + tail for tail in (*own, *own[:4], own[2])]
    for i, want, got in different:
        at = next(k for k, (a, b) in enumerate(zip(want, got, strict=True)) if a != b)
        assert options["temperature"] or lead(model, prompts[i] + want[:at], LIMITS) < TIE, (i, at, want, got)


def test_a_running_batch_is_not_disturbed_by_a_short_prompt(model: nv.Model) -> None:
    system, a, b, late = random_prompts(model, 100, 20, 30, 4)
    replies = []
    for together in (False, True):
        state = nv.init_state(model, **LIMITS)
        state, root = nv.prefill(model, state, system)
        ids = []
        for tail in (a, b):
            state, rid = nv.submit(model, state, [root, tail], GREEDY)
            ids.append(rid)
        done, steps = {}, 0
        while state.running or state.waiting:
            if steps == 9 and together:
                state, _ = nv.submit(model, state, [root, late], GREEDY)
            state, outs = nv.step(model, state)
            steps += 1
            done.update({out.request_id: out.output.token_ids for out in outs if out.output is not None})
        replies.append([done[rid][:10] for rid in ids])
    assert replies[0] == replies[1]


def test_only_the_captured_weights_run_in_a_graph(model: nv.Model) -> None:
    """Choosing tokens by deviation runs two layers: KV of the others stays where it is not chosen."""
    state = nv.init_state(model, **LIMITS)
    first, second = random_prompts(model, 30, 60)
    state, one = nv.prefill(model, state, first)
    state, two = nv.prefill(model, state, second)
    kept = []
    for recompute in (0, 0.1):
        state, whole = nv.compose(model, state, [one, two], recompute=recompute)
        (pages,) = state.kv.pools
        kv = pages[2:, torch.from_numpy(whole.pages.array().copy()).to(CUDA).long()].permute(1, 4, 0, 2, 3, 5).flatten(0, 1)
        kept.append(kv[: len(whole)].clone())
    changed = (kept[0] != kept[1]).flatten(1).any(1)
    assert changed.sum() == 6 and not changed[:30].any()


def test_prompts_of_different_options_share_a_step(model: nv.Model) -> None:
    limits = {**LIMITS, "max_num_batched_tokens": 64}
    short, long = random_prompts(model, 40, 90)
    plain = nv.SamplingParams(temperature=0.7, seed=1, max_tokens=5, ignore_eos=True)
    rare = nv.SamplingParams(top_k=5, seed=2, presence_penalty=0.5, logprobs=2, max_tokens=5, ignore_eos=True)
    replies = []
    for compile in (False, None):
        state = nv.init_state(model, compile=compile, **limits)
        for prompt, params in ((short, plain), (long, rare)):  # the second is cut by the budget of the step in which the first draws
            state, _ = nv.submit(model, state, prompt, params)
        _, ended = drain(model, state)
        replies.append([ended[rid].token_ids for rid in sorted(ended)])
    assert sum(a == b for a, b in zip(*replies, strict=True)) >= 1, replies  # a draw may fall between two bfloat16 roundings


def test_many_prompts_behind_one_prefix_read_it_once(model: nv.Model) -> None:
    """More tokens than a graph takes: FlashInfer's cascade, in which a query must not see what stands behind it."""
    system, *own = random_prompts(model, 200, 60, 48, 47, 33, 64)
    outputs, rows = [], []
    for cascade in (False, True):
        state = nv.init_state(model, cascade=cascade, **{**LIMITS, "max_num_batched_tokens": 512})
        state, root = nv.prefill(model, state, system)
        executor = state.runtime.executor
        assert isinstance(executor, GraphExecutor)
        contexts = [[root, tail] for tail in own]
        state, gens = nv.generate_many(model, state, contexts, nv.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=5))
        plans = executor._attention._plans
        assert plans is not None
        rows.append(plans.cascade.num_tokens)
        outputs.append([dict(gen.logprobs[0].top) for gen in gens if gen.logprobs is not None])
    assert rows == [0, sum(map(len, own))]
    for plain, shared in zip(*outputs, strict=True):
        both = plain.keys() & shared.keys()
        assert len(both) >= 3
        assert max(abs(plain[token] - shared[token]) for token in both) < 0.05


def test_extension_sizes() -> None:
    assert extension_sizes(8192) == [1, 8, 16, 32, 64, EXTENSION]
    assert extension_sizes(64) == [1, 8, 16, 32, 64] and extension_sizes(20) == [1, 8, 16, 20] and extension_sizes(1) == [1]
