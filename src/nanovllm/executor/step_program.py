"""`StepProgram`: the model function of the steps of an engine's sessions. In traced code it is one custom op, whatever runs inside.

So a caller's compiled program runs the kernels that the engine would run, and tracing a step does not depend on the number of layers.
"""

import operator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nanovllm import models
from nanovllm.config import ModelConfig
from nanovllm.executor.executor import Forward
from nanovllm.models.common.batch import Batch, Windowed
from nanovllm.models.model import Model
from nanovllm.ops.attention.plan_table import lookup, register
from nanovllm.state.kv_cache import KVState
from nanovllm.types import Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define(
    "step_logits(Tensor[] weights, Tensor(a!) pages, Tensor(b!)? frames, Tensor input_ids, Tensor positions, Tensor slots, "
    "Tensor page_tables, Tensor seq_lens, Tensor? cu_seqlens, Tensor? logit_indices, Tensor? frame_tables, Tensor? frame_slots, "
    "SymInt plan, SymInt frame_plan, SymInt program, SymInt vocab_size, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class StepProgram:
    """The model function of one engine's decode steps, with the signature of `nv.forward`.

    Called as it is, it calls the executor's function. In traced code a batch becomes the op `nanovllm::step_logits`, whose
    arguments are the weights, the KV pools and the tensors of the batch. No weights stand for the engine's own.
    """

    def __init__(self, model: Model, forward: Forward) -> None:
        self.forward, self.config, self.dtype = forward, model.config, model.dtype
        self.params = model.params
        self.handle = register(self)

    def __call__(self, params: Any, kv: KVState, batch: Batch, config: ModelConfig) -> tuple[Tensor, KVState]:
        """Donates `kv`. Run one step, as `nv.forward` does."""
        if not torch.compiler.is_compiling():
            return self.forward(params, kv, batch, config)
        if config is not self.config:  # the op runs the engine's config, so another one is traced layer by layer
            return models.forward(params, kv, batch, config)
        windowed = batch.windowed
        # The engine's own weights are no arguments of the op: a call of the compiled program need not check hundreds of tensors.
        weights = [] if params is self.params else tensors_of(params)
        logits = torch.ops.nanovllm.step_logits.default(
            weights, kv.pools[0], kv.pools[1] if len(kv.pools) > 1 else None, batch.input_ids, batch.positions, batch.slots,
            batch.page_tables, batch.seq_lens, batch.cu_seqlens, batch.logit_indices, None if windowed is None else windowed.page_tables,
            None if windowed is None else windowed.slots, batch.plan, 0 if windowed is None else windowed.plan, self.handle,
            self.config.vocab_size, self.dtype,
        )  # fmt: skip
        return logits, kv

    def params_of(self, weights: list[Tensor]) -> Any:
        """The weights as a tree. No weights, and the engine's own tensors, give the engine's own tree."""
        leaves, spec = pytree.tree_flatten(self.params)
        if not weights or all(map(operator.is_, weights, tensors_of(leaves))):
            return self.params
        given = iter(weights)
        return pytree.tree_unflatten([next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def tensors_of(params: Any) -> list[Tensor]:
    """The tensors of a tree, in order."""
    return [leaf for leaf in pytree.tree_leaves(params) if isinstance(leaf, Tensor)]


@torch.library.register_fake("nanovllm::step_logits", lib=_LIBRARY)
def _fake(
    weights, pages, frames, input_ids, positions, slots, page_tables, seq_lens, cu_seqlens, logit_indices, frame_tables,
    frame_slots, plan, frame_plan, program, vocab_size, dtype,
):  # fmt: skip
    return pages.new_empty(((input_ids if logit_indices is None else logit_indices).shape[0], vocab_size), dtype=dtype)


def _run(
    weights, pages, frames, input_ids, positions, slots, page_tables, seq_lens, cu_seqlens, logit_indices, frame_tables,
    frame_slots, plan, frame_plan, program, vocab_size, dtype,
) -> Tensor:  # fmt: skip
    known = lookup(program, StepProgram)
    windowed = None if frame_tables is None else Windowed(page_tables=frame_tables, slots=frame_slots, plan=frame_plan)
    batch = Batch(
        input_ids=input_ids, positions=positions, slots=slots, page_tables=page_tables, seq_lens=seq_lens, plan=plan, windowed=windowed,
        cu_seqlens=cu_seqlens, logit_indices=logit_indices,
    )  # fmt: skip
    kv = KVState(pools=(pages,) if frames is None else (pages, frames))
    logits, _ = known.forward(known.params_of(weights), kv, batch, known.config)
    return logits


_LIBRARY.impl("step_logits", _run, "CPU")
_LIBRARY.impl("step_logits", _run, "CUDA")
