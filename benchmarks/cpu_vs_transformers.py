"""Compare decode speed on a CPU with `generate` of transformers. Both run alternately in one process; the numbers are medians.

    python benchmarks/cpu_vs_transformers.py --model tiny --output benchmarks/results/cpu-tiny.json
    python benchmarks/cpu_vs_transformers.py --model qwen3-0.6b --dtypes float32,bfloat16 --tokens 24

The packaged model runs with its own weights, and the share of equal replies is reported. Other models run with random weights, which differ
between the two engines.
"""

import argparse
import json
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, random_weights
from nanovllm.entrypoints.cli.bench.peers import in_transformers
from nanovllm.entrypoints.cli.bench.stopwatch import Engine
from nanovllm.entrypoints.cli.bench.workloads import random_tokens
from nanovllm.loading.load_model import load_model
from nanovllm.types import dtype_of


def timed(call: Any) -> tuple[float, Any]:
    """Return the seconds of a call and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def compare(name: str, dtype: str, batches: list[int], num_tokens: int, repeats: int, compiled: bool) -> dict[str, Any]:
    """Measure decode tokens per second of both engines, and their ratio. The time of a one-token reply is subtracted as prefill time."""
    model = load_model(name, "cpu", dtype) if name == "tiny" else random_weights(name, device="cpu", dtype=dtype)
    other = in_transformers(model, name)
    other.generation_config.eos_token_id = None  # ignore the end token; min_new_tokens would forbid it instead
    engine = Engine(model, num_pages=2048, max_model_len=1024, compile=compiled or None)
    random, figures = Random(0), {}

    def theirs(prompts: list[list[int]], count: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.no_grad():
            out = other.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0)
        return out[:, ids.shape[1] :].tolist()

    for batch in batches:
        speeds: dict[str, list[float]] = {"ours": [], "theirs": []}
        agree = []
        for repeat in range(repeats + 1):
            prompts = [random_tokens(random, 32, model.config.vocab_size) for _ in range(batch)]
            calls = {"ours": lambda n, p=prompts: engine.generate(p, [n] * len(p), 0.0), "theirs": lambda n, p=prompts: theirs(p, n)}
            replies = {}
            for who, call in calls.items():
                first, _ = timed(lambda call=call: call(1))
                whole, replies[who] = timed(lambda call=call: call(num_tokens))
                if repeat:  # the first repeat is the warm-up
                    speeds[who].append(batch * (num_tokens - 1) / (whole - first))
            agree += [a == b for a, b in zip(replies["ours"], replies["theirs"], strict=True)]
        key = f"{dtype}_b{batch}"
        figures[f"{key}_tok_s"] = round(float(np.median(speeds["ours"])), 1)
        figures[f"{key}_transformers_tok_s"] = round(float(np.median(speeds["theirs"])), 1)
        figures[f"{key}_ratio"] = round(float(np.median(np.divide(speeds["ours"], speeds["theirs"]))), 2)
        if name == "tiny":
            figures[f"{key}_equal_replies"] = round(sum(agree) / len(agree), 3)
    return record(model, figures, "")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=["tiny", *SHAPES], help="default: %(default)s")
    parser.add_argument("--dtypes", default="float32", help="comma-separated (default: %(default)s)")
    parser.add_argument("--batches", default="1,8", help="batch sizes, comma-separated (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per reply (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats, whose median is reported (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="run our layers through torch.compile (needs a C++ compiler)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    for dtype in options.dtypes.split(","):
        dtype_of(dtype)
        batches = [int(b) for b in options.batches.split(",")]
        result |= compare(options.model, dtype, batches, options.tokens, options.repeats, options.compile)
    del result["dtype"]
    result["command"] = (
        f"python benchmarks/cpu_vs_transformers.py --model {options.model} --dtypes {options.dtypes} --tokens {options.tokens}"
    )
    result["command"] += " --compile" if options.compile else ""
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
