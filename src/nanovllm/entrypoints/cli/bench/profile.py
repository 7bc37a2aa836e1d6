"""`nanovllm profile`: the kernels of a decode step or of a prompt, their times, and the host's time."""

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
from nanovllm.entrypoints.arguments import TUNING, positive, tuning
from nanovllm.entrypoints.cli.bench.command import add_model_arguments, find_model
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.kernel_table import Kernel, as_json, kernels, table
from nanovllm.entrypoints.cli.bench.report import about
from nanovllm.entrypoints.cli.bench.stopwatch import Engine, room_for, start_decoding, time_steps
from nanovllm.entrypoints.cli.bench.workloads import random_tokens
from nanovllm.entrypoints.display.terminal import note
from nanovllm.entrypoints.outputs import require_output
from nanovllm.entrypoints.process import freeze
from nanovllm.errors import InvalidRequestError
from nanovllm.models.model import Model

DESCRIPTION = """\
Show the time of each kernel (on a CPU: of each op) in a decode step or in a prompt, and the time of the host. The step is timed without the
profiler first.
"""
AHEAD = 64  # tokens that a sequence allocates pages for in advance
BUDGET = 8192  # most tokens of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A profile.

    Attributes:
        step_us: Microseconds per step, measured without the profiler.
        host_us: Microseconds per step outside the model's calls, measured without the profiler.
        kernels: The kernels of a step, the slowest first.
    """

    step_us: float
    host_us: float
    kernels: tuple[Kernel, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nanovllm profile`."""
    add_model_arguments(parser)
    parser.add_argument("--tuning", type=tuning, default=None, metavar="FILE", help=TUNING)
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="rows of the batch (default: %(default)s)")
    context = "tokens of context of each row before the profiled steps (default: %(default)s)"
    parser.add_argument("--context", type=positive, default=256, metavar="N", help=context)
    parser.add_argument("--steps", type=positive, default=32, metavar="N", help="number of profiled steps (default: %(default)s)")
    prompts = "profile prompts of N tokens in place of decode steps; a step is one batch of --batch prompts"
    parser.add_argument("--prefill", type=positive, metavar="N", help=prompts)
    parser.add_argument("--top", type=positive, default=20, metavar="N", help="rows of the table (default: %(default)s)")
    parser.add_argument("--trace", type=Path, metavar="FILE.json", help="write a trace for chrome://tracing or ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    parser.add_argument("--eager", action="store_true", help="run without CUDA graphs and compiled layers")


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    """Profile, print the table or one JSON object, and write the trace if asked for. Returns 0."""
    require_output(options.trace)
    model, _ = find_model(options)
    length = options.prefill or options.context
    longest = length + (1 if options.prefill else room_for(options.batch, length, 2 * options.steps, BUDGET))
    if longest > model.config.max_position_embeddings:
        option, most = "--prefill" if options.prefill else "--context", model.config.max_position_embeddings
        raise InvalidRequestError(f"{option} {length}: with its steps a row has {longest} tokens, but the model has {most} positions")
    pages = options.batch * (-(-(longest + AHEAD) // 16) + 1)
    limits = {"num_pages": pages, "max_model_len": longest, "max_num_seqs": options.batch, "max_num_batched_tokens": BUDGET}
    engine = Engine(model, **limits, compile=False if options.eager else None, tuning=options.tuning)
    freeze()
    run = profile_prompts if options.prefill else profile_decode
    measured = run(engine, options.batch, length, options.steps, options.trace)
    cuda = model.device.type == "cuda"
    if not measured.kernels:
        note("the profiler saw no kernels: CUPTI may be missing, or in use by another profiler")
    what = f"{options.batch} x {length} tokens of prompt" if options.prefill else f"{options.batch} x {length} tokens of context"
    figures: dict[str, Any] = {
        "what": what, "step_us": measured.step_us, "host_us": measured.host_us, "kernels": as_json(measured.kernels),
    }  # fmt: skip
    result = record(model, figures, " ".join(("nanovllm profile", *arguments)))
    print(json.dumps(result, indent=2) if options.json else text(result, measured, options.top, cuda=cuda))
    return 0


def text(result: dict[str, Any], found: Profile, top: int, *, cuda: bool) -> str:
    """The profile as text: model and device, times per step, and the table of kernels."""
    busy = sum(kernel.us for kernel in found.kernels)
    where = f"{about(result)}: {result['what']}"
    took = f"{found.step_us:,.0f} us per step, {found.host_us:,.0f} us of host work outside the model's calls"
    took += " (on a GPU it overlaps the next step)" if cuda else ""
    made = f"{'kernels' if cuda else 'ops'}, under the profiler: {busy:,.0f} us per step"
    return "\n".join([where, took, made, "", *table(found.kernels, top, cuda=cuda)])


def profile_decode(engine: Engine, batch: int, context: int, steps: int, trace: Path | None = None) -> Profile:
    """Profile decode steps of `batch` rows after `context` tokens each. They are timed first, then run under the profiler."""
    model, random = engine.model, Random(5)
    prompts = [random_tokens(random, context, model.config.vocab_size) for _ in range(batch)]
    room = room_for(batch, context, 2 * steps, engine.state.config.max_num_batched_tokens)
    engine.state, _ = start_decoding(model, engine.state, prompts, room)
    engine.state, times = time_steps(model, engine.state, steps)

    def more() -> None:
        for _ in range(steps):
            engine.state, _ = step(model, engine.state)

    seen = _profiled(model, more, steps, trace)
    return Profile(step_us=_us(times.whole), host_us=_us(times.host), kernels=seen)


def profile_prompts(engine: Engine, batch: int, length: int, steps: int, trace: Path | None = None) -> Profile:
    """Profile prompts of `length` tokens up to their first token, `batch` at once.

    They are timed first, then run under the profiler. No two prompts share a prefix.
    """
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
    seen = _profiled(model, lambda: run(steps), steps, trace)
    return Profile(step_us=_us(times[:, 0]), host_us=_us(times[:, 0] - times[:, 1]), kernels=seen)


def _profiled(model: Model, run: Callable[[], object], steps: int, trace: Path | None) -> tuple[Kernel, ...]:
    """The kernels of a run of `steps` steps. CUPTI also sees the kernels inside CUDA graphs."""
    cuda = model.device.type == "cuda"
    if not cuda:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silence its marks on stderr; on a GPU it may report errors there
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
