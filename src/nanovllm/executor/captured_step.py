"""`CapturedStep`: the CUDA graph of a decode step, the memory that it reads and writes, and its results on the host."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch.utils import _pytree as pytree

from nanovllm.executor.decode_carry import DecodeCarry, DecodeOutput
from nanovllm.executor.executor import Drawn
from nanovllm.sampling import tensors
from nanovllm.sampling.process_logits import LogitsProcessor
from nanovllm.types import Tensor

R = TypeVar("R")
RESULTS = ("token_ids", "logprobs", "top_ids", "top_logprobs")  # the results of a step that the host fetches
MOVED = ("input_ids", "positions", "slots", "seq_lens")  # the tensors that a step updates for the next step
Way = Literal["fused", "planned", "shared"]  # by `rope_attend`, by FlashInfer's plan, or reading shared pages once


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """The key of a captured graph: its number of rows, its sampling features, its way to attend, and the functions before sampling."""

    size: int
    features: tensors.Features
    way: Way
    processors: tuple[LogitsProcessor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fetched:
    """Results on their way to the host: pinned memory, and the event after which it is filled."""

    event: torch.cuda.Event
    token_ids: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None

    def wait(self, rows: int) -> Drawn:
        """Wait, and return copies of the results of the first rows. Copies, because the next step fills the pinned memory again."""
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
    """A graph, the carry whose memory it reads and writes, the memory of its results, and the pinned memory for them on the host."""

    kind: StepKind
    graph: torch.cuda.CUDAGraph
    carry: DecodeCarry
    out: DecodeOutput
    fetched: Fetched

    def fetch(self) -> Fetched:
        """Copy the results of the last launched step to the host. A step that is launched afterwards may overwrite them on the device."""
        for name in RESULTS:
            source, target = getattr(self.out, name), getattr(self.fetched, name)
            if source is not None:
                target.copy_(source, non_blocking=True)
        self.fetched.event.record()
        return self.fetched


def moving_tensors(carry: DecodeCarry) -> list[Tensor]:
    """The tensors that a step updates in place for the next step."""
    batch, carried = carry.batch, pytree.tree_leaves([one.carried for one in carry.processing if one.carried is not None])
    return [*(getattr(batch, name) for name in MOVED), *(() if batch.windowed is None else (batch.windowed.slots,)), *carried]


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Do as `torch.cuda.graph`, but keep cached memory: giving it back for every graph of an engine takes one or two seconds in total.

    cuBLAS gets a workspace in the graph's own memory. PyTorch frees workspaces whenever somebody clears them, which `torch.compile` does
    before it records a graph; a graph that was recorded over such a workspace would then write into memory of others.
    """
    collects = gc.isenabled()
    gc.disable()  # memory that the collector frees while a graph is recorded breaks the record
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # other threads may allocate and wait meanwhile
            try:
                yield
            finally:
                graph.capture_end()
    finally:
        torch._C._cuda_clearCublasWorkspaces()
        if collects:
            gc.enable()


def recorded(pool: Any, stream: torch.cuda.Stream, run: Callable[[], R]) -> tuple[torch.cuda.CUDAGraph, R]:
    """Record what `run` launches. Returns the graph and the result of `run`.

    PyTorch gives no cached memory back while a graph is recorded. So if memory does not suffice, it is given back, and the graph recorded
    again.
    """

    def once() -> tuple[torch.cuda.CUDAGraph, R]:
        graph = torch.cuda.CUDAGraph()
        with recording(graph, pool, stream):
            return graph, run()

    try:
        return once()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return once()


def pinned_results(out: DecodeOutput) -> Fetched:
    """Pinned memory for a step's results."""

    def pinned(tensor: Tensor | None) -> Any:
        return None if tensor is None else torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)

    return Fetched(event=torch.cuda.Event(), **{name: pinned(getattr(out, name)) for name in RESULTS})
