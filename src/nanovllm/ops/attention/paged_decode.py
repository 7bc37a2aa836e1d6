"""`paged_decode`: attention of one new token per row to the pages of its sequence."""

import torch

from nanovllm.ops.attention.cascade import run_cascade
from nanovllm.ops.attention.cascade_plan import CascadePlan
from nanovllm.ops.attention.flashinfer_plans import DecodePlan
from nanovllm.ops.attention.plan_table import lookup
from nanovllm.ops.attention.reference import attend_one, decode_rows, first_seen, row_kv
from nanovllm.types import Float, Int32, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define(
    "paged_decode(Tensor q, Tensor pages, SymInt layer, Tensor page_tables, Tensor seq_lens, float scale, SymInt plan, "
    "SymInt window=0, float softcap=0.0) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def paged_decode(
    q: Float[Tensor, "B H D"],
    pages: Float[Tensor, "L N 2 K S W"],
    layer: int,
    page_tables: Int32[Tensor, "B P"],
    seq_lens: Int32[Tensor, "B"],
    scale: float,
    plan: int,
    window: int = 0,
    softcap: float = 0.0,
) -> Float[Tensor, "B H D"]:
    """Compute attention of each row's newest token, at index `seq_lens[b] - 1`, to the KV of its row, its own included.

    Nothing is written in place: `kv_write` has to write the newest token's KV first.

    Schema: `nanovllm::paged_decode(Tensor q, Tensor pages, SymInt layer, Tensor page_tables, Tensor seq_lens, float scale, SymInt plan,
    SymInt window=0, float softcap=0.0) -> Tensor`.
    The reference gathers the pages in plain torch. It computes in float32 or wider and rounds once.

    Args:
        q: Queries, `[B, H, D]`; H is a multiple of K.
        pages: One KV pool, `[L, N, 2, K, S, D]`, or in FP8 with the layout of `ops/kv_cache/fp8.py`.
        layer: The layer's index in this pool.
        page_tables: Page numbers of each row, int32 `[B, P]`.
        seq_lens: Tokens of each row, int32 `[B]`, each at least 1. A padding row has 1 token, on the dummy page.
        scale: Factor of the scores, usually `D ** -0.5`.
        plan: 0 for the reference, or the handle of a `DecodePlan` or `CascadePlan` whose pages cover `seq_lens`.
        window: Number of last tokens that each row attends to; 0 means all.
        softcap: A score s becomes `softcap * tanh(s / softcap)` after scaling; 0 means no cap.

    Returns:
        The attention output, `[B, H, D]`, in the dtype of `q`.

    Raises:
        IndexError: A page table is too short for its row. Checked on a CPU only.
        UnknownPlanError: No live plan has the handle `plan`.
        PlanMismatchError: The plan is of another kind, was never updated, or is for another batch size, window or soft cap.

    Examples:
        >>> from nanovllm.ops import paged_decode
        >>> pages = torch.zeros(1, 2, 2, 1, 4, 2)
        >>> pages[0, 0, 1, 0, :2] = torch.tensor([[1.0, 1.0], [3.0, 3.0]])  # values of two tokens; all keys are equal
        >>> tables, lens = torch.tensor([[0]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
        >>> paged_decode(torch.ones(1, 1, 2), pages, 0, tables, lens, scale=0.7, plan=0).tolist()
        [[[2.0, 2.0]]]
    """
    return torch.ops.nanovllm.paged_decode.default(q, pages, layer, page_tables, seq_lens, scale, plan, window, softcap)


@torch.library.register_fake("nanovllm::paged_decode", lib=_LIBRARY)
def _fake(
    q: Tensor, pages: Tensor, layer: int, page_tables: Tensor, seq_lens: Tensor, scale: float, plan: int, window: int = 0,
    softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape)


def _reference(
    q: Tensor, pages: Tensor, layer: int, page_tables: Tensor, seq_lens: Tensor, scale: float, plan: int, window: int = 0,
    softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    if plan:
        return run_cascade(lookup(plan, CascadePlan), q, pages, layer, page_tables, seq_lens, scale, window, softcap)
    kv, out = pages[layer], []
    for b, seq_len in enumerate(seq_lens.tolist()):
        out.append(attend_one(q[b], row_kv(kv, page_tables[b], seq_len, first_seen(seq_len, 1, window)), scale, softcap))
    return torch.stack(out)


def _cuda(
    q: Tensor, pages: Tensor, layer: int, page_tables: Tensor, seq_lens: Tensor, scale: float, plan: int, window: int = 0,
    softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    if plan == 0:
        return decode_rows(q, pages[layer], page_tables, seq_lens, scale, window, softcap)
    known = lookup(plan)
    if isinstance(known, CascadePlan):
        return run_cascade(known, q, pages, layer, page_tables, seq_lens, scale, window, softcap)
    return lookup(plan, DecodePlan).run(q, pages, layer, seq_lens, scale, window, softcap)


_LIBRARY.impl("paged_decode", _reference, "CPU")
_LIBRARY.impl("paged_decode", _cuda, "CUDA")
