"""Quantised matrices for tests of kernels: every form, with codes and scales at their limits."""

from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nanovllm.models.common.params import Params
from nanovllm.ops.linear.code_layouts import packed
from nanovllm.ops.linear.quantise import Kind, quantise
from nanovllm.ops.linear.quantised import QuantisedMatrix, gpu_layout, joined, laid_out
from nanovllm.testing.problems import routed
from nanovllm.types import Tensor


def quantised_problem(
    kind: Kind, outputs: int, columns: int, *, group: int | None = None, rows: int = 1, zeros: bool = False, order: bool = False,
    scales: torch.dtype = torch.float32, spread: float = 1.0, device: str = "cpu", seed: int = 0, gpu: bool = False,
) -> QuantisedMatrix:  # fmt: skip
    """Return a matrix of random codes, all values of which occur if it is large enough. Weights are about `1 / sqrt(columns)`.

    Args:
        kind: The kind of the codes.
        outputs: Rows of the matrix.
        columns: Columns of the matrix.
        group: Columns of a scale; None means all.
        rows: Rows of a scale.
        zeros: Whether there are zero points.
        order: Whether the columns are permuted.
        scales: The dtype of the scales.
        spread: The ratio of the largest scale to the smallest, about.
        device: The device of the matrix.
        seed: Another seed gives other codes, scales, zeros and another order.
        gpu: Whether the matrix is laid out for the kernels of a GPU wherever it is; otherwise for its device.
    """
    random = torch.Generator().manual_seed(outputs * columns + (group or 0) + seed)
    if kind == "fp8":
        bits = torch.randint(0, 254, (outputs, columns), generator=random)
        codes = (bits + (bits >= 127)).to(torch.uint8).view(torch.float8_e4m3fn)  # 127 and 255 are NaN
        size = 150.0
    elif kind == "int8":
        codes, size = torch.randint(-128, 128, (outputs, columns), generator=random).to(torch.int8), 74.0
    else:
        codes, size = packed(torch.randint(-8, 8, (outputs, columns), generator=random).to(torch.int8)), 4.6
    wide = min(columns, group or columns)
    grid = (-(-outputs // rows), -(-columns // wide))
    lowest = -128 if kind == "int8" else -8
    matrix = QuantisedMatrix(
        codes=codes,
        scales=(spread ** (torch.rand(grid, generator=random) - 0.5) / size / columns**0.5).to(scales),
        zeros=torch.randint(lowest, -lowest + 1, grid, generator=random).short() if zeros else None,
        order=torch.randperm(columns, generator=random).int() if order else None,
        columns=columns,
        group=wide,
        rows=rows,
    )
    return _placed(matrix, device, gpu)


def _placed(matrix: QuantisedMatrix, device: str, gpu: bool) -> QuantisedMatrix:
    moved = pytree.tree_map(lambda each: None if each is None else each.to(device), matrix)
    return gpu_layout(moved) if gpu else laid_out(moved)


def quantised_experts_problem(
    kind: Kind, tokens: int, k: int, num: int, width: int, inner: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu",
    routing: str = "random", gpu: bool = False, **form: Any,
) -> tuple[Tensor, QuantisedMatrix, QuantisedMatrix, Tensor, Tensor]:  # fmt: skip
    """Return inputs of `quantised_experts`. `form` are options of `quantised_problem`; all experts have the order of the first.

    `gpu` is as in `quantised_problem`. The other arguments are those of `experts_problem`.
    """
    torch.manual_seed(tokens * width + inner)
    x = torch.randn(tokens, width, device=device).to(dtype)

    def experts(outputs: int, columns: int) -> QuantisedMatrix:
        each = [quantised_problem(kind, outputs, columns, seed=seed, **form) for seed in range(num)]
        stacked = joined([replace(one, order=each[0].order) for one in each], dim=0)
        assert stacked is not None
        return _placed(stacked, device, gpu)

    return x, experts(2 * inner, width), experts(width, inner), *routed(tokens, k, num, dtype, device, routing)


def rounded(params: Params[Tensor], kind: Kind, group: int | None = None) -> Params[Tensor]:
    """Return a model's weights with the matrices of attention and MLP quantised, as `quantise` rounds them."""

    def each(matrix: Tensor | None) -> Any:
        return None if matrix is None else quantise(matrix, kind, group)

    layers = tuple(
        replace(w, qkv=each(w.qkv), o=each(w.o), gate_up=each(w.gate_up), down=each(w.down), experts=None if w.experts is None else
                replace(w.experts, gate_up=each(w.experts.gate_up), down=each(w.experts.down)))
        for w in params.layers
    )  # fmt: skip
    return replace(params, layers=layers)


def dequantised(params: Params[Tensor], dtype: torch.dtype) -> Params[Tensor]:
    """Return weights with each quantised matrix as the matrix that it stands for, in `dtype`."""
    return pytree.tree_map(
        lambda leaf: leaf.dequantised(dtype) if isinstance(leaf, QuantisedMatrix) else leaf,
        params,
        is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix),
    )
