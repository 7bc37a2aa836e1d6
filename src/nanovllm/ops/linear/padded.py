"""A matrix product on a CPU in which the bits of a row do not depend on the other rows."""

from itertools import repeat

import torch
import torch.nn.functional as F

from nanovllm.types import Tensor

ROWS = 16  # rows are padded to a multiple of this number
AT_ONCE = 1 << 20  # numbers of a weight that become float32 at the same time: 4 MiB stay in the processor's caches
PIECE = 64  # outputs of a part of a weight are a multiple of this number: rows of other sizes round in another order
HALVES = (torch.bfloat16, torch.float16)


def padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `x @ weight.T + bias` over rows padded to a multiple of 16: a product of few rows would round in another order.

    Processors differ in how many rows are few: 8 are enough on some, but not on all with AVX-512.

    Torch multiplies bfloat16 and float16 one number at a time on a processor with AVX2 alone. There the product is taken in float32, which
    is 2 times as fast with few rows and 8 times with many, and rounded once.
    """
    missing = -x.shape[0] % ROWS
    rows = F.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()
    alike = x.dtype == weight.dtype and (bias is None or x.dtype == bias.dtype)  # torch raises for the others
    if x.dtype in HALVES and alike and torch.backends.cpu.get_cpu_capability() == "AVX2":
        return _in_float32(rows, weight, bias)[: x.shape[0]]
    return F.linear(rows, weight, bias)[: x.shape[0]]


def _in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` by a product in float32, a few rows of the weight at a time."""
    wide, most = x.float(), max(PIECE, AT_ONCE // max(1, weight.shape[1]) // PIECE * PIECE)
    biases = repeat(None) if bias is None else bias.float().expand(len(weight)).split(most)
    parts = [F.linear(wide, part.float(), own).to(x.dtype) for part, own in zip(weight.split(most), biases, strict=False)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
