"""`paged_prefill`: causal attention of new tokens to the pages of their sequences, ragged over the batch (append attention)."""

import torch

from nanovllm.ops.attention.cascade import PromptCascade
from nanovllm.ops.attention.flashinfer_cascade import FlashInferCascade
from nanovllm.ops.attention.flashinfer_plans import PrefillPlan
from nanovllm.ops.attention.plan_table import lookup
from nanovllm.ops.attention.prompt_tiles import TilePlan
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
    pages: Float[Tensor, "L N 2 K S W"],
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
    """Compute causal attention of each row's new tokens to the KV of the row, up to and including themselves.

    The queries of row b are `q[cu_seqlens[b] : cu_seqlens[b + 1]]`. They are the last tokens of the row. Nothing is written in place:
    `kv_write` has to write the new tokens' KV first.

    Schema: `nanovllm::paged_prefill(Tensor q, Tensor pages, SymInt layer, Tensor page_tables, Tensor seq_lens, Tensor cu_seqlens,
    float scale, SymInt plan, Tensor? k=None, Tensor? v=None, SymInt window=0, float softcap=0.0) -> Tensor`.
    The reference is a loop over rows in plain torch. It computes in float32 or wider and rounds once.

    Args:
        q: Queries of all rows, one row after another, `[T, H, D]`; H is a multiple of K.
        pages: One KV pool, `[L, N, 2, K, S, D]`, or in FP8 with the layout of `ops/kv_cache/fp8.py`.
        layer: The layer's index in this pool.
        page_tables: Page numbers of each row, int32 `[B, P]`.
        seq_lens: Tokens of each row, new ones included, int32 `[B]`.
        cu_seqlens: First query of each row, then the number of queries, int32 `[B + 1]`.
        scale: Factor of the scores, usually `D ** -0.5`.
        plan: 0 for the reference, or the handle of a `PrefillPlan`, a `TilePlan` or a cascade plan that was updated for this step.
        k: Keys of the new tokens, `[T, K, D]`, if they are also contiguous outside the pages. A plan may read them here if the rows have
            no older tokens, and copies all of them out of the pages if there are few older ones.
        v: Values of the new tokens, like `k`.
        window: Number of last tokens, itself included, that each query attends to; 0 means all.
        softcap: A score s becomes `softcap * tanh(s / softcap)` after scaling; 0 means no cap.

    Returns:
        The attention output, `[T, H, D]`, in the dtype of `q`.

    Raises:
        IndexError: A page table is too short for its row. Only the reference checks this.
        UnknownPlanError: No live plan has the handle `plan`.
        PlanMismatchError: The plan is of another kind, was never updated, or is for another number of tokens, window or soft cap.

    Examples:
        >>> from nanovllm.ops import paged_prefill
        >>> pages = torch.zeros(1, 2, 2, 1, 4, 2)
        >>> pages[0, 0, 1, 0, :2] = torch.tensor([[1.0, 1.0], [3.0, 3.0]])  # values of two tokens; all keys are equal
        >>> tables, lens, bounds = (torch.tensor(x, dtype=torch.int32) for x in ([[0]], [2], [0, 2]))
        >>> paged_prefill(torch.ones(2, 1, 2), pages, 0, tables, lens, bounds, scale=0.7, plan=0)[:, 0].tolist()
        [[1.0, 1.0], [2.0, 2.0]]
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
        if isinstance(tiled := lookup(plan), TilePlan):
            return tiled.follow(q, pages[layer], page_tables, scale, window, softcap)
        return lookup(plan, PromptCascade).run(q, pages, layer, page_tables, scale, window, softcap)
    return prefill_rows(q, pages[layer], page_tables, seq_lens, cu_seqlens, scale, window, softcap)


def _cuda(
    q: Tensor, pages: Tensor, layer: int, page_tables: Tensor, seq_lens: Tensor, cu_seqlens: Tensor, scale: float, plan: int,
    k: Tensor | None = None, v: Tensor | None = None, window: int = 0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    if plan == 0:
        return prefill_rows(q, pages[layer], page_tables, seq_lens, cu_seqlens, scale, window, softcap)
    known = lookup(plan)
    if isinstance(known, TilePlan):
        from nanovllm.ops.attention.triton_prompts import attend_tiles

        return attend_tiles(q, pages[layer], page_tables, scale, known, window, softcap)
    if isinstance(known, PromptCascade):
        return known.run(q, pages, layer, page_tables, scale, window, softcap)
    if isinstance(known, FlashInferCascade):
        return known.run(q, pages, layer, scale, window, softcap)
    new = None if k is None or v is None else (k, v)
    return lookup(plan, PrefillPlan).run(q, pages, layer, scale, new=new, window=window, softcap=softcap)


_LIBRARY.impl("paged_prefill", _reference, "CPU")
_LIBRARY.impl("paged_prefill", _cuda, "CUDA")
