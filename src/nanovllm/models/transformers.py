"""The transformers fallback, for architectures without a file here: transformers' module runs the step, with attention over our pages.

The module has no weights of its own; it is only structure. For one call, `torch.func.functional_call` puts the weights, the step's pages
and the batch into it. So `forward` is a function of its arguments. transformers passes the calling module to an attention function. Each
such module has one `PagedStep`, whose buffers are the tensors of the step.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from nanovllm.config import ModelConfig
from nanovllm.errors import InvalidRequestError
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.params import Params
from nanovllm.ops import kv_write, paged_decode, paged_prefill
from nanovllm.ops.kv_cache.fp8 import head_dim_of, in_fp8
from nanovllm.state.kv_cache import KVState
from nanovllm.types import Float, Int32, Tensor, register_value

ATTENTION = "nanovllm_paged"  # the name of `attention` in transformers' registry
STEP = "nanovllm_step"  # the name of the submodule with the step


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ForeignParams(Params[Tensor]):
    """The weights of a transformers module.

    `layers` is empty, because no fast form supports them. `embed` is one of the weights. `inv_freq` is zero: the use of positions is not
    known, so keys can be copied but not rotated.

    Attributes:
        weights: The weights by the module's own names. Tied weights are listed under each name.
        buffers: The module's buffers by name.
        module: The module, without memory. It can run one call at a time, so only one thread may use it.
        keeps: Whether the module can compute the logits of selected tokens only.
    """

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    module: nn.Module
    keeps: bool


register_value(ForeignParams, static=("module", "keeps"))


class PagedStep(nn.Module):
    """The tensors of a step as buffers, which this file's `forward` sets. Called as attention, it maps `[1, H, T, D]` to `[1, T, H, D]`.

    `cu_seqlens` is empty for a decode batch. `plan` is on the host.
    """

    pages: Float[Tensor, "L N 2 K S W"]
    slots: Int32[Tensor, "T"]
    page_tables: Int32[Tensor, "B P"]
    seq_lens: Int32[Tensor, "B"]
    cu_seqlens: Int32[Tensor, "..."]
    plan: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("pages", "slots", "page_tables", "seq_lens", "cu_seqlens", "plan"):
            self.register_buffer(name, torch.empty(0, device="meta"), persistent=False)

    def forward(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> Tensor:
        """Write the keys and values of the module's layer, then attend over the page tables. Narrow heads are padded with zeros."""
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        width, kept = head_dim_of(self.pages), value.shape[-1]
        dtype = value.dtype if in_fp8(self.pages) else self.pages.dtype
        q_THD, k_TKD, v_TKD = (_heads(each, width, dtype) for each in (query, key, value))
        layer, plan = module.layer_idx, int(self.plan)
        kv_write(self.pages, layer, k_TKD, v_TKD, self.slots)
        over = (self.pages, layer, self.page_tables, self.seq_lens)
        how = {"window": sliding_window or 0, "softcap": softcap or 0.0}
        if self.cu_seqlens.numel():
            a_THD = paged_prefill(q_THD, *over, self.cu_seqlens, scale, plan, **how)
        else:
            a_THD = paged_decode(q_THD, *over, scale, plan, **how)
        return a_THD[None, ..., :kept].to(query.dtype)


def _heads(heads_1XTD: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Heads `[1, X, T, D]` as `[T, X, width]`, padded with zeros."""
    heads_TXD = heads_1XTD[0].transpose(0, 1)
    if heads_TXD.shape[-1] < width:
        heads_TXD = nn.functional.pad(heads_TXD, (0, width - heads_TXD.shape[-1]))
    return heads_TXD.to(dtype).contiguous()


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The attention function that is registered with transformers. It calls the `PagedStep` of the calling module."""
    return getattr(module, STEP)(module, query, key, value, attention_mask=attention_mask, **kwargs), None


def attach(module: nn.Module, step: nn.Module) -> None:
    """Add `step` as a submodule to `module` and to all its submodules with a `layer_idx`."""
    layered = [each for each in module.modules() if isinstance(vars(each).get("layer_idx"), int)]
    for each in (module, *layered):
        each.add_module(STEP, step)


def forward(params: ForeignParams, kv: KVState, batch: Batch, config: ModelConfig) -> tuple[Float[Tensor, "R V"], KVState]:
    """Donates `kv`. Run one step's tokens through the transformers module. Arguments and results are as in `registry.forward`."""
    (pages,) = kv.pools
    prompts = batch.slots.new_empty(0) if batch.cu_seqlens is None else batch.cu_seqlens
    step = {
        "pages": pages, "slots": batch.slots, "page_tables": batch.page_tables, "seq_lens": batch.seq_lens, "cu_seqlens": prompts,
        "plan": torch.tensor(batch.plan, device="cpu"),
    }  # fmt: skip
    tensors = {**params.weights, **params.buffers, **{f"{STEP}.{name}": tensor for name, tensor in step.items()}}
    given: dict[str, Any] = {
        "input_ids": batch.input_ids[None].long(), "position_ids": batch.positions[None].long(), "use_cache": False
    }  # fmt: skip
    wanted = batch.logit_indices
    if params.keeps and wanted is not None:
        given["logits_to_keep"] = wanted.long()
    logits = functional_call(params.module, tensors, kwargs=given, tie_weights=False).logits[0]
    return logits if params.keeps or wanted is None else logits[wanted], kv


def require_supported(kv: KVState | None, **hidden: object) -> KVState:
    """Return `kv`. Raises `InvalidRequestError` if it is None, or if one of the arguments for hidden states is not."""
    asked = ["kv=None"] if kv is None else [name for name, value in hidden.items() if value is not None]
    if kv is None or asked:
        raise InvalidRequestError(f"{asked[0]} needs a built-in architecture, and this model runs through the transformers fallback")
    return kv


def nothing_here(*_: Any, **__: Any) -> Any:
    """A placeholder for the table of weights, the layer and the head, which the transformers fallback lacks. Always raises."""
    raise InvalidRequestError("this architecture runs through the transformers fallback, which has no table of weights and no layers here")
