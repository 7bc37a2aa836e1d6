"""From how many tokens, and from which read rate on, loading the KV of a prompt is faster than running it. Arithmetic: nothing is run.

    python benchmarks/break_even.py --output benchmarks/results/break-even.json
    python benchmarks/write_docs.py

A prompt of 16,384 tokens takes what `nanovllm bench` recorded, where it did. Other models take the time of the recorded one at the share
of the card's matrix products that it reached: their operations for each token, over those per second. The choice is the engine's own
(`state/split_reads.py`), for an idle engine whose host memory has none of the pages.
"""

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES
from nanovllm.state.disk_pages import READ_LATENCY
from nanovllm.state.kv_cache import bytes_per_page
from nanovllm.state.offload import LATENCY
from nanovllm.state.split_reads import Paces, pages_to_load

RESULTS = Path(__file__).resolve().parent / "results"
TOKENS, PAGE, GB = 16384, 16, 1e9
HOST, DISKS = 48.6, (3.0, 7.0, 14.0)  # GB/s: copies from pinned memory as measured on an H200; NVMe of three generations


# by the name of a shape of `nanovllm bench`: the model, and the file of the run that recorded its prompt; None: none was
MODELS: Mapping[str, tuple[str, str | None]] = MappingProxyType(
    {
        "qwen3-0.6b": ("Qwen3-0.6B", "h200-bench.json"),
        "qwen3-8b": ("Qwen3-8B", "h200-8b.json"),
        "qwen3-32b": ("Qwen3-32B", None),
        "llama-3.3-70b": ("Llama-3.3-70B", None),
    }
)
SOURCE = "qwen3-8b"  # of which the others reach the share


def kv_bytes(shape: str) -> int:
    """Bytes of KV for each token, in bfloat16."""
    return bytes_per_page(SHAPES[shape], page_size=1, dtype=torch.bfloat16)


def flops(shape: str) -> float:
    """Operations for each token of a prompt of `TOKENS` tokens: products with the weights, and causal attention."""
    config = SHAPES[shape]
    heads = 2 * config.num_heads * config.head_dim + 2 * config.num_kv_heads * config.head_dim
    matrices = config.hidden_size * (heads + 3 * config.intermediate_size)
    return config.num_layers * (2.0 * matrices + 2.0 * TOKENS * config.num_heads * config.head_dim)


def tokens_per_second(shape: str) -> float:
    """Prompt tokens per second on an H200."""
    _, file = MODELS[shape]
    if file is None:
        return tokens_per_second(SOURCE) * flops(SOURCE) / flops(shape)
    return 1e3 * TOKENS / json.loads((RESULTS / file).read_text())["ttft_16k_cold_ms"]


def from_disk(shape: str, rate: float, disk: float) -> dict[str, Any]:
    """How a prompt is filled from a disk of so many GB/s."""
    page = PAGE * kv_bytes(shape)
    paces = Paces(run=PAGE / rate, read=page / (disk * GB), copy=page / (HOST * GB), before_read=READ_LATENCY)
    count = TOKENS // PAGE
    start, stop = pages_to_load(paces, [True] * count, count)
    ms = paces.running(count) if not stop else paces.splitting(count, start, count - start) if start else paces.reading(count, stop, stop)
    return {
        "gb_s": disk,
        "read_ms": round(1e3 * (READ_LATENCY + count * paces.read + LATENCY + count * paces.copy), 1),
        "way": "split" if start else "read" if stop else "run",
        "run_tokens": start * PAGE if stop else TOKENS,
        "ms": round(1e3 * ms, 1),
    }


def derived() -> dict[str, Any]:
    """All figures."""
    rows = []
    for shape, (name, file) in MODELS.items():
        rate, size = tokens_per_second(shape), kv_bytes(shape)
        saved = 1 / rate - size / (HOST * GB)  # seconds that each token saves out of host memory
        rows.append(
            {
                "model": name,
                "kv_bytes": size,
                "measured": file is not None,
                "tok_s": round(rate),
                "break_even_gb_s": round(size * rate / GB, 1),
                "run_ms": round(1e3 * TOKENS / rate, 1),
                "host_ms": round(1e3 * (LATENCY + TOKENS * size / (HOST * GB)), 1),
                "host_from_tokens": None if saved <= 0 else math.ceil(LATENCY / saved / PAGE) * PAGE,
                "disks": [from_disk(shape, rate, disk) for disk in DISKS],
            }
        )
    return {"command": "python benchmarks/break_even.py", "gpu": "NVIDIA H200", "host_gb_s": HOST, "tokens": TOKENS, "rows": rows}


def main() -> None:
    """Write the figures to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "break-even.json")
    parser.parse_args().output.write_text(json.dumps(derived(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
