"""`CapturedStep`: a CUDA graph of a decode step, the memory that it reads and writes, and its results on the host."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from nanovllm.executor.decode import DecodeCarry, DecodeOutput
from nanovllm.executor.executor import Drawn
from nanovllm.models.common.batch import Batch
from nanovllm.sampling import tensors
from nanovllm.types import Tensor

RESULTS = ("token_ids", "logprobs", "top_ids", "top_logprobs")  # what the host sees of a step
MOVED = ("input_ids", "positions", "slots", "seq_lens")  # what a step moves on by itself
Way = Literal["fused", "planned", "shared"]  # how a step attends: by `rope_attend`, FlashInfer's plan, or reading shared pages once


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """What a graph is for: rows, what its sampling does, and how it attends."""

    size: int
    features: tensors.Features
    way: Way


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fetched:
    """Results on their way to the host: pinned memory, and the event after which they are there."""

    event: torch.cuda.Event
    token_ids: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None

    def wait(self, rows: int) -> Drawn:
        """The results of the first rows, in memory of their own: the pinned one is filled again by the next step."""
        self.event.synchronize()

        def copied(tensor: Tensor | None) -> np.ndarray | None:
            return None if tensor is None else tensor[:rows].numpy().copy()

        return Drawn(
            token_ids=self.token_ids[:rows].numpy().copy(),
            logprobs=copied(self.logprobs),
            top_ids=copied(self.top_ids),
            top_logprobs=copied(self.top_logprobs),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapturedStep:
    """A graph, the carry whose memory it reads and writes, the memory of its results, and where they go on the host."""

    kind: StepKind
    graph: torch.cuda.CUDAGraph
    carry: DecodeCarry
    out: DecodeOutput
    fetched: Fetched

    def fetch(self) -> Fetched:
        """Send the results of the step that was launched last; a step launched after this may overwrite them on the device."""
        for name in RESULTS:
            source, target = getattr(self.out, name), getattr(self.fetched, name)
            if source is not None:
                target.copy_(source, non_blocking=True)
        self.fetched.event.record()
        return self.fetched


def moving_tensors(batch: Batch) -> list[Tensor]:
    """What a step moves on by itself."""
    return [*(getattr(batch, name) for name in MOVED), *(() if batch.windowed is None else (batch.windowed.slots,))]


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """`torch.cuda.graph` without giving cached memory back first, which for every graph of an engine takes a second or two in all."""
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool)
        try:
            yield
        finally:
            graph.capture_end()


def pinned_results(out: DecodeOutput) -> Fetched:
    """Pinned memory for a step's results."""

    def pinned(tensor: Tensor | None) -> Any:
        return None if tensor is None else torch.empty_like(tensor, device="cpu", pin_memory=True)

    return Fetched(event=torch.cuda.Event(), **{name: pinned(getattr(out, name)) for name in RESULTS})
