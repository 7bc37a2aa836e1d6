"""Measure one layer of quantised experts by kernel and tile configuration, in microseconds per number of tokens.

    python -m benchmarks.experts_tiles --model qwen3-30b-a3b --quantization fp8 --tokens 1,2,4,8,16

`few` are the kernels that run each pair of a token and an expert alone, `grouped` those that sort the pairs by expert. The first line of a
kernel is its default tile configuration; each of the next lines changes one field of one product. `chosen` marks what the op would take.
The calls run as in `experts.py`.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.experts import BF16, CALLS, CUDA, SIZES
from nanovllm.entrypoints.arguments import positives
from nanovllm.entrypoints.cli.bench.environment import commit, versions
from nanovllm.entrypoints.cli.bench.graph_timer import graph_us
from nanovllm.ops.backends import dependent_launch, shared_memory
from nanovllm.ops.compile_ahead import compile_ahead
from nanovllm.ops.linear.quantise import KINDS, quantise
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.linear.quantised_tiles import few_fits, many_fits
from nanovllm.ops.moe.quantised_experts import few_tile, grouped_tiles, tiles_of
from nanovllm.ops.moe.tiles import QuantisedFewTiles, QuantisedGroupedTiles
from nanovllm.testing.problems import experts_problem, routed

Tiles = QuantisedFewTiles | QuantisedGroupedTiles


def few(tokens: int, k: int, gate_up: QuantisedMatrix, down: QuantisedMatrix) -> Iterator[Tiles]:
    """The default of the kernels for few tokens, and others with other outputs or warps in one product."""
    first = few_tile(gate_up, 2, tokens * k * down.shape[2])
    second = few_tile(down, k, tokens * down.shape[1])
    if first is None or second is None:
        return
    yield QuantisedFewTiles(gate_up=first, down=second)
    sizes = [(outputs, warps) for outputs in (1, 2, 4, 8, 16) for warps in (1, 2, 4, 8)]
    for outputs, warps in sizes:
        tile = replace(first, outputs=outputs, warps=warps)
        if few_fits(tile, gate_up[0], True):
            yield QuantisedFewTiles(gate_up=tile, down=second)
    for outputs, warps in sizes:
        yield QuantisedFewTiles(gate_up=first, down=replace(second, outputs=outputs, warps=warps))


def grouped(tokens: int, k: int, gate_up: QuantisedMatrix, down: QuantisedMatrix) -> Iterator[Tiles]:
    """The default of the kernels for sorted pairs, and others with other outputs, stages or warps in one product."""
    memory = shared_memory(CUDA)
    usual = grouped_tiles(tokens * k / down.shape[0], gate_up, down, memory)
    yield usual
    for part, matrix, gated in (("gate_up", gate_up, True), ("down", down, False)):
        tile = getattr(usual, part)
        others = [replace(tile, outputs=outputs, warps=warps) for outputs in (16, 32, 64, 128) for warps in (1, 2, 4, 8)]
        others += [replace(tile, stages=stages) for stages in (2, 3, 4, 6, 8)]
        for other in others:
            if many_fits(other, matrix[0], gated, memory, split=False):
                yield replace(usual, **{part: other})


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SIZES), default="qwen3-30b-a3b", help="sizes (default: %(default)s)")
    parser.add_argument("--quantization", choices=KINDS, default="fp8", help="codes of the experts (default: %(default)s)")
    parser.add_argument("--tokens", type=positives, default=(1, 2, 4, 8, 16), help="numbers of tokens, separated by commas")
    parser.add_argument("--commit", help="the commit to record (default: the one that git reports)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    from nanovllm.ops.moe import triton_quantised_experts

    sizes = SIZES[options.model]
    (k, _, width, _), new, table = sizes, dependent_launch(CUDA), list[dict[str, Any]]()
    plain = experts_problem(1, *sizes, BF16, "cuda")[1:3]
    gate_up, down = (quantise(each, options.quantization) for each in plain)
    for tokens in options.tokens:
        x, usual = torch.randn(tokens, width, device=CUDA).to(BF16), tiles_of(tokens, k, gate_up, down, shared_memory(CUDA))
        routes = [routed(tokens, k, sizes[1], BF16, "cuda") for _ in range(CALLS)]
        every = dict.fromkeys([*few(tokens, k, gate_up, down), *grouped(tokens, k, gate_up, down)])

        def call(tiles: Tiles, count: int = CALLS, x=x, routes=routes) -> None:
            for chosen, weights in routes[:count]:
                triton_quantised_experts.launch(x, gate_up, down, chosen, weights, "silu", tiles, new, new)

        compile_ahead(CUDA, [lambda tiles=tiles: call(tiles, 1) for tiles in every])
        for tiles in every:
            kernel = "few" if isinstance(tiles, QuantisedFewTiles) else "grouped"
            line: dict[str, Any] = {"tokens": tokens, "kernel": kernel, "gate_up": astuple(tiles.gate_up), "down": astuple(tiles.down)}
            try:
                line["us"] = round(graph_us(lambda tiles=tiles: call(tiles)) / CALLS, 2)
            except Exception as error:  # a tile that takes too many resources is a result
                line["error"] = f"{type(error).__name__}: {str(error)[:80]}"
            table.append(line | ({"chosen": True} if tiles == usual else {}))
            print(*table[-1].values(), flush=True)
    result = {
        "gpu": torch.cuda.get_device_name(), "commit": options.commit or commit(), "versions": versions(),
        "command": f"python -m benchmarks.experts_tiles --model {options.model} --quantization {options.quantization}", "table": table,
    }  # fmt: skip
    if options.output:
        options.output.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
