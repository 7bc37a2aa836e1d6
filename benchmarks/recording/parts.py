"""The parts of `benchmarks/record_gpu.py`: what each runs, how long it may take, and what it needs.

They start in this order. The first builds FlashInfer's kernels, alone: figures that are taken meanwhile are of other kernels. Parts of
several cards are next, because cards would be idle while a part waits for several. Quiet parts are last, because the other cards are idle
meanwhile. Limits leave room for a machine that has built none of our kernels yet.
"""

import os
import sys
from collections.abc import Mapping
from types import MappingProxyType

from benchmarks.recording.choose import Part

PYTHON = (sys.executable, "-m")
TORCHRUN = (*PYTHON, "torch.distributed.run", "--standalone", "--nproc-per-node")  # --standalone takes a free port
EIGHT = ("--model", "qwen3-8b")
SMALL = ("--model", "qwen3-0.6b")
WORKERS = max(8, min(28, (os.cpu_count() or 1) - 4))
DECODE = "b1,b8,b64,offline"
TIERS = ("benchmarks/kv_tiers.py", "--prompt", "16384", "--host-kv-gib", "32", "--which", "first_tokens")
USERS = (
    *("benchmarks/kv_tiers.py", *EIGHT, "--which", "users", "--users", "200", "--visits", "200", "--at-once", "8"),
    *("--turn", "64", "--reply", "64", "--ways"),
)
BESIDE = ("benchmarks/kv_beside.py", "--host-kv-gib", "40", "--ways", "alone,device,host")
RESTART = ("benchmarks.restart", "--device", "cuda", "--repeats", "2", "--host-kv-gib", "16")


def bench(name: str, which: str, *more: str, limit: float = 300, quiet: bool = False, by_name: bool = False) -> Part:
    """A part that runs `nanovllm bench`."""
    return Part(name, (*PYTHON, "nanovllm", "bench", "--which", which, *more), limit, quiet=quiet, by_name=by_name)


def ranks(name: str, cards: int, model: str, *more: str, limit: float = 400, by_name: bool = False) -> Part:
    """A part that runs a model on several cards."""
    command = (*TORCHRUN, str(cards), "benchmarks/gpus.py", "--model", model, *more)
    return Part(f"{name}-x{cards}", command, limit, cards, by_name=by_name)


def share(name: str, of: int, model: str, *more: str, limit: float = 400) -> Part:
    """A part that runs the share of one of several ranks on one card."""
    command = (*PYTHON, "benchmarks.rank_share", "--ranks", str(of), "--model", model, *more)
    return Part(f"{name}-of-{of}", command, limit, by_name=True)


def faults(name: str, cards: int, ranks: int) -> Part:
    """A part that hurts ranks. With cards for two engines, it hurts one of two."""
    return Part(name, (*PYTHON, "benchmarks.rank_faults", *SMALL, "--tensor-parallel-size", str(ranks)), 400, cards)


def two_ranks(name: str, limit: float, *more: str) -> Part:
    """A part that runs the program of tests for two ranks."""
    return Part(name, (*TORCHRUN, "2", "tests/gpu/two_ranks.py", *more), limit, cards=2, figures=False)


def script(name: str, *words: str, limit: float = 300, quiet: bool = False) -> Part:
    """A part that runs a program of `benchmarks/`: a file, or a module by its name."""
    return Part(name, (sys.executable, *words) if words[0].endswith(".py") else (*PYTHON, *words), limit, quiet=quiet)


def tune(name: str, *model: str) -> Part:
    """A part that tunes kernels on random weights. Its file is no figure, and a run goes on from an older file."""
    command = (*PYTHON, "nanovllm", "tune", *model, "--output", f"OUT/gpu-{name}.json")
    return Part(name, command, 600, figures=False, by_name=True)


TESTS = Part(
    "tests",
    (
        *(*PYTHON, "pytest", "-q", "-m", "gpu", "tests/gpu", "-n", str(WORKERS), "--dist", "worksteal"),
        *("-p", "no:benchmark", "-p", "benchmarks.recording.outcomes"),  # pytest-benchmark warns of workers, and warnings are errors
        *("--outcomes=OUT/gpu-tests.jsonl", "--junitxml=OUT/gpu-tests.xml"),
    ),
    900,
    figures=False,
    environment=(("OMP_NUM_THREADS", "2"),),
)
LIST = (
    script("kernels", "benchmarks.recording.kernels", limit=420, quiet=True),
    *(ranks(name, 8, model) for name, model in (("8b", "qwen3-8b"), ("32b", "qwen3-32b"), ("70b", "llama-3.3-70b"))),
    ranks("235b-fp8", 8, "qwen3-235b-a22b", "--quantization", "fp8", limit=600),
    faults("rank-faults-x8", 8, ranks=4),
    *(ranks(name, 4, model) for name, model in (("8b", "qwen3-8b"), ("32b", "qwen3-32b"), ("70b", "llama-3.3-70b"))),
    ranks("235b-fp8", 4, "qwen3-235b-a22b", "--quantization", "fp8", limit=600),
    faults("rank-faults-x4", 4, ranks=2),
    two_ranks("two-ranks", 600),
    two_ranks("two-ranks-halves", 400, "--halves"),
    ranks("8b", 1, "qwen3-8b", by_name=True),  # the same program on one card: its rates, and the host's time
    ranks("8b", 2, "qwen3-8b"),
    ranks("32b", 2, "qwen3-32b"),
    ranks("70b", 2, "llama-3.3-70b", by_name=True),  # needs cards of more than 80 GB
    ranks("235b-fp8", 2, "qwen3-235b-a22b", "--quantization", "fp8", limit=600, by_name=True),  # needs cards of some 140 GB
    faults("rank-faults", 2, ranks=2),
    *(share(name, of, model) for of in (4, 8) for name, model in (("8b", "qwen3-8b"), ("32b", "qwen3-32b"), ("70b", "llama-3.3-70b"))),
    *(share("235b-fp8", of, "qwen3-235b-a22b", "--quantization", "fp8", limit=600) for of in (4, 8)),
    TESTS,
    tune("tune-0.6b", *SMALL),
    tune("tune-0.6b-fp8", *SMALL, "--quantization", "fp8"),
    tune("tune-8b-fp8", *EIGHT, "--quantization", "fp8"),
    tune("tune-8b-int4", *EIGHT, "--quantization", "int4"),
    bench("8b", f"{DECODE},prefix", *EIGHT, "--repeats", "1"),
    bench("8b-fp8", f"{DECODE},prefix", *EIGHT, "--quantization", "fp8"),
    bench("8b-fp8-activations", DECODE, *EIGHT, "--quantization", "fp8", "--fp8-activations"),
    bench("8b-int8", DECODE, *EIGHT, "--quantization", "int8"),
    bench("8b-int4", DECODE, *EIGHT, "--quantization", "int4"),
    bench("8b-int4-head", DECODE, *EIGHT, "--quantization", "int4", "--quantize-head"),
    bench("30b-a3b", "b1,b8,b64", "--model", "qwen3-30b-a3b", "--repeats", "1", by_name=True),  # as 70b-x2
    bench("30b-a3b-fp8", "b1,b8,b64", "--model", "qwen3-30b-a3b", "--quantization", "fp8", "--repeats", "1", by_name=True),  # as 70b-x2
    bench("0.6b-fp8", DECODE, *SMALL, "--quantization", "fp8"),
    script("kv-dtype", "benchmarks/kv_dtype.py", *SMALL),
    script("kv-dtype-8b", "benchmarks/kv_dtype.py", *EIGHT),
    script("long-rows", "benchmarks/long_rows.py"),
    script("embed", "benchmarks/embed.py", *SMALL, "--batches", "1,8,64", quiet=True),
    bench("start", "start,bare", quiet=True),
    bench("serving", f"{DECODE},fewshot,burst,ttft", quiet=True),
    bench("prefix", "prefix,host", quiet=True),
    script("latency", "benchmarks/latency.py", *EIGHT, "--seconds", "8", "--knobs", "inf,50,35,20", quiet=True),
    script("http", "benchmarks.http_bench", *SMALL, limit=400, quiet=True),
    script("constrained", "benchmarks.constrained", *SMALL, quiet=True),
    script("users-device", *USERS, "device_only"),
    script("users-host", *USERS, "host_memory", "--host-kv-gib", "180"),  # of the host's memory
    # The histories have 240 GB: the device holds a quarter, host memory 161 GB, and the folder what leaves host memory.
    script("users-disk", *USERS, "disk", "--host-kv-gib", "150", "--kv-dir-gib", "60"),
    script("restart-0.6b", *RESTART, *SMALL),
    script("restart-8b", *RESTART, *EIGHT),
    script("kv-tiers", *TIERS, *EIGHT, quiet=True),
    script("kv-tiers-0.6b", *TIERS, *SMALL, quiet=True),
    script("kv-beside", *BESIDE, *EIGHT, "--repeats", "2", limit=400, quiet=True),
    script("kv-beside-0.6b", *BESIDE, *SMALL, quiet=True),
    script("soak", "benchmarks.soak", *SMALL, "--minutes", "10", limit=780, quiet=True),
)
PARTS: Mapping[str, Part] = MappingProxyType({part.name: part for part in LIST})
# The figures of so many cards, and those of the shares of one of so many ranks, in one word.
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {f"x{cards}": tuple(part.name for part in LIST if part.cards == cards and part.figures) for cards in (2, 4, 8)}
    | {f"of-{ranks}": tuple(part.name for part in LIST if part.name.endswith(f"-of-{ranks}")) for ranks in (4, 8)}
)
