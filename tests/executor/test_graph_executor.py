"""The executor of a GPU on a CPU, with calls in the place of graphs: whatever clients ask for, replies are those of plain steps."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

import nanovllm as nv
from nanovllm.executor.executor import Runtime
from nanovllm.executor.graph_executor import GraphExecutor
from nanovllm.executor.prompt_buffers import PromptBuffers
from nanovllm.executor.prompt_graphs import PromptGraphs
from nanovllm.testing.models import random_model, tiny_config
from tests.executor.captured_on_cpu import graph_executor_of, without_cuda

pytestmark = pytest.mark.unhooked  # objects of torch.cuda are replaced by others

MODEL = random_model(tiny_config(vocab_size=60))
WINDOWED = random_model(replace(tiny_config(vocab_size=60), windows=(5, 0)))
PLAIN = nv.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
CLIENTS = (
    PLAIN,
    replace(PLAIN, temperature=0.9, max_tokens=7),
    replace(PLAIN, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01),
    replace(PLAIN, temperature=0.8, repetition_penalty=1.2, presence_penalty=0.7, frequency_penalty=0.5, max_tokens=15),
    replace(PLAIN, temperature=1.0, logit_bias={5: 3.0, 9: -100.0}, max_tokens=1),
    replace(PLAIN, temperature=0.6, logprobs=3, max_tokens=9),
)
LIMITS: dict[str, Any] = {"page_size": 4, "max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 32}


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with without_cuda():
        yield


def started(model: nv.Model, num_pages: int, **options: Any) -> tuple[nv.EngineState, GraphExecutor]:
    """A state with an executor of a GPU."""
    state = nv.init_state(model, num_pages=num_pages, **LIMITS)
    executor = graph_executor_of(model, state.config, state.kv, **options)
    return replace(state, runtime=Runtime(state.runtime.lease, executor)), executor


def served(model: nv.Model, state: nv.EngineState, seed: int, steps: int = 120) -> tuple[dict[int, list[int]], nv.EngineState]:
    """The replies to clients of all kinds that come, share prompts, go early, and run out of pages."""
    random, replies, live = Random(seed), dict[int, list[int]](), list[int]()
    shared = [random.randrange(60) for _ in range(12)]
    for step in range(steps):
        while len(live) < 6 and random.random() < 0.5 and step < steps - 60:
            own = [random.randrange(60) for _ in range(random.choice((1, 3, 7, 13, 20)))]
            params = replace(random.choice(CLIENTS), seed=random.randrange(100))
            state, rid = nv.submit(model, state, shared + own if random.random() < 0.3 else own, params)
            live.append(rid)
        if live and random.random() < 0.03:
            state = nv.cancel(state, live.pop(random.randrange(len(live))))
        state, outs = nv.step(model, state)
        for out in outs:
            replies.setdefault(out.request_id, []).extend(out.token_ids)
            if out.output is not None and out.request_id in live:
                live.remove(out.request_id)
    nv.check(state)
    return replies, state


def compared(model: nv.Model, seed: int, num_pages: int, cascade: bool | None = None) -> tuple[nv.EngineState, set[int]]:
    """Serve the same clients by plain steps and by captured ones. The replies must be equal. Returns the sizes of captured prompts too."""
    want, _ = served(model, nv.init_state(model, num_pages=num_pages, **LIMITS), seed)
    state, executor = started(model, num_pages, cascade=cascade)
    assert executor._short is not None and [kind.tokens for kind in executor._short.kinds] == [8, 16, 16]
    ran, run = set[int](), executor._short.run

    def noted(params: Any, kv: Any, host: Any) -> Any:
        logits = run(params, kv, host)
        ran.add(0 if logits is None else len(host.input_ids))
        return logits

    executor._short.run = noted
    got, state = served(model, state, seed)
    assert got == want
    return state, ran


@pytest.mark.parametrize(("seed", "num_pages", "cascade"), [(0, 60, None), (1, 14, None), (2, 14, True), (3, 20, False)])
def test_replies_are_those_of_plain_steps(seed: int, num_pages: int, cascade: bool | None) -> None:
    state, ran = compared(MODEL, seed, num_pages, cascade)
    assert state.stats.discarded_tokens > 0 and (num_pages > 14 or state.stats.preemptions > 0)
    assert 0 in ran and 0 < max(ran) <= 16  # some are too long


def test_prompts_of_two_kv_pools_are_captured() -> None:
    _, ran = compared(WINDOWED, 0, 60)
    assert 0 in ran and max(ran) > 8


def stale_tables(self: PromptBuffers, host: Any) -> None:
    """Leaves the page tables of the batch before."""
    FILL(self, replace(host, page_tables=host.page_tables * 0))


def logits_of_the_last_row(self: PromptGraphs, params: Any, kv: Any, host: Any) -> Any:
    """Gives every row the logits of the last one."""
    logits = RUN(self, params, kv, host)
    return None if logits is None else logits[-1:].expand_as(logits)


def ignores_the_memory(self: PromptGraphs, params: Any, kv: Any, host: Any) -> Any:
    """Runs steps that are too large, without their last tokens."""
    small = len(host.input_ids) <= 16
    return RUN(self, params, kv, host) if small else torch.zeros(len(host.logit_indices), 60)


FILL, RUN = PromptBuffers.fill, PromptGraphs.run


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [(PromptBuffers, "fill", stale_tables), (PromptGraphs, "run", logits_of_the_last_row), (PromptGraphs, "run", ignores_the_memory)],
)
def test_planted_faults_are_found(owner: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, fault)
    found = 0
    for seed in range(3):
        try:
            compared(MODEL, seed, 60)
        except AssertionError:
            found += 1
    assert found
