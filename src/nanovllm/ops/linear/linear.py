"""`linear`: the matrix product that all models use."""

import torch
import torch.nn.functional as F

from nanovllm.ops.linear.padded import padded_linear
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.linear.quantised_linear import quantised_linear
from nanovllm.types import Float, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def linear(
    x: Float[Tensor, "T in_"], weight: Float[Tensor, "out in_"] | QuantisedMatrix, bias: Float[Tensor, "out"] | None = None
) -> Float[Tensor, "T out"]:
    """Compute `x @ weight.T + bias`.

    On a CPU, a row's result has the same bits whatever the other rows are, and whatever their number. This holds in float32 and bfloat16 if
    both sizes are multiples of 16. Because a product of few rows would round in another order, rows are padded to a multiple of 16.
    There are two exceptions, because the libraries below torch order the sums of more rows in another way (measured with torch 2.13): with
    several threads more than 48 rows, and in bfloat16 on a processor with AMX more than 32.
    """
    if isinstance(weight, QuantisedMatrix):
        return quantised_linear(x, weight, bias)
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    if torch.compiler.is_compiling():  # tracing the padding would specialise the graph on the number of rows
        return torch.ops.nanovllm.linear.default(x, weight, bias)
    return padded_linear(x, weight, bias)


@torch.library.register_fake("nanovllm::linear", lib=_LIBRARY)
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


_LIBRARY.impl("linear", padded_linear, "CPU")
