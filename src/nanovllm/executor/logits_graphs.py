"""`LogitsGraphs`: the model function of a session's decode steps as CUDA graphs, so that a step that the caller runs is one launch.

`begin` captures a graph for the shape of its batch. A step copies the batch into static buffers, replays the graph, and copies the logits
out. While the caller's own graph is being captured, the kernels run as they are, and become part of that graph.
"""

from dataclasses import replace

import torch

from nanovllm.config import ModelConfig
from nanovllm.executor.captured_step import recording
from nanovllm.executor.executor import Forward
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.params import Params
from nanovllm.models.model import Model
from nanovllm.state.kv_cache import KVState, same_memory
from nanovllm.types import Tensor

KEPT = 8  # graphs; the one that a session needed least recently is freed first

Shape = tuple[int, int, int, int]  # rows, width of the page tables, handles of the plans


class LogitsGraphs:
    """Graphs over the engine's weights and KV memory, which share their memory: only one of them runs at a time."""

    def __init__(self, model: Model, forward: Forward) -> None:
        self._model, self._forward = model, forward
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, KVState, Batch, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(model.device)

    def free(self) -> None:
        """Free all graphs. None is replayed afterwards."""
        for graph, *_ in self._graphs.values():
            graph.reset()

    def prepare(self, kv: KVState, batch: Batch) -> None:
        """Capture the graph of a decode batch, unless it exists.

        The run before the capture writes what the first step over this batch will write.
        """
        shape = _shape(batch)
        if shape in self._graphs:
            self._graphs[shape] = self._graphs.pop(shape)  # to the end
            return
        static = _with_tensors(batch, [torch.empty_like(tensor) for tensor in _tensors(batch)])
        _copy(static, batch)
        params, config, here = self._model.params, self._model.config, torch.cuda.current_stream(self._model.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            self._forward(params, kv, static, config)
        here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph, self._pool, self._stream):
                logits, _ = self._forward(params, kv, static, config)
        except torch.OutOfMemoryError:  # the steps then run without a graph
            return
        self._graphs[shape] = graph, kv, static, logits
        for oldest in [*self._graphs][:-KEPT]:
            del self._graphs[oldest]

    def forward(self, params: Params[Tensor], kv: KVState, batch: Batch, config: ModelConfig) -> tuple[Tensor, KVState]:
        """Donates `kv`. Run a decode batch: by its graph, if there is one over these weights and this memory."""
        own = params is self._model.params and config is self._model.config and batch.cu_seqlens is None
        captured = self._graphs.get(_shape(batch)) if own else None
        if captured is None or not same_memory(captured[1], kv) or torch.cuda.is_current_stream_capturing():
            return self._forward(params, kv, batch, config)
        graph, _, static, logits = captured
        _copy(static, batch)
        graph.replay()
        return logits.clone(), kv


def _shape(batch: Batch) -> Shape:
    rows, width = batch.page_tables.shape
    return rows, width, batch.plan, 0 if batch.windowed is None else batch.windowed.plan


def _tensors(batch: Batch) -> list[Tensor]:
    windowed = () if batch.windowed is None else (batch.windowed.page_tables, batch.windowed.slots)
    return [batch.input_ids, batch.positions, batch.slots, batch.page_tables, batch.seq_lens, *windowed]


def _with_tensors(batch: Batch, tensors: list[Tensor]) -> Batch:
    input_ids, positions, slots, page_tables, seq_lens, *own = tensors
    windowed = batch.windowed if batch.windowed is None else replace(batch.windowed, page_tables=own[0], slots=own[1])
    return replace(
        batch, input_ids=input_ids, positions=positions, slots=slots, page_tables=page_tables, seq_lens=seq_lens, windowed=windowed
    )


def _copy(to: Batch, values: Batch) -> None:
    torch._foreach_copy_(_tensors(to), _tensors(values))  # pyright: ignore[reportPrivateImportUsage]
