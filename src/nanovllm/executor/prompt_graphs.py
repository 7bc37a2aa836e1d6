"""Captured prompts: CUDA graphs by number of tokens, for prompts that take the GPU less time than a host needs to launch kernels.

A step's prompts are filled into static buffers, with padding up to the tokens of the graph. Sampling is not part of the graph.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.utils import _pytree as pytree

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.executor.batch import HostBatch, sample_prompts
from nanovllm.executor.captured_step import recorded
from nanovllm.executor.compiled import all_fused
from nanovllm.executor.distributed import least
from nanovllm.executor.executor import Forward
from nanovllm.executor.prompt_buffers import PromptBuffers, PromptKind, prompt_tables
from nanovllm.models.common.params import Params
from nanovllm.models.common.sharding import in_parts
from nanovllm.models.fast.choice import FastChoice
from nanovllm.models.model import Model
from nanovllm.ops.backends import capability, processors
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.state.kv_cache import KVState, same_memory
from nanovllm.types import Float, Tensor

# FLOPs that an H200 computes while its host launches the kernels of a layer one by one, which takes the host some 0.5 ms. It takes 1.3 ms
# for a quantised layer, and 1.1 ms for one that ranks share (measured).
LAYER_FLOPS = 3e11
MULTIPROCESSORS = 132  # of an H200
QUANTISED = 1.5  # times as many in addition: matrices are dequantised in pieces. Experts and FP8 activations, which are not, count the same
RANKS = 1.0  # times as many in addition: sums of many rows are launched by NCCL
BUSY = 2  # a host that has other work takes at least so many times as long
EXPERTS = 3  # products of experts take so many times as long as others
SIZES = (192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 3584, 4096)  # tokens
BETWEEN_SIZES = (896, 1152, 1408, 1792)  # more of them for models on one GPU, so that a step has less padding
LARGE_SIZES = (5120, 6144, 7168, 8192)  # of models that ranks share
FEW_ROWS = 8  # prompts of the graphs that waste little on rows without a prompt
WIDE_SIZES = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)  # of the graphs for as many prompts as the engine runs at once


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapturedPrompts:
    """A graph, and the tensors that it reads."""

    graph: torch.cuda.CUDAGraph
    buffers: PromptBuffers


def prompt_kinds(model: Model, limits: EngineConfig, choice: FastChoice | None) -> list[PromptKind]:
    """The kinds that get a graph, ascending; none if not all layers are fused. Ranks call this at the same time, and find the same."""
    if not all_fused(model, choice):
        return []
    (most,) = least(model.config.mesh, [min(limits.max_num_batched_tokens, _most_tokens(model))])
    few, wide = min(FEW_ROWS, limits.max_num_seqs), limits.max_num_seqs
    every = sorted((*SIZES, *(LARGE_SIZES if _shared(model) else BETWEEN_SIZES)))
    sizes = [size for size in every if size <= most and limits.max_model_len > 1]
    many = {size for size in sizes if size in WIDE_SIZES or (size == sizes[-1] and size > WIDE_SIZES[0])}
    return sorted({PromptKind(tokens=size, rows=rows) for size in sizes for rows in ((few, wide) if size in many else (few,))})


def _most_tokens(model: Model) -> int:
    """The tokens of a step that takes the GPU as long as its launches take a busy host, or a quiet one if that is better.

    Two halves hide the sums of ranks, and ranks run long prompts so unless a graph takes them. Experts gained nothing beyond the bound of a
    quiet host, not even on a busy one.
    """
    moe = model.config.moe
    routed = 1.0 if moe is None else EXPERTS * moe.top_k / moe.num_experts  # for each weight of an expert
    multiplied = 0.0  # weights that a token is multiplied by
    for weight in _weights(model):
        stacked = len(weight.shape) == 3  # as the matrices of experts are
        multiplied += math.prod(weight.shape) * (routed if stacked else 1.0)
    slower = 1 if _shared(model) or moe is not None else BUSY
    return int(slower * _flops_while_launching(model) / (2 * multiplied))


def _flops_while_launching(model: Model) -> float:
    """What the GPU computes while a quiet host launches the kernels of a step one by one."""
    speed = 1.0
    if model.device.type == "cuda":
        speed = processors(model.device) / MULTIPROCESSORS / (1 if capability(model.device) >= (9, 0) else 2)
    quantised = any(isinstance(weight, QuantisedMatrix) for weight in _weights(model))
    launches = 1 + QUANTISED * quantised + RANKS * _shared(model)
    return speed * launches * LAYER_FLOPS * len(model.params.layers)


def _shared(model: Model) -> bool:
    """Whether several ranks share the model."""
    mesh = model.config.mesh
    return mesh is not None and mesh.size > 1


def _weights(model: Model) -> list[Tensor | QuantisedMatrix]:
    """All weights of the layers."""
    leaves = pytree.tree_leaves(model.params.layers, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor | QuantisedMatrix)]


def _attention_flops(host: HostBatch, config: ModelConfig) -> int:
    """The FLOPs of attention in all layers."""
    assert host.cu_seqlens is not None
    counts = np.diff(host.cu_seqlens).astype(np.int64)
    return int(counts @ (host.seq_lens - counts // 2)) * 4 * config.num_heads * config.head_dim * config.num_layers


def logits_bytes(kinds: Seq[PromptKind], model: Model) -> int:
    """The bytes of the logits that all kinds write to the same place."""
    return max([kind.rows for kind in kinds], default=0) * model.config.vocab_size * model.dtype.itemsize


class PromptGraphs:
    """The captured steps of prompts over the engine's weights and KV memory.

    They share their memory and write their logits to the same place: only one of them runs at a time.
    """

    def __init__(self, model: Model, limits: EngineConfig, kinds: Seq[PromptKind], forward: Forward, *, warm: Params[Tensor]) -> None:
        """Take the kinds to capture. `warm` are the weights for the run before one is recorded, with enough layers to load every kernel."""
        self.kinds = kinds
        self._model, self._limits, self._forward, self._warm = model, limits, forward, warm
        self._config = in_parts(model.config)
        (self._flops_while_launching,) = least(model.config.mesh, [int(_flops_while_launching(model))])  # GPUs may differ
        self._tables = prompt_tables(model.config, limits, model.device)
        self._logits: Float[Tensor, "R V"] | None = None
        self._steps: dict[PromptKind, CapturedPrompts] = {}
        self._kv: KVState | None = None
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(model.device)

    def run(self, params: Params[Tensor], kv: KVState, host: HostBatch) -> Float[Tensor, "R N"] | None:
        """Run a batch of prompts by the smallest graph that holds it.

        Returns:
            The logits, of which each rank has its own part. They are valid until the next run. None if no graph holds the batch, if the
            graphs are over other weights or other memory, or if so many tokens come before that FlashInfer's attention, which is faster
            than that of the graphs, saves more than the launches take.
        """
        tokens, rows = len(host.input_ids), len(host.seq_lens)
        kind = next((kind for kind in self.kinds if kind.tokens >= tokens and kind.rows >= rows), None)
        if kind is None or params is not self._model.params or self._kv is None or not same_memory(self._kv, kv):
            return None
        if 2 * _attention_flops(host, self._config) > self._flops_while_launching:
            return None
        assert host.logit_indices is not None
        step = self._steps[kind]
        step.buffers.fill(host)
        step.graph.replay()
        assert self._logits is not None
        return self._logits[: len(host.logit_indices)]

    def free(self) -> None:
        """Free all graphs. None is replayed afterwards."""
        for step in self._steps.values():
            step.graph.reset()

    def prepare(self, kv: KVState, kind: PromptKind) -> PromptBuffers:
        """Fill the buffers of a step and warm it up on a side stream. It runs prompts on the dummy page."""
        model, here = self._model, torch.cuda.current_stream(self._model.device)
        buffers = PromptBuffers(kind, self._tables, model.config, self._limits)
        (host,) = sample_prompts(replace(self._limits, max_num_batched_tokens=kind.tokens), [(1, kind.tokens)], model.config)
        buffers.fill(host)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            logits, _ = self._forward(self._warm, kv, buffers.batch, self._config)
        if self._logits is None:
            self._logits = logits.new_empty(max(kind.rows for kind in self.kinds), logits.shape[1])
        here.wait_stream(self._stream)
        return buffers

    def capture(self, kv: KVState, kind: PromptKind) -> None:
        """Prepare a step, then record it."""
        buffers, model, to = self.prepare(kv, kind), self._model, self._logits
        assert to is not None

        def run() -> None:
            logits, _ = self._forward(model.params, kv, buffers.batch, self._config)
            to[: len(logits)] = logits

        graph, _ = recorded(self._pool, self._stream, run)
        self._steps[kind], self._kv = CapturedPrompts(graph=graph, buffers=buffers), kv
