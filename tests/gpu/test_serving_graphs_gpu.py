"""What an engine captures: everything before the first request, whatever its clients ask for; and nothing waits for the device."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

import nanovllm as nv
from nanovllm.executor.attention_plans import Attention
from nanovllm.executor.batch import HostBatch
from nanovllm.executor.captured_step import CapturedStep, Way
from nanovllm.executor.cuda_graphs import StepGraphs
from nanovllm.executor.graph_executor import GraphExecutor
from nanovllm.sampling.row_options import KINDS
from nanovllm.testing.models import random_model, tiny_config
from tests.gpu.small import SMALL, random_prompts, require_same

pytestmark = pytest.mark.gpu

LIMITS: dict[str, Any] = {"num_pages": 4000, "page_size": 16, "max_num_seqs": 12, "max_num_batched_tokens": 1024, "max_model_len": 4096}
PLAIN = nv.SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
CLIENTS: dict[str, nv.SamplingParams] = {
    "greedy": PLAIN,
    "random": replace(PLAIN, temperature=0.9),
    "filtered": replace(PLAIN, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01),
    "nucleus": replace(PLAIN, temperature=1.0, top_p=0.9),
    "penalties": replace(PLAIN, temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
    "greedy penalties": replace(PLAIN, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
    "bias": replace(PLAIN, logit_bias={5: 3.0, 9: -100.0}),
    "logprobs": replace(PLAIN, logprobs=5),
    "prefix": PLAIN,
    "long": replace(PLAIN, max_tokens=60),
}


@pytest.fixture(scope="module")
def model() -> nv.Model:
    """Of so many KV heads that few rows of these lengths are long."""
    config = tiny_config("Qwen3ForCausalLM", **{**SMALL, "num_heads": 8, "num_kv_heads": 8}, max_position_embeddings=4096)
    return random_model(config, 0, "bfloat16", device="cuda", std=0.05)


@contextmanager
def captures() -> Iterator[list[int]]:
    """Every graph that is recorded meanwhile."""
    seen: list[int] = []
    begin = torch.cuda.CUDAGraph.capture_begin

    def counted(self: torch.cuda.CUDAGraph, *args: Any, **options: Any) -> None:
        seen.append(1)
        begin(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "capture_begin", counted)
        yield seen


def wait_for_kernels(model: nv.Model) -> None:
    """Wait until this machine has FlashInfer's kernels. Steps over kernels that are built after the start are captured when needed."""
    executor, end = nv.init_state(model, **LIMITS).runtime.executor, time.monotonic() + 300
    assert isinstance(executor, GraphExecutor)
    while not executor._attention.ready():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_nothing_is_captured_while_serving(model: nv.Model) -> None:
    wait_for_kernels(model)
    random, steps = Random(0), 0
    with captures() as made:
        state = nv.init_state(model, **LIMITS)
        assert made
    assert isinstance(state.runtime.executor, GraphExecutor)
    shared, kinds, decode = random_prompts(model, 1500)[0], set[tuple[str, str]](), state.runtime.executor._decode
    load = StepGraphs.load

    def noted(self: StepGraphs, *args: Any, **options: Any) -> CapturedStep:
        step = load(self, *args, **options)
        if self is decode:  # rows of one prompt share their pages, so the others always use "shared"
            kinds.add((step.kind.way, step.kind.sampling))
        return step

    with captures() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGraphs, "load", noted)
        live: list[int] = []
        while steps < 6000:
            phase = (steps // 200) % 4  # in turn: all kinds, the shared prefix, few long rows, single clients
            most = (12, 12, 8, 1)[phase]
            while len(live) < most and random.random() < 0.7:
                name = random.choice(sorted(CLIENTS)) if phase in (0, 3) else ("prefix", "long")[phase - 1]
                own = [random.randrange(model.config.vocab_size) for _ in range(random.randint(1, 300))]
                prompt = shared + own[:20] if name == "prefix" else own * 12 if name == "long" else own
                params = replace(CLIENTS[name], seed=steps) if phase != 1 else replace(random.choice([*CLIENTS.values()]), seed=steps)
                state, rid = nv.submit(model, state, prompt[:3900], params)
                live.append(rid)
            if live and random.random() < 0.02:
                state = nv.cancel(state, live.pop(random.randrange(len(live))))
            state, outs = nv.step(model, state)
            steps += 1
            ended = {out.request_id for out in outs if out.output is not None}
            live = [rid for rid in live if rid not in ended]
    assert not made, f"{len(made)} graphs were captured in {steps} steps"
    assert {way for way, _ in kinds} == {"fused", "planned", "shared"} and {each for _, each in kinds} == set(KINDS)
    nv.check(state)


def test_long_rows_without_flashinfer(model: nv.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are being built, or cannot be: few long rows then attend by our own kernel in many splits."""
    monkeypatch.setattr(Attention, "ready", lambda self: False)
    prompts, ways, follow = random_prompts(model, *[3000] * 7, 20), set[str](), StepGraphs._follow

    def noted(self: StepGraphs, host: HostBatch) -> Way:
        ways.add(way := follow(self, host))
        return way

    monkeypatch.setattr(StepGraphs, "_follow", noted)
    state, made = nv.generate_many(model, nv.init_state(model, **LIMITS), prompts, PLAIN)
    assert "long" in ways and "planned" not in ways
    _, want = nv.generate_many(model, nv.init_state(model, compile=False, **LIMITS), prompts, PLAIN)
    for prompt, reply, one in zip(prompts, made, want, strict=True):
        require_same(model, prompt, reply.token_ids, one.token_ids, LIMITS)
    nv.check(state)


def replies(model: nv.Model, compile: bool | None, together: bool) -> tuple[list[list[int]], int]:
    """The replies of one client of each kind, and the tokens that ran ahead and were discarded."""
    state = nv.init_state(model, compile=compile, **LIMITS)
    prompts = random_prompts(model, *range(5, 5 + 40 * len(CLIENTS), 40))
    params = [replace(p, seed=11, max_tokens=10 + 3 * i) for i, p in enumerate(CLIENTS.values())]
    if together:
        state, made = nv.generate_many(model, state, prompts, params)
    else:
        made = []
        for prompt, each in zip(prompts, params, strict=True):
            state, reply = nv.generate(model, state, prompt, each)
            made.append(reply)
    nv.check(state)
    return [reply.token_ids for reply in made], state.stats.discarded_tokens


def test_all_kinds_of_sampling_equal_eager_steps(model: nv.Model) -> None:
    want, _ = replies(model, False, True)
    prompts = random_prompts(model, *range(5, 5 + 40 * len(CLIENTS), 40))
    for together in (False, True):
        got, _ = replies(model, None, together)
        alike = 0
        for (name, params), prompt, a, b in zip(CLIENTS.items(), prompts, got, want, strict=True):
            alike += a[:8] == b[:8]
            if name in ("bias", "greedy penalties"):
                assert a[:8] == b[:8], name  # later two tokens may be equally probable but for bf16 roundings
            elif params.temperature == 0:
                require_same(model, prompt, a, b, LIMITS)
        assert alike >= len(CLIENTS) - 3  # a draw may fall between two bf16 roundings


def test_penalised_rows_run_ahead_and_count_once(model: nv.Model) -> None:
    """Pages, arrivals and ends discard steps that ran ahead; the counts of the tables are those of the tokens."""
    state = nv.init_state(model, **LIMITS)
    executor, ahead = state.runtime.executor, 0
    assert isinstance(executor, GraphExecutor)
    params = replace(CLIENTS["penalties"], max_tokens=60)
    ids = []
    for turn, prompt in enumerate(random_prompts(model, 3, 20, 40, 9, 33)):
        state, rid = nv.submit(model, state, prompt, replace(params, seed=turn))
        ids.append(rid)
        for _ in range(7):
            state, _ = nv.step(model, state)
            ahead += executor._ahead.launched
    assert ahead > 10
    entries = executor._rows._slots._entries
    marks = executor._rows.tables.marks.cpu()
    for sequence in state.running:
        (slot,) = [slot for slot, entry in entries.items() if entry.of() is sequence.request]
        counted = int(executor._rows.tables.counted[slot])
        tokens, start = sequence.tokens.array().copy(), sequence.request.num_prompt
        assert sequence.tokens.length - 1 <= counted <= sequence.tokens.length
        want = torch.bincount(torch.from_numpy(tokens[start:counted]).long(), minlength=marks.shape[1])
        assert torch.equal(marks[slot] >> 1, want.int())
        assert (marks[slot] & 1).nonzero()[:, 0].tolist() == sorted({*tokens[:start].tolist()})


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", ["greedy", "filtered", "penalties", "bias", "logprobs"])
def test_new_rows_wait_for_nothing(model: nv.Model, name: str) -> None:
    state = nv.init_state(model, **LIMITS)
    executor = state.runtime.executor
    assert isinstance(executor, GraphExecutor)
    load, extend, rows, loads, shorts = executor.load, executor._extend.load, executor._rows.rows, [], []

    def watched(call: Any, loads: list[int] = loads) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                loads.append(1)
                return call(*args, **options)
            finally:
                torch.cuda.set_sync_debug_mode(before)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "load", watched(load))
        patch.setattr(executor._extend, "load", watched(extend, shorts))
        patch.setattr(executor._rows, "rows", watched(rows))
        for turn, prompt in enumerate(random_prompts(model, 3, 20, 200, 9)):
            state, _ = nv.submit(model, state, prompt, replace(CLIENTS[name], seed=turn))
            for _ in range(3):
                state, _ = nv.step(model, state)
    assert len(loads) >= 4 and shorts
