"""`quantised_norm_linear` and `quantised_linear_add_norm`: the fused products of a decode step with quantised matrices."""

from collections.abc import Sequence

import torch

from nanovllm.ops.elementwise.norm_rope import ACTS, rms_norm
from nanovllm.ops.linear import quantised_cuda
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.linear.quantised_linear import quantised_linear
from nanovllm.types import Float, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_MATRIX = "Tensor codes, Tensor scales, Tensor? zeros, Tensor? order, int columns, int group, int rows, bool fp8_activations"
_LIBRARY.define(
    f"quantised_norm_linear(Tensor x, {_MATRIX}, Tensor? gain, Tensor? bias, Tensor? residual, float eps, bool gated, str act,"
    " int[] cut) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    f"quantised_linear_add_norm(Tensor x, {_MATRIX}, Tensor? bias, Tensor residual, Tensor gain, float eps, Tensor? inner, int[] cut)"
    " -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def quantised_norm_linear(
    x: Float[Tensor, "B K"],
    weight: QuantisedMatrix,
    gain: Float[Tensor, "K"] | None,
    bias: Float[Tensor, "out"] | None,
    residual: Float[Tensor, "B N"] | None,
    eps: float,
    gated: bool,
    act: str,
    cut: Sequence[int] = (),
) -> Float[Tensor, "B N"]:
    """Compute `norm_linear` for a quantised matrix. Arguments and result are those of `norm_linear`. Nothing is written in place.

    Schema: `nanovllm::quantised_norm_linear`, with the tensors and the sizes of the matrix after `x`.
    """
    return torch.ops.nanovllm.quantised_norm_linear.default(x, *_spread(weight), gain, bias, residual, eps, gated, act, cut)


def quantised_linear_add_norm(
    x: Float[Tensor, "B K"],
    weight: QuantisedMatrix,
    bias: Float[Tensor, "M"] | None,
    residual: Float[Tensor, "B M"],
    gain: Float[Tensor, "M"],
    eps: float,
    inner: Float[Tensor, "M"] | None,
    cut: Sequence[int] = (),
) -> tuple[Float[Tensor, "B M"], Float[Tensor, "B M"]]:
    """Compute `linear_add_norm` for a quantised matrix. Arguments and results are those of `linear_add_norm`. Nothing is written in place.

    Schema: `nanovllm::quantised_linear_add_norm`, with the tensors and the sizes of the matrix after `x`.
    """
    return torch.ops.nanovllm.quantised_linear_add_norm.default(x, *_spread(weight), bias, residual, gain, eps, inner, cut)


def _spread(w: QuantisedMatrix) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, int, int, int, bool]:
    return w.codes, w.scales, w.zeros, w.order, w.columns, w.group, w.rows, w.fp8_activations


def _matrix(codes, scales, zeros, order, columns, group, rows, rounds) -> QuantisedMatrix:
    sizes = {"columns": columns, "group": group, "rows": rows, "fp8_activations": rounds}
    return QuantisedMatrix(codes=codes, scales=scales, zeros=zeros, order=order, **sizes)


@torch.library.register_fake("nanovllm::quantised_norm_linear", lib=_LIBRARY)
def _fake(x, codes, scales, zeros, order, columns, group, rows, rounds, gain, bias, residual, eps, gated, act, cut):
    return x.new_empty(x.shape[0], codes.shape[0] // (2 if gated else 1))


def _norm_linear(x, codes, scales, zeros, order, columns, group, rows, rounds, gain, bias, residual, eps, gated, act, cut) -> Tensor:
    weight = _matrix(codes, scales, zeros, order, columns, group, rows, rounds)
    if quantised_cuda.runs(x, weight, gain, bias):
        return quantised_cuda.norm_product(x, weight, gain, bias, residual, eps, gated, act, cut)
    y = quantised_linear(x if gain is None else rms_norm(x, gain, eps), weight, bias)
    if gated:
        gate, up = y.chunk(2, -1)
        y = ACTS[act](gate) * up
    return y if residual is None else y + residual


@torch.library.register_fake("nanovllm::quantised_linear_add_norm", lib=_LIBRARY)
def _fake_add_norm(x, codes, scales, zeros, order, columns, group, rows, rounds, bias, residual, gain, eps, inner, cut):
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


def _linear_add_norm(
    x, codes, scales, zeros, order, columns, group, rows, rounds, bias, residual, gain, eps, inner, cut
) -> tuple[Tensor, Tensor]:  # fmt: skip
    weight = _matrix(codes, scales, zeros, order, columns, group, rows, rounds)
    if quantised_cuda.runs(x, weight, gain, bias, inner):
        return quantised_cuda.product_add_norm(x, weight, bias, residual, gain, eps, inner, cut)
    added = quantised_linear(x, weight, bias)
    y = residual + (added if inner is None else rms_norm(added, inner, eps))
    return y, rms_norm(y, gain, eps)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("quantised_norm_linear", _norm_linear, _device)
    _LIBRARY.impl("quantised_linear_add_norm", _linear_add_norm, _device)
