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
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nanovllm.state.disk_pages import READ_LATENCY
from nanovllm.state.offload import LATENCY
from nanovllm.state.split_reads import Paces, pages_to_load

RESULTS = Path(__file__).resolve().parent / "results"
TOKENS, PAGE, GB = 16384, 16, 1e9
HOST, DISKS = 48.6, (3.0, 7.0, 14.0)  # GB/s: copies from pinned memory as measured on an H200; NVMe of three generations


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a dense model in bfloat16, and the file of the run that recorded its prompt; None: none was."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    file: str | None = None

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV for each token."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2

    @property
    def flops(self) -> float:
        """Operations for each token of a prompt of `TOKENS` tokens: products with the weights, and causal attention."""
        matrices = self.hidden * (2 * self.heads * self.head_dim + 2 * self.kv_heads * self.head_dim + 3 * self.ffn)
        return self.layers * (2.0 * matrices + 2.0 * TOKENS * self.heads * self.head_dim)


MODELS: Mapping[str, Shape] = MappingProxyType(
    {
        "Qwen3-0.6B": Shape(layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, ffn=3072, file="h200-bench.json"),
        "Qwen3-8B": Shape(layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=12288, file="h200-8b.json"),
        "Qwen3-32B": Shape(layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, ffn=25600),
        "Llama-3.3-70B": Shape(layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672),
    }
)
SOURCE = "Qwen3-8B"  # of which the others reach the share


def tokens_per_second(name: str) -> float:
    """Prompt tokens per second on an H200."""
    shape = MODELS[name]
    if shape.file is None:
        return tokens_per_second(SOURCE) * MODELS[SOURCE].flops / shape.flops
    return 1e3 * TOKENS / json.loads((RESULTS / shape.file).read_text())["ttft_16k_cold_ms"]


def from_disk(shape: Shape, rate: float, disk: float) -> dict[str, Any]:
    """How a prompt is filled from a disk of so many GB/s."""
    page = PAGE * shape.kv_bytes
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
    for name, shape in MODELS.items():
        rate = tokens_per_second(name)
        saved = 1 / rate - shape.kv_bytes / (HOST * GB)  # seconds that each token saves out of host memory
        rows.append(
            {
                "model": name,
                "kv_bytes": shape.kv_bytes,
                "measured": shape.file is not None,
                "tok_s": round(rate),
                "break_even_gb_s": round(shape.kv_bytes * rate / GB, 1),
                "run_ms": round(1e3 * TOKENS / rate, 1),
                "host_ms": round(1e3 * (LATENCY + TOKENS * shape.kv_bytes / (HOST * GB)), 1),
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
