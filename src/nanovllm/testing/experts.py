"""Problems for `experts`, and the same without rounding, token by token."""

import torch

from nanovllm.ops.elementwise.norm_rope import ACTS
from nanovllm.types import Tensor


def experts_problem(
    tokens: int, k: int, num: int, width: int, inner: int, dtype: torch.dtype, device: str = "cpu", routing: str = "random"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs of `experts`. `routing`: `"random"`, `"few"` (only the last k + 1 experts are hit) or `"one"` (every token has the same)."""
    torch.manual_seed(tokens * width + inner)
    x = torch.randn(tokens, width, device=device).to(dtype)
    gate_up = torch.empty(num, 2 * inner, width, dtype=dtype, device=device).normal_(std=width**-0.5)
    down = torch.empty(num, width, inner, dtype=dtype, device=device).normal_(std=inner**-0.5)
    return x, gate_up, down, *routed(tokens, k, num, dtype, device, routing)


def routed(tokens: int, k: int, num: int, dtype: torch.dtype, device: str, routing: str = "random") -> tuple[Tensor, Tensor]:
    """Experts and weights as a router would choose them: distinct in a row, in order of descending weight."""
    scores = torch.randn(tokens, num, device=device)
    if routing == "one":
        scores = scores[:1].repeat(tokens, 1)
    elif routing == "few":
        scores[:, : -k - 1] -= 100
    weights, chosen = scores.softmax(-1).topk(k)
    return chosen, (weights / weights.sum(-1, keepdim=True)).to(dtype)


def wide_experts(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, act: str = "silu") -> Tensor:
    """`experts` without any rounding."""
    rows = []
    for row, ids, shares in zip(x.double(), chosen.tolist(), weights.double(), strict=True):
        total = torch.zeros_like(row)
        for e, share in zip(ids, shares, strict=True):
            gate, up = (gate_up[e].double() @ row).chunk(2)
            total += share * (down[e].double() @ (ACTS[act](gate) * up))
        rows.append(total)
    return torch.stack(rows)
