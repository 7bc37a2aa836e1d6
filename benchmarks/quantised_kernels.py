"""Measure the products of a decode step with quantised weights, by kernel, number of rows and tile configuration.

    python benchmarks/quantised_kernels.py --model Qwen3-8B --part few --output benchmarks/results/h200-quantised-few.json

The parts:
- `few`: 1 row, the kernel for few rows, the kernel whose warps divide the inputs and the kernel for many rows, with several tiles. Each
  with the fusions of a step.
- `many`: 8, 16, 64 and 256 rows on tensor cores, with several tiles.
- `long`: 256 to 2048 rows, the kernel on tensor cores beside a dequantised matrix that torch multiplies, for `FUSED_ROWS`, and beside
  activations that are rounded to FP8, too.
- `rounded`: the same for 32 to 256 rows, for `scaled_product.ROWS`.

A call runs inside a CUDA graph over several copies of its weights, which together are larger than L2, so that every call reads from memory.
The share is the time of the same product of this package in bfloat16, divided by the time. The first line of a kernel is its default tile.
Kernels are compiled ahead, in threads.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanovllm.config import ModelConfig
from nanovllm.entrypoints.cli.bench.environment import commit, versions
from nanovllm.entrypoints.cli.bench.graph_timer import graph_us
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES
from nanovllm.ops.backends import dependent_launch, processors, shared_memory
from nanovllm.ops.compile_ahead import compile_ahead
from nanovllm.ops.cuts import Cut
from nanovllm.ops.linear import scaled_product
from nanovllm.ops.linear.linear import linear
from nanovllm.ops.linear.linear_add_norm import linear_add_norm
from nanovllm.ops.linear.norm_linear import norm_linear
from nanovllm.ops.linear.quantise import Kind
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.linear.quantised_cuda import by_dequantising
from nanovllm.ops.linear.quantised_tiles import (
    SPLIT_ROWS,
    SUMMED_ROWS,
    FewTile,
    ManyTile,
    few_fits,
    few_tile,
    many_fits,
    many_tile,
    parts_of_product,
    split_fits,
    split_tile,
)
from nanovllm.testing.quantised_problems import quantised_problem

CUDA, BF16, EPS = torch.device("cuda"), torch.bfloat16, 1e-6
COPIES = 120 << 20  # bytes of all copies of a matrix, at least; L2 has 50 MB
WIDTHS = (9, 8, 5, 12, 24, 9, 6, 9, 5)  # of the columns of the table
PARTS = {"few": (1,), "many": (8, 16, 64, 256), "long": (256, 512, 1024, 2048), "rounded": (32, 64, 96, 128, 192, 256)}
KINDS: dict[str, tuple[Kind, int | None, int]] = {  # kind of codes, columns and rows of a scale
    "int4": ("int4", 128, 1), "fp8-block": ("fp8", 128, 128), "fp8": ("fp8", None, 1), "int8": ("int8", None, 1),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix of a decode step, and what is fused with its product: a norm before it, or a residual and a norm after it."""

    name: str
    outputs: int
    width: int
    gated: bool = False
    added: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to compute a product: a name, its tile configuration, and the call for one copy of the weights."""

    name: str
    tile: tuple[int, ...]
    call: Callable[[Any], object]


def matrices(config: ModelConfig) -> tuple[Matrix, ...]:
    """The matrices of a dense model's layer, and the head."""
    heads, hidden = config.num_heads * config.head_dim, config.hidden_size
    return (
        Matrix(name="qkv", outputs=heads + 2 * config.num_kv_heads * config.head_dim, width=hidden),
        Matrix(name="o", outputs=hidden, width=heads, added=True),
        Matrix(name="gate_up", outputs=2 * config.intermediate_size, width=hidden, gated=True),
        Matrix(name="down", outputs=hidden, width=config.intermediate_size, added=True),
        Matrix(name="head", outputs=config.vocab_size, width=hidden),
    )


def copies(kind: str, each: Matrix) -> list[QuantisedMatrix]:
    """As many copies of a quantised matrix as are larger than L2 together."""
    codes, group, rows = KINDS[kind]
    first = quantised_problem(codes, 256, each.width, group=group, rows=rows, scales=BF16 if codes == "int4" else torch.float32, gpu=True)
    width = first.codes.shape[1] * first.codes.itemsize
    whole = torch.randint(0, 120, (each.outputs, width), dtype=torch.uint8, device=CUDA).view(first.codes.dtype)
    grid = (-(-each.outputs // rows), first.scales.shape[1])
    one = replace(first, codes=whole, scales=torch.full(grid, 1e-3, dtype=first.scales.dtype, device=CUDA))
    count = max(2, math.ceil(COPIES / one.nbytes))
    return [one] + [replace(one, codes=whole.clone(), scales=one.scales.clone()) for _ in range(count - 1)]


def inputs(each: Matrix, rows: int) -> dict[str, Any]:
    """What a call takes beside the weights."""
    given: dict[str, Any] = {"x": torch.randn(rows, each.width, device=CUDA).to(BF16)}
    if each.added:
        return given | {
            "residual": torch.randn(rows, each.outputs, device=CUDA).to(BF16),
            "gain": torch.ones(each.outputs, device=CUDA, dtype=BF16),
        }
    return given | {"gain": torch.ones(each.width, device=CUDA, dtype=BF16)}


def few_ways(each: Matrix, weight: QuantisedMatrix, given: dict[str, Any]) -> Iterator[Way]:
    """The kernel for few rows with tiles about the default, as a step of few rows calls it."""
    from nanovllm.ops.linear import triton_quantised_few

    new, usual = dependent_launch(CUDA), few_tile(weight, each.gated)
    near = [(8, 4), (16, 4), (8, 8), (16, 8), (4, 4)]
    tiles = dict.fromkeys([usual, *(FewTile(outputs=outputs, warps=warps) for outputs, warps in near)])
    for tile in tiles:
        if not few_fits(tile, weight, each.gated):
            continue

        def call(w: QuantisedMatrix, tile: FewTile = tile) -> object:
            gain = None if each.added else given["gain"]
            return triton_quantised_few.launch(given["x"], w, gain, None, given.get("residual"), EPS, each.gated, tile, new, asm=new)

        yield Way(name="few", tile=astuple(tile), call=call)


def by_cut(name: str, cut: Cut, each: Matrix, given: dict[str, Any]) -> Way:
    """A product as a step of many rows calls it, after its norm, by a tile configuration."""

    def call(w: QuantisedMatrix) -> object:
        if each.added:
            return linear_add_norm(given["x"], w, None, given["residual"], given["gain"], EPS, cut=cut)
        return norm_linear(given["x"], w, gated=each.gated, cut=cut)

    return Way(name=name, tile=cut, call=call)


def split_ways(each: Matrix, weight: QuantisedMatrix, rows: int, given: dict[str, Any]) -> Iterator[Way]:
    """The kernel whose warps divide the inputs, with tiles about the default, as a step of few rows calls it, after its norm."""
    memory = shared_memory(CUDA)
    usual = split_tile(weight, rows, each.gated, processors(CUDA), memory, split=each.added)
    tiles = [replace(usual, outputs=outputs, warps=warps) for outputs in (16, 32, 64) for warps in (4, 8)]
    tiles += [replace(usual, stages=stages) for stages in (2, 3, 6)] + [replace(usual, parts=parts) for parts in (1, 2, 4)]
    for tile in dict.fromkeys([usual, *tiles]):
        if not split_fits(tile, weight, rows, each.gated, memory, split=each.added):
            continue
        yield by_cut("split", astuple(tile), each, given)


def many_ways(each: Matrix, weight: QuantisedMatrix, rows: int, given: dict[str, Any], changes: list[dict[str, int]]) -> Iterator[Way]:
    """The kernel on tensor cores with the default tile and with `changes` of it, as a step of many rows calls it, after its norm."""
    memory = shared_memory(CUDA)
    usual, seen = many_tile(weight, rows, each.gated, processors(CUDA), memory, split=each.added), set[ManyTile]()
    split = not each.gated and each.name != "head"
    if split and not each.added:
        usual = replace(usual, parts=parts_of_product(weight, usual, rows, processors(CUDA)))
    for change in ({}, *changes, *([{"parts": parts} for parts in (1, 2, 4)] if split else [])):
        tile = replace(usual, **change)
        if tile in seen or not many_fits(tile, weight, each.gated, memory, split=split):
            continue
        seen.add(tile)
        yield by_cut("many", astuple(tile), each, given)


def ways(part: str, each: Matrix, weight: QuantisedMatrix, rows: int, given: dict[str, Any]) -> Iterator[Way]:
    """What a part compares for one matrix and number of rows."""
    if part == "few":
        yield from few_ways(each, weight, given)
        yield from split_ways(each, weight, rows, given)
        yield from many_ways(each, weight, rows, given, [{"stages": 8}, {"outputs": 32, "warps": 2}, {"parts": 8} if each.added else {}])
    elif part == "many":
        if rows <= SPLIT_ROWS:
            yield from split_ways(each, weight, rows, given)
        tall = {"outputs": 128, "warps": 8} if not each.gated else {"warps": 8}
        changes = [tall, {"outputs": 64, "warps": 4}, {"rows": 64}, *({"stages": stages} for stages in (2, 3, 4, 6))]
        yield from many_ways(each, weight, rows, given, changes)
    else:
        yield from many_ways(each, weight, rows, given, [])
        yield Way(name="dequantised", tile=(), call=lambda w: by_dequantising(given["x"], w, None))
        if not scaled_product.against(weight):
            yield Way(name="scaled", tile=(), call=lambda w: scaled_product.product(given["x"], w, None))


def plain_us(each: Matrix, rows: int, given: dict[str, Any]) -> float:
    """Microseconds of the same product in bfloat16, over copies larger than L2, by this package's default kernels."""
    count = max(2, math.ceil(COPIES / (2 * each.outputs * each.width)))
    weights = [torch.randn(each.outputs, each.width, device=CUDA, dtype=BF16) for _ in range(count)]
    x, residual, gain = given["x"], given.get("residual"), given["gain"]
    if rows <= SUMMED_ROWS:
        before = None if each.added else gain
        return graph_us(lambda: [norm_linear(x, w, gain=before, residual=residual, eps=EPS, gated=each.gated) for w in weights]) / count
    if residual is not None:
        return graph_us(lambda: [linear_add_norm(x, w, None, residual, gain, EPS) for w in weights]) / count
    if each.name == "head":
        return graph_us(lambda: [linear(x, w) for w in weights]) / count
    return graph_us(lambda: [norm_linear(x, w, gated=each.gated) for w in weights]) / count


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured of one matrix: copies of it, and by number of rows the inputs and the ways to compute."""

    kind: str
    matrix: Matrix
    weights: list[QuantisedMatrix]
    rows: list[tuple[int, dict[str, Any], list[Way]]]


def plan(part: str, kind: str, each: Matrix) -> Plan:
    """Plan a part for one matrix. Prompts need few rows of the head, which is never multiplied with rounded activations."""
    weights, rows = copies(kind, each), PARTS[part] if part not in ("long", "rounded") or each.name != "head" else ()
    made = [(count, inputs(each, count)) for count in rows]
    return Plan(
        kind=kind, matrix=each, weights=weights, rows=[(n, given, list(ways(part, each, weights[0], n, given))) for n, given in made]
    )


def measure(planned: Plan, plain: dict[tuple[str, int], float]) -> Iterator[dict[str, Any]]:
    """Measure what is planned. `plain` remembers the times in bfloat16 by matrix and rows."""
    each, weights = planned.matrix, planned.weights
    for rows, given, all_ways in planned.rows:
        if (each.name, rows) not in plain:
            plain[each.name, rows] = plain_us(each, rows, given)
        usual = plain[each.name, rows]
        for way in all_ways:
            line: dict[str, Any] = {"kind": planned.kind, "matrix": each.name, "rows": rows, "kernel": way.name, "tile": way.tile}
            try:
                us = graph_us(lambda way=way: [way.call(weight) for weight in weights], 4) / len(weights)
            except Exception as error:  # a tile that takes too many resources is a result
                yield line | {"error": f"{type(error).__name__}: {str(error)[:80]}"}
                continue
            yield line | {
                "us": round(us, 2), "gb_s": round(weights[0].nbytes / us / 1e3), "bf16_us": round(usual, 2), "share": round(usual / us, 2)
            }  # fmt: skip


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-8B", help="the shapes: Qwen3-8B, Qwen3-0.6B or another name of `model_shapes.py`")
    parser.add_argument("--part", choices=list(PARTS), required=True, help="what to measure")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of weights, separated by commas")
    parser.add_argument("--matrices", default="qkv,o,gate_up,down,head", help="matrices, separated by commas")
    parser.add_argument("--commit", help="commit to record (default: the commit that git reports)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    table, plain = list[dict[str, Any]](), dict[tuple[str, int], float]()
    chosen = [each for each in matrices(SHAPES[options.model.lower()]) if each.name in options.matrices.split(",")]
    plans = [plan(options.part, kind, each) for kind in options.kinds.split(",") for each in chosen]
    compile_ahead(
        CUDA, [lambda way=way, each=each: way.call(each.weights[0]) for each in plans for *_, all_ways in each.rows for way in all_ways]
    )
    for each in plans:
        for line in measure(each, plain):
            table.append(line)
            print(" ".join(f"{value!s:>{wide}}" for value, wide in zip(line.values(), WIDTHS, strict=False)), flush=True)
    result = {
        "gpu": torch.cuda.get_device_name(), "commit": options.commit or commit(), "versions": versions(), "model": options.model,
        "command": f"python benchmarks/quantised_kernels.py --model {options.model} --part {options.part}", "table": table,
    }  # fmt: skip
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
