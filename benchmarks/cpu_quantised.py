"""Measure quantised weights on a CPU: matrix products and decode steps of bfloat16, int8 and int4 weights, and beside them llama.cpp.

    python benchmarks/cpu_quantised.py --output benchmarks/results/cpu-quantised.json

All forms take turns within one run, and the figures are medians of single steps, so a slow moment of the machine meets all of them. The
default is one thread on one core: on a machine that does other work, threads wait for each other and the figures say little.

llama.cpp (optional) runs Q8_0 and Q4_0 models of the same shapes, with random weights, in a process of another environment:

    python -m venv /tmp/llama && /tmp/llama/bin/pip install llama-cpp-python==0.3.36 gguf    # builds for this processor, minutes
    python benchmarks/cpu_quantised.py --llama /tmp/llama/bin/python

All its matrices are quantised, the table of embeddings included. Ours are quantised with the head; embeddings stay bfloat16.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from nanovllm.engine.init_state import init_state
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, random_weights
from nanovllm.entrypoints.cli.bench.stopwatch import start_decoding, time_steps
from nanovllm.entrypoints.cli.bench.workloads import random_tokens
from nanovllm.loading.quantisation.rounding import Rounding, rounded_params
from nanovllm.models.model import Model
from nanovllm.ops.linear.linear import linear
from nanovllm.ops.linear.quantise import Kind, quantise

KINDS: tuple[Kind, ...] = ("int8", "int4")
PRODUCTS = ((4096, 1024), (6144, 1024), (1024, 3072), (6144, 2048))  # rows and columns of matrices
READ = 256 << 20  # bytes of bfloat16 copies of a matrix: more than a cache holds
PROMPT = 32  # tokens
CHILD = Path(__file__).with_name("llama_cpp_steps.py")


def median_us(seconds: list[float]) -> float:
    """The median in microseconds."""
    return round(float(np.median(seconds)) * 1e6, 1)


def products(rows: int, repeats: int) -> dict[str, float]:
    """Microseconds of matrix products over weights that lie in no cache, for each form of the weights."""
    figures: dict[str, float] = {}
    for height, width in PRODUCTS:
        weight, x = torch.randn(height, width) * 0.02, torch.randn(rows, width).bfloat16()
        count = max(2, READ // (2 * height * width))
        forms: dict[str, list[Any]] = {"bfloat16": [weight.bfloat16().clone() for _ in range(count)]}
        for kind in KINDS:
            matrix = quantise(weight, kind)
            forms[kind] = [replace(matrix, codes=matrix.codes.clone(), scales=matrix.scales.clone()) for _ in range(count)]
        times: dict[str, list[float]] = {form: [] for form in forms}
        for repeat in range(repeats + 1):
            for form, copies in forms.items():
                start = time.perf_counter()
                for matrix in copies:
                    linear(x, matrix)
                if repeat:  # the first repeat is the warm-up
                    times[form].append((time.perf_counter() - start) / count)
        figures |= {f"product_{height}x{width}_b{rows}_{form}_us": median_us(each) for form, each in times.items()}
    return figures


class Ours:
    """Decode steps of one model at one number of rows."""

    def __init__(self, model: Model, rows: int, room: int):
        random = Random(0)
        prompts = [random_tokens(random, PROMPT, model.config.vocab_size) for _ in range(rows)]
        self.model = model
        self.state = init_state(model, num_pages=1024, max_model_len=1024)
        self.state, _ = start_decoding(model, self.state, prompts, room)

    def steps(self, count: int) -> list[float]:
        """The seconds of the next steps."""
        self.state, times = time_steps(self.model, self.state, count)
        return times.whole.tolist()


class LlamaCpp:
    """Decode steps of llama.cpp, in a process of its own that runs `llama_cpp_steps.py`. Its threads sleep while it waits."""

    def __init__(self, python: str, file: Path, threads: int):
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"} if threads == 1 else dict(os.environ)
        self.child = subprocess.Popen(
            [python, str(CHILD), "run", str(file), str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.features = self._answer()

    def _answer(self) -> Any:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp ended with exit status {self.child.wait()}")
        return json.loads(line)

    def steps(self, rows: int, count: int) -> list[float]:
        """The seconds of the next steps of `rows` sequences."""
        assert self.child.stdin is not None
        self.child.stdin.write(f"{rows} {count}\n")
        self.child.stdin.flush()
        return self._answer()


def decoding(name: str, batches: list[int], repeats: int, burst: int, llama: Mapping[str, LlamaCpp]) -> tuple[Model, dict[str, float]]:
    """Tokens per second of all forms, whose bursts of steps alternate."""
    plain = random_weights(name, device="cpu", dtype="bfloat16")
    models = {"bfloat16": plain}
    for kind in KINDS:  # a tied head gets a matrix of its own
        models[kind] = replace(plain, params=rounded_params(plain.params, Rounding(kind=kind, head=True)), fingerprint=kind)
    figures: dict[str, float] = {}
    for rows in batches:
        room = (repeats + 1) * burst + 16
        ours = {form: Ours(model, rows, room) for form, model in models.items()}
        calls: dict[str, Callable[[], list[float]]] = {form: lambda e=engine: e.steps(burst) for form, engine in ours.items()}
        calls |= {form: lambda e=engine, r=rows: e.steps(r, burst) for form, engine in llama.items()}
        times: dict[str, list[float]] = {form: [] for form in calls}
        ratios: dict[str, list[float]] = {form: [] for form in calls}
        for repeat in range(repeats + 1):
            medians = {}
            for form, call in calls.items():
                seconds = call()
                medians[form] = float(np.median(seconds))
                if repeat:
                    times[form] += seconds
            if repeat:
                for form, seconds in medians.items():
                    ratios[form].append(medians["bfloat16"] / seconds)
        figures |= {f"b{rows}_{form}_tok_s": round(rows / float(np.median(each)), 1) for form, each in times.items()}
        figures |= {f"b{rows}_{form}_to_bfloat16": round(float(np.median(each)), 2) for form, each in ratios.items() if form != "bfloat16"}
        for kind, other in zip(KINDS, ("q8_0", "q4_0"), strict=True):
            if other in ratios:
                pairs = np.divide(ratios[kind], ratios[other])
                figures[f"b{rows}_{kind}_to_llama_cpp"] = round(float(np.median(pairs)), 2)
    return plain, figures


def started(options: argparse.Namespace, folder: Path) -> dict[str, LlamaCpp]:
    """The processes of llama.cpp with models of the same shapes, written to `folder`."""
    config = SHAPES[options.model]
    shape = {
        "hidden": config.hidden_size, "intermediate": config.intermediate_size, "layers": config.num_layers, "heads": config.num_heads,
        "kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "vocab": config.vocab_size, "theta": config.rope.theta,
        "eps": config.rms_norm_eps,
    }  # fmt: skip
    engines = {}
    for kind in ("q8_0", "q4_0"):
        file = folder / f"{kind}.gguf"
        subprocess.run([options.llama, str(CHILD), "write", str(file), kind, json.dumps(shape)], check=True)
        engines[kind] = LlamaCpp(options.llama, file, options.threads)
    return engines


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=["qwen3-0.6b"], help="shapes (default: %(default)s)")
    parser.add_argument("--batches", default="1,8", help="numbers of rows, comma-separated (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--core", type=int, help="with one thread, the core that all processes run on (default: the last)")
    parser.add_argument("--repeats", type=int, default=9, help="turns of each form (default: %(default)s)")
    parser.add_argument("--burst", type=int, default=8, help="decode steps of a turn (default: %(default)s)")
    parser.add_argument("--llama", help="the Python of an environment with llama-cpp-python and gguf")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.threads == 1:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0)) if options.core is None else options.core})
    batches = [int(rows) for rows in options.batches.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        llama = started(options, Path(folder)) if options.llama else {}
    model, steps = decoding(options.model, batches, options.repeats, options.burst, llama)
    for engine in llama.values():
        engine.child.kill()
    figures: dict[str, Any] = {"llama_cpp": {name: engine.features for name, engine in llama.items()}} if llama else {}
    figures |= steps
    for rows in batches:
        figures |= products(rows, options.repeats)
    command = f"python benchmarks/cpu_quantised.py --threads {options.threads}" + (" --llama PYTHON" if llama else "")
    result = record(model, figures, command)
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
