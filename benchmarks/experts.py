"""Measure one feed-forward layer of a mixture of experts, in microseconds per number of tokens, compared with its lower bound.

    python benchmarks/experts.py --output benchmarks/results/h200-experts.json
    python benchmarks/experts.py --model qwen3-30b-a3b --quantization fp8

The calls run inside CUDA graphs. Each call in a graph has its own random, even routing, so weights that one call read are seldom in L2 for
the next call. The bound is the larger of two times: reading the weights of the chosen experts once, and computing the products. Memory and
arithmetic rates are measured first.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from nanovllm.entrypoints.cli.bench.environment import commit, versions
from nanovllm.entrypoints.cli.bench.graph_timer import graph_us
from nanovllm.entrypoints.cli.bench.roofline import Ceiling, measure_ceiling
from nanovllm.ops.backends import shared_memory
from nanovllm.ops.linear.quantise import KINDS, quantise
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.moe.experts import tiles_of
from nanovllm.ops.moe.quantised_experts import any_experts
from nanovllm.ops.moe.quantised_experts import tiles_of as quantised_tiles_of
from nanovllm.ops.moe.tiles import FewTiles, QuantisedFewTiles
from nanovllm.testing.problems import experts_problem, routed

Matrices = torch.Tensor | QuantisedMatrix
CUDA, BF16 = torch.device("cuda"), torch.bfloat16
SIZES = {
    "qwen3-30b-a3b": (8, 128, 2048, 768), "mixtral-8x7b": (2, 8, 4096, 14336), "ernie-4.5-21b-a3b": (6, 64, 2560, 1536),
    "qwen3-235b-a22b-x4": (8, 128, 4096, 384), "qwen3-235b-a22b-x8": (8, 128, 4096, 192),  # what one of several ranks has
}  # fmt: skip
TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096)
CALLS = 8  # calls per graph


def layer(sizes: tuple[int, int, int, int], tokens: int, weights: tuple[Matrices, Matrices], ceiling: Ceiling) -> dict[str, Any]:
    """Measure one layer with so many tokens."""
    k, num, width, inner = sizes
    x = torch.randn(tokens, width, device=CUDA).to(BF16)
    routes = [routed(tokens, k, num, BF16, "cuda") for _ in range(CALLS)]
    us = graph_us(lambda: [any_experts(x, *weights, *route, "silu") for route in routes]) / CALLS
    hit = sum(int(chosen.unique().numel()) for chosen, _ in routes) / CALLS
    read, products = hit * sum(each.nbytes for each in weights) / num, 2 * tokens * k * 3 * width * inner
    bound = 1e6 * max(read / ceiling.read_bytes, products / ceiling.flops)
    return {
        "us": round(us, 2), "bound_us": round(bound, 2), "of_bound": round(bound / us, 3), "hit": round(hit, 1),
        "gb_s": round(read / us / 1e3), "tflop_s": round(products / us / 1e6, 1),
        "launches": launches(sizes, tokens, *weights),
    }  # fmt: skip


def launches(sizes: tuple[int, int, int, int], tokens: int, gate_up: Matrices, down: Matrices) -> int:
    """Return the number of launches of a layer."""
    memory = shared_memory(CUDA)
    if isinstance(gate_up, QuantisedMatrix) and isinstance(down, QuantisedMatrix):
        tiles = quantised_tiles_of(tokens, sizes[0], gate_up, down, memory)
    else:
        tiles = tiles_of(tokens, *sizes, memory)
    return 2 if isinstance(tiles, FewTiles | QuantisedFewTiles) else 4


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SIZES), help="sizes of this model (default: all)")
    parser.add_argument("--quantization", choices=KINDS, help="round the matrices of the experts")
    parser.add_argument("--commit", help="commit to record (default: the commit that git reports)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    ceiling, table = measure_ceiling(CUDA, BF16), {}
    print(f"{torch.cuda.get_device_name()}: reads {ceiling.read_bytes / 1e9:.0f} GB/s, multiplies {ceiling.flops / 1e12:.0f} TFLOP/s")
    for name in [options.model] if options.model else SIZES:
        whole = experts_problem(1, *SIZES[name], BF16, "cuda")[1:3]
        first, second = whole if options.quantization is None else (quantise(each, options.quantization) for each in whole)
        weights = (first, second)
        del whole, first, second
        for tokens in TOKENS:
            row = table[f"{name}, {tokens} tokens"] = layer(SIZES[name], tokens, weights, ceiling)
            print(f"{name:18} {tokens:5} tokens", *(f"{key} {value:9}" for key, value in row.items()))
        del weights
    result = {
        "gpu": torch.cuda.get_device_name(), "commit": options.commit or commit(), "versions": versions(),
        "command": "python benchmarks/experts.py" + (f" --model {options.model}" if options.model else "")
        + (f" --quantization {options.quantization}" if options.quantization else ""),
        "read_gb_s": round(ceiling.read_bytes / 1e9), "tflop_s": round(ceiling.flops / 1e12), "table": table,
    }  # fmt: skip
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
