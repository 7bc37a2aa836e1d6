"""The Triton kernels of `norm_linear`: matrix products of few rows, whose time is the time to read the weights.

Import this module only if Triton is installed. A program loads its weights before it waits for the kernel that makes its input
(programmatic dependent launch). So the weights of the next kernel are loaded while one kernel computes. Only weights, norm weights and
biases may be read before the wait.
"""

# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# (tuples that grow in an unrolled loop, names bound in a compile-time branch, and loop ranges without `__next__`)

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.ops.linear.tiles import Tile, piece_of
from nanovllm.ops.triton_parts import activated, gained, launch_options, rounded
from nanovllm.types import Float, Tensor


@triton.jit
def _few(
    x, gain, w, bias, residual, y, N, eps, B: tl.constexpr, K: tl.constexpr, KC: tl.constexpr, BN: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i computes outputs i * BN ... (i + 1) * BN - 1 of every row; all K inputs are in registers, in pieces of KC."""
    if PDL:
        gdc_launch_dependents()
    STEPS: tl.constexpr = (K + KC - 1) // KC
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, KC)
    there = n < N
    at = w + n.to(tl.int64)[:, None] * K + k[None, :]
    weights = ()
    ups = ()
    gains = ()
    for step in tl.static_range(STEPS):
        both = there[:, None] & (step * KC + k < K)[None, :]
        weights += (tl.load(at + step * KC, mask=both, other=0.0, eviction_policy="evict_first"),)
        if GATED:
            ups += (tl.load(at + N.to(tl.int64) * K + step * KC, mask=both, other=0.0, eviction_policy="evict_first"),)
    if NORM:
        for step in tl.static_range(STEPS):
            gains += (tl.load(gain + step * KC + k, mask=step * KC + k < K, other=0.0),)
    biases = tl.load(bias + n, mask=there, other=0.0) if BIAS else 0.0
    if PDL:
        gdc_wait()
    rows = ()  # all loads are issued before the first is used: a store between them would delay them
    before = ()
    for b in tl.static_range(B):
        for step in tl.static_range(STEPS):
            rows += (tl.load(x + b * K + step * KC + k, mask=step * KC + k < K, other=0.0),)
        before += (tl.load(residual + b * N + n, mask=there, other=0.0) if RESIDUAL else 0.0,)
    for b in tl.static_range(B):
        scale = 1.0
        if NORM:
            for step in tl.static_range(STEPS):
                wide = rows[b * STEPS + step].to(tl.float32)
                if step == 0:
                    squares = wide * wide
                else:
                    squares += wide * wide
            scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        for step in tl.static_range(STEPS):
            xx = rows[b * STEPS + step]
            if NORM:
                xx = gained(xx.to(tl.float32) * scale, gains[step], xx.dtype)
            wide = xx.to(tl.float32)
            if step == 0:
                total = weights[0].to(tl.float32) * wide[None, :]
            else:
                total += weights[step].to(tl.float32) * wide[None, :]
            if GATED:
                if step == 0:
                    other = ups[0].to(tl.float32) * wide[None, :]
                else:
                    other += ups[step].to(tl.float32) * wide[None, :]
        acc = tl.sum(total, 1)
        if GATED:
            acc = activated(acc, tl.sum(other, 1), y.dtype.element_ty, ACT)
        tl.store(y + b * N + n, rounded(acc, biases, before[b], y.dtype.element_ty, BIAS, RESIDUAL), mask=there)


@triton.jit
def _many(
    x, gain, w, bias, residual, y, B, N, eps, BP: tl.constexpr, K: tl.constexpr, KS: tl.constexpr, KC: tl.constexpr, BN: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the same on tensor cores: KS warps take KC inputs each, in K / (KS KC) steps, and their sums are added at the end."""
    if PDL:
        gdc_launch_dependents()
    STEPS: tl.constexpr = K // (KS * KC)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    slices = tl.arange(0, KS)[:, None, None] * KC
    across, down = slices + tl.arange(0, KC)[None, None, :], slices + tl.arange(0, KC)[None, :, None]
    at = w + n.to(tl.int64)[None, :, None] * K + across
    there = (n < N)[None, :, None]
    weights = ()
    ups = ()
    for j in tl.static_range(STEPS):
        weights += (tl.load(at + j * KS * KC, mask=there, other=0.0, eviction_policy="evict_first"),)
    if GATED:
        at += N.to(tl.int64) * K
        for j in tl.static_range(STEPS):
            ups += (tl.load(at + j * KS * KC, mask=there, other=0.0, eviction_policy="evict_first"),)
    gains = ()
    if NORM:
        for j in tl.static_range(STEPS):
            gains += (tl.load(gain + j * KS * KC + down),)
    b = tl.arange(0, BP)
    on = (b < B)[None, None, :]
    source = x + b[None, None, :] * K + down
    acc = tl.zeros([KS, BN, BP], tl.float32)
    other = tl.zeros([KS, BN, BP], tl.float32)
    mask = (b < B)[None, :] & (n < N)[:, None]
    to = b[None, :] * N + n[:, None]
    biases = tl.load(bias + n, mask=n < N, other=0.0)[:, None] if BIAS else 0.0
    if PDL:
        gdc_wait()
    rows = ()
    if NORM:
        for j in tl.static_range(STEPS):
            rows += (tl.load(source + j * KS * KC, mask=on, other=0.0),)
        squares = tl.zeros([KS, BP], tl.float32)
        for j in tl.static_range(STEPS):
            wide = rows[j].to(tl.float32)
            squares += tl.sum(wide * wide, 1)
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)[None, None, :]
    before = tl.load(residual + to, mask=mask, other=0.0) if RESIDUAL else 0.0
    for j in tl.static_range(STEPS):
        xx = rows[j] if NORM else tl.load(source + j * KS * KC, mask=on, other=0.0)
        if NORM:
            xx = gained(xx.to(tl.float32) * scale, gains[j], xx.dtype)
        acc = tl.dot(weights[j], xx, acc)
        if GATED:
            other = tl.dot(ups[j], xx, other)
    total = tl.sum(acc, 0)
    if GATED:
        total = activated(total, tl.sum(other, 0), y.dtype.element_ty, ACT)
    tl.store(y + to, rounded(total, biases, before, y.dtype.element_ty, BIAS, RESIDUAL), mask=mask)


def launch(
    x: Float[Tensor, "B K"],
    weight: Float[Tensor, "out K"],
    gain: Float[Tensor, "K"] | None,
    bias: Float[Tensor, "N"] | None,
    residual: Float[Tensor, "B N"] | None,
    eps: float,
    gated: bool,
    tile: Tile,
    pdl: bool,
    act: str = "silu",
) -> Float[Tensor, "B N"]:
    """Launch the kernel of the op `norm_linear`. All tensors are contiguous; `tile.depth` times `tile.warps` divides K."""
    rows, width = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    flags = (gain is not None, bias is not None, residual is not None, gated, act, pdl)
    tensors = (x, x if gain is None else gain, weight, x if bias is None else bias, x if residual is None else residual, y)
    options = launch_options(tile.warps, pdl)
    grid = (triton.cdiv(outputs, tile.outputs),)
    kernel: Any = _many if tile.depth else _few
    with torch.cuda.device_of(x):
        if tile.depth:
            padded = max(8, triton.next_power_of_2(rows))
            kernel[grid](*tensors, rows, outputs, eps, padded, width, tile.warps, tile.depth, tile.outputs, *flags, **options)
        else:
            kernel[grid](*tensors, outputs, eps, rows, width, piece_of(width, tile.warps), tile.outputs, *flags, **options)
    return y
