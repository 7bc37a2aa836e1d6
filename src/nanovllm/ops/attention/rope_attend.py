"""`rope_attend`: from a fused projection's output to attention's, for one new token a row, in one launch on a GPU; `rope_write` is its
first half, for tokens of prompts."""

import torch

from nanovllm.ops.attention.fused_plan import FusedDecodePlan
from nanovllm.ops.attention.paged_decode import paged_decode
from nanovllm.ops.attention.plan_table import PlanMismatchError, lookup
from nanovllm.ops.backends import HALVES, dependent_launch, installed
from nanovllm.ops.elementwise.norm_rope import apply_rope, rms_norm
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
    pages: Float[Tensor, "L N 2 K S D"],
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
    """Donates `pages`: norm (where there is a gain) and rotate q and k, write k and v into `slots` of one layer, attend; `[B, H D]`.

    `qkv` is `[B, (H + 2K) D]`, of which q takes what k and v leave; `cos` and `sin` are those of `rope_angles`. `plan` is the handle of
    a `FusedDecodePlan`: then no row may write what another row of the batch reads. Or it is what `paged_decode` takes: then all is
    written before it is read. `window` and `softcap` as in `paged_decode`.
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
    pages: Float[Tensor, "L N 2 K S D"],
    layer: int,
    slots: Int32[Tensor, "T"],
    eps: float,
) -> tuple[Float[Tensor, "T H D"], Float[Tensor, "T K D"], Float[Tensor, "T K D"]]:
    """Donates `qkv` and `pages`: norm and rotate q and k where they lie, and write k and v into `slots` of one layer.

    Returns q, k and v, views of `qkv`. Arguments as in `rope_attend`.
    """
    torch.ops.nanovllm.rope_write.default(qkv, q_norm, k_norm, cos, sin, pages, layer, slots, eps)
    return _heads(qkv, pages)


def _heads(qkv: Tensor, pages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, views of a fused projection's output."""
    (_, _, _, num_kv_heads, _, head_dim) = pages.shape
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
    # What the kernel reads before it waits must not come from a copy made here.
    whole = all(t is None or t.is_contiguous() for t in (qkv, q_norm, k_norm, cos, sin, slots))
    if qkv.dtype not in HALVES or not installed("triton") or not whole:
        return _write_steps(qkv, q_norm, k_norm, cos, sin, pages, layer, slots, eps)
    from nanovllm.ops.attention import triton_rope_attend

    triton_rope_attend.write(qkv, q_norm, k_norm, cos, sin, pages[layer], slots, eps, True, dependent_launch(qkv.device))


@torch.library.register_fake("nanovllm::rope_attend", lib=_LIBRARY)
def _fake(qkv, q_norm, k_norm, cos, sin, pages, layer, page_tables, seq_lens, slots, scale, eps, plan, window=0, softcap=0.0):
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] - 2 * pages.shape[3] * pages.shape[5])


def _steps(qkv, q_norm, k_norm, cos, sin, pages, layer, page_tables, seq_lens, slots, scale, eps, plan, window=0, softcap=0.0) -> Tensor:
    q, k, v = _heads(qkv, pages)
    q, k = _turned(q, q_norm, cos, sin, eps), _turned(k, k_norm, cos, sin, eps)
    kv_write(pages, layer, k, v, slots)
    return paged_decode(q, pages, layer, page_tables, seq_lens, scale, plan, window, softcap).flatten(1)


def _cuda(qkv, q_norm, k_norm, cos, sin, pages, layer, page_tables, seq_lens, slots, scale, eps, plan, window=0, softcap=0.0) -> Tensor:
    found = lookup(plan) if plan else None
    # What the kernel reads before it waits must not come from a copy made here.
    whole = all(t is None or t.is_contiguous() for t in (q_norm, k_norm, cos, sin, seq_lens, slots)) and page_tables.stride(-1) == 1
    if qkv.dtype not in HALVES or not installed("triton") or not whole:
        plan = 0 if isinstance(found, FusedDecodePlan) else plan
        return _steps(qkv, q_norm, k_norm, cos, sin, pages, layer, page_tables, seq_lens, slots, scale, eps, plan, window, softcap)
    from nanovllm.ops.attention import triton_rope_attend

    if not isinstance(found, FusedDecodePlan):
        pdl = dependent_launch(qkv.device)
        q = triton_rope_attend.write(qkv.contiguous(), q_norm, k_norm, cos, sin, pages[layer], slots, eps, False, pdl)
        return paged_decode(q, pages, layer, page_tables, seq_lens, scale, plan, window, softcap).flatten(1)
    shape = (found.num_heads, found.num_kv_heads, found.head_dim)
    given = (qkv.shape[1] // pages.shape[5] - 2 * pages.shape[3], pages.shape[3], pages.shape[5])
    if shape != given or qkv.shape[0] > found.batch_size:
        raise PlanMismatchError(f"plan {plan} is for {found.batch_size} rows of heads {shape}, got {qkv.shape[0]} of {given}")
    return triton_rope_attend.launch(
        qkv.contiguous(), q_norm, k_norm, cos, sin, pages[layer], page_tables, seq_lens, slots, scale, eps, found,
        dependent_launch(qkv.device), window, softcap,
    )  # fmt: skip


_LIBRARY.impl("rope_write", _write_steps, "CPU")
_LIBRARY.impl("rope_write", _write_cuda, "CUDA")
_LIBRARY.impl("rope_attend", _steps, "CPU")
_LIBRARY.impl("rope_attend", _cuda, "CUDA")
