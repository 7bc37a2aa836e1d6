"""The kernel whose warps divide the inputs, under Triton's interpreter: against float64, over every form that it serves."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.ops.linear.quantise import KINDS, Kind
from nanovllm.ops.linear.quantised import gpu_layout
from nanovllm.ops.linear.quantised_tiles import (
    LARGE,
    SPLIT_FROM,
    SPLIT_ROWS,
    SplitTile,
    large,
    serves_few,
    serves_split,
    split_fits,
    split_tile,
)
from nanovllm.testing.quantised_problems import quantised_problem
from tests.ops.linear.test_quantised_kernels import block, error, every_code, inputs, product_problem, quiet

pytestmark = pytest.mark.interpret
ROW: dict[str, Any] = {"group": None}
FORMS: list[tuple[Kind, int, int, dict[str, Any]]] = [
    ("int4", 24, 512, {"group": 128, "scales": torch.bfloat16}), ("int4", 13, 512, {"group": 64, "zeros": True}),
    ("int4", 40, 1024, {"group": 32, "zeros": True, "scales": torch.float16}), ("int4", 6, 512, {**ROW, "zeros": True}),
    ("int4", 12, 512, {"group": 256, "spread": 1e4}), ("int4", 33, 1024, {"group": 128, "zeros": True}),
    ("int4", 10, 512, {"group": 96, "rows": 3, "zeros": True}), ("int8", 14, 512, {"group": 64, "zeros": True}),
    ("int8", 24, 512, {**ROW, "spread": 1e4}), ("fp8", 130, 512, {"group": 128, "rows": 128, "scales": torch.bfloat16}),
]  # fmt: skip


@quiet
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "gated", "extras"), [(1, False, True), (8, True, False), (11, False, False)])
def test_every_form(form: tuple[Kind, int, int, dict[str, Any]], rows: int, gated: bool, extras: bool) -> None:
    """Steps of half a block and of a whole one, by two and by four warps, and in parts."""
    from nanovllm.ops.linear import triton_quantised_split

    (kind, *_), (matrix, x, bias, want) = form, product_problem(form, rows, gated, extras)
    for tile in (
        SplitTile(outputs=16, depth=block(kind) // 2, stages=2, warps=2),
        SplitTile(outputs=32, depth=block(kind), stages=2, warps=4),
    ):
        assert split_fits(tile, matrix, rows, gated, 200_000, split=False)
        assert error(triton_quantised_split.product(x, matrix, bias, gated, tile, False), want) < 1e-5
    if not gated and bias is None:
        tile = SplitTile(outputs=16, depth=block(kind), stages=2, parts=2, warps=2)
        assert split_fits(tile, matrix, rows, False, 200_000, split=True)
        sums = triton_quantised_split.product(x, matrix, None, False, tile, False)
        assert sums.shape[0] == 2 and error(sums.sum(0), want) < 1e-5


@quiet
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gated", [False, True])
def test_nothing_beyond_a_tensor_is_read(form: tuple[Kind, int, int, dict[str, Any]], gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the scales of a step after the last one, which nothing would be multiplied by."""
    from triton.runtime.interpreter import InterpreterBuilder

    from nanovllm.ops.linear import triton_quantised_split

    kind, outputs, columns, more = form
    matrix, x = quantised_problem(kind, outputs + outputs % 2, columns, **more, gpu=True), inputs(3, columns)
    tensors = [each for each in (x, matrix.codes, matrix.scales, matrix.zeros) if each is not None]
    plain, num_loads = InterpreterBuilder.create_masked_load, 0

    def load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        nonlocal num_loads
        read = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)].astype(np.int64)
        inside = [(read >= each.data_ptr()) & (read < each.data_ptr() + each.nbytes) for each in tensors]
        assert np.any(inside, axis=0).all(), "memory of nobody is read"
        num_loads += 1
        return plain(self, ptrs, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", load)
    for tile in (
        SplitTile(outputs=16, depth=block(kind) // 2, stages=2, warps=2),
        SplitTile(outputs=16, depth=block(kind), stages=2, warps=4),
    ):
        triton_quantised_split.product(x, matrix, None, gated, tile, False)
    assert num_loads > 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_converted_exactly(kind: Kind) -> None:
    from nanovllm.ops.linear import triton_quantised_split

    matrix, numbers = every_code(kind)
    tile = SplitTile(outputs=32, depth=block(kind), stages=2, warps=1)
    for first in (0, 32, 64, 96):
        x = torch.zeros(4, matrix.columns)
        x[range(4), range(first, first + 4)] = 1
        want = (numbers[first // 64] if kind == "int4" else numbers).expand(4, -1)
        assert torch.equal(triton_quantised_split.product(x, matrix, None, False, tile, False), want)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_a_row_do_not_depend_on_the_other_rows(kind: Kind) -> None:
    from nanovllm.ops.linear import triton_quantised_split

    matrix, x = quantised_problem(kind, 24, 512, group=128, gpu=True), inputs(16, 512)
    tile = SplitTile(outputs=16, depth=block(kind), stages=2, warps=4)
    one, eight, nine, all_ = (triton_quantised_split.product(x[:rows], matrix, None, False, tile, False) for rows in (1, 8, 9, 16))
    assert torch.equal(one, eight[:1]) and torch.equal(nine, all_[:9])  # numpy multiplies in other steps for 8 columns than for 16


SHAPES = [(6144, 4096, False), (4096, 12288, False), (24576, 4096, True), (151936, 1024, False)]


@pytest.mark.parametrize(("outputs", "width", "gated"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [None, 32, 64, 128])
def test_default_tiles_fit(kind: Kind, outputs: int, width: int, gated: bool, group: int | None) -> None:
    """On an H200, an A100 and a small card."""
    matrix = quantised_problem(kind, 2, width, group=group, gpu=True)
    matrix = type(matrix)(
        codes=torch.empty(outputs, matrix.codes.shape[1], dtype=matrix.codes.dtype, device="meta"), scales=matrix.scales, columns=width,
        group=matrix.group,
    )  # fmt: skip
    for memory in (200_000, 158_720, 93_184):
        for rows in (1, 8, SPLIT_ROWS):
            for split in (False, True) if not gated else (False,):
                tile = split_tile(matrix, rows, gated, 132, memory, split=split)
                fits = split_fits(tile, matrix, rows, gated, memory, split=split)
                assert fits or not serves_split(matrix, rows)
                assert split or tile.parts == 1


def test_which_matrices_are_served() -> None:
    """Those with whole blocks of columns and scales for runs of columns; 8 bits only from some rows on, fewer with a large matrix."""
    for kind in KINDS:
        usual = quantised_problem(kind, 16, 512, group=128, gpu=True)
        wide = replace(usual, codes=torch.empty(LARGE // usual.width, usual.width, dtype=usual.codes.dtype, device="meta"))
        assert not large(usual) and large(wide)
        for matrix, least in ((wide, SPLIT_FROM[kind][0]), (usual, SPLIT_FROM[kind][1])):
            assert serves_split(matrix, SPLIT_ROWS) and not serves_split(matrix, SPLIT_ROWS + 1)
            for rows in (1, 2, 3):
                assert serves_few(matrix, rows) == (not serves_split(matrix, rows)) == (rows < least)
    for columns, group in ((520, 128), (512, 40)):
        odd = quantised_problem("int4", 16, columns, group=group, gpu=True)
        assert not serves_split(odd, 1) and serves_few(odd, 1)
    assert gpu_layout(usual) is usual
