"""A call captured as a CUDA graph, and how long the device takes for it."""

from collections.abc import Callable
from statistics import median
from typing import TypeVar

import torch

T = TypeVar("T")


def captured(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of a call, which refuses whatever waits for the device, and what its replays write to. The call runs once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def graph_us(call: Callable[[], object], repeats: int = 10) -> float:
    """Microseconds of a call, replayed from a graph: the median of five runs of `repeats`."""
    graph, _ = captured(call)
    return replay_us(graph.replay, repeats)


def replay_us(call: Callable[[], object], repeats: int = 10) -> float:
    """Microseconds of a call as the device runs it: the median of five runs of `repeats`."""
    times = []
    call()
    for _ in range(5):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(repeats):
            call()
        last.record()
        last.synchronize()
        times.append(1e3 * first.elapsed_time(last) / repeats)
    return median(times)
