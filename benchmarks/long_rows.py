"""Measure decode attention of one layer over few rows with long contexts, by tile configuration, beside FlashInfer, in microseconds.

    python benchmarks/long_rows.py --model qwen3-8b --output benchmarks/results/h200-long-rows.json

A launch of ours normalises, rotates and writes the new keys and values, too; FlashInfer's attends only. `short` is the tile configuration
for rows that are not long, `long` that of `FusedDecodePlan(long=True)`, and `reads` the time to read the KV at `--read-tb` terabytes per
second. Other names are tiles, warps, tiles in flight and splits. Launches of `LAYERS` layers run in one CUDA graph. Results are compared
with FlashInfer's.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanovllm.entrypoints.cli.bench.environment import commit, versions
from nanovllm.entrypoints.cli.bench.graph_timer import graph_us
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES
from nanovllm.ops.attention.flashinfer import AttentionWorkspace
from nanovllm.ops.attention.flashinfer_plans import DecodePlan
from nanovllm.ops.attention.fused_plan import FusedDecodePlan
from nanovllm.ops.attention.paged_decode import paged_decode
from nanovllm.ops.attention.rope_attend import rope_attend

LAYERS, SIZE, CUDA, BF16 = 6, 16, torch.device("cuda"), torch.bfloat16
POINTS: tuple[tuple[int, ...], ...] = (
    (8192,), (32768,), (16384,) * 2, (8192,) * 4, (16384,) * 4, (4096,) * 8, (16384,) * 8, (2048,) * 16, (16384,) * 16,
    (16384, *(512,) * 7), (32768, *(200,) * 15),
)  # fmt: skip
CUTS = tuple(
    (tile, warps, stages, splits) for tile, warps, stages in ((64, 4, 3), (32, 4, 6), (128, 8, 2), (64, 4, 0)) for splits in (8, 16, 32, 64)
)


def times(heads: int, kv_heads: int, head_dim: int, lens: Sequence[int], terabytes: float) -> dict[str, Any]:
    """Microseconds of a layer over rows of these lengths, by the way to attend."""
    rows, counts = len(lens), [-(-each // SIZE) for each in lens]
    width, random = max(counts), np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    tables = np.zeros((rows, width), np.int32)
    for row, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
        tables[row, :count] = random[end - count : end]
    pages = torch.randn(LAYERS, sum(counts), 2, kv_heads, SIZE, head_dim, device=CUDA).to(BF16)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, device=CUDA).to(BF16)
    gain, angles = torch.ones(head_dim, device=CUDA, dtype=BF16), torch.randn(rows, 1, head_dim, device=CUDA)
    on_device = torch.from_numpy(tables).to(CUDA), torch.tensor(lens, dtype=torch.int32, device=CUDA)
    slots = torch.tensor([tables[row, (each - 1) // SIZE] * SIZE + (each - 1) % SIZE for row, each in enumerate(lens)], dtype=torch.int32)
    slots, scale = slots.to(CUDA), head_dim**-0.5
    flash = DecodePlan(AttentionWorkspace(rows, heads, kv_heads, head_dim, CUDA), rows, width, heads, kv_heads, head_dim, SIZE, BF16, CUDA)
    flash.update(np.array(counts, np.int32), tables)

    def ours(plan: FusedDecodePlan) -> Callable[[], list[torch.Tensor]]:
        def run() -> list[torch.Tensor]:
            return [
                rope_attend(qkv, gain, gain, angles, angles, pages, layer, *on_device, slots, scale, 1e-6, plan.handle)
                for layer in range(LAYERS)
            ]

        return run

    sizes = (rows, heads, kv_heads, head_dim, CUDA)
    plans = {"short": FusedDecodePlan(*sizes), "long": FusedDecodePlan(*sizes, long=True)}
    plans |= {"x".join(map(str, cut)): FusedDecodePlan(*sizes, cut) for cut in CUTS}
    want = rope_attend(qkv, gain, gain, angles, angles, pages, 0, *on_device, slots, scale, 1e-6, flash.handle).float()
    found: dict[str, Any] = {"reads": round(2e-6 * 2 * sum(lens) * kv_heads * head_dim / terabytes, 1)}
    q = torch.randn(rows, heads, head_dim, device=CUDA).to(BF16)
    attend = [lambda layer=layer: paged_decode(q, pages, layer, *on_device, scale, flash.handle) for layer in range(LAYERS)]
    found["flashinfer"] = round(graph_us(lambda: [run() for run in attend]) / LAYERS, 1)
    for name, plan in plans.items():
        if not torch.allclose(ours(plan)()[0].float(), want, rtol=2e-2, atol=2e-3):
            raise SystemExit(f"{name} differs from FlashInfer over rows of {tuple(lens)}")
        found[name] = round(graph_us(ours(plan)) / LAYERS, 1)
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen3-8b", help="the shape of heads (default: %(default)s)")
    parser.add_argument("--read-tb", type=float, default=4.1, metavar="TB", help="terabytes a GPU reads in a second (default: %(default)s)")
    parser.add_argument("--commit", help="commit to record (default: the commit that git reports)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    config, table = SHAPES[options.model], list[dict[str, Any]]()
    for lens in POINTS:
        us = times(config.num_heads, config.num_kv_heads, config.head_dim, lens, options.read_tb)
        table.append({"rows": len(lens), "longest": lens[0], "others": lens[-1], "us": us})
        best = sorted((each, name) for name, each in us.items() if name not in ("reads", "flashinfer", "short", "long"))[:4]
        print(len(lens), lens[0], lens[-1], {name: us[name] for name in ("reads", "flashinfer", "short", "long")}, best, flush=True)
        if options.output:
            result = {"gpu": torch.cuda.get_device_name(), "commit": options.commit or commit(), "versions": versions()}
            command = f"python benchmarks/long_rows.py --model {options.model} --read-tb {options.read_tb}"
            options.output.write_text(json.dumps({**result, "command": command, "long_rows": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
