"""Derive the decode rates of models that need several GPUs from steps of one GPU and from sums over two and four.

    python benchmarks/past_one_gpu.py --output benchmarks/results/past-one-gpu.json
    python benchmarks/write_docs.py

Nothing is run. A decode step with tensor parallelism over n GPUs takes the time in which one GPU reads its part of the weights and of the
KV, and the time of the all-reduces, two per layer and one exchange at the head. Two estimates of the reading time are made:

- by share: bytes over the measured reading rate times the share of the roofline that a recorded row reaches (`SOURCES`);
- by layer: bytes over the measured reading rate, and for each layer the microseconds by which that recorded row exceeds its roofline.

The two agree where the parts of a layer are as large as those of the recorded row. Where they are smaller, the first is too fast.

Where one of n ranks has been measured alone on one GPU (`ALONE`), a third estimate needs neither: the time of its step, and for each sum
what it takes beyond its launch alone.

Sizes are those of the published configs. Contexts are those of `nanovllm bench`: b1 is 128 tokens in and 512 out, b64 128 in and 256 out.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
GPUS = (2, 4, 8)
BATCHES: Mapping[str, tuple[int, int, int]] = MappingProxyType({"b1": (1, 128, 512), "b64": (64, 128, 256)})  # rows, tokens in, tokens out
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model. `experts` is 0 for a dense one, and `ffn` the width of an expert otherwise."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    experts: int = 0
    used: int = 0


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "Llama-3.3-70B": Shape(layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocab=128256),
        "Qwen3-235B-A22B": Shape(
            layers=94, hidden=4096, heads=64, kv_heads=4, head_dim=128, ffn=1536, vocab=151936, experts=128, used=8
        ),
    }
)  # fmt: skip
CASES = (("Llama-3.3-70B", "bf16"), ("Llama-3.3-70B", "fp8"), ("Qwen3-235B-A22B", "fp8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The recorded rows that say how near to the roofline steps come."""

    file: str
    layers: int


SOURCES: Mapping[tuple[str, str], Source] = MappingProxyType(
    {
        ("dense", "bf16"): Source(file="h200-8b.json", layers=36),
        ("dense", "fp8"): Source(file="h200-8b-fp8.json", layers=36),
        ("experts", "fp8"): Source(file="h200-30b-a3b-fp8.json", layers=48),
    }
)
CARDS: Mapping[str, str] = MappingProxyType({"H100": "h100-8b-fp8.json", "H200": "h200-8b.json"})  # where their rates were measured
MEMORY_GB: Mapping[str, int] = MappingProxyType({"H100": 80, "H200": 141})

# Recorded runs of `benchmarks/gpus.py` with the sums over two and four GPUs, and by batch the form that a layer takes: few rows add the
# residual, many take the norm, too. For eight GPUs, microseconds of a sum of bf16 numbers by bytes that others published.
SUMS: Mapping[tuple[str, int], str] = MappingProxyType({
    ("H100", 2): "h100x2-8b.json", ("H200", 2): "h200x2-8b.json", ("H100", 4): "h100x4-8b.json", ("H200", 4): "h200x4-8b.json",
})  # fmt: skip
FORMS: Mapping[str, str] = MappingProxyType({"b1": "add_push", "b64": "add_norm_push"})
WAYS: Mapping[str, str] = MappingProxyType({"sum_push": "alone", "add_push": "with the residual", "add_norm_push": "with the norm"})
SHOWN = (2 * KIB, 8 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 512 * KIB, MIB)
PUBLISHED: Mapping[str, Mapping[int, float]] = MappingProxyType(
    {
        "one-shot, sglang#2904": {8 * KIB: 5.7, 64 * KIB: 7.8, 512 * KIB: 16.7},
        "NCCL, Triton-distributed#57": {16 * KIB: 20.7, 64 * KIB: 23.0, 256 * KIB: 24.8},
    }
)
# Recorded runs of the same models on several GPUs.
MEASURED: Mapping[tuple[str, str, str, int], str] = MappingProxyType({
    ("Llama-3.3-70B", "bf16", "H200", 2): "h200x2-70b.json", ("Llama-3.3-70B", "bf16", "H200", 4): "h200x4-70b.json",
    ("Llama-3.3-70B", "bf16", "H100", 4): "h100x4-70b.json", ("Qwen3-235B-A22B", "fp8", "H200", 2): "h200x2-235b-fp8.json",
    ("Qwen3-235B-A22B", "fp8", "H100", 4): "h100x4-235b-fp8.json", ("Qwen3-235B-A22B", "fp8", "H200", 4): "h200x4-235b-fp8.json",
})  # fmt: skip

# Runs of `benchmarks/rank_share.py`, as far as they are recorded: the share of one of so many ranks, alone on one GPU.
ALONE: Mapping[tuple[str, str, str, int], str] = MappingProxyType(
    {("Llama-3.3-70B", "bf16", "H200", gpus): f"h200-70b-of-{gpus}.json" for gpus in (4, 8)}
    | {("Qwen3-235B-A22B", "fp8", "H200", gpus): f"h200-235b-fp8-of-{gpus}.json" for gpus in (4, 8)}
)


def matrix_bytes(shape: Shape, dtype: str, rows: float) -> tuple[float, float, float]:
    """The bytes that a step of `rows` rows reads, of matrices that are cut over the GPUs, of the head, and of the router of experts.

    FP8 has a scale of four bytes for each row of a matrix; head and router stay in bfloat16. Of E experts a step reads
    `E (1 - (1 - k/E)^rows)`, if every token chooses k of them at random. With infinitely many rows these are the bytes in memory.
    """
    q, kv, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    layer = _matrix(q + 2 * kv, hidden, dtype) + _matrix(hidden, q, dtype)
    mlp = _matrix(2 * shape.ffn, hidden, dtype) + _matrix(hidden, shape.ffn, dtype)
    router = shape.layers * 2 * hidden * shape.experts
    return shape.layers * (layer + mlp * read_experts(shape, rows)), 2.0 * shape.vocab * hidden, float(router)


def read_experts(shape: Shape, rows: float) -> float:
    """The expected number of experts of a layer that a step reads; 1 for a dense model."""
    return shape.experts * (1 - (1 - shape.used / shape.experts) ** rows) if shape.experts else 1.0


def _matrix(outputs: int, inputs: int, dtype: str) -> float:
    return outputs * inputs * 2 if dtype == "bf16" else outputs * inputs + 4 * outputs


def kv_bytes(shape: Shape, gpus: int) -> float:
    """The bytes of a token's keys and values on one GPU. With more GPUs than KV heads each GPU has one whole head."""
    return shape.layers * 2 * max(1.0, shape.kv_heads / gpus) * shape.head_dim * 2


def gpu_bytes(shape: Shape, dtype: str, gpus: int, rows: int, context: float) -> float:
    """The bytes that one GPU reads in a step."""
    cut, head, router = matrix_bytes(shape, dtype, rows)
    return (cut + head) / gpus + router + rows * context * kv_bytes(shape, gpus)


def memory_bytes(shape: Shape, dtype: str, gpus: int) -> float:
    """The bytes of weights on one GPU. The embedding is whole on each, so that it needs no exchange."""
    cut, head, router = matrix_bytes(shape, dtype, float("inf"))
    return (cut + head) / gpus + router + head


def flops(shape: Shape, rows: int) -> float:
    """The operations of a step in matrix products, over all GPUs."""
    cut, head, router = matrix_bytes(shape, "bf16", 1)  # the experts of one token, at two bytes a weight
    return rows * (cut + head + router)


def all_reduce(size: int, card: str, gpus: int, form: str, results: Path = RESULTS) -> dict[str, Any]:
    """The microseconds of a sum over the GPUs, the way of summing, and whether the time is measured, published or extrapolated.

    Args:
        size: The bytes of the tensor that is summed.
        card: The name of the GPUs.
        gpus: Their number.
        form: What is done in the same launch: one of `WAYS`. Of published ways the fastest is taken.
        results: The folder of the recorded runs.
    """
    if (card, gpus) in SUMS:
        points = sums(card, gpus, form, results)
        return {"us": _between(points, size), "way": WAYS[form], "from": "extrapolated" if size > max(points) else "measured"}
    found = []
    for way, points in PUBLISHED.items():
        if size > max(points) and any(size <= max(other) for other in PUBLISHED.values()):
            continue  # another source has this size
        if size >= min(points):
            found.append((_between(points, size), way, size > max(points)))
    us, way, beyond = min(found)
    return {"us": us, "way": way, "from": "extrapolated" if beyond else "published"}


def sums(card: str, gpus: int, form: str, results: Path = RESULTS) -> dict[int, float]:
    """The recorded microseconds of a form of the sum over two or four GPUs, by bytes."""
    return _by_size(_read(results / SUMS[card, gpus]), form)


def _by_size(recorded: Mapping[str, Any], form: str) -> dict[int, float]:
    return {int(size): us for size, us in recorded["all_reduce_us"][form].items()}


def _between(points: Mapping[int, float], size: int) -> float:
    """The line between the nearest points; below the first its value, beyond the last the last line goes on."""
    known = sorted(points.items())
    if size <= known[0][0]:
        return known[0][1]
    (x, y), (z, w) = next(((a, b) for a, b in pairwise(known) if size <= b[0]), (known[-2], known[-1]))
    return y + (w - y) * (size - x) / (z - x)


def sources(results: Path = RESULTS) -> dict[tuple[str, str, str], tuple[float, float]]:
    """By kind of model, dtype and batch: the share of the roofline of the recorded row, and its microseconds per layer beyond it."""
    found = {}
    for (kind, dtype), source in SOURCES.items():
        file = _read(results / source.file)
        for batch in BATCHES:
            row = next(one for one in file["workloads"] if one["key"] == f"{batch}_decode_tok_s")
            share = row["roofline_percent"] / 100
            found[kind, dtype, batch] = share, 1e3 * row["step_ms"] * (1 - share) / source.layers
    return found


def usable_bytes(card: str, results: Path = RESULTS) -> float:
    """The bytes that a GPU has for weights and KV: what the engine gave them in the recorded run of Qwen3-8B in FP8 on 80 GB.

    For other cards as much of their nominal memory.
    """
    pages = _read(results / "h100-8b-fp8.json")["num_pages"]
    eight = Shape(layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=12288, vocab=151936)
    return (pages * 16 * kv_bytes(eight, 1) + memory_bytes(eight, "fp8", 1)) * MEMORY_GB[card] / MEMORY_GB["H100"]


def derived(results: Path = RESULTS) -> dict[str, Any]:
    """All rates: a row per model, dtype, card, number of GPUs and batch."""
    known, rows, fits = sources(results), [], []
    rates = {card: _read(results / file)["roofline"] for card, file in CARDS.items()}
    for name, dtype in CASES:
        shape = SHAPES[name]
        for card in CARDS:
            usable = usable_bytes(card, results)
            for gpus in GPUS:
                left = (usable - memory_bytes(shape, dtype, gpus)) / kv_bytes(shape, gpus)
                weights = round(memory_bytes(shape, dtype, gpus) / 1e9, 1)
                fits.append({"model": name, "dtype": dtype, "card": card, "gpus": gpus, "weights_gb": weights, "kv_tokens": int(left)})
                for batch in BATCHES:
                    source = known["experts" if shape.experts else "dense", dtype, batch]
                    row = step(shape, dtype, card, gpus, batch, source, rates[card], results)
                    rows.append({"model": name, "dtype": dtype, "card": card, "gpus": gpus, "batch": batch, **row})
                    rows[-1]["fits"] = left >= _tokens(batch)
    told = {f"{kind} {dtype} {batch}": [round(share, 3), round(us, 1)] for (kind, dtype, batch), (share, us) in known.items()}
    ways = [
        {"gpus": f"{gpus} {card}", "way": way, "us": {size: us for size, us in sums(card, gpus, form, results).items() if size in SHOWN}}
        for card, gpus in SUMS
        for form, way in WAYS.items()
    ]
    ways += [{"gpus": "8 H100", "way": way, "us": dict(us)} for way, us in PUBLISHED.items()]
    return {
        "command": "python benchmarks/past_one_gpu.py",
        "usable_gb": {card: round(usable_bytes(card, results) / 1e9, 1) for card in CARDS},
        "rates": rates,
        "sources": told,
        "all_reduces": ways,
        "fits": fits,
        "rows": rows,
        "measured": [one for row in rows for one in _measured(row, results)],
        "alone": [one for row in rows for one in _of_one_rank(row, results)],
    }


def _measured(row: Mapping[str, Any], results: Path) -> list[dict[str, Any]]:
    """The measured rate of a row, if there is one."""
    if (file := MEASURED.get((row["model"], row["dtype"], row["card"], row["gpus"]))) is None:
        return []
    recorded, (low, high) = _read(results / file), sorted((row["share_tok_s"], row["layer_tok_s"]))
    told = {name: row[name] for name in ("model", "dtype", "card", "gpus", "batch")}
    rate = recorded[f"{row['batch']}_decode_tok_s"]
    return [told | {"file": file, "commit": recorded["commit"], "tok_s": rate, "derived_tok_s": [low, high]}]


def _of_one_rank(row: Mapping[str, Any], results: Path) -> list[dict[str, Any]]:
    """The rate of a row by a recorded run of one rank alone, if there is one."""
    name = ALONE.get((row["model"], row["dtype"], row["card"], row["gpus"]))
    if name is None or not (results / name).exists():
        return []
    recorded, shape, batch = _read(results / name), SHAPES[row["model"]], row["batch"]
    alone = BATCHES[batch][0] / recorded[f"{batch}_decode_tok_s"]
    launch = _between(_by_size(recorded, FORMS[batch]), BATCHES[batch][0] * shape.hidden * 2)
    beyond = 2 * shape.layers * max(0.0, row["all_reduce_us"] - launch) / 1e6
    told = {key: row[key] for key in ("model", "dtype", "card", "gpus", "batch")}
    rate = BATCHES[batch][0] / (alone + beyond)
    times = {"alone_ms": round(1e3 * alone, 2), "beyond_ms": round(1e3 * beyond, 2), "tok_s": round(rate, 1)}
    measured = [one["tok_s"] for one in _measured(row, results)]
    return [told | times | {"file": name, "commit": recorded["commit"], "measured_tok_s": measured[0] if measured else None}]


def step(
    shape: Shape,
    dtype: str,
    card: str,
    gpus: int,
    batch: str,
    source: tuple[float, float],
    rates: Mapping[str, float],
    results: Path = RESULTS,
) -> dict[str, Any]:
    """The milliseconds of a step and its parts, and tokens per second, by both estimates."""
    (rows, length, reply), (share, layer_us) = BATCHES[batch], source
    read = gpu_bytes(shape, dtype, gpus, rows, length + reply / 2)
    limit = max(read / (rates["read_gb_s"] * 1e9), flops(shape, rows) / gpus / (rates["matmul_tflop_s"] * 1e12))
    reduced = all_reduce(rows * shape.hidden * 2, card, gpus, FORMS[batch], results)
    least = sums(card, gpus, "sum_push", results) if (card, gpus) in SUMS else min(PUBLISHED.values(), key=lambda each: min(each.values()))
    head = min(least.values())
    exchanged = (2 * shape.layers * reduced["us"] + head) / 1e6
    by_share, by_layer = limit / share + exchanged, limit + shape.layers * layer_us / 1e6 + exchanged
    return {
        "gpu_gb": round(read / 1e9, 2), "roofline_ms": round(1e3 * limit, 3), "all_reduce_us": round(reduced["us"], 1),
        "all_reduce_by": reduced["way"], "all_reduce_from": reduced["from"], "all_reduces_ms": round(1e3 * exchanged, 3),
        "share_ms": round(1e3 * by_share, 2), "layer_ms": round(1e3 * by_layer, 2),
        "share_tok_s": round(rows / by_share, 1), "layer_tok_s": round(rows / by_layer, 1),
    }  # fmt: skip


def _tokens(batch: str) -> int:
    rows, length, reply = BATCHES[batch]
    return rows * (length + reply)


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def main() -> None:
    """Write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "past-one-gpu.json", help="the file to write (default: %(default)s)")
    options = parser.parse_args()
    options.output.write_text(json.dumps(derived(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
