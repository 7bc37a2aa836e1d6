"""Measure the products of a decode step with quantised weights, by kernel, number of rows and tile configuration.

    python benchmarks/quantised_kernels.py --model Qwen3-8B --part few --output benchmarks/results/h200-quantised-few.json

The parts:
- `few`: 1 row, the kernel for few rows, the kernel whose warps divide the inputs and the kernel for many rows, with several tiles. Each
  with the fusions of a step.
- `many`: 8, 16, 64 and 256 rows on tensor cores, with several tiles.
- `long`: 256 to 2048 rows, the kernel on tensor cores beside a dequantised matrix that torch multiplies, for `FUSED_ROWS`, and beside
  activations that are rounded to FP8, too.
- `rounded`: the same for 32 to 256 rows, for `scaled_product.ROWS`.
- `rows`: 32 to 256 rows, the kernel whose programs take all rows, with several tiles, beside the default, cuBLAS in bfloat16 and
  activations that are rounded to FP8, each with what follows in a step. Results are compared with float64 before they are timed; the last
  column is the largest error, relative to the largest result. At the end, the sums over the matrices, of the fastest tile of each.

A call runs inside a CUDA graph over several copies of its weights, which together are larger than L2, so that every call reads from memory.
The share is the time of the same product of this package in bfloat16, divided by the time. The first line of a kernel is its default tile.
Kernels are compiled ahead, in threads. The file is written after each matrix.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

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
    gates_alone,
    many_fits,
    many_tile,
    parts_of_product,
    rows_fits,
    rows_tile,
    split_fits,
    split_tile,
    usual_tile,
)
from nanovllm.testing.quantised_problems import quantised_problem

CUDA, BF16, EPS = torch.device("cuda"), torch.bfloat16, 1e-6
COPIES = 120 << 20  # bytes of all copies of a matrix, at least; L2 has 50 MB
WIDTHS = (9, 8, 5, 12, 30, 9, 6, 9, 5, 8)  # of the columns of the table
SOME = (32, 64, 96, 128, 192, 256)
PARTS = {"few": (1,), "many": (8, 16, 64, 256), "long": (256, 512, 1024, 2048), "rounded": SOME, "rows": SOME}
# Changes of the default tile of the kernel whose programs take all rows, by number of rows. A `depth` of 2 is half a block.
ROWS_CHANGES: dict[int, list[dict[str, int]]] = {
    32: [{"outputs": 64, "warps": 4, "stages": 4}],
    64: [{"outputs": 64, "warps": 4}, {"depth": 2, "stages": 6}],
    96: [{"outputs": 64, "warps": 4}, {"depth": 1, "stages": 3}, {"rows": 128, "tail": 0}],
    128: [{"outputs": 64, "warps": 4}, {"outputs": 256, "warps": 16}],
    192: [{"outputs": 64, "warps": 4, "stages": 3}, {"rows": 256, "tail": 0}, {"rows": 64, "tail": 32}],
    256: [{"outputs": 64, "warps": 4, "stages": 3}, {"rows": 128}, {"rows": 128, "outputs": 256, "warps": 16}],
}
CHECKED, WRONG = 8192, 0.02  # outputs of a product that is checked, at most, and an error that no rounding explains
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
    call: Callable[[Any], Any]
    plain: bool = False  # whether the weights are in bfloat16


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


def plain_copies(each: Matrix) -> list[torch.Tensor]:
    """As many copies of a matrix in bfloat16 as are larger than L2 together."""
    count = max(2, math.ceil(COPIES / (2 * each.outputs * each.width)))
    return [torch.randn(each.outputs, each.width, device=CUDA, dtype=BF16) for _ in range(count)]


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


def followed(name: str, each: Matrix, given: dict[str, Any], multiply: Callable[[Any], torch.Tensor], *, plain: bool = False) -> Way:
    """A product by torch, and the launch that follows it in a step."""
    from nanovllm.ops.linear import triton_many_rows

    new = dependent_launch(CUDA)

    def call(w: Any) -> object:
        y = multiply(w)
        if each.added:
            return triton_many_rows.sum_norm(y.unsqueeze(0), None, given["residual"], given["gain"], EPS, new)
        return triton_many_rows.gate(y, new) if each.gated else y

    return Way(name=name, tile=(), call=call, plain=plain)


def rows_ways(each: Matrix, weight: QuantisedMatrix, rows: int, given: dict[str, Any]) -> Iterator[Way]:
    """The default kernel, the one whose programs take all rows, and products by torch."""
    memory, count = shared_memory(CUDA), processors(CUDA)
    alone = each.gated and gates_alone(weight, rows)
    yield by_cut("default", astuple(usual_tile(weight, rows, alone, count, memory, split=each.added)), each, given)
    usual, span = rows_tile(weight, rows, each.gated, count, memory), 128 // weight.fields
    changes = [change | ({"depth": span // change["depth"]} if "depth" in change else {}) for change in ROWS_CHANGES[rows]]
    tiles = [usual, *(replace(usual, **change) for change in changes)]
    if not each.gated:
        tiles += [replace(usual, parts=parts) for parts in (usual.parts // 2, usual.parts * 2)]
        tiles += [replace(tile, parts=2 * tile.parts) for tile in tiles if tile.outputs == 64]
    for tile in dict.fromkeys(tiles):
        if rows_fits(tile, weight, each.gated, memory, split=not each.gated):
            yield by_cut("rows", astuple(tile), each, given)
    yield followed("cublas", each, given, lambda w: F.linear(given["x"], w), plain=True)
    if rows >= 192:
        yield followed("dequantised", each, given, lambda w: by_dequantising(given["x"], w, None))
    if not scaled_product.against(weight):
        yield followed("scaled", each, given, lambda w: scaled_product.product(given["x"], w, None))


def check_problem(kind: str, each: Matrix) -> tuple[Matrix, QuantisedMatrix]:
    """A matrix of random codes and scales, with no more outputs than are checked."""
    codes, group, high = KINDS[kind]
    small, scales = replace(each, outputs=min(each.outputs, CHECKED)), BF16 if codes == "int4" else torch.float32
    return small, quantised_problem(
        codes, small.outputs, each.width, group=group, rows=high, scales=scales, spread=16, device=CUDA.type, gpu=True
    )  # fmt: skip


def checked(each: Matrix, weight: QuantisedMatrix, rows: int, tried: Sequence[Way]) -> dict[tuple[str, Cut], float]:
    """The largest error of each way with a tile configuration, relative to the largest result of float64.

    It is infinite if the kernel whose programs take all rows computes other bits a second time, or with fewer rows.
    """
    given, errors = inputs(each, rows), dict[tuple[str, Cut], float]()
    some = given | {name: given[name][:17] for name in ("x", "residual") if name in given}
    want = given["x"].double() @ weight.dequantised(torch.float64).T
    if each.gated:
        gates, ups = want.chunk(2, -1)
        want = F.silu(gates) * ups
    want = want + given["residual"].double() if each.added else want

    def result(way: Way, these: dict[str, Any]) -> torch.Tensor:
        found: Any = by_cut(way.name, way.tile, each, these).call(weight)
        return found[0] if each.added else found

    for way in tried:
        try:
            found = result(way, given)
            same = way.name != "rows" or (torch.equal(found, result(way, given)) and torch.equal(found[:17], result(way, some)))
        except Exception as problem:  # it fails again where it is timed
            print(f"{way.name} {way.tile}: {type(problem).__name__}", flush=True)
            continue
        errors[way.name, way.tile] = float((found.double() - want).abs().max() / want.abs().max()) if same else math.inf
    return errors


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
    elif part == "rows":
        yield from rows_ways(each, weight, rows, given)
    else:
        yield from many_ways(each, weight, rows, given, [])
        yield Way(name="dequantised", tile=(), call=lambda w: by_dequantising(given["x"], w, None))
        if not scaled_product.against(weight):
            yield Way(name="scaled", tile=(), call=lambda w: scaled_product.product(given["x"], w, None))


def plain_call(each: Matrix, rows: int, given: dict[str, Any]) -> Callable[[torch.Tensor], object]:
    """The same product in bfloat16, by this package's default kernels."""
    x, residual, gain = given["x"], given.get("residual"), given["gain"]
    if rows <= SUMMED_ROWS:
        before = None if each.added else gain
        return lambda w: norm_linear(x, w, gain=before, residual=residual, eps=EPS, gated=each.gated)
    if residual is not None:
        return lambda w: linear_add_norm(x, w, None, residual, gain, EPS)
    return (lambda w: linear(x, w)) if each.name == "head" else lambda w: norm_linear(x, w, gated=each.gated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured of one matrix: copies of it, and by number of rows the inputs and the ways to compute."""

    part: str
    kind: str
    matrix: Matrix
    weights: list[QuantisedMatrix]
    rows: list[tuple[int, dict[str, Any], list[Way]]]

    def calls(self, plain: torch.Tensor) -> Iterator[Callable[[], object]]:
        """Every call with one copy of the weights, `plain` in bfloat16."""
        for rows, given, all_ways in self.rows:
            yield lambda rows=rows, given=given: plain_call(self.matrix, rows, given)(plain)
            for way in all_ways:
                yield lambda way=way: way.call(plain if way.plain else self.weights[0])


def plan(part: str, kind: str, each: Matrix) -> Plan:
    """Plan a part for one matrix. Prompts need few rows of the head, which is never multiplied with rounded activations."""
    weights, rows = copies(kind, each), PARTS[part] if part not in ("long", "rounded", "rows") or each.name != "head" else ()
    made = [(count, inputs(each, count)) for count in rows]
    listed = [(n, given, list(ways(part, each, weights[0], n, given))) for n, given in made]
    return Plan(part=part, kind=kind, matrix=each, weights=weights, rows=listed)


def measure(planned: Plan, plains: list[torch.Tensor], plain: dict[tuple[str, int], float]) -> Iterator[dict[str, Any]]:
    """Measure what is planned. `plain` remembers the times in bfloat16, of `plains`, by matrix and rows."""
    each, weights, checks = planned.matrix, planned.weights, planned.part == "rows"
    small, weight = check_problem(planned.kind, each) if checks else (each, weights[0])
    for rows, given, all_ways in planned.rows:
        if (each.name, rows) not in plain:
            own = plain_call(each, rows, given)
            plain[each.name, rows] = graph_us(lambda own=own: [own(one) for one in plains], 4) / len(plains)
        usual = plain[each.name, rows]
        errors = checked(small, weight, rows, [way for way in all_ways if way.tile]) if checks else {}
        for way in all_ways:
            line: dict[str, Any] = {"kind": planned.kind, "matrix": each.name, "rows": rows, "kernel": way.name, "tile": way.tile}
            error, read = errors.get((way.name, way.tile)), plains if way.plain else weights
            if error is not None and not error < WRONG:
                yield line | {"error": f"wrong by {error:.2g}"}
                continue
            try:
                us = graph_us(lambda way=way, read=read: [way.call(one) for one in read], 4) / len(read)
            except Exception as problem:  # a tile that takes too many resources is a result
                yield line | {"error": f"{type(problem).__name__}: {str(problem)[:80]}"}
                continue
            yield line | {
                "us": round(us, 2), "gb_s": round(read[0].nbytes / us / 1e3), "bf16_us": round(usual, 2), "share": round(usual / us, 2)
            } | ({} if error is None else {"off": float(f"{error:.2g}")})  # fmt: skip


def sums(table: list[dict[str, Any]]) -> Iterator[str]:
    """Lines with the time of all matrices together, by kind, rows and kernel, each with its fastest tile, if all were measured."""
    best, names = dict[tuple[str, int, str], dict[str, float]](), {line["matrix"] for line in table}
    for line in table:
        if "us" in line:
            of = best.setdefault((line["kind"], line["rows"], line["kernel"]), {})
            of[line["matrix"]] = min(line["us"], of.get(line["matrix"], math.inf))
            best.setdefault((line["kind"], line["rows"], "bf16"), {})[line["matrix"]] = line["bf16_us"]
    for kind, rows in dict.fromkeys(key[:2] for key in best):
        whole = {name: sum(of.values()) for (k, n, name), of in best.items() if (k, n) == (kind, rows) and of.keys() == names}
        yield f"{kind:>9} {rows:>5} " + " ".join(f"{name} {us:.1f}" for name, us in whole.items())


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-8B", help="the shapes: Qwen3-8B, Qwen3-0.6B or another name of `model_shapes.py`")
    parser.add_argument("--part", choices=list(PARTS), required=True, help="what to measure")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of weights, separated by commas")
    parser.add_argument("--matrices", default="qkv,o,gate_up,down,head", help="matrices, separated by commas")
    parser.add_argument("--seconds", type=float, help="begin no other matrix after so many seconds")
    parser.add_argument("--commit", help="commit to record (default: the commit that git reports)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    began, table, plain = time.monotonic(), list[dict[str, Any]](), dict[tuple[str, int], float]()
    result = {
        "gpu": torch.cuda.get_device_name(), "commit": options.commit or commit(), "versions": versions(), "model": options.model,
        "command": f"python benchmarks/quantised_kernels.py --model {options.model} --part {options.part}", "table": table,
    }  # fmt: skip
    by_name = {each.name: each for each in matrices(SHAPES[options.model.lower()])}
    for kind in options.kinds.split(","):
        for name in options.matrices.split(","):
            if options.seconds and time.monotonic() - began > options.seconds:
                print(f"{kind} {name}: no time left", flush=True)
                continue
            planned, plains = plan(options.part, kind, by_name[name]), plain_copies(by_name[name])
            compile_ahead(CUDA, planned.calls(plains[0]))
            print(f"{kind} {name}: compiled after {time.monotonic() - began:.0f} s", flush=True)
            for line in measure(planned, plains, plain):
                table.append(line)
                print(" ".join(f"{value!s:>{wide}}" for value, wide in zip(line.values(), WIDTHS, strict=False)), flush=True)
            if options.output:
                options.output.write_text(json.dumps(result, indent=2) + "\n")
    if options.part == "rows":
        print(*sums(table), sep="\n", flush=True)


if __name__ == "__main__":
    main()
