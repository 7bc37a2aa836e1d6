"""`linear`: the one matrix product of the models, which a quantised form can replace."""

import torch
import torch.nn.functional as F

from nanovllm.types import Float, Tensor

ROWS = 8  # on a CPU every product has a multiple of this many rows

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def linear(x: Float[Tensor, "T in_"], weight: Float[Tensor, "out in_"], bias: Float[Tensor, "out"] | None = None) -> Float[Tensor, "T out"]:
    """`x @ weight.T + bias`.

    On a CPU in float32 and bfloat16, with both sizes multiples of 16, a row's result is bitwise the same whatever the other rows and
    however many: a product of few rows would be rounded in another order, so the rows are padded to a multiple of 8.
    """
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    if torch.compiler.is_compiling():  # traced, the padding would make a shape of every number of rows
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
