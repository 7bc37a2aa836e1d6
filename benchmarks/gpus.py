"""Measure a model that several GPUs run together: the rates of `nanovllm bench`, and each all-reduce by its size.

    torchrun --nproc-per-node 2 benchmarks/gpus.py --model qwen3-8b --output benchmarks/results/h200x2-8b.json

Every rank runs the same program. `all_reduce_us` has, by bytes, the time of the forms of a sum over the ranks in a CUDA graph: `sum`
alone, `add`, the sum with the residual in one launch, and `add_norm`, that with the norm of rows of 4096. The embedding takes one `sum`,
each layer two `add` or `add_norm`. Each form is measured twice: `push`, where ranks store tensors into the others' memory, and `meet`,
where they read the others' memory once all have come. The larger sizes of `meet` are NCCL's. `pushed_bytes` and, for `add_norm`,
`pushed_rows_bytes` are where an engine changes.
`--sums` measures nothing else. `prompt_16k_ways_ms` has the time to the first token of a prompt of 16,384 tokens that runs whole, and as
two halves whose layers take turns. `roofline_percent` are the shares of the roofline of one GPU's part, in which the sums are not counted.
`kv_tokens` is the number of tokens whose KV fits into the pages: if it is small, most requests of `offline` wait for pages.
`host_us` are the microseconds of a step in which no call of the model runs: scheduling, page tables, the work on tokens.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanovllm.config import Mesh
from nanovllm.entrypoints.cli.bench import report
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.graph_timer import graph_us
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, random_weights
from nanovllm.entrypoints.cli.bench.roofline import held_bytes, measure_ceiling
from nanovllm.entrypoints.cli.bench.stopwatch import Engine
from nanovllm.entrypoints.cli.bench.workloads import measure
from nanovllm.entrypoints.process import freeze
from nanovllm.executor.executor import executor_of
from nanovllm.executor.graph_executor import GraphExecutor
from nanovllm.ops.distributed.collectives import all_reduce, all_reduce_add, all_reduce_add_norm
from nanovllm.ops.distributed.process_group import ProcessGroup, make_mesh
from nanovllm.ops.distributed.shared_memory import NUM_ROWS, PIECES
from nanovllm.ops.linear.quantise import KINDS

SIZES = tuple(1 << power for power in range(11, 24))  # bytes
WIDTH = 4096  # elements of a row
LONG, WHICH = 16384, "b1,b8,b64,offline"  # tokens of the long prompt, and workloads


def all_reduce_times(mesh: Mesh, group: ProcessGroup) -> dict[str, dict[str, float]]:
    """Microseconds of a sum over the ranks, by its form and its bytes in bfloat16."""
    found: dict[str, dict[str, float]] = {}
    engine, gain = (group.pushed, group.pushed_rows), torch.ones(WIDTH, device=group.device, dtype=torch.bfloat16)
    for way, most in (("push", PIECES // mesh.size), ("meet", 0)):
        group.pushed = group.pushed_rows = most
        for size in SIZES:
            y, x = (torch.randn(1, size // 2, device=group.device).to(torch.bfloat16) for _ in range(2))
            forms: dict[str, Callable[[int], object]] = {
                "sum": lambda _, y=y: all_reduce(y, mesh),
                "add": lambda at, y=y, x=x: all_reduce_add(y, x, mesh, at % 2),
            }
            if size >= 2 * WIDTH:
                rows, residual = y.view(1, -1, WIDTH), x.view(-1, WIDTH)
                forms["add_norm"] = lambda at, y=rows, x=residual: all_reduce_add_norm(y, None, x, gain, 1e-6, mesh, at % 2)
            for form, call in forms.items():
                serves = size <= most and (form != "add_norm" or size // (2 * WIDTH) <= NUM_ROWS // mesh.size)
                if way == "meet" or serves:
                    us = graph_us(lambda call=call: [call(at) for at in range(20)]) / 20
                    found.setdefault(f"{form}_{way}", {})[str(size)] = round(us, 2)
    group.pushed, group.pushed_rows = engine
    return found


def prompt_ms(engine: Engine, repeats: int = 3, first: int = 0) -> float:
    """Milliseconds from a prompt of `LONG` tokens to its first token, with nothing reused. Calls take `first`s that are 100 apart."""
    seconds = []
    for repeat in range(first, first + repeats + 1):
        prompt = [300 + (7 * at + repeat * 1009) % 9000 for at in range(LONG)]
        start = time.perf_counter()
        engine.generate([prompt], [1], 0.0)
        seconds.append(time.perf_counter() - start)
    return round(1e3 * statistics.median(seconds[1:]), 2)


def prompt_ways(engine: Engine, rounds: int = 5) -> dict[str, float]:
    """Milliseconds of the prompt of `prompt_ms`, run whole and as two halves whose layers take turns. The rounds alternate."""
    executor = executor_of(engine.state)
    assert isinstance(executor, GraphExecutor)
    chosen, found = executor.halves_from, dict[str, list[float]]()
    for turn in range(rounds):
        for at, (way, least) in enumerate({"whole": None, "halves": 2}.items()):
            executor.halves_from = least
            found.setdefault(way, []).append(prompt_ms(engine, 3, 100 * (1 + 2 * turn + at)))
    executor.halves_from = chosen
    return {way: round(statistics.median(each), 2) for way, each in found.items()}


def main(
    arguments: list[str] | None = None, make: Callable[[], Mesh] = make_mesh, share: str | None = None, layers: int | None = None
) -> None:
    """Run the command line.

    Args:
        arguments: Its words; None: those of the process.
        make: What makes the mesh.
        share: How the command begins that is recorded, if only one rank of the mesh is there. None: `torchrun` has started all.
        layers: The first layers of the model, so many; None: all.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b", help="the shape (default: %(default)s)")
    parser.add_argument("--quantization", choices=KINDS, help="round the matrices to 8 or 4 bits")
    parser.add_argument("--which", default=WHICH, help="workloads of nanovllm bench (default: %(default)s)")
    parser.add_argument("--num-pages", type=int, help="pages of KV (default: as many as fit)")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each workload (default: %(default)s)")
    parser.add_argument("--sums", action="store_true", help="measure the sums over the ranks alone, without a model")
    parser.add_argument("--prompts", action="store_true", help="of an engine, measure the long prompts alone")
    parser.add_argument("--commit", help="the commit to record (default: the one that git reports)")
    parser.add_argument("--output", type=Path, help="write the result to this JSON file")
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    mesh = make()
    group = mesh.owner
    assert isinstance(group, ProcessGroup)
    device = group.device
    figures: dict[str, Any] = {"gpus": mesh.size} if share is None else {"gpus": 1, "share_of": mesh.size}
    figures |= {} if layers is None else {"layers": layers}
    if options.sums:
        figures |= {"all_reduce_us": all_reduce_times(mesh, group), "pushed_bytes": group.pushed, "pushed_rows_bytes": group.pushed_rows}
        if not mesh.rank:
            print(json.dumps(figures, indent=1), flush=True)
        return _leave()
    model = random_weights(options.model, device=device, quantization=options.quantization, mesh=mesh, layers=layers)
    loaded = time.perf_counter()
    ceiling = measure_ceiling(device, model.dtype)  # before the engine takes the memory
    began = time.perf_counter()
    engine = Engine(model, num_pages=options.num_pages, max_model_len=min(model.config.max_position_embeddings, LONG + 1024), check=False)
    engine.generate([[300] * 32], [2], 0.0)
    figures["start_s"] = {"mesh_and_weights": round(loaded - begin, 2), "engine": round(time.perf_counter() - began, 2)}
    freeze()  # as `nanovllm bench` does
    if options.prompts:
        figures["prompt_16k_ways_ms"] = prompt_ways(engine)
        if not mesh.rank:
            print(json.dumps(figures), flush=True)
        del engine, model
        return _leave()
    figures |= {"all_reduce_us": all_reduce_times(mesh, group), "pushed_bytes": group.pushed, "pushed_rows_bytes": group.pushed_rows}
    held, shares = held_bytes(model.params, model.config, model.dtype), dict[str, float]()
    host = dict[str, float]()
    figures |= {"roofline": report.ceiling_json(ceiling), "roofline_percent": shares, "host_us": host}
    figures["kv_tokens"] = engine.state.config.num_pages * engine.state.config.page_size

    def note(line: str | None = None) -> None:
        """Print a line, and write what there is so far: a run may be ended."""
        if mesh.rank:
            return
        print(line or json.dumps(figures), flush=True)
        if options.output is not None:
            command = share or f"torchrun --nproc-per-node {mesh.size} benchmarks/gpus.py"
            command += f" --model {options.model}"
            command += "" if options.which == WHICH else f" --which {options.which}"
            command += "" if options.quantization is None else f" --quantization {options.quantization}"
            options.output.write_text(json.dumps(record(model, figures, command, options.commit), indent=1) + "\n")

    for one in measure(engine.generate, options.which.split(","), model.config.vocab_size, options.repeats, lambda: engine.spent):
        figures[one.key] = one.figure
        row = report.row(one, model.config, model.dtype, ceiling, held)
        shares[one.key] = row["roofline_percent"]
        if row["host_percent"] is not None:
            host[one.key] = round(10 * row["host_percent"] * row["step_ms"], 1)
        note(f"{one.key}: {one.figure:,}")
    figures["prompt_16k_ms"] = prompt_ms(engine)
    if mesh.size > 1:
        figures["prompt_16k_ways_ms"] = prompt_ways(engine)
    note()
    del engine, model
    _leave()


def _leave() -> None:
    gc.collect()  # NCCL waits for the end of graphs that use it
    if dist.is_initialized():
        torch.cuda.synchronize()
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
