"""The Triton kernels of matrix products of more rows than `triton_linear.py` takes: a pipelined product, cut along its inputs too where its
outputs are few, and the sum of such parts with what follows in a decoder layer. Imported only where Triton is.

All wait for the kernel ahead of them before they read what changes from step to step (programmatic dependent launch).
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.ops.linear.tiles import LINE, MOST_ASKED, WideTile
from nanovllm.ops.triton_parts import activated, gained, rounded
from nanovllm.types import Float, Float32, Tensor


@triton.jit
def _ask(lines):
    """Have these 128 bytes each brought into L2, and go on."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _product(
    x, w, bias, y, B, N, K: tl.constexpr, PART: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    BIAS: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (outputs, rows, part): `[BP, BN]` outputs over PART of the K inputs; sums of parts are stored in float32.

    Before it waits it asks for the first LINES lines of every output's weights.
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
            _ask(w + n.to(tl.int64)[:, None] * K + part * PART + tl.arange(0, LINES)[None, :] * 64)  # `LINE`
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
    """The RMS norm of a row of M numbers, behind which zeros may stand, with its gain."""
    wide = x.to(tl.float32)
    return gained(wide * tl.rsqrt(tl.sum(wide * wide, 0) / M + eps), gains, x.dtype)


@triton.jit(do_not_specialize=["B"])  # the number of rows: one kernel for all
def _sum_norm(
    parts, bias, inner, residual, gain, y, h, B, eps, M: tl.constexpr, MP: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program i: row i's sum of parts, plus bias, its norm with `inner`, plus residual, rounded where the plain functions round; and the
    norm of all that with `gain`. What of `inner`, `residual`, and `gain` with `h`, is None is left out, of the kernel's arguments too."""
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
    """`x @ weight.T + bias`, or of a stacked gate and up projection `act(gate) * up`; `tile.parts` is 1. All tensors are contiguous."""
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    y = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, y, outputs, gated, tile, pdl, act)
    return y


def partial_product(x: Float[Tensor, "B K"], weight: Float[Tensor, "N K"], tile: WideTile, pdl: bool) -> Float32[Tensor, "parts B N"]:
    """Sums over equal parts of K, whose sum is `x @ weight.T`; `tile.parts` is more than 1."""
    y = torch.empty((tile.parts, x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    _launch(x, weight, None, y, weight.shape[0], False, tile, pdl)
    return y


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, outputs: int, gated: bool, tile: WideTile, pdl: bool, act: str = "silu"
) -> None:
    rows, width = x.shape
    options = {"num_warps": tile.warps} | ({"launch_pdl": True} if pdl else {})
    part = width // tile.parts
    # A power of two; for gate and up the kernels ahead leave no time, and several programs over the same weights would all ask.
    lines = 0 if gated or rows > tile.rows else min(MOST_ASKED, part & -part) // LINE
    kernel: Any = _product
    with torch.cuda.device_of(x):
        kernel[(outputs // tile.outputs, triton.cdiv(rows, tile.rows), tile.parts)](
            x, weight, x if bias is None else bias, y, rows, outputs, width, part, tile.rows, tile.outputs, tile.depth,
            tile.stages, bias is not None, gated, act, tile.parts, lines, pdl, **options,
        )  # fmt: skip


def gate(gate_up: Float[Tensor, "B 2*N"], pdl: bool, act: str = "silu") -> Float[Tensor, "B N"]:
    """`act(gate) * up` of the two halves. Contiguous."""
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
    """`residual + (sum of parts + bias)`, or the RMS norm of that sum with `inner`, and the RMS norm of it all with `gain`. All tensors are
    contiguous."""
    y, h = torch.empty_like(residual), torch.empty_like(residual)
    _rows(parts, bias, inner, residual, gain, y, h, eps, pdl)
    return y, h


def norm_add(
    x: Float[Tensor, "B M"], gain: Float[Tensor, "M"], residual: Float[Tensor, "B M"] | None, eps: float, pdl: bool
) -> Float[Tensor, "B M"]:
    """The RMS norm of x with a gain, plus a residual where there is one. All tensors are contiguous."""
    y = torch.empty_like(x)
    if len(x):  # of a prompt no logits may be asked for
        _rows(x.unsqueeze(0), None, gain, residual, None, y, None, eps, pdl)
    return y


def _rows(
    parts: Tensor, bias: Tensor | None, inner: Tensor | None, residual: Tensor | None, gain: Tensor | None, y: Tensor, h: Tensor | None,
    eps: float, pdl: bool,
) -> None:  # fmt: skip
    (rows, width), kernel = y.shape, cast(Any, _sum_norm)
    whole = triton.next_power_of_2(width)
    options = {"num_warps": 4 if whole <= 4096 else 8} | ({"launch_pdl": True} if pdl else {})
    with torch.cuda.device_of(parts):
        kernel[(rows,)](
            parts, y if bias is None else bias, inner, residual, gain, y, h, rows, eps, width, whole, bias is not None, parts.shape[0], pdl,
            **options,
        )  # fmt: skip
