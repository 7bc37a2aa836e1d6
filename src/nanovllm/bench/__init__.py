"""`nanovllm bench` and `nanovllm profile`: how fast this machine runs a model, beside what its memory and arithmetic allow."""

from .command import add_arguments, main
from .engine import Engine, host_time
from .peers import PEERS, Peer
from .record import commit, record, versions
from .roofline import Ceiling, Work, limit_seconds, measure_ceiling, step_bytes
from .shapes import SHAPES, random_weights
from .workloads import WORKLOADS, measure, random_tokens, run_workloads

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
