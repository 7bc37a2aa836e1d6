"""An engine that starts while FlashInfer's kernels are built, and kernels that are compiled ahead."""

import os
import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import Any

import pytest

import nanovllm as nv
from nanovllm.executor import flashinfer_loading
from nanovllm.executor.graph_executor import GraphExecutor
from tests.gpu.small import random_prompts, require_same, small_model

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LIMITS: dict[str, Any] = {"num_pages": 800, "page_size": 16, "max_num_seqs": 12, "max_num_batched_tokens": 8192, "max_model_len": 512}
MANY = 10 * (460,) + (300, 40)  # more tokens than captured prompts hold


def test_replies_while_kernels_are_built(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    model, may_end = small_model(), Event()
    prompts = random_prompts(model, *MANY)
    eager = nv.init_state(model, compile=False, **LIMITS)
    eager, want = nv.generate_many(model, eager, prompts, GREEDY)
    monkeypatch.setattr(flashinfer_loading, "missing", lambda wanted: wanted)
    monkeypatch.setattr(flashinfer_loading, "build_apart", lambda wanted: may_end.wait(300))
    state = nv.init_state(model, **LIMITS)
    executor = state.runtime.executor
    assert isinstance(executor, GraphExecutor)
    assert "being built" in capfd.readouterr().err
    for ready in (False, True):
        assert executor._attention.ready() == ready
        state, got = nv.generate_many(model, state, prompts, GREEDY)
        for prompt, a, b in zip(prompts, got, want, strict=True):
            require_same(model, prompt, a.token_ids, b.token_ids, LIMITS)
        state, carry = nv.begin(model, state, [[a.chunk] for a in got[:2]], GREEDY, room=8)
        for _ in range(4):
            carry, _ = nv.decode_step(model.params, carry, model.config)
        state, more = nv.commit(model, state, carry)
        nv.check(state)
        for reply in [*got, *more]:
            state = nv.release(state, reply.chunk)
        may_end.set()
        loading = executor._attention._loading
        if loading is not None:
            loading.backend.result(120)


def test_replies_without_kernels_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("Ninja build failed")

    model = small_model()
    prompts = random_prompts(model, *MANY)
    eager = nv.init_state(model, compile=False, **LIMITS)
    eager, want = nv.generate_many(model, eager, prompts, GREEDY)
    monkeypatch.setattr(flashinfer_loading, "load", broken)
    with pytest.warns(UserWarning, match="slower"):
        state = nv.init_state(model, **LIMITS)
    state, got = nv.generate_many(model, state, prompts, GREEDY)
    for prompt, a, b in zip(prompts, got, want, strict=True):
        require_same(model, prompt, a.token_ids, b.token_ids, LIMITS)


PROGRAM = """
import sys, torch, nanovllm as nv
from triton import knobs
from tests.gpu.small import small_model
compiled, built = [], []
model = small_model()
from nanovllm.ops import compile_ahead
original = compile_ahead.FirstStart.rehearse
def rehearse(self, call):
    before = len(compiled)
    original(self, call)
    print("ahead", len(compiled) - before)
compile_ahead.FirstStart.rehearse = rehearse
knobs.runtime.jit_post_compile_hook = lambda **given: compiled.append(given["fn"].name)
knobs.compilation.listener = lambda *, src, cache_hit, **given: cache_hit or built.append(src.name)
state = nv.init_state(model, num_pages=64, page_size=16, max_num_seqs=20, max_num_batched_tokens=512, max_model_len=256)
print("all", len(compiled))
print("built", *built)
nv.generate(model, state, list(range(20)), nv.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
"""


def test_kernels_are_compiled_ahead_once(tmp_path: Path) -> None:
    """Nearly all kernels of a first start are compiled by rehearsals. The second start rehearses nothing, and compiles nothing anew."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    runs = []
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300, check=True)
        lines = [line.split() for line in run.stdout.splitlines()]
        ahead, every = (sum(int(n) for name, *rest in lines if name == wanted for n in rest) for wanted in ("ahead", "all"))
        runs.append((ahead, every, [kernel for name, *rest in lines if name == "built" for kernel in rest]))
    (ahead, every, built), (again, loaded, anew) = runs
    assert ahead >= 0.8 * every > 0 and built, runs
    assert again == 0 and loaded > 0 and anew == [], runs
