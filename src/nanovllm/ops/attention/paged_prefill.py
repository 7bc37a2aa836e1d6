"""`paged_prefill`: causal attention of new tokens to their sequences' pages, ragged over the batch (append attention)."""

import torch

from nanovllm.ops.attention.cascade import PromptCascade
from nanovllm.ops.attention.flashinfer_cascade import FlashInferCascade
from nanovllm.ops.attention.flashinfer_plans import PrefillPlan
from nanovllm.ops.attention.plan_table import lookup
from nanovllm.ops.attention.reference import prefill_rows
from nanovllm.types import Float, Int32, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define(
    "paged_prefill(Tensor q, Tensor pages, SymInt layer, Tensor page_tables, Tensor seq_lens, Tensor cu_seqlens, float scale, SymInt plan, "
    "Tensor? k=None, Tensor? v=None, SymInt window=0, float softcap=0.0) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def paged_prefill(
    q: Float[Tensor, "T H D"],
    pages: Float[Tensor, "L N 2 K S D"],
    layer: int,
    page_tables: Int32[Tensor, "B P"],
    seq_lens: Int32[Tensor, "B"],
    cu_seqlens: Int32[Tensor, "B+1"],
    scale: float,
    plan: int,
    k: Float[Tensor, "T K D"] | None = None,
    v: Float[Tensor, "T K D"] | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> Float[Tensor, "T H D"]:
    """Attention of row b's queries, tokens `cu_seqlens[b]` to `cu_seqlens[b+1]`, to all KV of the row up to themselves.

    `seq_lens[b]` counts the row's KV, its queries' own included, which must have been written: the queries stand at the last positions.
    H is a multiple of K. `plan` is the handle of a `PrefillPlan` or of a cascade updated for this step, or 0 for the
    reference. `k` and `v` are what was written for these tokens, where it lies together too: a plan of rows that hold nothing else may
    read it there. `window`: a query attends to the last so many keys up to and including itself. `softcap`: scaled scores s become
    `softcap * tanh(s / softcap)`. Of both, 0 means none.
    """
    return torch.ops.nanovllm.paged_prefill.default(q, pages, layer, page_tables, seq_lens, cu_seqlens, scale, plan, k, v, window, softcap)


@torch.library.register_fake("nanovllm::paged_prefill", lib=_LIBRARY)
def _fake(
    q: Tensor, pages: Tensor, layer: int, page_tables: Tensor, seq_lens: Tensor, cu_seqlens: Tensor, scale: float, plan: int,
    k: Tensor | None = None, v: Tensor | None = None, window: int = 0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape)


def _reference(
    q: Tensor, pages: Tensor, layer: int, page_tables: Tensor, seq_lens: Tensor, cu_seqlens: Tensor, scale: float, plan: int,
    k: Tensor | None = None, v: Tensor | None = None, window: int = 0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    if plan:
        return lookup(plan, PromptCascade).run(q, pages, layer, page_tables, scale, window, softcap)
    return prefill_rows(q, pages[layer], page_tables, seq_lens, cu_seqlens, scale, window, softcap)


def _cuda(
    q: Tensor, pages: Tensor, layer: int, page_tables: Tensor, seq_lens: Tensor, cu_seqlens: Tensor, scale: float, plan: int,
    k: Tensor | None = None, v: Tensor | None = None, window: int = 0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    if plan == 0:
        return prefill_rows(q, pages[layer], page_tables, seq_lens, cu_seqlens, scale, window, softcap)
    found = lookup(plan)
    if isinstance(found, PromptCascade):
        return found.run(q, pages, layer, page_tables, scale, window, softcap)
    if isinstance(found, FlashInferCascade):
        return found.run(q, pages, layer, scale, window, softcap)
    new = None if k is None or v is None else (k, v)
    return lookup(plan, PrefillPlan).run(q, pages, layer, scale, new=new, window=window, softcap=softcap)


_LIBRARY.impl("paged_prefill", _reference, "CPU")
_LIBRARY.impl("paged_prefill", _cuda, "CUDA")
