"""Measure decoding for published models of each family, with random weights, compared with the roofline.

    python benchmarks/families.py --output benchmarks/results/h200-families.json

Each model runs `nanovllm bench --model NAME --which b1,b8,b64` in a process of its own. The results also name the kernels that decode the
model, and the reason if they are not the fast ones. If a model fails, its error is printed, the others still run, and the exit status is 1.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from nanovllm.entrypoints.cli.bench.environment import commit
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES
from nanovllm.entrypoints.cli.check.kernel_choice import kernels
from nanovllm.loading.load_model import resolve_device, resolve_dtype
from nanovllm.models.registry import fitted

FAMILIES = (
    "llama-3.1-8b", "tinyllama-1.1b", "qwen2.5-7b", "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "mistral-7b-v0.1", "mixtral-8x7b",
    "phi-3-mini", "phi-4-mini", "gemma-7b", "gemma-2-9b", "gemma-3-4b", "ernie-4.5-0.3b", "ernie-4.5-21b-a3b", "gpt2-xl",
)  # fmt: skip
SAME = ("engine", "gpu", "cpu", "versions", "dtype")  # keys that are the same for all models


def measured(name: str, repeats: int, at: str, seconds: float) -> dict[str, Any]:
    """Measure a model in a new process and return the result. Raises `subprocess.SubprocessError` if the process fails."""
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "run.json"
        given = ("--model", name, "--which", "b1,b8,b64", "--repeats", str(repeats), "--commit", at, "--output", str(file))
        command = [sys.executable, "-m", "nanovllm", "bench", *given]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds)
        return json.loads(file.read_text())


def path(name: str) -> dict[str, str]:
    """Return the kernels that decode a model on the default device, and the reason against faster ones."""
    device = resolve_device(None)
    dtype = resolve_dtype(None, SHAPES[name], device)
    choice = kernels(fitted(SHAPES[name], device, dtype), device, dtype)
    return {"architecture": SHAPES[name].architecture, "decode": choice.decode, "against": choice.against}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(FAMILIES), help="models of nanovllm bench, comma-separated (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each workload, whose median is reported (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=180, help="time limit per model (default: %(default)s)")
    parser.add_argument("--commit", help="commit to record (default: the commit that git reports)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    names, at = options.models.split(","), options.commit or commit()
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"unknown models {', '.join(unknown)}; choose from {', '.join(SHAPES)}")
    chosen = f" --models {options.models}" if options.models != ",".join(FAMILIES) else ""
    result: dict[str, Any] = {"commit": at, "command": f"python benchmarks/families.py --repeats {options.repeats}{chosen}", "models": {}}
    failed = False
    for name in names:
        start = time.perf_counter()
        try:
            figures = measured(name, options.repeats, at, options.seconds)
        except subprocess.SubprocessError as error:
            lines = error.stderr.strip().splitlines() if isinstance(error, subprocess.CalledProcessError) else []
            print(f"{name}: {lines[-1] if lines else error}", flush=True)
            failed = True
            continue
        result |= {key: figures[key] for key in SAME}
        rows = {row["key"]: row for row in figures["workloads"] if row["key"].endswith("_decode_tok_s")}
        decode = {key: {part: row[part] for part in ("tok_s", "step_ms", "roofline_percent")} for key, row in rows.items()}
        result["models"][name] = path(name) | {"read_gb_s": figures["roofline"]["read_gb_s"], **decode}
        shown = ", ".join(f"{row['tok_s']:,.0f} ({row['roofline_percent']:.0f}%)" for row in decode.values())
        print(f"{name}: {shown} tokens/s; {result['models'][name]['decode']}; {time.perf_counter() - start:.0f} s", flush=True)
        if options.output:
            options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"on {torch.cuda.get_device_name() if torch.cuda.is_available() else 'a CPU'}, commit {at}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
