"""Build FlashInfer's kernels for the models of the other parts, and wait: prompts and long rows would run on other kernels meanwhile.

    python -m benchmarks.recording.kernels --output benchmarks/out/gpu-kernels.json

`seconds` is how long that took; a second or two if this machine had them.
"""

import argparse
import json
import time
from pathlib import Path

import nanovllm as nv
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, random_weights
from nanovllm.executor.executor import executor_of
from nanovllm.executor.graph_executor import GraphExecutor
from nanovllm.loading.load_model import resolve_device

LIMIT = 400.0  # seconds


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", choices=sorted(SHAPES), default="qwen3-0.6b", help="a model of the same head size (default: %(default)s)"
    )
    parser.add_argument("--commit", help="commit to record (default: the commit that git reports)")
    parser.add_argument("--output", type=Path, help="write the result to this JSON file")
    options = parser.parse_args(arguments)
    model, begin = random_weights(options.model, device=resolve_device("cuda")), time.perf_counter()
    executor = executor_of(nv.init_state(model, num_pages=512, max_num_seqs=8, max_model_len=4096, check=False))
    while isinstance(executor, GraphExecutor) and not executor._attention.ready():
        if time.perf_counter() - begin > LIMIT:
            raise SystemExit(f"FlashInfer's kernels are not there after {LIMIT:.0f} seconds")
        time.sleep(0.2)
    result = record(model, {"seconds": round(time.perf_counter() - begin, 1)}, f"python -m {__spec__.name}", options.commit)
    print(json.dumps(result["seconds"]))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
