"""The Triton kernels of matrix products of more rows than those of `triton_few_rows.py`. Import this module only if Triton is installed.

One kernel is a pipelined product; if it has few outputs, its inputs are divided between programs too. Another kernel sums such parts and
applies bias, norms and residual. All kernels wait for the previous kernel before they read data that change between steps (programmatic
dependent launch).
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.ops.linear.tiles import LINE, MOST_ASKED, WideTile
from nanovllm.ops.triton_parts import activated, gained, launch_options, rounded
from nanovllm.types import Float, Float32, Tensor


@triton.jit
def ask(lines):
    """Prefetch these lines of 128 bytes into L2 without waiting."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _product(
    x, w, bias, y, B, N, K: tl.constexpr, PART: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    BIAS: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (outputs, rows, part) computes `[BP, BN]` outputs over PART of the K inputs; partial sums are stored in float32.

    Before it waits, it prefetches the first LINES lines of every output's weights.
    """
    if PDL:
        gdc_launch_dependents()
    n, b, part = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BP + tl.arange(0, BP), tl.program_id(2)
    k = part * PART + tl.arange(0, BK)
    on = (b < B)[:, None]
    rows = x + b.to(tl.int64)[:, None] * K + k[None, :]
    columns = w + n.to(tl.int64)[None, :] * K + k[:, None]
    ups = columns + N.to(tl.int64) * K
    acc = tl.zeros([BP, BN], tl.float32)
    other = tl.zeros([BP, BN], tl.float32)
    biases = tl.load(bias + n)[None, :] if BIAS else 0.0
    if PDL:
        if LINES:
            ask(w + n.to(tl.int64)[:, None] * K + part * PART + tl.arange(0, LINES)[None, :] * 64)  # `LINE`
        gdc_wait()
    for at in tl.range(0, PART, BK, num_stages=STAGES):
        inputs = tl.load(rows + at, mask=on, other=0.0)
        acc = tl.dot(inputs, tl.load(columns + at), acc)
        if GATED:
            other = tl.dot(inputs, tl.load(ups + at), other)
    to = y + (part * B + b).to(tl.int64)[:, None] * N + n[None, :]
    if PARTS > 1:
        tl.store(to, acc, mask=on)
    else:
        if GATED:
            acc = activated(acc, other, y.dtype.element_ty, ACT)
        tl.store(to, rounded(acc, biases, acc, y.dtype.element_ty, BIAS, False), mask=on)


@triton.jit
def _normed(x, gains, M: tl.constexpr, eps):
    """Compute the RMS norm of a row of M numbers, which may be padded with zeros, times its weights."""
    wide = x.to(tl.float32)
    return gained(wide * tl.rsqrt(tl.sum(wide * wide, 0) / M + eps), gains, x.dtype)


@triton.jit(do_not_specialize=["B"])  # the number of rows: one kernel for all
def _sum_norm(
    parts, bias, inner, residual, gain, y, h, B, eps, M: tl.constexpr, MP: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program i sums row i's parts, adds the bias, applies the norm `inner`, adds the residual, and stores the result and its norm `gain`.

    It rounds where the plain functions round. `inner`, `residual`, and `gain` with `h`, may be None: then they are left out, also of the
    compiled kernel's arguments.
    """
    if PDL:
        gdc_launch_dependents()
    b, m = tl.program_id(0).to(tl.int64), tl.arange(0, MP)
    inside = m < M
    if gain is not None:
        gains = tl.load(gain + m, mask=inside, other=0.0)
    if inner is not None:
        inners = tl.load(inner + m, mask=inside, other=0.0)
    biases = tl.load(bias + m, mask=inside, other=0.0) if BIAS else 0.0
    if PDL:
        gdc_wait()
    before = 0.0
    if residual is not None:
        before = tl.load(residual + b * M + m, mask=inside, other=0.0)
    total = tl.zeros([MP], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + (part * B + b) * M + m, mask=inside, other=0.0).to(tl.float32)
    total = rounded(total, biases, before, y.dtype.element_ty, BIAS, residual is not None and inner is None)
    if inner is not None:
        total = _normed(total, inners, M, eps)
        if residual is not None:
            total = rounded(total.to(tl.float32), biases, before, y.dtype.element_ty, False, True)
    tl.store(y + b * M + m, total, mask=inside)
    if gain is not None:
        tl.store(h + b * M + m, _normed(total, gains, M, eps), mask=inside)


@triton.jit
def _gate(gate_up, y, N, BN: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    b, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    on = n < N
    gate, up = tl.load(gate_up + b * 2 * N + n, mask=on), tl.load(gate_up + b * 2 * N + N + n, mask=on)
    tl.store(y + b * N + n, activated(gate, up, y.dtype.element_ty, ACT), mask=on)


def product(
    x: Float[Tensor, "B K"],
    weight: Float[Tensor, "out K"],
    bias: Float[Tensor, "out"] | None,
    gated: bool,
    tile: WideTile,
    pdl: bool,
    act: str = "silu",
) -> Float[Tensor, "B N"]:
    """Compute `x @ weight.T + bias`, or `act(gate) * up` for a gate and an up projection stacked in `weight`.

    All tensors are contiguous, and `tile.parts` is 1.
    """
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    y = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, y, outputs, gated, tile, pdl, act)
    return y


def partial_product(x: Float[Tensor, "B K"], weight: Float[Tensor, "N K"], tile: WideTile, pdl: bool) -> Float32[Tensor, "parts B N"]:
    """Compute `x @ weight.T` as partial sums over equal parts of K; `tile.parts` is more than 1."""
    y = torch.empty((tile.parts, x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    _launch(x, weight, None, y, weight.shape[0], False, tile, pdl)
    return y


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, outputs: int, gated: bool, tile: WideTile, pdl: bool, act: str = "silu"
) -> None:
    rows, width = x.shape
    options = launch_options(tile.warps, pdl)
    part = width // tile.parts
    # A power of two. 0 for gate and up, because earlier kernels leave no time to prefetch, and if several programs share the weights.
    lines = 0 if gated or rows > tile.rows else min(MOST_ASKED, part & -part) // LINE
    kernel: Any = _product
    with torch.cuda.device_of(x):
        kernel[(outputs // tile.outputs, triton.cdiv(rows, tile.rows), tile.parts)](
            x, weight, x if bias is None else bias, y, rows, outputs, width, part, tile.rows, tile.outputs, tile.depth,
            tile.stages, bias is not None, gated, act, tile.parts, lines, pdl, **options,
        )  # fmt: skip


def gate(gate_up: Float[Tensor, "B F2"], pdl: bool, act: str = "silu") -> Float[Tensor, "B F"]:
    """Compute `act(gate) * up` of the two halves of a contiguous tensor."""
    rows, width = gate_up.shape
    y = torch.empty((rows, width // 2), dtype=gate_up.dtype, device=gate_up.device)
    block, kernel = min(2048, triton.next_power_of_2(width // 2)), cast(Any, _gate)
    with torch.cuda.device_of(gate_up):
        kernel[(rows, triton.cdiv(width // 2, block))](gate_up, y, width // 2, block, act, pdl, **({"launch_pdl": True} if pdl else {}))
    return y


def sum_norm(
    parts: Float[Tensor, "parts B M"],
    bias: Float[Tensor, "M"] | None,
    residual: Float[Tensor, "B M"],
    gain: Float[Tensor, "M"],
    eps: float,
    pdl: bool,
    inner: Float[Tensor, "M"] | None = None,
) -> tuple[Float[Tensor, "B M"], Float[Tensor, "B M"]]:
    """Compute `residual + (sum of parts + bias)` and its RMS norm with `gain`; with `inner`, the sum is normalised before the residual.

    All tensors are contiguous.
    """
    y, h = torch.empty_like(residual), torch.empty_like(residual)
    _rows(parts, bias, inner, residual, gain, y, h, eps, pdl)
    return y, h


def summed(parts: Float[Tensor, "parts B M"], bias: Float[Tensor, "M"] | None, dtype: torch.dtype, pdl: bool) -> Float[Tensor, "B M"]:
    """Compute the sum of parts, plus a bias if given, in a dtype. All tensors are contiguous."""
    y = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    _rows(parts, bias, None, None, None, y, None, 0.0, pdl)
    return y


def norm_add(
    x: Float[Tensor, "B M"], gain: Float[Tensor, "M"], residual: Float[Tensor, "B M"] | None, eps: float, pdl: bool
) -> Float[Tensor, "B M"]:
    """Compute the RMS norm of x with weight `gain`, plus a residual if given. All tensors are contiguous."""
    y = torch.empty_like(x)
    if len(x):  # a step may need no logits, and then has no rows
        _rows(x.unsqueeze(0), None, gain, residual, None, y, None, eps, pdl)
    return y


def _rows(
    parts: Tensor, bias: Tensor | None, inner: Tensor | None, residual: Tensor | None, gain: Tensor | None, y: Tensor, h: Tensor | None,
    eps: float, pdl: bool,
) -> None:  # fmt: skip
    (rows, width), kernel = y.shape, cast(Any, _sum_norm)
    whole = triton.next_power_of_2(width)
    options = launch_options(4 if whole <= 4096 else 8, pdl)
    with torch.cuda.device_of(parts):
        kernel[(rows,)](
            parts, y if bias is None else bias, inner, residual, gain, y, h, rows, eps, width, whole, bias is not None, parts.shape[0], pdl,
            **options,
        )  # fmt: skip
