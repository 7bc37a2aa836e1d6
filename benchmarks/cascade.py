"""Measure attention of one layer with and without cascade, in microseconds, for several numbers of rows, shared tokens and own tokens.

    python benchmarks/cascade.py --output benchmarks/results/h200-cascade.json

Decode launches run inside CUDA graphs. The bounds in `executor/cascade_policy.py`, from which shared pages are read once, come from this
table.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanovllm.config import ModelConfig
from nanovllm.entrypoints.cli.bench.environment import commit, versions
from nanovllm.entrypoints.cli.bench.graph_timer import graph_us, replay_us
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES
from nanovllm.executor.cascade_policy import shared_runs
from nanovllm.ops import paged_decode, paged_prefill
from nanovllm.ops.attention.cascade_plan import CascadePlan, CascadeWorkspace
from nanovllm.ops.attention.flashinfer import AttentionWorkspace
from nanovllm.ops.attention.flashinfer_cascade import FlashInferCascade
from nanovllm.ops.attention.flashinfer_plans import DecodePlan, PrefillPlan

LAYERS, SIZE, CUDA = 8, 16, torch.device("cuda")
DECODE = [(rows, shared, own) for rows in (2, 4, 8, 16, 32, 64) for shared, own in ((256, 200), (1024, 200), (4096, 200), (16384, 64))]
PROMPTS = [(32, 16384, 32), (32, 1024, 32), (8, 16384, 64), (4, 4096, 48), (32, 4096, 128), (8, 16384, 256)]


def pool(config: ModelConfig, rows: int, shared: int, own: int) -> tuple[torch.Tensor, np.ndarray]:
    """Return pages of `LAYERS` layers, and page tables of rows that share the first `shared` tokens."""
    first, each = shared // SIZE, -(-(own + 64) // SIZE)
    ids = np.random.default_rng(0).permutation(first + rows * each).astype(np.int32)
    tables = np.concatenate((np.tile(ids[:first], (rows, 1)), ids[first:].reshape(rows, each)), 1).astype(np.int32)
    pages = torch.randn(LAYERS, len(ids) + 1, 2, config.num_kv_heads, SIZE, config.head_dim, device=CUDA).to(torch.bfloat16)
    return pages, tables


def decode(config: ModelConfig, rows: int, shared: int, own: int) -> dict[str, float]:
    """Measure plain and cascade decode attention of one layer."""
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    pages, tables = pool(config, rows, shared, own)
    counts, lens = np.full(rows, tables.shape[1], np.int32), np.full(rows, shared + own, np.int32)
    on_device = torch.from_numpy(tables).to(CUDA), torch.from_numpy(lens).to(CUDA)
    q = torch.randn(rows, heads[0], heads[2], device=CUDA).to(torch.bfloat16)
    plain = DecodePlan(AttentionWorkspace(rows, *heads, CUDA), rows, tables.shape[1], *heads, SIZE, torch.bfloat16, CUDA)
    plain.update(counts, tables)
    cascade = CascadePlan(CascadeWorkspace(rows, heads[0], heads[2], CUDA), rows, heads[0], heads[1], SIZE, CUDA)
    if not cascade.update(shared_runs(tables, lens // SIZE, counts, lambda n, pages: True)):
        raise AssertionError("the shared runs do not fit into the cascade plan")

    def layers(handle: int) -> Callable[[], Any]:
        return lambda: [paged_decode(q, pages, i, *on_device, heads[2] ** -0.5, handle) for i in range(LAYERS)]

    return _compared(graph_us(layers(plain.handle)), graph_us(layers(cascade.handle)), (rows - 1) * shared, config)


def prompts(config: ModelConfig, rows: int, shared: int, new: int) -> dict[str, float]:
    """Measure plain and cascade attention of `new` prompt tokens per row in one layer, without CUDA graphs."""
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    pages, tables = pool(config, rows, shared, new)
    lens, cu = np.full(rows, shared + new, np.int32), np.arange(0, rows * new + 1, new, dtype=np.int32)
    on_device = [torch.from_numpy(x).to(CUDA) for x in (tables, lens, cu)]
    q = torch.randn(rows * new, heads[0], heads[2], device=CUDA).to(torch.bfloat16)
    space = AttentionWorkspace(rows, *heads, CUDA)
    plain, whole = (
        PrefillPlan(space, rows, tables.shape[1], *heads, SIZE, torch.bfloat16, CUDA, causal=causal) for causal in (True, False)
    )
    counts = -(-lens // SIZE)
    cascade = FlashInferCascade(plain, whole)

    def layers(handle: int) -> Callable[[], Any]:
        return lambda: [paged_prefill(q, pages, i, *on_device, heads[2] ** -0.5, handle) for i in range(LAYERS)]

    plain.update(cu, lens, tables)
    one = replay_us(layers(plain.handle))
    cascade.update(lens, cu, tables, shared_runs(tables, (lens - new) // SIZE, counts, lambda n, pages: True))
    return _compared(one, replay_us(layers(cascade.handle)), (rows - 1) * shared, config)


def _compared(plain: float, cascade: float, tokens: int, config: ModelConfig) -> dict[str, float]:
    spared = tokens * 2 * config.num_kv_heads * config.head_dim * 2 / 2**20
    return {"plain_us": round(plain / LAYERS, 2), "cascade_us": round(cascade / LAYERS, 2), "spared_mib": round(spared, 1)}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=list(SHAPES), help="sizes of this model (default: %(default)s)")
    parser.add_argument("--commit", help="commit to record (default: the commit that git reports)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    config = SHAPES[options.model]
    table = {f"decode {rows} rows, {shared} shared, {own} own": decode(config, rows, shared, own) for rows, shared, own in DECODE}
    table |= {f"prompts {rows} rows, {shared} shared, {new} new": prompts(config, rows, shared, new) for rows, shared, new in PROMPTS}
    for name, row in table.items():
        print(f"{name:48}", *(f"{key} {value:8.2f}" for key, value in row.items()))
    result = {
        "gpu": torch.cuda.get_device_name(), "commit": options.commit or commit(), "versions": versions(),
        "command": f"python benchmarks/cascade.py --model {options.model}", "table": table,
    }  # fmt: skip
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
