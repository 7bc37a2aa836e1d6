"""`nanovllm bench` and `nanovllm profile`: how fast this machine runs a model, beside what its memory and arithmetic allow."""

from nanovllm.entrypoints.cli.bench.command import add_arguments, main
from nanovllm.entrypoints.cli.bench.environment import commit, record, versions
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, random_weights
from nanovllm.entrypoints.cli.bench.peers import PEERS, Peer
from nanovllm.entrypoints.cli.bench.roofline import Ceiling, Work, limit_seconds, measure_ceiling, step_bytes
from nanovllm.entrypoints.cli.bench.stopwatch import Engine, host_time
from nanovllm.entrypoints.cli.bench.workloads import WORKLOADS, measure, random_tokens, run_workloads

__all__ = [
    "PEERS",
    "SHAPES",
    "WORKLOADS",
    "Ceiling",
    "Engine",
    "Peer",
    "Work",
    "add_arguments",
    "commit",
    "host_time",
    "limit_seconds",
    "main",
    "measure",
    "measure_ceiling",
    "random_tokens",
    "random_weights",
    "record",
    "run_workloads",
    "step_bytes",
    "versions",
]
