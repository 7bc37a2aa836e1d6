"""Capture a call as a CUDA graph, and measure its time on the device."""

from collections.abc import Callable
from statistics import median
from typing import TypeVar

import torch

T = TypeVar("T")


def captured(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Run a call once, then capture it as a CUDA graph.

    Capturing fails if the call waits for the device.

    Returns:
        The graph, and the result of the captured call. Each replay writes into the tensors of this result.
    """
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
    """Microseconds per call, replayed from a graph: the median of five runs of `repeats` calls."""
    graph, _ = captured(call)
    return replay_us(graph.replay, repeats)


def replay_us(call: Callable[[], object], repeats: int = 10) -> float:
    """Microseconds per call by the device's clock: the median of five runs of `repeats` calls."""
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
