"""Layers compiled by `torch.compile`, and the forward of a GPU's fused kernels."""

from functools import partial
from types import FunctionType
from typing import Any

import torch

from nanovllm import models
from nanovllm.config import ModelConfig
from nanovllm.executor.executor import Forward
from nanovllm.models.common.batch import Batch
from nanovllm.models.fast.choice import FastChoice, LayerFunction
from nanovllm.models.fast.cuts import Cuts, with_cuts
from nanovllm.models.model import Model
from nanovllm.state.kv_cache import KVState
from nanovllm.types import Tensor

COMPILED_PROMPTS = ((1, 8), (2, 8))  # rows and tokens: all that compiled layers distinguish
COMPILES = 32  # of an engine's layer: one row, any other number, prompts; first and others, with a window or not; the unforeseen


def compiled_layer(model: Model) -> LayerFunction:
    """The model's layer as one compiled function, which serves all layers and every number of tokens."""
    # The tracer counts compilations by code object: one of its own, so that engines do not use each other's limit up.
    original = model.spec.layer
    own = FunctionType(original.__code__.replace(), original.__globals__, original.__name__, original.__defaults__)
    return torch.compile(own, fullgraph=True)


def compiled_forward(model: Model) -> Forward:
    """The model's forward over what `compiled_layer` returns.

    A prompt's chunk of one token runs uncompiled: it is rare, and would need a compilation of its own.
    """
    compiled = compiled_layer(model)

    def layer(w: Any, x: Tensor, pages: Tensor, index: int, cos: Tensor, sin: Tensor, batch: Batch, config: ModelConfig) -> Tensor:
        if index < 2:  # what is not marked varies later at the price of one more compilation
            _mark_dynamic(x, cos, sin, batch)
        return compiled(w, x, pages, index, cos, sin, batch, config)

    def forward(params: Any, kv: KVState, batch: Batch, config: ModelConfig) -> tuple[Tensor, KVState]:
        whole = batch.cu_seqlens is None or batch.input_ids.shape[0] > 1
        with torch._dynamo.config.patch(recompile_limit=COMPILES):
            return models.forward(params, kv, batch, config, layer=layer if whole else model.spec.layer)

    return forward


def _mark_dynamic(x: Tensor, cos: Tensor, sin: Tensor, batch: Batch) -> None:
    for tensor in (x, cos, sin, batch.slots, batch.page_tables, batch.seq_lens, batch.cu_seqlens):
        if tensor is not None and tensor.shape[0] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    if batch.page_tables.shape[1] > 1:
        torch._dynamo.maybe_mark_dynamic(batch.page_tables, 1)


def fused_forward(model: Model, choice: FastChoice | None, cuts: Cuts | None = None) -> Forward:
    """The forward of `models/fast/fused.py`, with the layers that `choice` leaves out compiled; None: it leaves none out."""
    forward = with_cuts(models.fused.forward, cuts)
    if choice is None or choice.all_layers:
        return forward if choice is None or choice.head else partial(forward, choice=choice)
    compiled = compiled_layer(model)

    def plain(w: Any, x: Tensor, pages: Tensor, index: int, cos: Tensor, sin: Tensor, batch: Batch, config: ModelConfig) -> Tensor:
        _mark_dynamic(x, cos, sin, batch)
        with torch._dynamo.config.patch(recompile_limit=COMPILES):
            return compiled(w, x, pages, index, cos, sin, batch, config)

    return partial(forward, plain=plain, choice=choice)
