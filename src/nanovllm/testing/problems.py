"""Inputs for tests of the kernels of a fused decode step, and references that do not round."""

from typing import Any

import torch

from nanovllm.ops import kv_write
from nanovllm.ops.elementwise.norm_rope import ACTS
from nanovllm.ops.kv_cache.fp8 import FP8, stored_width
from nanovllm.types import Tensor


def wide_norm_linear(
    x: Tensor,
    weight: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    gated: bool,
    act: str = "silu",
) -> Tensor:
    """Compute `norm_linear` in float64, without rounding in between."""
    x, weight = x.double(), weight.double()
    gain, bias, residual = (None if t is None else t.double() for t in (gain, bias, residual))
    if gain is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain
    y = x @ weight.T
    if bias is not None:
        y = y + bias
    if gated:
        gate, up = y.chunk(2, -1)
        y = ACTS[act](gate) * up
    return y if residual is None else y + residual


def linear_problem(
    rows: int,
    outputs: int,
    width: int,
    gated: bool,
    norm: bool,
    extras: bool,
    dtype: torch.dtype,
    device: str = "cpu",
    gains: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, float, bool]:
    """Return inputs of `norm_linear` with a few extreme norm weights. `gains` is the dtype of the norm weights; None means `dtype`."""
    torch.manual_seed(rows * width + outputs)
    x = torch.randn(rows, width, dtype=dtype, device=device)
    weight = (torch.randn(outputs * (2 if gated else 1), width, device=device) / width**0.5).to(dtype)
    gain = (torch.rand(width, device=device) + 0.5).to(gains or dtype) if norm else None
    if gain is not None:
        gain[::37] = 96.5
    bias = torch.randn(outputs, dtype=dtype, device=device) if extras and not gated else None
    residual = torch.randn(rows, outputs, dtype=dtype, device=device) if extras and not gated else None
    return x, weight, gain, bias, residual, 1e-6, gated


def attention_problem(
    lens: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    size: int,
    norm: bool,
    dtype: torch.dtype,
    device: str = "cpu",
    gains: torch.dtype | None = None,
) -> tuple[Any, ...]:
    """Return inputs of `rope_attend` for rows of these lengths. `gains` is the dtype of the norm weights; None means `dtype`.

    If there are several rows, the last row only reads: its slot is on the dummy page.
    """
    torch.manual_seed(len(lens) * head_dim)
    rows, width = len(lens), max(-(-n // size) for n in lens) + 1
    num_pages = rows * width + 1
    pages = torch.randn(2, num_pages, 2, kv_heads, size, head_dim, device=device).to(dtype)
    tables = torch.randperm(num_pages - 1)[: rows * width].view(rows, width).int()
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    last = seq_lens - 1
    slots = tables[torch.arange(rows), (last // size).long()] * size + last % size
    if rows > 1:
        slots[-1] = (num_pages - 1) * size
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    angles = torch.rand(rows, 1, head_dim // 2, device=device) * 6
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    both = [(torch.rand(head_dim, device=device) + 0.5).to(gains or dtype) if norm else None for _ in range(2)]
    return qkv, *both, cos, sin, pages, 1, tables.to(device), seq_lens.to(device), slots.int().to(device), head_dim**-0.5, 1e-6


def experts_problem(
    tokens: int, k: int, num: int, width: int, inner: int, dtype: torch.dtype, device: str = "cpu", routing: str = "random"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return inputs of `experts`.

    `routing` is `"random"`, `"few"` (only the last k + 1 experts are chosen) or `"one"` (all tokens have the same experts).
    """
    torch.manual_seed(tokens * width + inner)
    x = torch.randn(tokens, width, device=device).to(dtype)
    gate_up = torch.empty(num, 2 * inner, width, dtype=dtype, device=device).normal_(std=width**-0.5)
    down = torch.empty(num, width, inner, dtype=dtype, device=device).normal_(std=inner**-0.5)
    return x, gate_up, down, *routed(tokens, k, num, dtype, device, routing)


def routed(tokens: int, k: int, num: int, dtype: torch.dtype, device: str, routing: str = "random") -> tuple[Tensor, Tensor]:
    """Return experts and weights as a router chooses them: distinct per token, in order of descending weight."""
    scores = torch.randn(tokens, num, device=device)
    if routing == "one":
        scores = scores[:1].repeat(tokens, 1)
    elif routing == "few":
        scores[:, : -k - 1] -= 100
    weights, chosen = scores.softmax(-1).topk(k)
    return chosen, (weights / weights.sum(-1, keepdim=True)).to(dtype)


def wide_experts(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, act: str = "silu") -> Tensor:
    """Compute `experts` in float64, without rounding in between."""
    rows = []
    for row, ids, shares in zip(x.double(), chosen.tolist(), weights.double(), strict=True):
        total = torch.zeros_like(row)
        for e, share in zip(ids, shares, strict=True):
            gate, up = (gate_up[e].double() @ row).chunk(2)
            total += share * (down[e].double() @ (ACTS[act](gate) * up))
        rows.append(total)
    return torch.stack(rows)


def fp8_pages(pages: Tensor) -> Tensor:
    """Return pages of numbers, `[..., N, 2, K, S, D]`, as pages in FP8, written by `kv_write`."""
    layers = pages.reshape(-1, *pages.shape[-5:])
    _, num_pages, _, heads, size, head_dim = layers.shape
    made = torch.zeros(*layers.shape[:-1], stored_width(head_dim, FP8), dtype=torch.uint8, device=pages.device).view(FP8)
    slots = torch.arange(num_pages * size, dtype=torch.int32, device=pages.device)
    for index, layer in enumerate(layers):
        k, v = layer.permute(1, 0, 3, 2, 4).reshape(2, -1, heads, head_dim)
        kv_write(made, index, k, v, slots)
    return made.view(*pages.shape[:-5], *made.shape[1:])
