"""Measure decode steps over KV in FP8 and over KV in the dtype of the model, and how many tokens the same memory holds.

    python benchmarks/kv_dtype.py --model qwen3-8b --output benchmarks/results/h200-8b-kv.json
    python benchmarks/kv_dtype.py --model tiny --device cpu --points 1x256,8x256 --num-pages 512

Two engines run one after the other over the same weights. Each point is the median time of a step of so many rows, each with so many tokens
of context. `gain` is the time without FP8 by the time with it, and `limit` the gain if both steps took the least time that their bytes and
operations take. `tokens_gain` is the tokens of the pool with FP8 by those without, where the engine chooses its pages by the free memory.
"""

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch

from nanovllm.entrypoints.arguments import positive
from nanovllm.entrypoints.cli.bench.command import add_model_arguments, find_model
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.roofline import measure_ceiling
from nanovllm.entrypoints.cli.bench.scaling import obstacle, points
from nanovllm.entrypoints.cli.bench.stopwatch import Engine

STEPS = 48
POINTS = "1x1024,1x16384,8x1024,8x16384,32x1024,32x16384"


def sizes_of(text: str) -> list[tuple[int, int]]:
    """Pairs of rows and tokens of context, of a text such as `1x1024,8x16384`.

    Examples:
        >>> sizes_of("1x1024,8x16384")
        [(1, 1024), (8, 16384)]
    """
    pairs = [tuple(positive(number) for number in each.split("x")) for each in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ROWSxTOKENS")
    return [(rows, tokens) for rows, tokens in pairs]


def table(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each point that both engines have run."""
    found = {(point["rows"], point["context"]): point for point in after}
    rows = []
    for plain in before:
        if (fp8 := found.get((plain["rows"], plain["context"]))) is not None:
            rows.append(
                {
                    "rows": plain["rows"],
                    "context": plain["context"],
                    "plain_us": plain["step_us"],
                    "fp8_us": fp8["step_us"],
                    "gain": round(plain["step_us"] / fp8["step_us"], 2),
                    "limit": round(plain["limit_us"] / fp8["limit_us"], 2),
                    "fp8_roofline_percent": fp8["roofline_percent"],
                }
            )
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--points", type=sizes_of, default=POINTS, metavar="ROWSxTOKENS,...", help="(default: %(default)s)")
    parser.add_argument("--num-pages", type=positive, help="pages of KV (default: as many as fit)")
    parser.add_argument("--commit", help="commit to record (default: the commit that git reports)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args(arguments)
    model, name = find_model(options)
    ceiling = measure_ceiling(model.device, model.dtype)  # before an engine takes the memory
    longest = min(model.config.max_position_embeddings, max(tokens for _, tokens in options.points) + 256)
    measured: dict[str, list[dict[str, Any]]] = {"plain": [], "fp8": []}
    tokens = dict[str, int]()
    written = ",".join(f"{rows}x{context}" for rows, context in options.points)
    command = f"python benchmarks/kv_dtype.py --model {name} --points {written}"

    def note() -> None:
        """Write what there is so far: a run may be ended."""
        results: dict[str, Any] = {"points": table(measured["plain"], measured["fp8"]), "tokens": tokens}
        if len(tokens) == 2:
            results["tokens_gain"] = round(tokens["fp8"] / tokens["plain"], 3)
        if options.output:
            options.output.write_text(json.dumps(record(model, {"kv_dtype": results}, command, options.commit), indent=1) + "\n")

    for way, kv_dtype in (("plain", None), ("fp8", "fp8")):
        engine = Engine(model, num_pages=options.num_pages, max_model_len=longest, kv_dtype=kv_dtype)
        limits = engine.state.config
        tokens[way] = limits.num_pages * limits.page_size
        fit = [(rows, context) for rows, context in options.points if obstacle(limits, rows, context, STEPS) is None]
        for point in points(engine, ceiling, fit, STEPS):
            measured[way].append({key: getattr(point, key) for key in ("rows", "context", "step_us", "limit_us", "roofline_percent")})
            print(way, json.dumps(measured[way][-1]), flush=True)
            note()
        del engine
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
    for row in table(measured["plain"], measured["fp8"]):
        print(json.dumps(row), flush=True)
    print(json.dumps(tokens), flush=True)


if __name__ == "__main__":
    main()
