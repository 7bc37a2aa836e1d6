"""The Triton kernels of `route` and `norm_route`. Import this module only if Triton is installed."""

# pyright: reportAttributeAccessIssue=false
# (compile-time constants)

from typing import Any, cast

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.ops.triton_parts import gained, launch_options
from nanovllm.types import Float, Float32, Int32, Tensor

_TAKEN = tl.constexpr(-0x80000000)  # lower than what any score becomes
HELD = 64  # weights of the router in a thread's registers, at most, if more than one expert is to be there


@triton.jit
def _norm_router(x, gain, w, h, logits, eps, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr):
    """Program (experts, row) computes BN logits of the norm of its row. The first one of a row writes the norm, too."""
    if PDL:
        gdc_launch_dependents()
    row, n, k = tl.program_id(1).to(tl.int64), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, KP)
    inside, there = k < K, n < E
    weights = tl.load(w + n[:, None] * K + k[None, :], mask=there[:, None] & inside[None, :], other=0.0)
    gains = tl.load(gain + k, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    xx = tl.load(x + row * K + k, mask=inside, other=0.0)
    wide = xx.to(tl.float32)
    normed = gained(wide * tl.rsqrt(tl.sum(wide * wide, 0) / K + eps), gains, xx.dtype)
    if tl.program_id(0) == 0:
        tl.store(h + row * K + k, normed, mask=inside)
    found = tl.sum(weights.to(tl.float32) * normed.to(tl.float32)[None, :], 1)
    tl.store(logits + row * E + n, found.to(logits.dtype.element_ty), mask=there)


@triton.jit
def _route(
    logits, bias, chosen, weights, least, E: tl.constexpr, EP: tl.constexpr, TOP: tl.constexpr, BIAS: tl.constexpr,
    NORMALISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program t chooses the TOP experts of token t and their weights. A score that is NaN is the lowest.

    Scores become integers that order as they do, because a warp finds the largest integer in one instruction.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    t, e = tl.program_id(0).to(tl.int64), tl.arange(0, EP)
    x = tl.load(logits + t * E + e, mask=e < E, other=float("-inf")).to(tl.float32)
    shares = tl.exp(x - tl.max(x, 0))
    shares = shares / tl.sum(shares, 0)
    score = shares + tl.load(bias + e, mask=e < E, other=0.0) if BIAS else shares
    bits = tl.where(score == score, score, float("-inf")).to(tl.int32, bitcast=True)  # noqa: PLR0124
    left = tl.where(e < E, bits ^ ((bits >> 31) & 0x7FFFFFFF), _TAKEN)
    place = tl.full([EP], TOP, tl.int32)
    for k in tl.static_range(TOP):  # pyright: ignore[reportGeneralTypeIssues]
        best = tl.min(tl.where(left == tl.max(left, 0), e, EP), 0)
        place = tl.where(e == best, k, place)
        left = tl.where(e == best, _TAKEN, left)
    on = place < TOP
    if NORMALISE:
        shares = shares / tl.maximum(tl.sum(tl.where(on, shares, 0.0), 0), least)
    tl.store(chosen + t * TOP + place, e, mask=on)
    tl.store(weights + t * TOP + place, shares, mask=on)


def route(
    logits: Float[Tensor, "T E"], bias: Float32[Tensor, "E"] | None, top_k: int, normalise: bool, least_sum: float, pdl: bool
) -> tuple[Int32[Tensor, "T k"], Float32[Tensor, "T k"]]:
    """Launch the kernel of the op `route`. All tensors are contiguous; the numbers of experts are int32."""
    tokens, num = logits.shape
    chosen = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    if tokens:
        with torch.cuda.device_of(logits):
            cast(Any, _route)[(tokens,)](
                logits, logits if bias is None else bias, chosen, weights, least_sum, num, triton.next_power_of_2(num), top_k,
                bias is not None, normalise, pdl, **launch_options(1, pdl),
            )  # fmt: skip
    return chosen, weights


def norm_router(
    x: Float[Tensor, "T M"], gain: Float[Tensor, "M"], router: Float[Tensor, "E M"], eps: float, pdl: bool
) -> tuple[Float[Tensor, "T M"], Float[Tensor, "T E"]]:
    """Launch the kernel of the norm and the logits of `norm_route`, for at least one token. All tensors are contiguous."""
    (tokens, width), num = x.shape, router.shape[0]
    h, logits = torch.empty_like(x), x.new_empty((tokens, num), dtype=router.dtype)
    padded, warps = triton.next_power_of_2(width), 4 if width <= 8192 else 8
    each = 2 if 2 * padded <= HELD * 32 * warps else 1
    with torch.cuda.device_of(x):
        cast(Any, _norm_router)[(triton.cdiv(num, each), tokens)](
            x, gain, router, h, logits, eps, num, width, padded, each, pdl, **launch_options(warps, pdl)
        )
    return h, logits
