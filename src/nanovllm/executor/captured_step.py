"""`CapturedStep`: the CUDA graphs of a decode step, the memory that they read and write, and its results on the host."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch.utils import _pytree as pytree

from nanovllm.executor.decode_carry import DecodeCarry
from nanovllm.executor.executor import Drawn
from nanovllm.sampling.params import MAX_LOGPROBS
from nanovllm.sampling.process_logits import LogitsProcessor
from nanovllm.sampling.row_options import Kind
from nanovllm.types import Float32, Int32, Tensor

R = TypeVar("R")
MOVED = ("input_ids", "positions", "slots", "seq_lens")  # the tensors that a step updates for the next step
# By `rope_attend`, the same for few long rows, by FlashInfer's plan, or reading shared pages once.
Way = Literal["fused", "long", "planned", "shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """The key of a captured step: its number of rows, its way to attend, how it samples, and the functions before sampling."""

    size: int
    way: Way
    sampling: Kind = "greedy"
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
class Results:
    """The memory of the results of all steps over one set of buffers, of B rows: log-probabilities on the device, and all on the host.

    Tokens have no memory of their own on the device: they are the next step's input.
    """

    logprobs: Float32[Tensor, "B"]
    top_ids: Int32[Tensor, "B k"]
    top_logprobs: Float32[Tensor, "B k"]
    host: Fetched

    @classmethod
    def of(cls, rows: int, vocab_size: int, device: torch.device) -> "Results":
        """Memory for so many rows."""
        shape = rows, min(MAX_LOGPROBS, vocab_size)
        floats, ints = torch.float32, torch.int32
        each: dict[str, Any] = {"logprobs": (rows, floats), "top_ids": (shape, ints), "top_logprobs": (shape, floats)}

        def pinned(of: Any, dtype: torch.dtype) -> Tensor:
            return torch.empty(of, dtype=dtype, pin_memory=device.type == "cuda")

        host = Fetched(event=torch.cuda.Event(), token_ids=pinned(rows, ints), **{name: pinned(*how) for name, how in each.items()})
        return cls(**{name: torch.empty(of, dtype=dtype, device=device) for name, (of, dtype) in each.items()}, host=host)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapturedStep:
    """Graphs that run one after another, the carry whose memory they read and write, and the memory of the results.

    The first graph runs the model, samples greedily, and moves on to the next tokens. If the step samples in another way, the second graph
    does that over the same logits, and replaces the tokens. With parts of the logits on several ranks, the second graph samples greedily
    too, and the first does not sample.
    """

    kind: StepKind
    graphs: tuple[torch.cuda.CUDAGraph, ...]
    carry: DecodeCarry
    results: Results

    def replay(self) -> None:
        """Launch the step."""
        self.run()
        self.draw()

    def run(self) -> None:
        """Launch the model, which moves on to the next tokens. `draw` must follow before the results are fetched."""
        self.graphs[0].replay()

    def draw(self) -> None:
        """Launch the sampling, which replaces the tokens of `run`. It reads what the host has written since."""
        for graph in self.graphs[1:]:
            graph.replay()

    def fetch(self) -> Fetched:
        """Copy the results of the last launched step to the host. A step that is launched afterwards may overwrite them on the device."""
        size, host = self.kind.size, self.results.host
        token_ids = host.token_ids[:size]
        token_ids.copy_(self.carry.batch.input_ids, non_blocking=True)
        more: dict[str, Tensor] = {}
        if self.kind.sampling == "logprobs":
            for name in ("logprobs", "top_ids", "top_logprobs"):
                more[name] = getattr(host, name)[:size]
                more[name].copy_(getattr(self.results, name)[:size], non_blocking=True)
        host.event.record()
        return Fetched(event=host.event, token_ids=token_ids, **more)


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
