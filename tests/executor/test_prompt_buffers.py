"""A batch of prompts in the buffers of a captured step gives the logits and the KV of the batch itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import nanovllm as nv
from nanovllm.config import EngineConfig, Mesh
from nanovllm.executor import prompt_graphs
from nanovllm.executor.batch import HostBatch, sample_prompts, to_device
from nanovllm.executor.prompt_buffers import PromptBuffers, PromptKind, prompt_tables
from nanovllm.executor.prompt_graphs import PromptGraphs
from nanovllm.loading.quantisation.rounding import Rounding, rounded_params
from nanovllm.models import registry
from nanovllm.ops.distributed.in_process import run_ranks
from nanovllm.ops.linear.quantise import KINDS
from nanovllm.state.kv_cache import init_kv
from nanovllm.state.pool_sizes import dummies
from nanovllm.testing.models import random_model, tiny_config
from tests.executor.captured_on_cpu import without_cuda

LIMITS = EngineConfig(num_pages=60, page_size=4, max_num_seqs=6, max_num_batched_tokens=64, max_model_len=64, num_frames=60, seed=0)


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers count as fused, as on a GPU."""
    monkeypatch.setattr(prompt_graphs, "all_fused", lambda *_: True)


def prompt_kinds(model: nv.Model, limits: EngineConfig) -> list[PromptKind]:
    """The kinds of an engine that chooses no layers."""
    return prompt_graphs.prompt_kinds(model, limits, None)


def test_a_model_of_plain_layers_has_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert prompt_kinds(random_model(tiny_config()), replace(LIMITS, max_num_batched_tokens=1024)) == []


def batch_of(model: nv.Model, rows: list[tuple[int, int]], limits: EngineConfig, seed: int) -> HostBatch:
    """Prompts with so many new tokens after so many older ones, on random pages."""
    rng = np.random.default_rng(seed)
    size, (_, frame) = limits.page_size, dummies(model.config, limits)
    width = -(-max(map(sum, rows)) // size)
    tables = [rng.permutation(limits.num_pages)[: len(rows) * width].reshape(len(rows), width).astype(np.int32) for _ in range(2)]
    places = [np.arange(before, before + new, dtype=np.int32) for new, before in rows]
    row_of = np.repeat(np.arange(len(rows)), [new for new, _ in rows])
    flat, ends = np.concatenate(places), np.cumsum([new for new, _ in rows])
    slots = [table[row_of, flat // size] * size + flat % size for table in tables]
    return HostBatch(
        input_ids=rng.integers(0, model.config.vocab_size, len(flat)).astype(np.int32),
        positions=flat,
        slots=slots[0],
        page_tables=tables[0],
        frame_tables=None if frame is None else tables[1],
        frame_slots=None if frame is None else slots[1],
        seq_lens=np.array([sum(row) for row in rows], np.int32),
        page_counts=np.array([-(-sum(row) // size) for row in rows], np.int32),
        cu_seqlens=np.concatenate(([0], ends)).astype(np.int32),
        logit_indices=(ends - 1)[1:].astype(np.int32),
    )


@pytest.mark.parametrize("windows", [(), (5, 0)], ids=["one pool", "two pools"])
def test_logits_and_kv_are_those_of_the_batch_itself(windows: tuple[int, ...]) -> None:
    model = random_model(replace(tiny_config(), windows=windows))
    config, params = model.config, model.params
    where = {"page_size": LIMITS.page_size, "dtype": model.dtype, "device": model.device}
    buffers = PromptBuffers(PromptKind(tokens=40, rows=5), prompt_tables(config, LIMITS, model.device), config, LIMITS)
    own = {
        name: tensor.data_ptr() for name in ("input_ids", "page_tables") if isinstance(tensor := getattr(buffers.batch, name), torch.Tensor)
    }
    for seed, rows in enumerate([[(13, 0), (7, 30), (1, 9)], [(40, 0)], [(5, 2), (5, 7), (1, 0), (3, 4), (9, 9)]]):
        host = batch_of(model, rows, LIMITS, seed)
        frames = None if host.frame_tables is None else LIMITS.num_frames
        kv = init_kv(config, num_pages=LIMITS.num_pages, num_frames=frames, **where)
        for pool in kv.pools:
            pool.copy_(torch.randn_like(pool))
        other = replace(kv, pools=tuple(pool.clone() for pool in kv.pools))
        want, _ = registry.forward(params, kv, to_device(host, model.device), config)
        buffers.fill(host)
        got, _ = registry.forward(params, other, buffers.batch, config)
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got[: len(want)], want)
        for a, b in zip(other.pools, kv.pools, strict=True):
            torch.testing.assert_close(a[:, :-1], b[:, :-1])  # all but the dummy
    assert own == {name: getattr(buffers.batch, name).data_ptr() for name in own}


def test_the_sizes_of_graphs_fit_the_model_and_the_engine() -> None:
    model = random_model(tiny_config())
    kinds = prompt_kinds(model, replace(LIMITS, max_num_batched_tokens=1024, max_num_seqs=256))
    assert kinds == sorted(kinds) and kinds[-1] == PromptKind(tokens=1024, rows=256) and PromptKind(tokens=192, rows=8) in kinds
    assert {kind.rows for kind in kinds} == {8, 256} and {kind.rows for kind in kinds if kind.tokens < 512} == {8}
    cut = prompt_kinds(model, replace(LIMITS, max_num_batched_tokens=700, max_num_seqs=256))
    assert cut[-1] == PromptKind(tokens=640, rows=256)  # the largest graph also serves many prompts
    assert {kind.rows for kind in prompt_kinds(model, replace(LIMITS, max_num_batched_tokens=300, max_num_seqs=3))} == {3}
    assert prompt_kinds(model, replace(LIMITS, max_num_batched_tokens=100)) == []


def weights_of(model: nv.Model) -> int:
    """The weights of all layers."""
    return sum(weight.numel() for weight in pytree.tree_leaves(model.params.layers) if weight is not None)


def set_bound(monkeypatch: pytest.MonkeyPatch, products: float, slower: float = prompt_graphs.BUSY) -> None:
    """Let a host that is `slower` than a quiet one launch a layer of 16-bit weights while the GPU computes so many products of numbers."""
    monkeypatch.setattr(prompt_graphs, "LAYER_FLOPS", 2 * products / slower)


def test_quantised_weights_are_counted_as_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as the elements that hold their codes: prompts multiply with them. They need more launches, so that larger steps are captured."""
    model = random_model(tiny_config())
    set_bound(monkeypatch, 700 * weights_of(model) / model.config.num_layers)
    limits = replace(LIMITS, max_num_batched_tokens=8192)
    assert prompt_kinds(model, limits)[-1].tokens == 640
    for kind in KINDS:
        rounded = replace(model, params=rounded_params(model.params, Rounding(kind=kind)))
        assert prompt_kinds(rounded, limits)[-1].tokens == 1536  # at most 1,750


def test_experts_count_as_far_as_a_token_is_routed_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And several times, because their products are slower. For a busy host no more are captured."""
    model = random_model(tiny_config("Qwen3MoeForCausalLM"))
    moe = model.config.moe
    assert moe is not None and moe.top_k < moe.num_experts
    monkeypatch.setattr(prompt_graphs, "EXPERTS", 5)
    stacked = [w.experts for w in model.params.layers if w.experts is not None]
    experts = sum(each.gate_up.numel() + each.down.numel() for each in stacked)
    multiplied = weights_of(model) - experts + prompt_graphs.EXPERTS * experts * moe.top_k // moe.num_experts
    for tokens, most in ((639, 512), (641, 640)):
        set_bound(monkeypatch, tokens * multiplied / model.config.num_layers, 1)
        assert prompt_kinds(model, replace(LIMITS, max_num_batched_tokens=8192))[-1].tokens == most


def test_ranks_capture_more_of_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their launches take longer, and their share of the weights is what they multiply. For a busy host they capture no more."""
    whole = random_model(tiny_config())
    limits = replace(LIMITS, max_num_batched_tokens=8192)
    set_bound(monkeypatch, 4000 * weights_of(whole) / whole.config.num_layers)
    assert prompt_kinds(whole, limits)[-1].tokens == 3584
    assert {kind.tokens for kind in prompt_kinds(whole, limits)} >= {896, 1152, 1408, 1792}

    def of_a_rank(mesh: Mesh) -> tuple[int, int]:
        model = random_model(tiny_config(), mesh=mesh)
        set_bound(monkeypatch, 3100 * weights_of(model) / model.config.num_layers, 1)
        assert not {kind.tokens for kind in prompt_kinds(model, limits)} & {896, 1152, 1408, 1792}
        return prompt_kinds(model, limits)[-1].tokens, prompt_kinds(model, replace(limits, max_num_batched_tokens=5000))[-1].tokens

    assert run_ranks(of_a_rank, 2) == [(6144, 4096)] * 2
    set_bound(monkeypatch, 7000 * weights_of(whole) / whole.config.num_layers)
    assert run_ranks(lambda mesh: prompt_kinds(random_model(tiny_config(), mesh=mesh), limits)[-1].tokens, 1) == [4096]


@pytest.mark.unhooked  # CUDA graphs have a stand-in
def test_ranks_on_unlike_gpus_capture_the_same_prompts_and_replay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one rank would run the sums of a graph while another runs those of launches."""
    limits = replace(LIMITS, max_num_batched_tokens=8192)

    def flops(model: nv.Model) -> float:
        assert model.config.mesh is not None
        return 2e3 * weights_of(model) / (1 + model.config.mesh.rank)

    def bound(mesh: Mesh) -> float:
        model = random_model(tiny_config(), mesh=mesh)
        return PromptGraphs(model, limits, [], registry.forward, warm=model.params)._flops_while_launching

    monkeypatch.setattr(prompt_graphs, "_flops_while_launching", flops)
    first, second = run_ranks(lambda mesh: prompt_kinds(random_model(tiny_config(), mesh=mesh), limits), 2)
    assert first == second and first[-1].tokens == 384
    with without_cuda():
        lower, same = run_ranks(bound, 2)
    assert lower == same


@pytest.mark.unhooked  # CUDA graphs have a stand-in
def test_prompts_far_behind_others_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's attention is faster than that of the graphs, which shows once attention is most of the work."""
    model, limits = random_model(tiny_config()), replace(LIMITS, num_pages=600, max_model_len=1024, max_num_seqs=4)
    config = model.config
    pair = 4 * config.num_heads * config.head_dim  # FLOPs of a token that attends to another
    kv = init_kv(config, num_pages=limits.num_pages, page_size=limits.page_size, dtype=model.dtype, device=model.device)
    with without_cuda(), torch.no_grad():
        monkeypatch.setattr(prompt_graphs, "LAYER_FLOPS", 2.0 * pair * 2000)  # of a quiet host
        kind = PromptKind(tokens=16, rows=2)
        graphs = PromptGraphs(model, limits, [kind], registry.forward, warm=model.params)
        graphs.capture(kv, kind)
        for rows, captured in (
            ([(16, 0)], True),
            ([(8, 240)], True),
            ([(8, 250)], False),  # 8 x 254 pairs
            ([(1, 1000), (9, 100)], True),
            ([(2, 800), (9, 100)], False),
        ):
            ran = graphs.run(model.params, kv, batch_of(model, rows, limits, 0))
            assert (ran is not None) == captured, rows


@pytest.mark.parametrize("max_model_len", [1, 2, 3, 4, 5, 64])
def test_what_capture_runs_fits_into_its_buffers(max_model_len: int) -> None:
    model, limits = random_model(tiny_config()), replace(LIMITS, max_model_len=max_model_len, max_num_batched_tokens=256)
    kinds = prompt_kinds(model, limits)
    assert bool(kinds) == (max_model_len > 1)
    for kind in kinds:
        buffers = PromptBuffers(kind, prompt_tables(model.config, limits, model.device), model.config, limits)
        (host,) = sample_prompts(replace(limits, max_num_batched_tokens=kind.tokens), [(1, kind.tokens)], model.config)
        buffers.fill(host)
        assert len(host.input_ids) == min(kind.tokens, max_model_len)
