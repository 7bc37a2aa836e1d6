"""`quantised_experts`: a mixture of experts whose matrices are quantised."""

import torch

from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.moe.experts import every_expert, experts
from nanovllm.types import Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_MATRIX = "Tensor {0}_codes, Tensor {0}_scales, Tensor? {0}_zeros, Tensor? {0}_order, int {0}_columns, int {0}_group, int {0}_rows"
_LIBRARY.define(
    f"quantised_experts(Tensor x, {_MATRIX.format('gate_up')}, {_MATRIX.format('down')}, Tensor chosen, Tensor weights, str act) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def quantised_experts(x: Tensor, gate_up: QuantisedMatrix, down: QuantisedMatrix, chosen: Tensor, weights: Tensor, act: str) -> Tensor:
    """Compute `experts` for quantised matrices `[E, 2 F, M]` and `[E, M, F]`. Arguments and result are those of `experts`.

    Schema: `nanovllm::quantised_experts`, with the tensors and the sizes of each matrix in a row. On a CPU the chosen experts are
    dequantised; on a GPU all are, one after another, so that no shape depends on the routing.
    """
    return torch.ops.nanovllm.quantised_experts.default(x, *_spread(gate_up), *_spread(down), chosen, weights, act)


def any_experts(
    x: Tensor, gate_up: Tensor | QuantisedMatrix, down: Tensor | QuantisedMatrix, chosen: Tensor, weights: Tensor, act: str
) -> Tensor:
    """`experts`, or `quantised_experts` if both matrices are quantised. If one is, it is dequantised."""
    if isinstance(gate_up, QuantisedMatrix) and isinstance(down, QuantisedMatrix):
        return quantised_experts(x, gate_up, down, chosen, weights, act)
    return experts(x, _full(gate_up, x.dtype), _full(down, x.dtype), chosen, weights, act)


def plain_experts(
    x: Tensor, gate_up: Tensor | QuantisedMatrix, down: Tensor | QuantisedMatrix, chosen: Tensor, weights: Tensor, act: str
) -> Tensor:
    """`every_expert`, over dequantised copies of quantised matrices: `torch.func` can transform it with respect to `x`."""
    return every_expert(x, _full(gate_up, x.dtype), _full(down, x.dtype), chosen, weights, act)


def _full(matrix: Tensor | QuantisedMatrix, dtype: torch.dtype) -> Tensor:
    return matrix.dequantised(dtype) if isinstance(matrix, QuantisedMatrix) else matrix


def _spread(matrix: QuantisedMatrix) -> tuple[Tensor | int | None, ...]:
    return matrix.codes, matrix.scales, matrix.zeros, matrix.order, matrix.columns, matrix.group, matrix.rows


def _gathered(parts: tuple) -> QuantisedMatrix:
    codes, scales, zeros, order, columns, group, rows = parts
    return QuantisedMatrix(codes=codes, scales=scales, zeros=zeros, order=order, columns=columns, group=group, rows=rows)


@torch.library.register_fake("nanovllm::quantised_experts", lib=_LIBRARY)
def _fake(x: Tensor, *_) -> Tensor:
    return x.new_empty(x.shape)


def _cpu(x: Tensor, *given) -> Tensor:
    matrices, (chosen, weights, act) = (_gathered(given[:7]), _gathered(given[7:14])), given[14:]
    hit, places = chosen.unique(return_inverse=True)
    if not len(hit):
        return x.new_zeros(x.shape)
    gate_up, down = (torch.stack([matrix[e].dequantised(x.dtype) for e in hit.tolist()]) for matrix in matrices)
    return experts(x, gate_up, down, places.view_as(chosen), weights, act)


def _cuda(x: Tensor, *given) -> Tensor:
    gate_up, down, (chosen, weights, act) = _gathered(given[:7]), _gathered(given[7:14]), given[14:]
    total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for e in range(down.shape[0]):
        own = torch.where(chosen == e, 0, 1)  # of one expert, number 0; a pair of another has number 1, which does not exist
        total += every_expert(x, gate_up[e].dequantised(x.dtype)[None], down[e].dequantised(x.dtype)[None], own, weights, act)
    return total.to(x.dtype)


_LIBRARY.impl("quantised_experts", _cpu, "CPU")
_LIBRARY.impl("quantised_experts", _cuda, "CUDA")
