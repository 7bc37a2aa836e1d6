"""A matrix product on a CPU in which the bits of a row do not depend on the other rows."""

import torch.nn.functional as F

from nanovllm.types import Tensor

ROWS = 8  # rows are padded to a multiple of this number


def padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `x @ weight.T + bias` over rows padded to a multiple of 8: a product of few rows would round in another order."""
    missing = -x.shape[0] % ROWS
    rows = F.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()
    return F.linear(rows, weight, bias)[: x.shape[0]]
