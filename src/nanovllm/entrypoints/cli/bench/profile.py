"""`nanovllm profile`: which kernels a decode step, or a prompt, is made of, and what the host adds."""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from nanovllm.engine.step import step
from nanovllm.entrypoints.arguments import TUNING, positive, require_folder, tuning
from nanovllm.entrypoints.cli.bench.command import add_model_arguments, find_model
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.kernel_table import Kernel, as_json, kernels, table
from nanovllm.entrypoints.cli.bench.stopwatch import Engine, room_for, start_decoding, time_steps
from nanovllm.entrypoints.cli.bench.workloads import random_tokens
from nanovllm.entrypoints.display.terminal import note
from nanovllm.entrypoints.process import freeze
from nanovllm.errors import InvalidRequestError
from nanovllm.models.model import Model

AHEAD = 64  # tokens that a sequence takes pages for in advance
BUDGET = 8192  # tokens of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Microseconds of a step, measured without the profiler: as a whole, and of it outside the model's calls; and what it is made of."""

    step_us: float
    host_us: float
    kernels: tuple[Kernel, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nanovllm profile`."""
    add_model_arguments(parser)
    parser.add_argument("--tuning", type=tuning, default=None, metavar="FILE", help=TUNING)
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="rows that decode (default %(default)s)")
    parser.add_argument("--context", type=positive, default=256, metavar="N", help="tokens of each before the steps (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=32, metavar="N", help="steps that are profiled (default %(default)s)")
    prompts = "profile prompts of N tokens in place of decode steps; one of them, or --batch together, counts as a step"
    parser.add_argument("--prefill", type=positive, metavar="N", help=prompts)
    parser.add_argument("--top", type=positive, default=20, metavar="N", help="rows of the table (default %(default)s)")
    parser.add_argument("--trace", type=Path, metavar="FILE.json", help="write a trace for chrome://tracing or ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    parser.add_argument("--eager", action="store_true", help="plain function calls, on a GPU too")


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    """Profile, print the table or one JSON object, write the trace where asked. Returns 0."""
    require_folder(options.trace)
    model, _ = find_model(options)
    length = options.prefill or options.context
    longest = length + (1 if options.prefill else room_for(options.batch, length, 2 * options.steps, BUDGET))
    if longest > model.config.max_position_embeddings:
        option, most = "--prefill" if options.prefill else "--context", model.config.max_position_embeddings
        raise InvalidRequestError(f"{option} {length}: with the steps {longest} tokens a row, more than the model's {most} positions")
    pages = options.batch * (-(-(longest + AHEAD) // 16) + 1)
    limits = {"num_pages": pages, "max_model_len": longest, "max_num_seqs": options.batch, "max_num_batched_tokens": BUDGET}
    engine = Engine(model, **limits, compile=False if options.eager else None, tuning=options.tuning)
    freeze()
    run = profile_prompts if options.prefill else profile_decode
    found = run(engine, options.batch, length, options.steps, options.trace)
    cuda = model.device.type == "cuda"
    if not found.kernels:
        note("the profiler saw no kernels: CUPTI may be missing, or in use by another profiler")
    what = f"{options.batch} x {length} tokens of prompt" if options.prefill else f"{options.batch} x {length} tokens of context"
    figures: dict[str, Any] = {"what": what, "step_us": found.step_us, "host_us": found.host_us, "kernels": as_json(found.kernels)}
    result = record(model, figures, " ".join(("nanovllm profile", *arguments)))
    print(json.dumps(result, indent=2) if options.json else text(result, found, options.top, cuda=cuda))
    return 0


def text(result: dict[str, Any], found: Profile, top: int, *, cuda: bool) -> str:
    """The table under what was profiled and what a step took."""
    busy = sum(kernel.us for kernel in found.kernels)
    where = f"{result['model']}, {result['dtype']}, {result['gpu'] or result['cpu']}, commit {result['commit']}: {result['what']}"
    took = f"{found.step_us:,.0f} us a step, {found.host_us:,.0f} us of host work outside the model's calls"
    took += " (on a GPU, while the next step runs)" if cuda else ""
    made = f"{'kernels' if cuda else 'ops'}, under the profiler: {busy:,.0f} us a step"
    return "\n".join([where, took, made, "", *table(found.kernels, top, cuda=cuda)])


def profile_decode(engine: Engine, batch: int, context: int, steps: int, trace: Path | None = None) -> Profile:
    """Decode steps of `batch` rows behind `context` tokens each: timed first, then under the profiler."""
    model, random = engine.model, Random(5)
    prompts = [random_tokens(random, context, model.config.vocab_size) for _ in range(batch)]
    room = room_for(batch, context, 2 * steps, engine.state.config.max_num_batched_tokens)
    engine.state, _ = start_decoding(model, engine.state, prompts, room)
    engine.state, times = time_steps(model, engine.state, steps)

    def more() -> None:
        for _ in range(steps):
            engine.state, _ = step(model, engine.state)

    found = _profiled(model, more, steps, trace)
    return Profile(step_us=_us(times.whole), host_us=_us(times.host), kernels=found)


def profile_prompts(engine: Engine, batch: int, length: int, steps: int, trace: Path | None = None) -> Profile:
    """Prompts of `length` tokens up to their first token, `batch` together: timed first, then under the profiler. No two begin alike."""
    model, random = engine.model, Random(6)

    def prompts() -> list[list[int]]:
        return [random_tokens(random, length, model.config.vocab_size) for _ in range(batch)]

    def run(count: int) -> list[tuple[float, float]]:
        times = []
        for _ in range(count):
            some, before, start = prompts(), engine.spent.model_seconds, time.perf_counter()
            engine.generate(some, [1] * batch, 0.0)
            times.append((time.perf_counter() - start, engine.spent.model_seconds - before))
        return times

    run(2)
    times = np.array(run(steps))
    found = _profiled(model, lambda: run(steps), steps, trace)
    return Profile(step_us=_us(times[:, 0]), host_us=_us(times[:, 0] - times[:, 1]), kernels=found)


def _profiled(model: Model, run: Callable[[], object], steps: int, trace: Path | None) -> tuple[Kernel, ...]:
    """The kernels of a run of so many steps. Those of a CUDA graph are seen by CUPTI as they run, whoever launched them."""
    cuda = model.device.type == "cuda"
    if not cuda:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it writes marks of its own to stderr; on a GPU it may have errors to tell
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as seen:
        start = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize(model.device)
        seconds = time.perf_counter() - start
    if trace is not None:
        seen.export_chrome_trace(str(trace))
    return kernels(seen.events() or (), steps, cuda=cuda, seconds=seconds)


def _us(seconds: np.ndarray) -> float:
    return round(1e6 * float(np.median(seconds)), 1)
