"""`nanovllm bench`: the workloads that engines are compared by, on random weights at real shapes or on a model of yours."""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from . import collector
from .compile import Drawn, Executor
from .config import ModelConfig, RopeConfig
from .decode import DecodeCarry
from .engine import step, submit
from .errors import InvalidRequestError
from .init import init_state
from .model import Model, load_model, resolve_device, resolve_dtype
from .models import REGISTRY
from .sampling_params import SamplingParams
from .state.engine_state import EngineState
from .state.kv import KVState
from .weights import random_fingerprint, random_params

GPU_MODEL = "qwen3-0.6b"  # unless told otherwise
WORKLOADS = ("b1", "b8", "b64", "offline", "prefix", "host")
Generate = Callable[[list[list[int]], list[int], float], list[list[int]]]

SHAPES: dict[str, ModelConfig] = {
    "qwen3-0.6b": ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16,
        num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e6), tie_word_embeddings=True,
        max_position_embeddings=40960, dtype="bfloat16",
    ),
    "qwen3-8b": ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32,
        num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e6), tie_word_embeddings=False,
        max_position_embeddings=40960, dtype="bfloat16",
    ),
    "tinyllama-1.1b": ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_layers=22, num_heads=32,
        num_kv_heads=4, head_dim=64, rms_norm_eps=1e-5, rope=RopeConfig(theta=1e4), tie_word_embeddings=False,
        max_position_embeddings=2048, dtype="bfloat16",
    ),
}  # fmt: skip


def random_weights(name: str, *, device: torch.device | str | None = None, dtype: torch.dtype | str | None = None, seed: int = 0) -> Model:
    """A model of one of `SHAPES` with random weights and no tokenizer."""
    config = SHAPES[name]
    target = resolve_device(device)
    chosen = resolve_dtype(dtype, config, target)
    return Model(
        name=f"{name} (random weights)",
        config=config,
        params=random_params(config, seed=seed, device=target, dtype=chosen),
        tokenizer=None,
        spec=REGISTRY[config.architecture],
        generation_config={},
        fingerprint=random_fingerprint(config, seed),
        device=target,
        dtype=chosen,
    )


class Engine:
    """An engine under measurement: the state of the last call, and whole batches by `submit` and `step`."""

    def __init__(self, model: Model, **limits: Any):
        self.model, self.state = model, init_state(model, **limits)

    def generate(self, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[list[int]]:
        """Token ids in and out, in order; the end-of-sequence token is ignored."""
        order = []
        for prompt, count in zip(prompts, max_tokens, strict=True):
            params = SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True)
            self.state, rid = submit(self.model, self.state, prompt, params)
            order.append(rid)
        done: dict[int, list[int]] = {}
        while len(done) < len(order):
            self.state, outs = step(self.model, self.state)
            done.update({out.request_id: out.output.token_ids for out in outs if out.output is not None})
        return [done[rid] for rid in order]


def random_tokens(random: Random, count: int, vocab_size: int) -> list[int]:
    """Token ids as the peers' benchmark draws them: 300 ... 10,000, or the whole of a smaller vocabulary."""
    low, high = (300, 10000) if vocab_size > 10000 else (0, vocab_size - 1)
    return [random.randint(low, high) for _ in range(count)]


def run_workloads(generate: Generate, which: Sequence[str], vocab_size: int, repeats: int = 3) -> dict[str, float]:
    """Tokens a second and milliseconds of the chosen workloads: medians of `repeats`, but for `offline`, which runs once."""
    random = Random(1)
    out: dict[str, float] = {}

    def prompt(count: int) -> list[int]:
        return random_tokens(random, count, vocab_size)

    def timed(prompts: list[list[int]], counts: list[int], temperature: float = 0.0) -> float:
        start = time.perf_counter()
        replies = generate(prompts, counts, temperature)
        seconds = time.perf_counter() - start
        if [len(r) for r in replies] != counts:
            raise AssertionError("an engine returned another number of tokens than it was asked for")
        return seconds

    timed([prompt(64)], [16])
    for size in (1, 8, 64):
        if f"b{size}" not in which:
            continue
        count = 512 if size == 1 else 256
        timed([prompt(128) for _ in range(size)], [count] * size)
        rates, firsts = [], []
        for _ in range(repeats):
            first = timed([prompt(128) for _ in range(size)], [1] * size)
            whole = timed([prompt(128) for _ in range(size)], [count] * size)
            rates.append(size * (count - 1) / (whole - first))
            firsts.append(first)
        out[f"b{size}_decode_tok_s"] = round(float(np.median(rates)), 1)
        out[f"b{size}_ttft_ms"] = round(1e3 * float(np.median(firsts)), 2)
    if "offline" in which:
        draw = Random(0)
        prompts = [random_tokens(draw, draw.randint(100, 1024), vocab_size) for _ in range(256)]
        counts = [draw.randint(100, 1024) for _ in range(256)]
        out["offline_tok_s"] = round(sum(counts) / timed(prompts, counts, 0.6), 1)
    if "prefix" in which:
        cold, warm, rates = [], [], []
        for again in range(repeats):
            shared = prompt(16384)
            cold.append(timed([shared + prompt(16)], [1]))
            warm.append(timed([shared + prompt(16)], [1]))
            if not again:
                timed([shared + prompt(32) for _ in range(32)], [8] * 32)
            rates.append(32 * 256 / timed([shared + prompt(32) for _ in range(32)], [256] * 32))
        out["ttft_16k_cold_ms"] = round(1e3 * float(np.median(cold)), 2)
        out["ttft_16k_warm_ms"] = round(1e3 * float(np.median(warm)), 2)
        out["shared16k_x32_tok_s"] = round(float(np.median(rates)), 1)
    return out


class _Stopwatch:
    """An executor that adds up the time spent in the model's steps, from launch to tokens on the host."""

    def __init__(self, inner: Executor):
        self.inner, self.seconds = inner, 0.0

    def prefill(self, model: Model, kv: KVState, rows: Any, *, draw: bool = True) -> tuple[Drawn | None, KVState]:
        return self.inner.prefill(model, kv, rows, draw=draw)

    def load(self, model: Model, kv: KVState, rows: Any) -> DecodeCarry:
        return self.inner.load(model, kv, rows)

    def refresh(self, model: Model, carry: DecodeCarry, rows: Any) -> DecodeCarry:
        return self.inner.refresh(model, carry, rows)

    def narrow(self, model: Model, carry: DecodeCarry, keep: Any, rows: Any) -> DecodeCarry:
        return self.inner.narrow(model, carry, keep, rows)

    def decode(self, model: Model, carry: DecodeCarry) -> tuple[DecodeCarry, Drawn]:
        start = time.perf_counter()
        result = self.inner.decode(model, carry)
        self.seconds += time.perf_counter() - start
        return result

    def thrown_away(self) -> int:
        return self.inner.thrown_away()

    def begin(self, model: Model, kv: KVState, rows: Any, ticket: int) -> DecodeCarry:
        return self.inner.begin(model, kv, rows, ticket)

    def end(self, ticket: int) -> None:
        self.inner.end(ticket)


def host_time(model: Model, state: EngineState, size: int, steps: int = 200) -> tuple[EngineState, dict[str, float]]:
    """Microseconds a decode step at batch `size`: the whole step, and what of it is outside the model (scheduling, tables, settling)."""
    watch = _Stopwatch(state.runtime.executor)
    random, limit = Random(2), SamplingParams(temperature=0.0, max_tokens=steps + 8, ignore_eos=True)
    runtime = state.runtime
    runtime.executor = watch
    try:
        for _ in range(size):
            state, _ = submit(model, state, random_tokens(random, 32, model.config.vocab_size), limit)
        while state.waiting or any(s.todo > 1 for s in state.running):
            state, _ = step(model, state)
        state, _ = step(model, state)
        watch.seconds, start, count = 0.0, time.perf_counter(), 0
        while len(state.running) == size:
            state, _ = step(model, state)
            count += 1
        whole = time.perf_counter() - start
    finally:
        runtime.executor = watch.inner
    return state, {
        f"b{size}_step_us": round(1e6 * whole / count, 1),
        f"b{size}_host_us": round(1e6 * (whole - watch.seconds) / count, 1),
    }


def versions() -> dict[str, str]:
    """What the figures depend on besides the code."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "flashinfer", "transformers"):
        module = sys.modules.get(name)
        if module is not None:
            found[name] = str(getattr(module, "__version__", "?"))
    return found


def commit() -> str:
    """The commit of the source tree that runs, `+` behind it where files differ from it; `unknown` outside a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def record(model: Model, figures: dict[str, float], arguments: Sequence[str]) -> dict[str, Any]:
    """One run's object: where, what, with which command, and the figures."""
    cuda = model.device.type == "cuda"
    return {
        "engine": "nanovllm",
        "gpu": torch.cuda.get_device_name(model.device) if cuda else None,
        "cpu": None if cuda else f"{platform.machine()}, {torch.get_num_threads()} threads",
        "commit": commit(),
        "versions": versions(),
        "command": "nanovllm bench " + " ".join(arguments),
        "model": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        **figures,
    }


def _positive(text: str) -> int:
    """An argument that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nanovllm bench`."""
    where = f"tiny, a folder, a repository, or random weights of one of {', '.join(SHAPES)} (default: {GPU_MODEL} on a GPU, tiny on a CPU)"
    parser.add_argument("--model", default=None, help=where)
    parser.add_argument("--which", default=None, help=f"comma-separated: {', '.join(WORKLOADS)} (default: all; on a CPU b1,b8,host)")
    parser.add_argument("--device", default=None, help="cuda or cpu (default: a GPU where there is one)")
    parser.add_argument("--dtype", default=None, help="float32, bfloat16, ... (default: bfloat16 on a GPU, float32 on a CPU)")
    repeats = "runs of each workload but offline, of which the median counts (default: %(default)s)"
    parser.add_argument("--repeats", type=_positive, default=3, help=repeats)
    parser.add_argument("--output", type=Path, default=None, help="also write the result to this JSON file")
    parser.add_argument("--commit", default=None, help="the commit to record where the source tree is not a checkout")


def main(options: argparse.Namespace, arguments: Sequence[str] = ()) -> int:
    """Run the chosen workloads, print one JSON object, and write it where asked. Returns 0."""
    device = resolve_device(options.device)
    cuda = device.type == "cuda"
    which = options.which.split(",") if options.which else list(WORKLOADS if cuda else ("b1", "b8", "host"))
    if unknown := set(which) - set(WORKLOADS):
        raise InvalidRequestError(f"unknown workload {', '.join(map(repr, sorted(unknown)))}; there are {', '.join(WORKLOADS)}")
    name = options.model or (GPU_MODEL if cuda else "tiny")
    model = random_weights(name, device=device, dtype=options.dtype) if name in SHAPES else load_model(name, device, options.dtype)
    start = time.perf_counter()
    engine = Engine(model, max_model_len=min(model.config.max_position_embeddings, 20480))
    figures = {"init_s": round(time.perf_counter() - start, 2)}
    collector.freeze()
    figures |= run_workloads(engine.generate, which, model.config.vocab_size, options.repeats)
    if "host" in which:
        for size in (1, 64):
            engine.state, host = host_time(model, engine.state, size)
            figures |= host
    result = record(model, figures, arguments)
    if options.commit:
        result["commit"] = options.commit
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0
