"""`paged_decode`: attention of one new token a row to its sequence's pages."""

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
    pages: Float[Tensor, "L N 2 K S D"],
    layer: int,
    page_tables: Int32[Tensor, "B P"],
    seq_lens: Int32[Tensor, "B"],
    scale: float,
    plan: int,
    window: int = 0,
    softcap: float = 0.0,
) -> Float[Tensor, "B H D"]:
    """Attention of row b's newest token, at position `seq_lens[b] - 1`, to all KV of the row, its own included, or to its last `window`.

    `softcap`: scaled scores s become `softcap * tanh(s / softcap)`. Of both, 0 means none.

    H is a multiple of K; every `seq_lens[b]` is at least 1 (padding rows: 1, on the dummy page). `plan` is the handle of a
    `DecodePlan` whose pages cover `seq_lens`, of a `CascadePlan` whose runs do, or 0 for the reference.
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
    found = lookup(plan)
    if isinstance(found, CascadePlan):
        return run_cascade(found, q, pages, layer, page_tables, seq_lens, scale, window, softcap)
    return lookup(plan, DecodePlan).run(q, pages, layer, seq_lens, scale, window, softcap)


_LIBRARY.impl("paged_decode", _reference, "CPU")
_LIBRARY.impl("paged_decode", _cuda, "CUDA")
