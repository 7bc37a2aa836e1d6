"""`linear`: the one matrix product of the models, which a quantised form can replace; and `pack`, its weight layout on a CPU."""

import torch
import torch.nn.functional as F

from ..types import Float, Tensor

ROWS = 8  # on a CPU every product with a plain weight has a multiple of this many rows
SPLIT = 1024  # inputs from which oneDNN sums a single row in another order than a row among others

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def linear(x: Float[Tensor, "T in_"], weight: Float[Tensor, "out in_"], bias: Float[Tensor, "out"] | None = None) -> Float[Tensor, "T out"]:
    """`x @ weight.T + bias`; `weight` is plain or what `pack` made of it.

    On a CPU, with weights from `pack` in float32, bfloat16 or float16, a row's result is bitwise the same whatever the other rows and
    however many. A plain product rounds a row differently where there are few, so its rows are padded to a multiple of 8; with oneDNN's
    layout only a single row of more than 1,024 inputs needs another beside it. In float64 the last bit may differ.
    """
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    if torch.compiler.is_compiling():  # a traced weight does not show its layout: the op looks at the real one
        return torch.ops.nanovllm.linear.default(x, weight, bias)
    return _cpu_linear(x, weight, bias)


def pack(weight: Tensor) -> Tensor:
    """The weight `[out, in]` in the layout that `linear` wants: oneDNN's own on a CPU, which is faster and keeps rows bitwise equal.

    Elsewhere, and where oneDNN is missing or does not know the dtype, the same tensor comes back. The packed form is a copy.
    """
    if weight.device.type != "cpu" or weight.is_mkldnn or weight.dtype not in (torch.float32, torch.bfloat16):
        return weight
    if not torch.backends.mkldnn.is_available():
        return weight
    try:
        return _reorder(weight, ROWS)
    except RuntimeError:  # bfloat16 on a CPU without AVX-512
        return weight


def _reorder(weight: Tensor, rows: int) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


@torch.library.register_fake("nanovllm::linear", lib=_LIBRARY)
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _cpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.is_mkldnn:
        if x.shape[0] == 1 and x.shape[1] > SPLIT:
            return torch.ops.mkldnn._linear_pointwise(x.expand(2, -1).contiguous(), weight, bias, "none", [], "")[:1]
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight, bias, "none", [], "")
    missing = -x.shape[0] % ROWS
    rows = F.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()
    return F.linear(rows, weight, bias)[: x.shape[0]]


# Two keys, because a packed weight dispatches by its own layout and a fake tensor of one by its device.
_LIBRARY.impl("linear", _cpu_linear, "CPU")
_LIBRARY.impl("linear", _cpu_linear, "MkldnnCPU")
