"""Everything that needs a GPU, in one call: the tests, and the figures of benchmarks/results that name a GPU.

    python -m benchmarks.record_gpu                                  # about 45 minutes, written to benchmarks/out
    python -m benchmarks.record_gpu --parts tests,serving --limit 9  # what fits into nine minutes

Parts run one after another, because each needs the GPU alone. A part that fails or reaches the limit does not stop the others. The exit
code is 1 if one did.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

PYTHON = (sys.executable, "-m")
EIGHT = ("--model", "qwen3-8b")
BENCH = (*PYTHON, "nanovllm", "bench", "--which")
# For each part its command. OUT stands for the folder of the results.
PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tests": (*PYTHON, "pytest", "-q", "-m", "gpu", "tests/gpu", "-n", "8", "-p", "no:benchmark", "--junitxml=OUT/gpu-tests.xml"),
        "start": (*BENCH, "start,bare", "--output", "OUT/gpu-start.json"),
        "serving": (*BENCH, "b1,b8,b64,offline,fewshot,burst,ttft", "--output", "OUT/gpu-serving.json"),
        "prefix": (*BENCH, "prefix,host", "--output", "OUT/gpu-prefix.json"),
        "latency": (
            sys.executable,
            "benchmarks/latency.py",
            *EIGHT,
            "--seconds",
            "8",
            "--knobs",
            "inf,50,35,20",
            "--output",
            "OUT/gpu-latency.json",
        ),
        "http": (*PYTHON, "benchmarks.http_bench", "--model", "qwen3-0.6b", "--output", "OUT/gpu-http.json"),
        "constrained": (*PYTHON, "benchmarks.constrained", "--model", "qwen3-0.6b", "--output", "OUT/gpu-constrained.json"),
        "embed": (sys.executable, "benchmarks/embed.py", "--model", "qwen3-0.6b", "--batches", "1,8,64", "--output", "OUT/gpu-embed.json"),
        "8b": (*BENCH, "b1,b8,b64,offline,prefix", *EIGHT, "--repeats", "1", "--output", "OUT/gpu-8b.json"),
        "8b-fp8": (*BENCH, "b1,b8,b64,offline", *EIGHT, "--quantization", "fp8", "--output", "OUT/gpu-8b-fp8.json"),
        "8b-int4": (*BENCH, "b1,b8,b64,offline", *EIGHT, "--quantization", "int4", "--output", "OUT/gpu-8b-int4.json"),
        "soak": (*PYTHON, "benchmarks.soak", "--model", "qwen3-0.6b", "--minutes", "10", "--output", "OUT/gpu-soak.json"),
    }
)


def main() -> int:
    """Run the parts that were asked for. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), metavar="NAME,...", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"), metavar="FOLDER", help="for results (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=60.0, metavar="MINUTES", help="of all parts together (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    options = parser.parse_args()
    names, end, failed = options.parts.split(","), time.monotonic() + 60 * options.limit, 0
    if unknown := set(names) - PARTS.keys():
        parser.error(f"unknown part {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        command = [word.replace("OUT", str(options.out)) for word in PARTS[name]]
        print(f"{name}: {' '.join(command)}", flush=True)
        if options.dry_run:
            continue
        started = time.monotonic()
        with open(options.out / f"gpu-{name}.log", "w", encoding="utf-8") as log:
            try:
                code = subprocess.run(command, stdout=log, stderr=log, check=False, timeout=max(1.0, end - started)).returncode
            except subprocess.TimeoutExpired:
                code = None
        failed += code != 0
        took = f"{time.monotonic() - started:.0f} s"
        print(f"{name}: {'reached the limit' if code is None else 'done' if code == 0 else f'exit code {code}'} after {took}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
