"""The CUDA kernels of the ops against dense float32 attention and against the CPU references.

Stale decode schedules are the point of the second half: planned for more pages than the rows have reached, replayed while lengths grow.
"""

import numpy as np
import pytest
import torch

from nanovllm.entrypoints.cli.bench.graph_timer import captured
from nanovllm.ops import copy_pages, kv_write, move_kv, paged_decode, paged_prefill
from nanovllm.ops.attention import flashinfer_plans, reference
from nanovllm.ops.attention.flashinfer import AttentionWorkspace
from nanovllm.ops.attention.flashinfer_plans import DecodePlan, PrefillPlan
from nanovllm.ops.attention.plan_table import PlanMismatchError, UnknownPlanError
from nanovllm.ops.attention.prompt_tiles import TilePlan

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # FlashInfer and its needs may warn
CUDA = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
# dtype, head_dim, page_size, query heads a key/value head, key/value heads
SHAPES = [
    (torch.bfloat16, 128, 16, 2, 8),
    (torch.bfloat16, 128, 1, 1, 4),
    (torch.bfloat16, 128, 32, 4, 8),
    (torch.bfloat16, 64, 16, 7, 2),
    (torch.bfloat16, 64, 4, 2, 3),
    (torch.float16, 128, 16, 4, 2),
]


# The same for windows and soft caps, whose kernels are built for each head_dim
LIMITED = [
    (torch.bfloat16, 64, 16, 7, 2),
    (torch.bfloat16, 128, 16, 4, 2),
    (torch.bfloat16, 256, 16, 2, 4),
]
WINDOWS = (0, 1, 17, 128, 130, 300, 5000)  # of a tile's part, of tiles, and more than any row holds
SOFTCAPS = [0.0, 5.0]


def capped(scores, softcap):
    return softcap * (scores / softcap).tanh() if softcap else scores


class Pool:
    """Two layers of pages full of large garbage, and rows that own random ones, `counts[b]` of them."""

    def __init__(self, counts, shape, seed=0):
        self.dtype, self.head_dim, self.page_size, self.group, self.kv_heads = shape
        self.rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.counts = np.array(counts, np.int32)
        self.num_pages = int(self.counts.sum()) + 3
        self.dummy = self.num_pages - 1
        size = (2, self.num_pages, 2, self.kv_heads, self.page_size, self.head_dim)
        self.pages = torch.full(size, 300.0, dtype=self.dtype, device=CUDA)
        ids = self.rng.permutation(self.num_pages - 1).astype(np.int32)
        self.tables = np.full((len(counts), int(self.counts.max()) + 1), self.dummy, np.int32)
        for b, count in enumerate(counts):
            self.tables[b, :count], ids = ids[:count], ids[count:]
        self.device_tables = torch.from_numpy(self.tables).to(CUDA)
        self.lens = np.zeros(len(counts), np.int64)
        self.k = [torch.zeros(2, 0, self.kv_heads, self.head_dim, dtype=self.dtype, device=CUDA) for _ in counts]
        self.v = list(self.k)
        self.scale = self.head_dim**-0.5

    def slots(self, b, start, stop):
        at = torch.arange(start, stop, device=CUDA)
        return (self.device_tables[b, at // self.page_size] * self.page_size + at % self.page_size).int()

    def grow(self, b, length):
        """Write row b's tokens up to `length` in both layers."""
        n = length - int(self.lens[b])
        k, v = torch.randn(2, 2, n, self.kv_heads, self.head_dim, device=CUDA).to(self.dtype)
        for layer in range(2):
            kv_write(self.pages, layer, k[layer], v[layer], self.slots(b, self.lens[b], length))
        self.k[b], self.v[b] = torch.cat((self.k[b], k), 1), torch.cat((self.v[b], v), 1)
        self.lens[b] = length

    def queries(self, n):
        return torch.randn(n, self.group * self.kv_heads, self.head_dim, device=CUDA).to(self.dtype)

    def dense(self, q, b, layer, length, window=0, softcap=0.0):
        """Row b's last len(q) of `length` tokens, causally, in float32."""
        k = self.k[b][layer, :length].float().repeat_interleave(self.group, 1)
        v = self.v[b][layer, :length].float().repeat_interleave(self.group, 1)
        scores = capped(torch.einsum("qhd,khd->hqk", q.float(), k) * self.scale, softcap)
        every = torch.ones(len(q), length, dtype=torch.bool, device=CUDA)
        hidden = every.triu(length - len(q) + 1)
        if window:
            hidden |= every.tril(length - len(q) - window)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)

    def dense_decode(self, q, layer, lens, window=0, softcap=0.0):
        """`dense` for one query a row, all rows at once; `lens` may be shorter than the rows are."""
        k, v = (torch.nn.utils.rnn.pad_sequence([row[layer].float() for row in rows], batch_first=True) for rows in (self.k, self.v))
        scores = capped(torch.einsum("bkgd,bmkd->bkgm", q.float().unflatten(1, (self.kv_heads, self.group)), k) * self.scale, softcap)
        at, lens = torch.arange(k.shape[1], device=CUDA), torch.as_tensor(lens, device=CUDA)[:, None]
        hidden = (at >= lens) | (at < lens - window) if window else at >= lens
        weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
        return torch.einsum("bkgm,bmkd->bkgd", weights, v).flatten(1, 2)

    def sizes(self):
        return (self.group * self.kv_heads, self.kv_heads, self.head_dim, self.page_size, self.dtype, CUDA)

    def workspace(self, rows=256):
        space = AttentionWorkspace(rows, self.group * self.kv_heads, self.kv_heads, self.head_dim, CUDA)
        space.buffer.fill_(0xFF)  # NaN, whatever it is read as
        return space

    def close(self, out, want):
        assert out.dtype == self.dtype
        error = (out.float() - want).norm(dim=-1) / want.norm(dim=-1)  # a head of a token each
        assert error.max() < 3 * TOLERANCE[self.dtype], f"relative error {error.max()}"
        assert (out.float() - want).norm() < TOLERANCE[self.dtype] * want.norm()


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=CUDA)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "page_size", "head_dim"), [(8, 16, 128), (3, 1, 64), (1, 4, 24)])
def test_kv_write_from_views_of_a_fused_projection(dtype, kv_heads, page_size, head_dim):
    tokens, pages = 37, torch.randn(3, 50, 2, kv_heads, page_size, head_dim, dtype=dtype)
    qkv = torch.randn(tokens, 4 * kv_heads, head_dim, dtype=dtype)
    slots = torch.randperm(50 * page_size)[:tokens].int()
    want = pages.clone()
    kv_write(want, 1, qkv[:, 2 * kv_heads : 3 * kv_heads], qkv[:, 3 * kv_heads :], slots)
    on_gpu, qkv_gpu = pages.to(CUDA), qkv.to(CUDA)
    kv_write(on_gpu, 1, qkv_gpu[:, 2 * kv_heads : 3 * kv_heads], qkv_gpu[:, 3 * kv_heads :], slots.to(CUDA))
    assert torch.equal(on_gpu.cpu(), want)
    transposed = qkv_gpu[:, 3 * kv_heads :].transpose(1, 2).contiguous().transpose(1, 2)
    kv_write(on_gpu, 2, transposed, transposed, slots.to(CUDA))
    kv_write(want, 2, transposed.cpu(), transposed.cpu(), slots)
    assert torch.equal(on_gpu.cpu(), want)


@pytest.mark.parametrize("page_shape", [(8, 16, 128), (3, 1, 24)])
def test_copy_pages(page_shape):
    pages = torch.randn(3, 40, 2, *page_shape, dtype=torch.bfloat16)
    src, dst = torch.tensor([4, 4, 39, 0], dtype=torch.int32), torch.tensor([1, 38, 2, 7], dtype=torch.int32)
    on_gpu = pages.to(CUDA)
    copy_pages(on_gpu, src.to(CUDA), dst.to(CUDA))
    copy_pages(pages, src, dst)
    assert torch.equal(on_gpu.cpu(), pages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "page_size", "head_dim"), [(8, 16, 128), (3, 1, 64), (1, 4, 24)])
def test_move_kv(dtype, kv_heads, page_size, head_dim):
    pages = torch.randn(3, 60, 2, kv_heads, page_size, head_dim, dtype=dtype)
    order = torch.randperm(60 * page_size).int()
    count = 25 if page_size > 1 else 20
    src, dst = order[:count], order[count : 2 * count]
    shift = torch.randint(-20000, 20000, (count,), dtype=torch.int32)
    shift[:3] = 0
    speed = 1.0 / 1e4 ** (torch.arange(0, head_dim, 2) / head_dim)
    on_gpu = pages.to(CUDA)
    move_kv(on_gpu, *(x.to(CUDA) for x in (src, dst, shift, speed)))
    before = pages.clone()
    move_kv(pages, src, dst, shift, speed)
    found = on_gpu.cpu()
    assert torch.equal(found[:, :, 1], pages[:, :, 1])
    torch.testing.assert_close(found.float(), pages.float(), rtol=0, atol=0.04 if dtype == torch.bfloat16 else 0.01)
    untouched = torch.ones(60 * page_size, dtype=torch.bool)
    untouched[dst.long()] = False
    flat = lambda x: x.permute(1, 4, 0, 2, 3, 5).flatten(0, 1)  # noqa: E731
    assert torch.equal(flat(found)[untouched], flat(before)[untouched])
    still = dst[:3].long()
    assert torch.equal(flat(found)[still], flat(pages)[still])


@pytest.mark.parametrize("shape", [(torch.float32, 48, 4, 2, 2), SHAPES[0]])
def test_without_a_plan_plain_torch_serves(shape):
    pool = Pool([3, 1, 9], shape)
    for b, length in enumerate(pool.counts * pool.page_size - 1):
        pool.grow(b, int(length))
    lens = int32(pool.lens.tolist())
    q = pool.queries(3)
    out = paged_decode(q, pool.pages, 1, pool.device_tables, lens, pool.scale, 0)
    for b in range(3):
        pool.close(out[b : b + 1], pool.dense(q[b : b + 1], b, 1, int(pool.lens[b])))
    out = paged_prefill(q, pool.pages, 1, pool.device_tables[1:], lens[1:], int32([0, 1, 3]), pool.scale, 0)
    pool.close(out, torch.cat((pool.dense(q[:1], 1, 1, int(pool.lens[1])), pool.dense(q[1:], 2, 1, int(pool.lens[2])))))


def test_decode_without_a_plan_can_be_captured():
    pool = Pool([3, 5], SHAPES[0])
    pool.grow(0, 20), pool.grow(1, 70)
    lens, q = int32([20, 70]), pool.queries(2)
    step = lambda: paged_decode(q, pool.pages, 0, pool.device_tables, lens, pool.scale, 0)  # noqa: E731
    want = step()
    graph, out = captured(step)
    graph.replay()
    assert torch.equal(out, want)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 33, 70])
def test_a_stale_decode_plan_serves_every_length_up_to_its_pages(shape, rows):
    rng = np.random.default_rng(rows)
    counts = rng.integers(1, 1 + 600 // shape[2], rows)
    counts[0] = 2000 // shape[2]  # many splits
    pool = Pool(counts, shape)
    space = pool.workspace()
    plan = DecodePlan(space, rows, int(counts.max()), *pool.sizes())
    plan.update(pool.counts, pool.tables)
    for b in range(rows):
        pool.grow(b, int(pool.counts[b]) * pool.page_size)
    full = pool.counts.astype(np.int64) * pool.page_size
    trials = [full, np.ones_like(full), np.maximum(1, full - pool.page_size), np.maximum(1, full - 128), np.minimum(full, 129)]
    trials += [rng.integers(1, full + 1) for _ in range(8)]
    for lens in trials:
        space.buffer.fill_(0xFF)
        q = pool.queries(rows)
        for layer in range(2):
            out = paged_decode(q, pool.pages, layer, pool.device_tables, int32(lens.tolist()), pool.scale, plan.handle)
            pool.close(out, pool.dense_decode(q, layer, lens))


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("shape", LIMITED, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_one_decode_plan_serves_layers_of_several_windows(shape, rows, softcap):
    """Planned for more pages than the rows have reached, as in `test_a_stale_decode_plan_serves_every_length_up_to_its_pages`."""
    rng = np.random.default_rng(rows)
    counts = rng.integers(1, 1 + 600 // shape[2], rows)
    counts[0] = 4000 // shape[2]
    pool = Pool(counts, shape)
    space = pool.workspace()
    plan = DecodePlan(space, rows, int(counts.max()), *pool.sizes(), windows=WINDOWS, softcap=softcap)
    plan.update(pool.counts, pool.tables)
    for b in range(rows):
        pool.grow(b, int(pool.counts[b]) * pool.page_size)
    full = pool.counts.astype(np.int64) * pool.page_size
    trials = [full, np.ones_like(full), np.maximum(1, full - 128), np.minimum(full, 129), *(rng.integers(1, full + 1) for _ in range(3))]
    for lens in trials:
        q = pool.queries(rows) * 3
        for layer in range(2):
            for window in WINDOWS:
                space.buffer.fill_(0xFF)
                given = (q, pool.pages, layer, pool.device_tables, int32(lens.tolist()), pool.scale, plan.handle)
                pool.close(paged_decode(*given, window, softcap), pool.dense_decode(q, layer, lens, window, softcap))


def test_replays_of_layers_with_windows_follow_lengths_and_new_plans():
    shape, rows, windows = LIMITED[1], 4, (200, 0)
    pool = Pool([60, 3, 20, 40], shape)
    for b in range(rows):
        pool.grow(b, int(pool.counts[b]) * 16)
    plan = DecodePlan(pool.workspace(), rows, 61, *pool.sizes(), windows=windows, softcap=5.0)
    plan.update(np.ones(rows, np.int32), np.full((rows, 1), pool.dummy, np.int32))  # captured on padding rows
    q, lens = pool.queries(rows), torch.ones(rows, dtype=torch.int32, device=CUDA)

    def step():
        given = [(q, pool.pages, layer, pool.device_tables, lens, pool.scale, plan.handle, windows[layer], 5.0) for layer in range(2)]
        return [paged_decode(*each) for each in given]

    graph, outs = captured(step)
    first = [list(plan.schedules[window].info) for window in windows]
    for start in ([1, 1, 1, 1], [199, 30, 201, 500], [900, 40, 310, 198]):
        for grown in range(0, 40, 3):
            now = np.minimum(np.array(start) + grown, pool.counts * 16)
            plan.update(np.minimum(-(-now // 16) + grown % 2, pool.counts).astype(np.int32), pool.tables)
            assert [list(plan.schedules[window].info) for window in windows] == first  # a captured launch stays valid
            q.copy_(pool.queries(rows) * 3)
            lens.copy_(int32(now.tolist()))
            graph.replay()
            for layer, window in enumerate(windows):
                pool.close(outs[layer], pool.dense_decode(q, layer, now, window, 5.0))


def test_unwritten_slots_of_planned_pages_are_never_read():
    pool = Pool([40, 3], SHAPES[0])
    plan = DecodePlan(pool.workspace(), 2, 40, *pool.sizes())
    plan.update(pool.counts, pool.tables)
    pool.pages.fill_(float("nan"))
    pool.grow(0, 33), pool.grow(1, 5)
    q = pool.queries(2)
    out = paged_decode(q, pool.pages, 0, pool.device_tables, int32([33, 5]), pool.scale, plan.handle)
    pool.close(out, torch.cat((pool.dense(q[:1], 0, 0, 33), pool.dense(q[1:], 1, 0, 5))))


def decode_step(pool, plan, q, lens, outs):
    """One captured step: a token written at each row's end, attention in both layers, lengths moved on, all on the device."""
    k = q[:, : pool.kv_heads].contiguous()
    at = (lens - 1).long()
    slots = pool.device_tables.gather(1, (at // pool.page_size)[:, None])[:, 0] * pool.page_size + (at % pool.page_size).int()
    for layer in range(2):
        kv_write(pool.pages, layer, k, k, slots)
        outs[layer].copy_(paged_decode(q, pool.pages, layer, pool.device_tables, lens, pool.scale, plan.handle))
    lens += 1


def test_replays_follow_lengths_on_the_device_and_new_plans():
    shape, rows = SHAPES[0], 6
    counts = [3, 20, 1, 9, 40, 2]
    pool = Pool(counts, shape)
    plan = DecodePlan(pool.workspace(), rows, 41, *pool.sizes())
    plan.update(np.ones(rows, np.int32), np.full((rows, 1), pool.dummy, np.int32))  # captured on padding rows
    q = pool.queries(rows)
    lens, outs = torch.ones(rows, dtype=torch.int32, device=CUDA), torch.zeros(2, *q.shape, dtype=pool.dtype, device=CUDA)
    real_tables = pool.device_tables.clone()
    pool.device_tables.fill_(pool.dummy)
    graph, _ = captured(lambda: decode_step(pool, plan, q, lens, outs))
    pool.device_tables.copy_(real_tables)
    first = list(plan.schedules[0].info)
    start = [1, 250, 3, 100, 511, 16]
    for b, length in enumerate(start):
        pool.grow(b, length - 1) if length > 1 else None
    lens.copy_(int32(start))
    planned = np.array([1, 16, 1, 7, 32, 1], np.int32)
    for step in range(30):
        needed = -(-(np.array(start) + step) // pool.page_size)
        if step == 0 or (needed > planned).any():
            planned = np.minimum(needed + 1, pool.counts).astype(np.int32)  # a page ahead of need, so most steps do not plan
            plan.update(planned, pool.tables)
            assert list(plan.schedules[0].info) == first  # a captured launch stays valid
        if start[2] + step > 16 or start[5] + step > 32:
            break
        q.copy_(pool.queries(rows))
        graph.replay()
        for b in range(rows):
            new = q[b : b + 1, : pool.kv_heads].expand(2, -1, -1, -1).reshape(2, 1, pool.kv_heads, pool.head_dim)
            pool.k[b], pool.v[b] = torch.cat((pool.k[b], new), 1), torch.cat((pool.v[b], new), 1)
        for layer in range(2):
            pool.close(outs[layer], pool.dense_decode(q, layer, np.array(start) + step))
    assert step > 10


def test_updates_may_run_ahead_of_the_device():
    """Six schedules are made while the device is still busy; none overwrites what an earlier one has yet to copy."""
    shape, rows = SHAPES[0], 8
    pool = Pool([30] * rows, shape)
    for b in range(rows):
        pool.grow(b, 30 * 16)
    plan = DecodePlan(pool.workspace(), rows, 31, *pool.sizes())
    q, rng, results = pool.queries(rows), np.random.default_rng(0), []
    order = [rng.permutation(rows) for _ in range(6)]
    counts = [rng.integers(1, 31, rows).astype(np.int32) for _ in range(6)]
    lens = [int32((c * 16 - rng.integers(0, 16, rows)).tolist()) for c in counts]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for turn in range(6):
        plan.update(counts[turn], pool.tables[order[turn]])
        results.append(paged_decode(q, pool.pages, 0, pool.device_tables, lens[turn], pool.scale, plan.handle))
    for turn, out in enumerate(results):
        host = lens[turn].tolist()
        pool.close(out, torch.cat([pool.dense(q[b : b + 1], order[turn][b], 0, host[b]) for b in range(rows)]))


ROWS = [(100, 20), (17, 17), (300, 1), (64, 64), (1000, 700), (5, 2)]


def prefill_case(shape, rows):
    pool = Pool([-(-length // shape[2]) for length, _ in rows], shape)
    for b, (length, _) in enumerate(rows):
        pool.grow(b, length)
    cu = np.cumsum([0, *(n for _, n in rows)]).astype(np.int32)
    seq_lens = np.array([length for length, _ in rows], np.int32)
    q = pool.queries(int(cu[-1]))
    wants = [torch.cat([pool.dense(q[cu[b] : cu[b + 1]], b, y, length) for b, (length, _) in enumerate(rows)]) for y in range(2)]
    return pool, cu, seq_lens, q, wants


@pytest.mark.parametrize("shape", [*SHAPES, (torch.bfloat16, 256, 16, 2, 4), (torch.float32, 64, 16, 2, 2)], ids=str)
@pytest.mark.parametrize("rows", [ROWS, [(2000, 900)], [(33, 32)] * 40], ids=["mixed", "long", "many"])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (130, 5.0)], ids=["plain", "limited"])
def test_prompts_by_tiles_as_graphs(shape, rows, window, softcap):
    pool, cu, seq_lens, q, wants = prefill_case(shape, rows)
    extra, heads = 40, pool.group * pool.kv_heads
    plan = TilePlan(len(rows) + 3, len(q) + extra, heads, pool.kv_heads, torch.device(CUDA))
    wide = torch.cat((q, torch.full_like(q[:1], float("nan")).expand(extra, -1, -1)))
    tables, nothing = (
        torch.full((len(rows) + 3, pool.tables.shape[1]), pool.dummy, dtype=torch.int32, device=CUDA),
        torch.zeros(0, device=CUDA),
    )
    tables[: len(rows)] = pool.device_tables

    def run():
        return paged_prefill(
            wide, pool.pages, 1, tables, nothing.int(), nothing.int(), pool.scale, plan.handle, None, None, window, softcap
        )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    plan.update(cu, seq_lens)
    graph.replay()
    given = pool.pages, 1, pool.device_tables, int32(seq_lens), int32(cu), pool.scale, 0
    pool.close(out[: len(q)], paged_prefill(q, *given, None, None, window, softcap) if window else wants[1])
    assert not out[len(q) :].any()


def prefill(pool, plan, q, cu, seq_lens, layer):
    return paged_prefill(q, pool.pages, layer, pool.device_tables, int32(seq_lens), int32(cu), pool.scale, plan.handle)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [ROWS, [(2000, 900)], [(33, 32)] * 40], ids=["mixed", "long", "many"])
def test_prefill_over_a_cached_prefix(shape, rows):
    pool, cu, seq_lens, q, wants = prefill_case(shape, rows)
    plan = PrefillPlan(pool.workspace(), 64, 2100 // pool.page_size + 1, *pool.sizes(), backend="fa2")
    plan.update(cu, seq_lens, pool.tables)
    fused = torch.randn(len(q), 3 * q.shape[1], pool.head_dim, device=CUDA).to(pool.dtype)  # q as a view of a fused projection
    fused[:, : q.shape[1]] = q
    for layer, want in enumerate(wants):
        pool.close(prefill(pool, plan, q, cu.tolist(), seq_lens.tolist(), layer), want)
        pool.close(prefill(pool, plan, fused[:, : q.shape[1]], cu.tolist(), seq_lens.tolist(), layer), want)


@pytest.mark.parametrize("rows", [ROWS, [(2000, 900)], [(33, 32)] * 40], ids=["mixed", "long", "many"])
def test_prefill_with_hoppers_own_kernel(rows):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fa3 is for compute capability 9.0")
    pool, cu, seq_lens, q, wants = prefill_case(SHAPES[0], rows)
    plan = PrefillPlan(pool.workspace(), 64, 2100 // pool.page_size + 1, *pool.sizes(), backend="fa3")
    plan.update(cu, seq_lens, pool.tables)
    assert plan.chosen == "fa3"
    for layer, want in enumerate(wants):
        pool.close(prefill(pool, plan, q, cu.tolist(), seq_lens.tolist(), layer), want)


def limited_prefill(pool, plan, q, cu, seq_lens, layer, *rest):
    given = (pool.device_tables, int32(seq_lens.tolist()), int32(cu.tolist()), pool.scale, plan.handle)
    return paged_prefill(q, pool.pages, layer, *given, *rest)


def check_windows(shape, rows, backend, softcap):
    pool, cu, seq_lens, q, _ = prefill_case(shape, rows)
    q = q * 3
    space = pool.workspace()
    plan = PrefillPlan(space, 64, 5000 // pool.page_size, *pool.sizes(), backend=backend, windows=WINDOWS, softcap=softcap)
    plan.update(cu, seq_lens, pool.tables)
    assert plan.chosen == backend
    for layer in range(2):
        for window in WINDOWS:
            space.buffer.fill_(0xFF)
            parts = [pool.dense(q[cu[b] : cu[b + 1]], b, layer, length, window, softcap) for b, (length, _) in enumerate(rows)]
            pool.close(limited_prefill(pool, plan, q, cu, seq_lens, layer, None, None, window, softcap), torch.cat(parts))


# Long rows of few queries are split; of several queries and a window their parts must lie where the merge looks for them.
WINDOWED_ROWS = [ROWS, [(2000, 900)], [(4000, 40)], [(3000, 5), (700, 2)], [(33, 32)] * 40]


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("shape", LIMITED, ids=str)
@pytest.mark.parametrize("rows", WINDOWED_ROWS, ids=["mixed", "long", "split", "few", "many"])
def test_one_prefill_plan_serves_layers_of_several_windows(shape, rows, softcap):
    check_windows(shape, rows, "fa2", softcap)


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("rows", WINDOWED_ROWS, ids=["mixed", "long", "split", "few", "many"])
def test_windows_with_hoppers_own_kernel(rows, softcap):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fa3 is for compute capability 9.0")
    check_windows(LIMITED[1], rows, "fa3", softcap)


@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_windows_where_new_keys_and_values_lie_together(softcap):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fa3 is for compute capability 9.0")
    rows = [(33, 33), (700, 700), (128, 128)]
    pool, cu, seq_lens, q, _ = prefill_case(LIMITED[1], rows)
    plan = PrefillPlan(pool.workspace(), 64, 200, *pool.sizes(), backend="fa3", windows=WINDOWS, softcap=softcap)
    plan.update(cu, seq_lens, pool.tables, together=True)
    assert plan.together
    for layer in range(2):
        k, v = (torch.cat([row[layer] for row in part]) for part in (pool.k, pool.v))
        for window in WINDOWS:
            parts = [pool.dense(q[cu[b] : cu[b + 1]], b, layer, length, window, softcap) for b, (length, _) in enumerate(rows)]
            pool.close(limited_prefill(pool, plan, q, cu, seq_lens, layer, k, v, window, softcap), torch.cat(parts))


def test_a_captured_prefill_of_windows_serves_other_batches():
    """Also batches of rows that a window holds: what is captured cannot do without it."""
    shape, windows = LIMITED[1], (0, 50)
    longest = prefill_case(shape, [(320, 1)])[0]
    plan = PrefillPlan(longest.workspace(), 3, 20, *longest.sizes(), max_tokens=128, windows=windows)
    q = torch.zeros(128, 8, 128, dtype=torch.bfloat16, device=CUDA)
    pages = torch.zeros(2, 64, 2, 2, 16, 128, dtype=torch.bfloat16, device=CUDA)
    plan.update(np.array([0, 1], np.int32), np.array([1], np.int32), np.zeros((1, 1), np.int32))
    run = lambda: [plan.run(q, pages, layer, 128**-0.5, window=windows[layer]) for layer in range(2)]  # noqa: E731
    graph, outs = captured(run)
    for rows in [[(100, 20), (17, 17)], [(300, 60)], [(40, 1), (50, 3), (64, 64)], [(9, 9)]]:
        pool, cu, seq_lens, real_q, _ = prefill_case(shape, rows)
        pages[:, : pool.num_pages].copy_(pool.pages)
        q.fill_(float("nan"))[: len(real_q)].copy_(real_q)
        plan.update(cu, seq_lens, pool.tables)
        graph.replay()
        for layer, window in enumerate(windows):
            parts = [pool.dense(real_q[cu[b] : cu[b + 1]], b, layer, length, window) for b, (length, _) in enumerate(rows)]
            pool.close(outs[layer][: len(real_q)], torch.cat(parts))


FRESH = [[(1500, 1500)], [(33, 33), (700, 700), (128, 128)], [(900, 900), (40, 30)]]


@pytest.mark.parametrize("rows", FRESH, ids=["one", "more", "prefix"])
def test_prefill_where_new_keys_and_values_lie_together(rows):
    """Read there, in views of a fused projection, where no row has others; out of the pages where one has."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fa3 is for compute capability 9.0")
    pool, cu, seq_lens, q, wants = prefill_case(SHAPES[0], rows)
    plan = PrefillPlan(pool.workspace(), 64, 2100 // pool.page_size + 1, *pool.sizes(), backend="fa3")
    plan.update(cu, seq_lens, pool.tables, together=True)
    assert plan.together == all(length == new for length, new in rows)
    heads, kv_heads = q.shape[1], pool.kv_heads
    for layer, want in enumerate(wants):
        k, v = (torch.cat([row[layer, length - new :] for row, (length, new) in zip(part, rows, strict=True)]) for part in (pool.k, pool.v))
        fused = torch.cat((q, k, v), 1)
        if plan.together:
            pool.pages[layer].fill_(torch.nan)
        q_view, k_view, v_view = fused.split((heads, kv_heads, kv_heads), 1)
        given = (q_view, pool.pages, layer, pool.device_tables, int32(seq_lens.tolist()), int32(cu.tolist()), pool.scale, plan.handle)
        pool.close(paged_prefill(*given, k_view, v_view), want)
        if plan.together:
            with pytest.raises(PlanMismatchError):
                paged_prefill(*given)


OLDER = [[(1500, 900)], [(1500, 1500), (700, 300), (129, 65)], [(2000, 1000), (16, 16)]]


@pytest.mark.parametrize("windows", [(0,), (0, 100)])
@pytest.mark.parametrize("rows", OLDER, ids=["one", "more", "whole"])
def test_prefill_copies_older_keys_and_values_out_of_the_pages(rows, windows, monkeypatch):
    """Where rows have no more of them than new ones; they may be in the pages of another half."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fa3 is for compute capability 9.0")
    monkeypatch.setattr(flashinfer_plans, "COPIED_FROM", 1)
    pool, cu, seq_lens, q, wants = prefill_case(SHAPES[0], rows)
    plan = PrefillPlan(pool.workspace(), 64, 2100 // pool.page_size + 1, *pool.sizes(), backend="fa3", windows=windows)
    plan.update(cu, seq_lens, pool.tables, together=True)
    assert plan.together and plan.copied is not None
    for layer, want in enumerate(wants):
        unused = q.new_full((len(q), pool.kv_heads, pool.head_dim), torch.nan)
        given = (q, pool.pages, layer, pool.device_tables, int32(seq_lens.tolist()), int32(cu.tolist()), pool.scale, plan.handle)
        pool.close(paged_prefill(*given, unused, unused), want)
        if len(windows) == 2:
            parts = [pool.dense(q[cu[b] : cu[b + 1]], b, layer, length, 100) for b, (length, _) in enumerate(rows)]
            pool.close(paged_prefill(*given, unused, unused, 100), torch.cat(parts))
    plan.update(cu, seq_lens, pool.tables)
    assert not plan.together and plan.copied is None


def test_a_captured_prefill_serves_other_batches():
    shape, space = SHAPES[0], None
    steps = [[(100, 20), (17, 17)], [(300, 60)], [(40, 1), (50, 3), (64, 64)]]
    longest = prefill_case(shape, [(320, 1)])[0]
    space = longest.workspace()
    plan = PrefillPlan(space, 3, 20, *longest.sizes(), max_tokens=128)
    q = torch.zeros(128, 16, 128, dtype=torch.bfloat16, device=CUDA)
    pages = torch.zeros(2, 64, 2, 8, 16, 128, dtype=torch.bfloat16, device=CUDA)
    plan.update(np.array([0, 1], np.int32), np.array([1], np.int32), np.zeros((1, 1), np.int32))
    run = lambda: [plan.run(q, pages, layer, 128**-0.5) for layer in range(2)]  # noqa: E731
    graph, outs = captured(run)
    for rows in steps:
        pool, cu, seq_lens, real_q, wants = prefill_case(shape, rows)
        pages[:, : pool.num_pages].copy_(pool.pages)
        q.fill_(float("nan"))[: len(real_q)].copy_(real_q)
        plan.update(cu, seq_lens, pool.tables)
        graph.replay()
        for out, want in zip(outs, wants, strict=True):
            pool.close(out[: len(real_q)], want)
            assert not out[len(real_q) :].any()


def test_all_of_it_on_another_stream():
    pool, cu, seq_lens, q, wants = prefill_case(SHAPES[0], ROWS)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        plan = PrefillPlan(pool.workspace(), 64, 64, *pool.sizes(), backend="fa2")
        plan.update(cu, seq_lens, pool.tables)
        pool.close(prefill(pool, plan, q, cu.tolist(), seq_lens.tolist(), 1), wants[1])
        decode = DecodePlan(plan.workspace, len(ROWS), 64, *pool.sizes())
        decode.update(pool.counts, pool.tables)
        last = q[torch.from_numpy(cu[1:] - 1).long().to(CUDA)]
        out = paged_decode(last, pool.pages, 0, pool.device_tables, int32(seq_lens.tolist()), pool.scale, decode.handle)
        pool.close(out, wants[0][torch.from_numpy(cu[1:] - 1).long().to(CUDA)])


def test_plans_refuse_what_they_were_not_made_for():
    pool = Pool([2, 2], SHAPES[0])
    pool.grow(0, 3), pool.grow(1, 3)
    plan = DecodePlan(pool.workspace(), 2, 4, *pool.sizes())
    q, lens = pool.queries(2), int32([3, 3])
    decode = lambda q, handle: paged_decode(q, pool.pages, 0, pool.device_tables, lens, pool.scale, handle)  # noqa: E731
    with pytest.raises(PlanMismatchError, match="never updated"):
        decode(q, plan.handle)
    with pytest.raises(PlanMismatchError, match=r"1 counts and 1 page tables"):
        plan.update(pool.counts[:1], pool.tables[:1])
    for counts in ([0, 1], [1, 4]):  # the tables are 3 wide
        with pytest.raises(PlanMismatchError, match=r"must be in 1 \.\.\. 3"):
            plan.update(np.array(counts, np.int32), pool.tables)
    plan.update(pool.counts, pool.tables)
    with pytest.raises(PlanMismatchError, match="3 rows"):
        decode(pool.queries(3), plan.handle)
    with pytest.raises(PlanMismatchError, match="DecodePlan"):
        prefill(pool, plan, q, [0, 1, 2], [3, 3], 0)
    handle = plan.handle
    del plan
    with pytest.raises(UnknownPlanError):
        decode(q, handle)


def test_plans_refuse_windows_and_soft_caps_that_they_were_not_made_for():
    pool = Pool([2, 2], LIMITED[1])
    pool.grow(0, 3), pool.grow(1, 3)
    space, q, lens = pool.workspace(), pool.queries(2), int32([3, 3])
    plain, limited = (DecodePlan(space, 2, 4, *pool.sizes(), **kw) for kw in ({}, {"windows": (0, 64), "softcap": 5.0}))
    for plan, rest in ((plain, (64, 0.0)), (plain, (0, 5.0)), (limited, (32, 5.0)), (limited, (64, 0.0)), (limited, (64, 6.0))):
        plan.update(pool.counts, pool.tables)
        with pytest.raises(PlanMismatchError, match="window"):
            paged_decode(q, pool.pages, 0, pool.device_tables, lens, pool.scale, plan.handle, *rest)
    for windows in ((), (-1,)):
        with pytest.raises(PlanMismatchError, match="windows"):
            DecodePlan(space, 2, 4, *pool.sizes(), windows=windows)
    with pytest.raises(PlanMismatchError, match="causal"):
        PrefillPlan(space, 2, 4, *pool.sizes(), causal=False, windows=(0, 64))
    prompts = PrefillPlan(space, 2, 4, *pool.sizes(), backend="fa2")
    prompts.update(np.array([0, 1, 2], np.int32), np.array([3, 3], np.int32), pool.tables)
    with pytest.raises(PlanMismatchError, match="window 64"):
        paged_prefill(q, pool.pages, 0, pool.device_tables, lens, int32([0, 1, 2]), pool.scale, prompts.handle, None, None, 64)


def test_the_same_bits_again():
    """A plan's result does not vary from run to run."""
    pool = Pool([100, 7, 30], SHAPES[0])
    for b in range(3):
        pool.grow(b, int(pool.counts[b]) * 16 - 5)
    plan = DecodePlan(pool.workspace(), 3, 100, *pool.sizes())
    plan.update(pool.counts, pool.tables)
    q, lens = pool.queries(3), int32(pool.lens.tolist())
    outs = [paged_decode(q, pool.pages, 0, pool.device_tables, lens, pool.scale, plan.handle) for _ in range(5)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert reference.decode_rows(q, pool.pages[0], pool.device_tables, lens, pool.scale).dtype == pool.dtype
