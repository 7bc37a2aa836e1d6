"""Measure operations on chunks: compose, the first token after it, save, load and sharing. The numbers are medians of the repeats.

python benchmarks/chunks.py --output benchmarks/results/h200-chunks.json
python benchmarks/chunks.py --model tiny --length 256 --device cpu
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

import nanovllm as nv
from nanovllm import ops
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, random_weights
from nanovllm.entrypoints.cli.bench.workloads import random_tokens
from nanovllm.state.kv_cache import bytes_per_page

PARTS = 16
ONE = nv.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Return the seconds of a call, the device's work included, and its result."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result


def copy_rate(device: torch.device) -> float:
    """Return the bytes that a plain copy reads and writes per second."""
    source = torch.empty((1 << 30) if device.type == "cuda" else (1 << 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [timed(lambda: target.copy_(source), device)[0] for _ in range(6)]
    return 2 * source.numel() / float(np.median(seconds[1:]))


def measure(model: nv.Model, length: int, repeats: int, folder: Path, disk: Path) -> dict[str, float]:
    """Measure `PARTS` chunks of `length` tokens each. Files go to `folder`, which is in memory, and once to `disk`."""
    device, total, size, random = model.device, PARTS * length, 16, Random(0)
    state = nv.init_state(model, num_pages=6 * total // size + 64, page_size=size, max_model_len=total + 256, max_num_seqs=64)
    each = bytes_per_page(model.config, page_size=size, dtype=model.dtype) // size
    vocabulary, figures, times = model.config.vocab_size, {}, {}

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    chunks, path = [], folder / "chunk.safetensors"
    for _ in range(PARTS):
        state, chunk = nv.prefill(model, state, random_tokens(random, length, vocabulary))
        chunks.append(chunk)
    tail = random_tokens(random, 16, vocabulary)
    for repeat in range(repeats + 1):
        composed, (state, whole) = timed(lambda state=state: nv.compose(model, state, chunks), device)
        first, state = timed(lambda state=state, whole=whole: first_token(model, state, [whole, tail]), device)
        again, (state, eight) = timed(lambda state=state: nv.compose(model, state, chunks, recompute=8), device)
        saved, _ = timed(lambda state=state, whole=whole: nv.save_chunk(state, whole, path), device)
        loaded, (state, copy) = timed(lambda state=state: nv.load_chunk(model, state, path), device)
        filled, (state, fresh) = timed(lambda state=state: nv.prefill(model, state, random_tokens(random, total, vocabulary)), device)
        if repeat:  # the first repeat is the warm-up
            for name, seconds in (
                ("compose", composed), ("first_token_after_compose", first), ("compose_recompute_8", again), ("save", saved),
                ("load", loaded), ("prefill", filled),
            ):  # fmt: skip
                note(name, seconds)
        for chunk in (whole, eight, copy, fresh):
            state = nv.release(state, chunk)
    state, whole = nv.compose(model, state, chunks)
    saved, _ = timed(lambda: nv.save_chunk(state, whole, disk / path.name), device)
    note("save_to_disk", saved)
    forget(disk / path.name)
    loaded, (state, copy) = timed(lambda: nv.load_chunk(model, state, disk / path.name), device)
    note("load_from_disk", loaded)
    state = nv.release(nv.release(state, whole), copy)
    figures.update({f"{name}_ms": round(1e3 * float(np.median(values)), 2) for name, values in times.items()})
    moved = 2 * each * (total - length)  # the first chunk's pages are shared, so its tokens do not move
    figures["tokens"], figures["moved_mb"] = total, round(moved / 1e6, 1)
    figures["compose_gb_s"] = round(moved / 1e6 / figures["compose_ms"], 1)
    figures["copy_gb_s"] = round(copy_rate(device) / 1e9, 1)
    figures["compose_of_copy"] = round(figures["compose_gb_s"] / figures["copy_gb_s"], 3)
    figures["move_kv_of_copy"] = round(move_rate(model, state, total) / 1e9 / figures["copy_gb_s"], 3)
    figures["file_mb"] = round(path.stat().st_size / 1e6, 1)
    return figures | sharing(model, random)


def forget(path: Path) -> None:
    """Remove a file from the system's page cache, as far as the system allows it, so that the next reader reads the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def first_token(model: nv.Model, state: nv.EngineState, context: list[Any]) -> nv.EngineState:
    """Submit a request for one token and step until it has ended."""
    state, _ = nv.submit(model, state, context, ONE)
    while state.waiting or state.running:
        state, _ = nv.step(model, state)
    return state


def move_rate(model: nv.Model, state: nv.EngineState, num_tokens: int) -> float:
    """Return the bytes that `move_kv` alone reads and writes per second, for pages in random order. It overwrites the pool."""
    (pages,) = state.kv.pools
    size = pages.shape[4]
    order = np.random.default_rng(0).permutation(2 * (num_tokens // size)).astype(np.int32)
    slots = torch.from_numpy((order[:, None] * size + np.arange(size, dtype=np.int32)).ravel()).to(model.device)
    source, target = slots.view(2, -1)
    shift = torch.full_like(source, 1000)
    seconds = [timed(lambda: ops.move_kv(pages, source, target, shift, model.params.inv_freq), model.device)[0] for _ in range(6)]
    return 2 * pages[:, 0].numel() // size * len(source) * pages.element_size() / float(np.median(seconds[1:]))


def sharing(model: nv.Model, random: Random) -> dict[str, float]:
    """Count the pages of 64 requests of 64 tokens that share one prompt of 1,024 tokens, and of the same requests without sharing."""
    size, prompt, own, requests = 16, 1024, 64, 64
    alone = -(-(prompt + own) // size) * requests
    state = nv.init_state(model, num_pages=alone, page_size=size, max_model_len=prompt + own, max_num_seqs=requests, compile=False)
    state, system = nv.prefill(model, state, random_tokens(random, prompt, model.config.vocab_size))
    for _ in range(requests):
        state, _ = nv.prefill(model, state, random_tokens(random, own, model.config.vocab_size), after=system)
    used = alone - state.pool.pages.num_free
    return {"pages_shared": used, "pages_alone": alone, "pages_saved_share": round(1 - used / alone, 4)}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=["tiny", *SHAPES], help="sizes of this model with random weights, or tiny")
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--length", type=int, default=1024, help="tokens of each of the 16 chunks (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="repeats, whose median is reported (default: %(default)s)")
    parser.add_argument("--disk", type=Path, help="a folder on a disk, for one file (default: the system's folder for temporary files)")
    parser.add_argument("--commit", help="commit to record (default: the commit that git reports)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    load = nv.load_model if options.model == "tiny" else random_weights
    model = load(options.model, device=options.device)
    memory, shm = Path("/dev/shm"), os.access("/dev/shm", os.W_OK)
    with tempfile.TemporaryDirectory(dir=memory if shm else None) as folder, tempfile.TemporaryDirectory(dir=options.disk) as disk:
        figures = measure(model, options.length, options.repeats, Path(folder), Path(disk))
    result = record(model, figures, f"python benchmarks/chunks.py --model {options.model} --length {options.length}", options.commit)
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
