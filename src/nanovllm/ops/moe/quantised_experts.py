"""`quantised_experts`: a mixture of experts whose matrices are quantised."""

import math
from dataclasses import replace

import torch

from nanovllm.ops.backends import dependent_launch, own_kernels, shared_memory
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.linear.quantised_tiles import (
    HELD,
    MOST_HELD,
    PROGRAMS,
    VECTOR,
    FewTile,
    many_fits,
    many_tile,
    regular,
    scale_form,
    steps_of,
)
from nanovllm.ops.moe.experts import ExpertsMismatchError, every_expert, experts, plus, require_experts, require_fit
from nanovllm.ops.moe.tiles import QuantisedFewTiles, QuantisedGroupedTiles
from nanovllm.types import Tensor

MOST_WARPS = 8  # of a program for few tokens
_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_MATRIX = "Tensor {0}_codes, Tensor {0}_scales, Tensor? {0}_zeros, Tensor? {0}_order, int {0}_columns, int {0}_group, int {0}_rows"
_LIBRARY.define(
    f"quantised_experts(Tensor x, {_MATRIX.format('gate_up')}, {_MATRIX.format('down')}, Tensor chosen, Tensor weights, str act, "
    "Tensor? residual=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def quantised_experts(
    x: Tensor,
    gate_up: QuantisedMatrix,
    down: QuantisedMatrix,
    chosen: Tensor,
    weights: Tensor,
    act: str,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute `experts` for quantised matrices `[E, 2 F, M]` and `[E, M, F]`. Arguments and result are those of `experts`.

    Schema: `nanovllm::quantised_experts`, with the tensors and the sizes of each matrix in a row. On a CPU the chosen experts are
    dequantised. On a GPU with Triton, kernels read the codes, in bfloat16 and float16, in as many launches as `experts` takes, so that one
    captured call serves any routing. Otherwise all experts are dequantised there, one after another.

    Raises:
        ExpertsMismatchError: As in `experts`, or the scales, zeros or order of a matrix do not fit its codes.
    """
    require_fit(x, gate_up.shape, down.shape, chosen, weights, act, residual)
    for matrix in (gate_up, down):
        _require_parts(matrix)
    return torch.ops.nanovllm.quantised_experts.default(x, *_spread(gate_up), *_spread(down), chosen, weights, act, residual)


def any_experts(
    x: Tensor,
    gate_up: Tensor | QuantisedMatrix,
    down: Tensor | QuantisedMatrix,
    chosen: Tensor,
    weights: Tensor,
    act: str,
    residual: Tensor | None = None,
) -> Tensor:
    """`experts`, or `quantised_experts` if both matrices are quantised. If one is, it is dequantised."""
    if isinstance(gate_up, QuantisedMatrix) and isinstance(down, QuantisedMatrix):
        return quantised_experts(x, gate_up, down, chosen, weights, act, residual)
    return experts(x, _full(gate_up, x.dtype), _full(down, x.dtype), chosen, weights, act, residual)


def plain_experts(
    x: Tensor, gate_up: Tensor | QuantisedMatrix, down: Tensor | QuantisedMatrix, chosen: Tensor, weights: Tensor, act: str
) -> Tensor:
    """`every_expert`, over dequantised copies of quantised matrices: `torch.func` can transform it with respect to `x`."""
    return every_expert(x, _full(gate_up, x.dtype), _full(down, x.dtype), chosen, weights, act)


def _full(matrix: Tensor | QuantisedMatrix, dtype: torch.dtype) -> Tensor:
    return matrix.dequantised(dtype) if isinstance(matrix, QuantisedMatrix) else matrix


def _require_parts(matrix: QuantisedMatrix) -> None:
    """Raise `ExpertsMismatchError` if parts of a matrix do not fit together: kernels read memory by their shapes."""
    num, outputs, columns = matrix.shape
    grid = num, -(-outputs // matrix.rows), -(-columns // matrix.group)
    parts = {"scales": (matrix.scales, grid), "zeros": (matrix.zeros, grid), "order": (matrix.order, (columns,))}
    for name, (part, shape) in parts.items():
        if part is not None and tuple(part.shape) != shape:
            raise ExpertsMismatchError(f"quantised experts {tuple(matrix.shape)} have {name} {tuple(part.shape)}, expected {shape}")


def _spread(matrix: QuantisedMatrix) -> tuple[Tensor | int | None, ...]:
    return matrix.codes, matrix.scales, matrix.zeros, matrix.order, matrix.columns, matrix.group, matrix.rows


def _gathered(parts: tuple) -> QuantisedMatrix:
    codes, scales, zeros, order, columns, group, rows = parts
    return QuantisedMatrix(codes=codes, scales=scales, zeros=zeros, order=order, columns=columns, group=group, rows=rows)


@torch.library.register_fake("nanovllm::quantised_experts", lib=_LIBRARY)
def _fake(x: Tensor, *_) -> Tensor:
    return x.new_empty(x.shape)


def _cpu(x: Tensor, *given) -> Tensor:
    matrices, (chosen, weights, act, residual) = (_gathered(given[:7]), _gathered(given[7:14])), _last(given)
    hit, places = chosen.unique(return_inverse=True)
    if not len(hit):
        return x.new_zeros(x.shape)
    require_experts(hit.tolist(), matrices[1].shape[0])
    gate_up, down = (torch.stack([matrix[e].dequantised(x.dtype) for e in hit.tolist()]) for matrix in matrices)
    return experts(x, gate_up, down, places.view_as(chosen), weights, act, residual)


def _last(given: tuple) -> tuple:
    """The arguments of the op after its matrices. It leaves out defaults."""
    return given[14:] if len(given) == 18 else (*given[14:], None)


def _cuda(x: Tensor, *given) -> Tensor:
    gate_up, down, (chosen, weights, act, residual) = _gathered(given[:7]), _gathered(given[7:14]), _last(given)
    if x.shape[0] == 0:
        return x.new_empty(x.shape)
    if own_kernels(x.device, x.dtype) and _readable(gate_up) and _readable(down):
        from nanovllm.ops.moe import triton_quantised_experts

        new = dependent_launch(x.device)
        tokens, k = chosen.shape
        tiles = tiles_of(tokens, k, gate_up, down, shared_memory(x.device))
        routing = chosen.contiguous(), weights.contiguous()
        before = None if residual is None else residual.contiguous()
        return triton_quantised_experts.launch(x.contiguous(), gate_up, down, *routing, act, tiles, new, new, before)
    return plus(_one_by_one(x, gate_up, down, chosen, weights, act), residual)


def _readable(matrix: QuantisedMatrix) -> bool:
    parts = (matrix.codes, matrix.scales, matrix.zeros, matrix.order)
    return matrix.in_gpu_layout and all(each is None or each.is_contiguous() for each in parts)


def _one_by_one(x: Tensor, gate_up: QuantisedMatrix, down: QuantisedMatrix, chosen: Tensor, weights: Tensor, act: str) -> Tensor:
    total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for e in range(down.shape[0]):
        own = torch.where(chosen == e, 0, 1)  # of one expert, number 0; a pair of another has number 1, which does not exist
        total += every_expert(x, gate_up[e].dequantised(x.dtype)[None], down[e].dequantised(x.dtype)[None], own, weights, act)
    return total.to(x.dtype)


def tiles_of(
    tokens: int, k: int, gate_up: QuantisedMatrix, down: QuantisedMatrix, memory: int
) -> QuantisedFewTiles | QuantisedGroupedTiles:
    """Choose the tile configuration for a number of tokens: pairs run alone while they are at most a quarter as many as experts.

    In bfloat16 they do up to a half. Sorting pays earlier here, because tensor cores take fewer instructions for a code than sums in
    float32: `benchmarks/experts_tiles.py` measures it.

    Args:
        tokens: Number of tokens.
        k: Experts per token.
        gate_up: Gate and up projections of all experts.
        down: Down projections of all experts.
        memory: Shared memory that one program may use, in bytes.
    """
    num, width, inner = down.shape
    first, second = few_tile(gate_up, 2, tokens * k * inner), few_tile(down, k, tokens * width)
    if first is not None and second is not None and (tokens == 1 or 4 * tokens * k <= num):
        return QuantisedFewTiles(gate_up=first, down=second)
    return grouped_tiles(tokens * k / num, gate_up, down, memory)


def few_tile(matrix: QuantisedMatrix, at_once: int, outputs: int) -> FewTile | None:
    """Choose the tile configuration for few tokens; None if the kernels for few tokens do not serve the matrix.

    Programs have as few warps as hold a row's codes in `HELD` registers of a thread: many small programs hide the latency of the routing,
    which each reads before its codes.

    Args:
        matrix: The matrices of all experts.
        at_once: Rows of codes that an output needs: gate and up, or those of all experts of a token.
        outputs: Outputs of all programs together.
    """
    if not regular(replace(matrix, order=None)):  # inputs in another order are gathered before
        return None
    warps = 1
    while warps < MOST_WARPS and steps_of(matrix, warps) * VECTOR // 4 * at_once > HELD:
        warps *= 2
    held = steps_of(matrix, warps) * VECTOR // 4 * at_once
    if held > MOST_HELD:
        return None
    each = 1 << max(0, (HELD // held).bit_length() - 1)
    while each > 2 and outputs // each < PROGRAMS:
        each //= 2
    return FewTile(outputs=min(each, 16), warps=warps)


def grouped_tiles(pairs: float | int, gate_up: QuantisedMatrix, down: QuantisedMatrix, memory: int) -> QuantisedGroupedTiles:
    """Choose blocks that hold all pairs of most experts, given the average number of pairs per expert.

    Narrow experts, as of one of several GPUs, have few programs for gate and up, which keep more loads in flight, and few loop steps in
    the down product, whose programs are small so that many run at once.
    """
    rows = 16 if pairs <= 8 else 32 if pairs <= 24 else 64 if pairs <= 96 else 128
    while True:
        first, second = (many_tile(matrix[0], rows, gated, 0, memory) for matrix, gated in ((gate_up, True), (down, False)))
        if first.rows == second.rows:
            break
        rows = min(first.rows, second.rows)
    if rows == 16 and "spread" not in (scale_form(gate_up, first.depth), scale_form(down, second.depth)):
        hit = down.shape[0] * (1 - math.exp(-pairs))  # experts, if every token chooses at random
        more = replace(first, stages=max(first.stages, 6))
        if hit * -(-down.columns // first.outputs) <= PROGRAMS and many_fits(more, gate_up[0], True, memory, split=False):
            first = more
        if (steps := -(-down.width // second.depth)) <= 3:  # zeros take registers, which one warp lacks
            second = replace(second, stages=min(second.stages, 3), warps=1 if steps <= 2 and down.zeros is None else 2)
    return QuantisedGroupedTiles(gate_up=first, down=second)


_LIBRARY.impl("quantised_experts", _cpu, "CPU")
_LIBRARY.impl("quantised_experts", _cuda, "CUDA")
