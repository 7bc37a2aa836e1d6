"""KV in FP8 on a GPU: the kernels against the plain functions, captured steps against eager ones, the size of the pool."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nanovllm as nv
from nanovllm.executor.cascade_policy import own_runs, shared_runs
from nanovllm.executor.graph_executor import GraphExecutor
from nanovllm.models.common.layers import inverse_frequencies
from nanovllm.ops.attention.cascade import cascade_rows
from nanovllm.ops.attention.cascade_plan import CascadePlan, CascadeWorkspace
from nanovllm.ops.attention.fused_plan import FusedDecodePlan
from nanovllm.ops.attention.prompt_tiles import TilePlan
from nanovllm.ops.attention.reference import decode_rows, prefill_rows
from nanovllm.ops.attention.rope_attend import rope_attend
from nanovllm.ops.kv_cache import kv_write as write_op
from nanovllm.ops.kv_cache import move_kv as move_op
from nanovllm.ops.kv_cache.fp8 import FP8, numbers, quantised, split, stored_width
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.problems import attention_problem, fp8_pages
from tests.gpu.small import random_prompts, require_same, small_model

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
LIMITS: dict[str, Any] = {
    "num_pages": 600, "page_size": 16, "max_num_seqs": 12, "max_num_batched_tokens": 1024, "max_model_len": 512, "kv_dtype": "fp8",
}  # fmt: skip
LIMITS_OF_ATTENTION = [(0, 0.0), (100, 0.0), (33, 2.0)]  # window, soft cap


def bits(pages: torch.Tensor) -> torch.Tensor:
    return pages.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "size", "head_dim"), [(8, 16, 128), (1, 1, 64), (3, 5, 80), (16, 16, 256)])
def test_written_bits_are_those_of_plain_torch(heads: int, size: int, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tokens = 300
    kv = torch.randn(tokens, 2 * heads, head_dim, device=CUDA) * torch.logspace(-6, 4, tokens, device=CUDA)[:, None, None]
    kv[1], kv[2, 0, 0], kv[3, :, 1], kv[4] = 0, torch.nan, torch.inf, -torch.inf
    k, v = kv.to(dtype).split(heads, 1)
    pages = torch.zeros(2, tokens, 2, heads, size, stored_width(head_dim, FP8), dtype=torch.uint8, device=CUDA).view(FP8)
    want, slots = pages.clone(), torch.randperm(tokens * size, device=CUDA)[:tokens].int()
    write_op._reference(want, 1, k, v, slots)
    write_op._cuda(pages, 1, k, v, slots)
    assert torch.equal(bits(pages), bits(want))
    cpu = torch.zeros(pages.shape, dtype=torch.uint8).view(FP8)
    write_op._reference(cpu, 1, k.cpu(), v.cpu(), slots.cpu())
    assert torch.equal(bits(pages).cpu(), bits(cpu))
    assert numbers(pages[1]).isfinite().all()


def test_all_codes_and_halfway_numbers() -> None:
    """Every number between two codes, in the middle too, rounds on a GPU as on a CPU."""
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).double()
    between = torch.cat([codes[:-1] + (codes[1:] - codes[:-1]) * part for part in (0.0, 0.25, 0.5, 0.75)]).float()
    x = torch.nn.functional.pad(between, (0, -len(between) % 127)).view(-1, 127)
    x = torch.cat((torch.full((len(x), 1), 448.0), x), 1).view(-1, 1, 128)  # the scale is 1
    pages = torch.zeros(1, len(x), 2, 1, 1, 132, dtype=torch.uint8, device=CUDA).view(FP8)
    write_op._cuda(pages, 0, x.to(CUDA), -x.to(CUDA), torch.arange(len(x), dtype=torch.int32, device=CUDA))
    found = split(pages)[0][0].cpu()[:, :, 0, 0]
    want, _ = quantised(x[:, 0])
    assert torch.equal(found[:, 0].float(), want.float()) and torch.equal(found[:, 1].float(), -want.float())


@pytest.mark.parametrize(("heads", "size", "head_dim"), [(8, 16, 128), (3, 5, 80), (16, 16, 256)])
def test_moving(heads: int, size: int, head_dim: int) -> None:
    torch.manual_seed(1)
    pages = fp8_pages(torch.randn(3, 64, 2, heads, size, head_dim, device=CUDA))
    order, count = torch.randperm(64 * size, device=CUDA).int(), 32 * size
    src, dst, shift = order[:count], order[count:], torch.randint(-500, 500, (count,), dtype=torch.int32, device=CUDA)
    shift[::3] = 0
    want, speed = pages.clone(), inverse_frequencies(tiny_config().rope, head_dim).to(CUDA)
    move_op._reference(want, src, dst, shift, speed)
    move_op._cuda(pages, src, dst, shift, speed)
    same = (bits(pages) == bits(want)).double().mean().item()
    assert same > 0.98, same  # sines differ in the last bits, so some numbers round otherwise
    torch.testing.assert_close(numbers(pages), numbers(want), rtol=0.14, atol=0.02)
    values = [numbers(each)[:, :, 1] for each in (pages, want)]
    assert torch.equal(*values)


@pytest.mark.parametrize("limits", LIMITS_OF_ATTENTION)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim"),
    [(1, 16, 8, 128), (4, 28, 4, 128), (8, 32, 8, 128), (16, 16, 8, 128), (48, 6, 2, 80), (64, 16, 8, 64), (24, 16, 8, 256)],
)
def test_decoding(rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, limits: tuple[int, float]) -> None:
    lens = [17 + 61 * row % 700 for row in range(rows)]
    qkv, q_gain, k_gain, cos, sin, plain, layer, *rest = attention_problem(lens, heads, kv_heads, head_dim, 16, True, dtype, "cuda")
    pages = fp8_pages(plain)
    q_and_k = tuple(t.float() for t in (qkv, q_gain, k_gain))
    want = rope_attend(*q_and_k, cos, sin, pages.clone(), layer, *rest, 0, *limits)
    plan = FusedDecodePlan(rows, heads, kv_heads, head_dim, CUDA, fp8=True)
    written = pages.clone()
    got = rope_attend(qkv, q_gain, k_gain, cos, sin, written, layer, *rest, plan.handle, *limits)
    torch.testing.assert_close(got.float(), want, rtol=3e-2, atol=3e-2)
    # The row reads back what it stored: attention over the written pages gives the same.
    q = rotated(qkv, q_gain, cos, sin, heads, head_dim).float()
    again = decode_rows(q, written[layer], *rest[:2], rest[3], *limits).flatten(1)
    torch.testing.assert_close(got.float(), again, rtol=3e-2, atol=3e-2)


def rotated(qkv: torch.Tensor, gain: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """The queries of a fused projection, normed and rotated."""
    from nanovllm.ops.elementwise.norm_rope import apply_rope, rms_norm

    q = qkv.unflatten(-1, (-1, head_dim))[:, :heads]
    return apply_rope(rms_norm(q, gain, 1e-6), cos, sin)


@pytest.mark.parametrize("limits", LIMITS_OF_ATTENTION)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "group", "head_dim"), [(3, 2, 128), (24, 4, 64), (5, 3, 80), (40, 1, 256)])
def test_shared_pages(rows: int, group: int, head_dim: int, dtype: torch.dtype, limits: tuple[int, float]) -> None:
    torch.manual_seed(rows)
    kv_heads, width, size = 2, 60, 16
    pages = fp8_pages(torch.randn(rows * width + 1, 2, kv_heads, size, head_dim, device=CUDA))
    tables = torch.randperm(rows * width).view(rows, width).int()
    tables[:, :30] = tables[0, :30]
    lens = torch.randint(30 * size + 1, width * size + 1, (rows,), dtype=torch.int32)
    counts = -(-lens.numpy() // size)
    q, heads = torch.randn(rows, kv_heads * group, head_dim, device=CUDA).to(dtype), kv_heads * group
    for runs in (shared_runs(tables.numpy(), lens.numpy() // size, counts, lambda _, __: True), own_runs(counts)):
        from nanovllm.ops.attention import triton_cascade

        plan = CascadePlan(CascadeWorkspace(rows, heads, head_dim, CUDA, fp8=True), rows, heads, kv_heads, size, CUDA)
        assert plan.update(runs)
        where = pages, tables.to(CUDA), lens.to(CUDA), 0.1
        got = triton_cascade.cascade_decode(q, *where, plan, *limits)
        want = cascade_rows(q.float(), *where, runs, *limits)
        torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("limits", LIMITS_OF_ATTENTION)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (28, 4, 128), (6, 2, 80), (8, 8, 64), (16, 8, 256)])
def test_prompts(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, limits: tuple[int, float]) -> None:
    from nanovllm.ops.attention.triton_prompts import attend_tiles

    torch.manual_seed(heads)
    new, old = np.array([(700, 0), (1, 90), (64, 600), (129, 31)], np.int32).T
    cu_seqlens, seq_lens = np.concatenate(([0], new.cumsum())).astype(np.int32), (new + old).astype(np.int32)
    width = -(-int(seq_lens.max()) // 16)
    tables = torch.randperm(4 * width, dtype=torch.int32, device=CUDA).view(4, width)
    pages = fp8_pages(torch.randn(4 * width, 2, kv_heads, 16, head_dim, device=CUDA))
    count = int(cu_seqlens[-1])
    q = torch.randn(count, heads, head_dim, device=CUDA).to(dtype)
    plan = TilePlan(4, count, heads, kv_heads, CUDA)
    plan.update(cu_seqlens, seq_lens)
    got = attend_tiles(q, pages, tables, 0.1, plan, *limits)
    on_gpu = (torch.from_numpy(x).to(CUDA) for x in (seq_lens, cu_seqlens))
    want = prefill_rows(q.float(), pages, tables, *on_gpu, 0.1, *limits)
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("cascade", [None, True, False])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma3ForCausalLM", "MistralForCausalLM", "GPT2LMHeadModel"])
def test_graphs_equal_eager_steps(architecture: str, cascade: bool | None) -> None:
    """Fused and compiled layers, windows, captured and long prompts; nothing of FlashInfer is loaded."""
    if architecture == "GPT2LMHeadModel":
        model = random_model(
            tiny_config(architecture, hidden_size=256, num_heads=4, num_kv_heads=4, head_dim=64), 0, "bfloat16", device="cuda", std=0.05
        )
    else:
        model = small_model(architecture)
    prompts = random_prompts(model, 1, 5, 17, 64, 150, 400, 33)
    prompts += [[*prompts[5][:300], token] for token in (1, 2, 3)]  # share pages
    _, want = nv.generate_many(model, nv.init_state(model, compile=False, **LIMITS), prompts, GREEDY)
    state = nv.init_state(model, cascade=cascade, **LIMITS)
    executor, address = state.runtime.executor, state.kv.pools[0].data_ptr()
    assert isinstance(executor, GraphExecutor) and not executor._attention.ready()
    state, got = nv.generate_many(model, state, prompts, GREEDY)
    nv.check(state)
    assert state.kv.pools[0].data_ptr() == address and state.kv.pools[0].dtype == FP8
    assert not any(kind.way == "planned" for kind in executor._decode._steps)
    for prompt, one, other in zip(prompts, got, want, strict=True):
        require_same(model, prompt, one.token_ids, other.token_ids, LIMITS)


def test_sessions_chunks_and_files(tmp_path: Path) -> None:
    model = small_model()
    state, prompts = nv.init_state(model, **LIMITS), random_prompts(model, 40, 70)
    chunks = []
    for prompt in prompts:
        state, chunk = nv.prefill(model, state, prompt)
        chunks.append(chunk)
    state, whole = nv.compose(model, state, chunks, recompute=0.2)
    state, short = nv.drop(model, state, whole, 10, 30, mode="shift")
    nv.save_chunk(state, short, tmp_path / "chunk")
    other, loaded = nv.load_chunk(model, nv.init_state(model, **LIMITS, compile=False), tmp_path / "chunk")
    state, carry = nv.begin(model, state, [[short, [3]], [whole, [3]]], GREEDY, room=40)
    for _ in range(40):
        carry, _ = nv.decode_step(model.params, carry, model.config)
    state, gens = nv.commit(model, state, carry)
    _, want = nv.generate(model, other, [loaded, [3]], GREEDY)
    assert gens[0].token_ids[:2] == want.token_ids[:2]  # later tokens may differ where two are as good as tied
    nv.check(state)
    cpu = random_model(model.config, 0, "bfloat16", std=0.05)
    again, on_cpu = nv.load_chunk(cpu, nv.init_state(cpu, num_pages=64, kv_dtype="fp8"), tmp_path / "chunk")
    assert len(on_cpu) == len(short)
    nv.check(again)


def test_a_compiled_program_copies_no_kv() -> None:
    model = small_model()
    state, prompts = nv.init_state(model, **LIMITS), random_prompts(model, 40, 70)
    state, want = nv.generate_many(model, state, prompts, GREEDY)
    state, carry = nv.begin(model, state, prompts, GREEDY, room=40)
    address = carry.kv.pools[0].data_ptr()

    def run(params: Any, carry: nv.DecodeCarry) -> tuple[nv.DecodeCarry, torch.Tensor]:
        carry, out = nv.decode_step(params, carry, model.config)
        return carry, out.token_ids

    compiled, drawn = torch.compile(run, fullgraph=True), []
    for _ in range(40):
        carry, tokens = compiled(model.params, carry)
        drawn.append(tokens.clone())
    assert carry.kv.pools[0].data_ptr() == address
    state, _ = nv.commit(model, state, carry)
    for prompt, one, other in zip(prompts, torch.stack(drawn, 1).tolist(), want, strict=True):
        require_same(model, prompt, one, other.token_ids, LIMITS)


def test_the_pool_has_19_tenths_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 << 30, 8 << 30))  # other processes of a test run take and free memory
    sizes = {"hidden_size": 256, "num_heads": 2, "num_kv_heads": 2, "head_dim": 128, "num_layers": 4, "max_position_embeddings": 1 << 20}
    model, pages = random_model(tiny_config(**sizes), 0, "bfloat16", device="cuda"), []
    for kv_dtype, width in ((None, 256), ("fp8", 132)):
        state = nv.init_state(model, kv_dtype=kv_dtype, memory_fraction=0.4, max_num_seqs=64)
        pages.append(state.config.num_pages)
        assert state.kv.pools[0].nbytes == (state.config.num_pages + 1) * 4 * 2 * 2 * 16 * width
        del state
        torch.cuda.empty_cache()
    assert pages[1] >= 1.9 * pages[0]
