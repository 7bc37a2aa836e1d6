"""Measure the share of one of several ranks on one GPU, without the others: what `benchmarks/gpus.py` measures, but for the exchange.

    python -m benchmarks.rank_share --ranks 8 --model llama-3.3-70b --output benchmarks/results/h200-70b-of-8.json
    python -m benchmarks.rank_share --ranks 4 --layers 12 --model qwen3-235b-a22b --quantization fp8 --which b1

A step takes the time of its kernels and of all its launches, those of sums included, which wait for nobody (see `absent_ranks.py`).
`all_reduce_us` has these launches alone. With all ranks a step takes longer by what their sums take beyond them, and by what the ranks wait
for each other. `--layers` keeps the first layers, to compare kernels within seconds. Further options are those of `benchmarks/gpus.py`.
"""

import argparse

import torch

from benchmarks import gpus
from benchmarks.absent_ranks import mesh_of_one


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True, help="the number of ranks that share the model")
    parser.add_argument("--layers", type=int, help="layers of the model (default: all)")
    options, rest = parser.parse_known_args(arguments)
    if options.ranks < 2:
        parser.error(f"--ranks {options.ranks}: give at least 2")
    words = f"python -m benchmarks.rank_share --ranks {options.ranks}" + (f" --layers {options.layers}" if options.layers else "")
    gpus.main(rest, lambda: mesh_of_one(options.ranks, torch.device("cuda", 0)), words, options.layers)


if __name__ == "__main__":
    main()
