"""Layers compiled by `torch.compile`, and the forward function of a GPU's fused kernels."""

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

COMPILED_PROMPTS = ((1, 8), (2, 8))  # rows and tokens: compiled layers distinguish no others
# The most compilations of an engine's layer: for one row, other numbers of rows, and prompts; for the first layer and others; with and
# without a sliding window. The rest is in reserve.
COMPILES = 32


def compiled_layer(model: Model) -> LayerFunction:
    """The model's layer as one compiled function, which serves all layers and any number of tokens."""
    # The tracer counts compilations per code object. A copy for each engine keeps engines from using up each other's limit.
    original = model.spec.layer
    own = FunctionType(original.__code__.replace(), original.__globals__, original.__name__, original.__defaults__)
    return torch.compile(own, fullgraph=True)


def compiled_forward(model: Model) -> Forward:
    """The model's forward function over the layer of `compiled_layer`.

    A prompt piece of one token runs uncompiled: it is rare, and would need its own compilation.
    """
    compiled = compiled_layer(model)

    def layer(w: Any, x: Tensor, pages: Tensor, index: int, cos: Tensor, sin: Tensor, batch: Batch, config: ModelConfig) -> Tensor:
        if index < 2:  # a size that is not marked costs one more compilation when it changes
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


def all_fused(model: Model, choice: FastChoice | None) -> bool:
    """Whether every layer of the model runs in its fused form. `choice` is as in `fused_forward`."""
    return models.fused.serves(model.params, model.config) and (choice is None or choice.all_layers)


def fused_forward(model: Model, choice: FastChoice | None, cuts: Cuts | None = None) -> Forward:
    """The forward function of `models/fast/fused.py`. Layers that `choice` leaves out run compiled; None leaves none out."""
    forward = with_cuts(models.fused.forward, cuts)
    if choice is None or choice.all_layers:
        return forward if choice is None or choice.head else partial(forward, choice=choice)
    compiled = compiled_layer(model)

    def plain(w: Any, x: Tensor, pages: Tensor, index: int, cos: Tensor, sin: Tensor, batch: Batch, config: ModelConfig) -> Tensor:
        _mark_dynamic(x, cos, sin, batch)
        with torch._dynamo.config.patch(recompile_limit=COMPILES):
            return compiled(w, x, pages, index, cos, sin, batch, config)

    return partial(forward, plain=plain, choice=choice)
