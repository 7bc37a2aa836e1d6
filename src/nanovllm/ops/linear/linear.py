"""`linear`: the matrix product that all models use. A quantised product could replace it."""

import torch
import torch.nn.functional as F

from nanovllm.types import Float, Tensor

ROWS = 8  # on a CPU rows are padded to a multiple of this number

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def linear(x: Float[Tensor, "T in_"], weight: Float[Tensor, "out in_"], bias: Float[Tensor, "out"] | None = None) -> Float[Tensor, "T out"]:
    """Compute `x @ weight.T + bias`.

    On a CPU, a row's result has the same bits whatever the other rows are, and whatever their number. This holds in float32 and bfloat16 if
    both sizes are multiples of 16. Because a product of few rows would round in another order, rows are padded to a multiple of 8.
    """
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    if torch.compiler.is_compiling():  # tracing the padding would specialise the graph on the number of rows
        return torch.ops.nanovllm.linear.default(x, weight, bias)
    return _cpu(x, weight, bias)


@torch.library.register_fake("nanovllm::linear", lib=_LIBRARY)
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    missing = -x.shape[0] % ROWS
    rows = F.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()
    return F.linear(rows, weight, bias)[: x.shape[0]]


_LIBRARY.impl("linear", _cpu, "CPU")
