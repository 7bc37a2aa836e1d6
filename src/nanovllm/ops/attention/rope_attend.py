"""`rope_attend`: norm, rotation, KV write and attention for one new token per row, in one launch on a GPU.

Its input is the output of a fused qkv projection. `rope_write` is its first half, for tokens of prompts.
"""

import torch

from nanovllm.ops.attention.fused_plan import FusedDecodePlan
from nanovllm.ops.attention.paged_decode import paged_decode
from nanovllm.ops.attention.plan_table import PlanMismatchError, lookup
from nanovllm.ops.backends import HALVES, dependent_launch, installed
from nanovllm.ops.elementwise.norm_rope import apply_rope, rms_norm
from nanovllm.ops.kv_cache.fp8 import head_dim_of
from nanovllm.ops.kv_cache.kv_write import kv_write
from nanovllm.types import Float, Float32, Int32, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")


_LIBRARY.define(
    "rope_write(Tensor(a!) qkv, Tensor? q_norm, Tensor? k_norm, Tensor cos, Tensor sin, Tensor(b!) pages, SymInt layer, Tensor slots, "
    "float eps) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "rope_attend(Tensor qkv, Tensor? q_norm, Tensor? k_norm, Tensor cos, Tensor sin, Tensor(a!) pages, SymInt layer, Tensor page_tables, "
    "Tensor seq_lens, Tensor slots, float scale, float eps, SymInt plan, SymInt window=0, float softcap=0.0) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def rope_attend(
    qkv: Float[Tensor, "B width"],
    q_norm: Float[Tensor, "D"] | None,
    k_norm: Float[Tensor, "D"] | None,
    cos: Float32[Tensor, "B 1 D"],
    sin: Float32[Tensor, "B 1 D"],
    pages: Float[Tensor, "L N 2 K S W"],
    layer: int,
    page_tables: Int32[Tensor, "B P"],
    seq_lens: Int32[Tensor, "B"],
    slots: Int32[Tensor, "B"],
    scale: float,
    eps: float,
    plan: int,
    window: int = 0,
    softcap: float = 0.0,
) -> Float[Tensor, "B heads"]:
    """Donates `pages`: normalise and rotate q and k, write k and v into `slots` of one layer, and attend.

    Args:
        qkv: Output of the projection, `[B, (H + 2 K) D]`: H query heads, then K key heads, then K value heads.
        q_norm: Norm weight of query heads, `[D]`; None means no norm.
        k_norm: Norm weight of key heads, `[D]`; None means no norm.
        cos: Cosines from `rotary_angles`, `[B, 1, D]`.
        sin: Sines from `rotary_angles`, `[B, 1, D]`.
        pages: One KV pool, `[L, N, 2, K, S, D]`, or in FP8 with the layout of `ops/kv_cache/fp8.py`.
        layer: The layer's index in this pool.
        page_tables: Page numbers of each row, int32 `[B, P]`.
        seq_lens: Tokens of each row, new token included, int32 `[B]`.
        slots: Slot of each new token, int32 `[B]`.
        scale: Factor of the scores.
        eps: Added to the mean square in the norms.
        plan: Handle of a `FusedDecodePlan`: then no row may write a slot that another row of the batch reads. Or a plan of `paged_decode`:
            then all rows write before any row reads.
        window: As in `paged_decode`.
        softcap: As in `paged_decode`.

    Returns:
        The attention output, `[B, H D]`.

    Raises:
        UnknownPlanError: No live plan has the handle `plan`.
        PlanMismatchError: The plan is for other sizes.
    """
    return torch.ops.nanovllm.rope_attend.default(
        qkv, q_norm, k_norm, cos, sin, pages, layer, page_tables, seq_lens, slots, scale, eps, plan, window, softcap
    )


def rope_write(
    qkv: Float[Tensor, "T width"],
    q_norm: Float[Tensor, "D"] | None,
    k_norm: Float[Tensor, "D"] | None,
    cos: Float32[Tensor, "T 1 D"],
    sin: Float32[Tensor, "T 1 D"],
    pages: Float[Tensor, "L N 2 K S W"],
    layer: int,
    slots: Int32[Tensor, "T"],
    eps: float,
) -> tuple[Float[Tensor, "T H D"], Float[Tensor, "T K D"], Float[Tensor, "T K D"]]:
    """Donates `qkv` and `pages`: normalise and rotate q and k in place, and write k and v into `slots` of one layer.

    The arguments are as in `rope_attend`. Returns q, k and v as views of `qkv`.
    """
    torch.ops.nanovllm.rope_write.default(qkv, q_norm, k_norm, cos, sin, pages, layer, slots, eps)
    return _heads(qkv, pages)


def _heads(qkv: Tensor, pages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as views of a fused projection's output."""
    num_kv_heads, head_dim = pages.shape[3], head_dim_of(pages)
    heads = qkv.unflatten(-1, (-1, head_dim))
    q, k, v = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    return q, k, v


def _turned(x: Tensor, gain: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return apply_rope(x if gain is None else rms_norm(x, gain, eps), cos, sin)


@torch.library.register_fake("nanovllm::rope_write", lib=_LIBRARY)
def _fake_write(qkv, q_norm, k_norm, cos, sin, pages, layer, slots, eps):
    return None


def _write_steps(qkv, q_norm, k_norm, cos, sin, pages, layer, slots, eps) -> None:
    q, k, v = _heads(qkv, pages)
    for part, gain in ((q, q_norm), (k, k_norm)):
        part.copy_(_turned(part, gain, cos, sin, eps))
    kv_write(pages, layer, k, v, slots)


def _write_cuda(qkv, q_norm, k_norm, cos, sin, pages, layer, slots, eps) -> None:
    # The kernel reads these tensors before it waits for the previous kernel, so they must not be copies that are made here.
    whole = all(t is None or t.is_contiguous() for t in (qkv, q_norm, k_norm, cos, sin, slots))
    if qkv.dtype not in HALVES or not installed("triton") or not whole:
        return _write_steps(qkv, q_norm, k_norm, cos, sin, pages, layer, slots, eps)
    from nanovllm.ops.attention import triton_rope_attend

    triton_rope_attend.write(qkv, q_norm, k_norm, cos, sin, pages[layer], slots, eps, True, dependent_launch(qkv.device))


@torch.library.register_fake("nanovllm::rope_attend", lib=_LIBRARY)
def _fake(qkv, q_norm, k_norm, cos, sin, pages, layer, page_tables, seq_lens, slots, scale, eps, plan, window=0, softcap=0.0):
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] - 2 * pages.shape[3] * head_dim_of(pages))


def _steps(qkv, q_norm, k_norm, cos, sin, pages, layer, page_tables, seq_lens, slots, scale, eps, plan, window=0, softcap=0.0) -> Tensor:
    q, k, v = _heads(qkv, pages)
    q, k = _turned(q, q_norm, cos, sin, eps), _turned(k, k_norm, cos, sin, eps)
    kv_write(pages, layer, k, v, slots)
    return paged_decode(q, pages, layer, page_tables, seq_lens, scale, plan, window, softcap).flatten(1)


def _cuda(qkv, q_norm, k_norm, cos, sin, pages, layer, page_tables, seq_lens, slots, scale, eps, plan, window=0, softcap=0.0) -> Tensor:
    known = lookup(plan) if plan else None
    # The kernel reads these tensors before it waits for the previous kernel, so they must not be copies that are made here.
    whole = all(t is None or t.is_contiguous() for t in (q_norm, k_norm, cos, sin, seq_lens, slots)) and page_tables.stride(-1) == 1
    if qkv.dtype not in HALVES or not installed("triton") or not whole:
        plan = 0 if isinstance(known, FusedDecodePlan) else plan
        return _steps(qkv, q_norm, k_norm, cos, sin, pages, layer, page_tables, seq_lens, slots, scale, eps, plan, window, softcap)
    from nanovllm.ops.attention import triton_rope_attend

    if not isinstance(known, FusedDecodePlan):
        pdl = dependent_launch(qkv.device)
        q = triton_rope_attend.write(qkv.contiguous(), q_norm, k_norm, cos, sin, pages[layer], slots, eps, False, pdl)
        return paged_decode(q, pages, layer, page_tables, seq_lens, scale, plan, window, softcap).flatten(1)
    shape = (known.num_heads, known.num_kv_heads, known.head_dim)
    head_dim = head_dim_of(pages)
    given = (qkv.shape[1] // head_dim - 2 * pages.shape[3], pages.shape[3], head_dim)
    if shape != given or qkv.shape[0] > known.batch_size:
        raise PlanMismatchError(
            f"plan {plan} is for {known.batch_size} rows of (heads, key/value heads, head_dim) {shape}, got {qkv.shape[0]} of {given}"
        )
    return triton_rope_attend.launch(
        qkv.contiguous(), q_norm, k_norm, cos, sin, pages[layer], page_tables, seq_lens, slots, scale, eps, known,
        dependent_launch(qkv.device), window, softcap,
    )  # fmt: skip


_LIBRARY.impl("rope_write", _write_steps, "CPU")
_LIBRARY.impl("rope_write", _write_cuda, "CUDA")
_LIBRARY.impl("rope_attend", _steps, "CPU")
_LIBRARY.impl("rope_attend", _cuda, "CUDA")
