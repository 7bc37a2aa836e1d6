"""Sampling on a GPU: the generator's bits are the CPU's, the tokens are the CPU's but for rounding, and nothing waits for the host."""

import numpy as np
import pytest
import torch

from nanovllm.ops.sampling.draw import draw
from nanovllm.ops.sampling.least_kept import least_kept
from nanovllm.ops.sampling.uniforms import uniforms
from nanovllm.sampling.params import SamplingParams
from nanovllm.sampling.penalty_tables import PenaltyTables, draw_rows
from nanovllm.sampling.row_options import LINES, kind_of, needs_tables, pack, packed_options, row_options
from nanovllm.sampling.sampler import record, sample
from nanovllm.sampling.tensors import build

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

NO_IDS = np.empty(0, np.int64)
QWEN3_VOCAB = 151_936
MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    SamplingParams(temperature=0.0),
    SamplingParams(top_p=0.9, logprobs=3),
    SamplingParams(min_p=0.05, temperature=1.5),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(top_k=1000, logit_bias={5: 3.0, 9: -100.0}),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, frequency_penalty=1.0),
]


def rows_of(params):
    return [(p, 100 + i, np.arange(3 * i), np.arange(i)) for i, p in enumerate(params)]


def logits_of(rows, vocab, dtype=torch.float32, seed=0):
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.mark.parametrize("num", [1, 3, 4, 2047, 2048, 2049, QWEN3_VOCAB])
def test_uniforms_are_bitwise_the_cpus(num):
    keys = torch.tensor([[0, 0], [2**63 - 1, 2**31 - 1], [12345678901234, 77], [5, 2**40], [2**32 - 1, 2**32]])
    assert torch.equal(uniforms(keys.cuda(), num).cpu(), uniforms(keys, num))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 2, 97, 2048, 4100, QWEN3_VOCAB])
def test_draw_equals_the_cpus(vocab, dtype):
    logits = logits_of(64, vocab, dtype)
    temperature = torch.tensor([0.0, 0.3, 1.0, 2.0]).repeat(16)
    keys = torch.stack((torch.arange(64) * 2**40, torch.arange(64)), 1)
    for least in (None, torch.full((64,), -1.0)):
        if least is not None and vocab < 97:
            continue
        expected = draw(logits, temperature, least, keys)
        found = draw(logits.cuda(), temperature.cuda(), None if least is None else least.cuda(), keys.cuda()).cpu()
        assert torch.equal(found[::4], expected[::4])
        assert (found != expected).sum() <= 1  # logarithms differ in the last bit, which two close scores may show


def test_draw_of_ties_and_of_rows_without_a_maximum():
    keys, zero, one = torch.tensor([[1, 1]]).cuda(), torch.zeros(1).cuda(), torch.ones(1).cuda()
    tied = torch.zeros(1, 5000).cuda()
    tied[0, 7::1000] = 1.0
    assert draw(tied, zero, None, keys).item() == 7
    for bad in (-torch.inf, torch.nan, torch.inf):
        for temperature in (zero, one):
            assert 0 <= draw(torch.full((1, 5000), bad).cuda(), temperature, one, keys).item() < 5000
    assert draw(torch.full((1, 5000), -torch.inf).cuda(), one, None, keys).item() == 0
    assert draw(torch.zeros(0, 5000).cuda(), torch.zeros(0).cuda(), None, keys[:0]).shape == (0,)


def test_strided_logits():
    logits, keys = logits_of(8, 301).cuda(), torch.arange(16).view(8, 2).cuda()
    for view in (torch.cat((logits, logits), 1)[:, :301], logits.t().contiguous().t()):
        assert torch.equal(draw(view, torch.ones(8).cuda(), None, keys), draw(logits, torch.ones(8).cuda(), None, keys))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 97, 4100, 9001, 32000, QWEN3_VOCAB])
def test_the_least_kept_logits_are_bitwise_the_cpus(vocab, dtype):
    """All filters over rows of every kind: sharp, flat, of ties, of equal logits (more than there is room for), and without a maximum."""
    draw_options, rows = np.random.default_rng(vocab), 24
    for spread in (0.01, 1.0, 3.0, 30.0):
        x = logits_of(rows, vocab, dtype, seed=int(spread)) * spread
        x[1], x[2], x[3, ::2], x[4, -1], x[5], x[6, 0] = 0, torch.round(x[2] * 2) / 2, -torch.inf, torch.nan, -torch.inf, torch.inf
        x[7] = x[7] - 50.0

        def of(*values, kind=torch.float32, count=rows):
            return torch.tensor(draw_options.choice(values, count), dtype=kind)

        for on in ((1, 1, 1), (0, 1, 0), (1, 0, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0)):
            temperature = of(0.0, 0.3, 0.6, 1.0, 2.0, 100.0)
            options = of(0, 1, 20, 50, 1000, 10**6, kind=torch.int32), of(1.0, 1e-9, 0.5, 0.9, 0.95, 0.9999), of(0.0, 1.0)
            options = [option if used else None for option, used in zip(options, on, strict=True)]
            want = least_kept(x, temperature, *options)
            got = least_kept(x.cuda(), temperature.cuda(), *(None if option is None else option.cuda() for option in options))
            assert torch.equal(got.cpu(), want), (spread, on, (got.cpu() != want).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("vocab", [257, QWEN3_VOCAB])
def test_sample_equals_the_cpus(vocab):
    logits, rows = logits_of(len(MIXED), vocab), rows_of(MIXED)
    host, device = build(rows, vocab, "cpu"), build(rows, vocab, "cuda")
    differ = 0
    for position in range(8):
        positions = torch.full((len(MIXED),), position, dtype=torch.int32)
        expected, found = sample(logits, host, positions), sample(logits.cuda(), device, positions.cuda())
        differ += int((found.token_ids.cpu() != expected.token_ids).sum())
        agree = (found.token_ids.cpu() == expected.token_ids).nonzero()[:, 0]
        torch.testing.assert_close(found.logprobs.cpu()[agree], expected.logprobs[agree], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.top_logprobs.cpu(), expected.top_logprobs, rtol=1e-5, atol=1e-5)
        assert torch.equal(found.top_ids.cpu(), expected.top_ids)
        for b in (2, 5):
            assert found.token_ids[b].item() == expected.token_ids[b].item()
    assert differ <= 1


@pytest.mark.parametrize("vocab", [257, QWEN3_VOCAB])
def test_a_token_does_not_depend_on_the_batch(vocab):
    logits, rows = logits_of(len(MIXED), vocab, torch.bfloat16).cuda(), rows_of(MIXED)
    positions = torch.arange(len(MIXED), device="cuda")
    together = sample(logits, build(rows, vocab, "cuda"), positions).token_ids
    for b, row in enumerate(rows):
        alone = sample(logits[b : b + 1], build([row], vocab, "cuda"), positions[b : b + 1]).token_ids
        assert alone.item() == together[b].item()


SETS = [[SamplingParams(temperature=0.0)] * 4, [SamplingParams()] * 4, MIXED[:2] * 2, MIXED]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("params", SETS, ids=["greedy", "plain", "candidates", "everything"])
def test_no_step_waits_for_the_host(params):
    logits, sampling = logits_of(len(params), 4096).cuda(), build(rows_of(params), 4096, "cuda")
    positions = torch.zeros(len(params), dtype=torch.int32, device="cuda")
    sample(logits, sampling, positions)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        record(sampling, sample(logits, sampling, positions).token_ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("params", SETS, ids=["greedy", "plain", "candidates", "everything"])
def test_a_captured_graph_replays_with_other_requests(params):
    """One graph of a kind serves any options of that kind, and counts what it draws; each step equals the plain sampler's."""
    vocab, size, kind, device = 4096, len(params) + 2, kind_of(map(packed_options, params)), torch.device("cuda")
    tables, lines = PenaltyTables.empty(size, vocab, device), torch.zeros(LINES, size + size % 2, dtype=torch.int32, device=device)
    host = np.zeros(lines.shape, np.int32)
    pack([], host)
    lines.copy_(torch.from_numpy(host))
    options, logits = row_options(lines, size), torch.zeros(size, vocab, device="cuda")
    newest, lengths = (torch.zeros(size, dtype=torch.int32, device="cuda") for _ in range(2))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        draw_rows(kind, logits, options, tables, newest, lengths)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = draw_rows(kind, logits, options, tables, newest, lengths)
        newest.copy_(captured.token_ids)
        lengths.add_(1)
    for round_, chosen in enumerate((params, params[::-1], params[:1])):
        rows, packed = rows_of(chosen), []
        for slot, (p, seed, prompt, output) in enumerate(rows):
            packed.append((packed_options(p), seed, size - 1 - slot if needs_tables(p) else -1))
            tables.fill(size - 1 - slot, *(ids.astype(np.int32) for ids in (prompt, output)), dict(p.logit_bias or ()), round_ + 1)
        pack(packed, host)
        lines.copy_(torch.from_numpy(host))
        eager, count = build(rows, vocab, "cuda"), len(rows)
        lengths.fill_(round_ + 1)
        for step in range(4):
            logits.copy_(logits_of(size, vocab, seed=10 * round_ + step))
            graph.replay()
            expected = sample(logits[:count], eager, torch.full((count,), round_ + 1 + step, dtype=torch.int32, device="cuda"))
            eager = record(eager, expected.token_ids)
            assert torch.equal(captured.token_ids[:count], expected.token_ids)
            if expected.logprobs is not None:
                torch.testing.assert_close(captured.logprobs[:count], expected.logprobs)


@pytest.mark.compile
@pytest.mark.parametrize("params", SETS[1:], ids=["plain", "candidates", "everything"])
def test_compiled_equals_eager(params):
    def step(logits, sampling, positions):
        out = sample(logits, sampling, positions)
        return out, record(sampling, out.token_ids)

    compiled = torch.compile(step, fullgraph=True)
    one, two = build(rows_of(params), 4096, "cuda"), build(rows_of(params), 4096, "cuda")
    for position in range(4):
        logits = logits_of(len(params), 4096, seed=position).cuda()
        positions = torch.full((len(params),), position, dtype=torch.int32, device="cuda")
        with torch.no_grad():
            (expected, one), (found, two) = step(logits, one, positions), compiled(logits, two, positions)
        assert torch.equal(found.token_ids, expected.token_ids)
        if one.penalties is not None:
            assert torch.equal(one.penalties.counts, two.penalties.counts)


def test_opcheck():
    keys = torch.tensor([[1, 2], [3, 4]]).cuda()
    torch.library.opcheck(torch.ops.nanovllm.uniforms.default, (keys, 6))
    torch.library.opcheck(torch.ops.nanovllm.draw.default, (torch.randn(2, 9).cuda(), torch.ones(2).cuda(), torch.zeros(2).cuda(), keys))
