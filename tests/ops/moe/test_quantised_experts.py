"""`quantised_experts`: the kernels under Triton's interpreter, against float64, over every form of a matrix and at the limits."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from nanovllm.ops.elementwise.norm_rope import ACTS
from nanovllm.ops.linear.quantise import KINDS, Kind
from nanovllm.ops.linear.quantised import QuantisedMatrix, cpu_layout, gpu_layout, joined
from nanovllm.ops.linear.quantised_tiles import FewTile, ManyTile, many_fits, scale_form
from nanovllm.ops.moe.experts import ExpertsMismatchError, experts
from nanovllm.ops.moe.quantised_experts import any_experts, few_tile, grouped_tiles, plain_experts, quantised_experts, tiles_of
from nanovllm.ops.moe.tiles import QuantisedFewTiles, QuantisedGroupedTiles
from nanovllm.testing.problems import routed, wide_experts
from nanovllm.testing.quantised_problems import quantised_experts_problem, quantised_problem

interpreted = pytest.mark.interpret
quiet = pytest.mark.filterwarnings("ignore:.*overflow encountered in exp")  # of a sigmoid that is 0
ROW: dict[str, Any] = {"group": None}
# As for dense matrices: groups of every size, rows that share scales with a last block that is cut off, widths that are no power of two.
FORMS: list[tuple[Kind, dict[str, Any]]] = [
    ("fp8", {"group": 128, "rows": 128, "scales": torch.bfloat16}), ("fp8", {**ROW, "spread": 1e4}), ("int8", {**ROW, "spread": 1e4}),
    ("int8", {"group": 64, "zeros": True}), ("int8", {**ROW, "zeros": True}), ("int4", {"group": 128, "scales": torch.bfloat16}),
    ("int4", {"group": 32, "zeros": True, "scales": torch.float16}), ("int4", {**ROW, "zeros": True}),
    ("int4", {"group": 40, "rows": 3, "zeros": True}), ("int4", {"group": 64, "order": True}),
]  # fmt: skip
ODD: list[tuple[Kind, dict[str, Any]]] = [  # served by the kernels for many tokens alone
    ("int4", {"group": 10, "rows": 2, "zeros": True}), ("int8", {"group": 60}), ("fp8", {"group": 100, "rows": 128}),
]  # fmt: skip
FEW = [
    QuantisedFewTiles(gate_up=FewTile(outputs=16, warps=1), down=FewTile(outputs=64, warps=1)),
    QuantisedFewTiles(gate_up=FewTile(outputs=32, warps=2), down=FewTile(outputs=128, warps=2)),
]


def grouped(rows: int, outputs: int, depth: int) -> QuantisedGroupedTiles:
    tile = ManyTile(outputs=outputs, rows=rows, depth=depth, stages=2)
    return QuantisedGroupedTiles(gate_up=tile, down=tile)


def many(kind: Kind) -> list[QuantisedGroupedTiles]:
    """With steps of half a block of 128 columns, and of a whole one."""
    return [grouped(16, 64, 16), grouped(32, 128, 32)] if kind == "int4" else [grouped(16, 64, 32), grouped(32, 128, 64)]


def wide(problem: tuple[torch.Tensor, QuantisedMatrix, QuantisedMatrix, torch.Tensor, torch.Tensor], act: str = "silu") -> torch.Tensor:
    x, gate_up, down, chosen, weights = problem
    return wide_experts(x, gate_up.dequantised(torch.float64), down.dequantised(torch.float64), chosen, weights, act)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


@interpreted
@quiet
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("sizes", "act"), [((2, 2, 3, 264, 40), "silu"), ((1, 3, 5, 384, 136), "gelu")])
def test_few_tokens(form: tuple[Kind, dict[str, Any]], sizes: tuple[int, ...], act: str) -> None:
    """In programs of one warp, whose rows of codes take several steps, and of two."""
    from nanovllm.ops.moe import triton_quantised_experts

    kind, more = form
    problem = quantised_experts_problem(kind, *sizes, gpu=True, **more)
    want = wide(problem, act)
    residual = torch.randn_like(problem[0])
    for tiles in FEW:
        got = triton_quantised_experts.launch(*problem, act, tiles, False)
        assert error(got, want) < 1e-4
        assert torch.equal(triton_quantised_experts.launch(*problem, act, tiles, False, residual=residual), residual + got)


@interpreted
@quiet
@pytest.mark.parametrize("form", [*FORMS, *ODD])
@pytest.mark.parametrize(
    ("sizes", "act", "routing"),
    [((17, 3, 6, 200, 72), "silu", "random"), ((20, 2, 4, 131, 33), "gelu_tanh", "few"), ((33, 1, 1, 256, 64), "silu", "one")],
)
def test_many_tokens(form: tuple[Kind, dict[str, Any]], sizes: tuple[int, ...], act: str, routing: str) -> None:
    """Experts without tokens, with less than a block, and with several."""
    from nanovllm.ops.moe import triton_quantised_experts

    kind, more = form
    problem = quantised_experts_problem(kind, *sizes, routing=routing, gpu=True, **more)
    want = wide(problem, act)
    residual = torch.randn_like(problem[0])
    for tiles in many(kind):
        got = triton_quantised_experts.launch(*problem, act, tiles, False)
        assert error(got, want) < 1e-5
    # The launch that adds the residual is the same for all tiles.
    assert torch.equal(triton_quantised_experts.launch(*problem, act, tiles, False, residual=residual), residual + got)


@interpreted
@pytest.mark.parametrize(("kind", "code"), [("int8", -128), ("int8", 127), ("int4", -8), ("int4", 7), ("fp8", 448.0), ("fp8", -(2.0**-9))])
@pytest.mark.parametrize("zero", [None, -8, 8])
def test_codes_at_their_limits(kind: Kind, code: float, zero: int | None) -> None:
    """Sums of summands far larger than the codes are subtracted again. One neuron's gate is large, so that its activation is known."""
    from nanovllm.ops.moe import triton_quantised_experts

    x, gate_up, down, chosen, weights = quantised_experts_problem(kind, 3, 2, 4, 256, 128, group=128, gpu=True)
    byte = torch.tensor(code).to(torch.float8_e4m3fn).view(torch.uint8) if kind == "fp8" else torch.tensor(code)
    down = cpu_layout(down)
    stored = torch.full_like(down.codes.view(torch.uint8), (int(code) + 8) * 17 if kind == "int4" else int(byte) & 255)
    zeros = None if zero is None or kind == "fp8" else torch.full(down.scales.shape, zero, dtype=torch.int16)
    down = gpu_layout(replace(down, codes=stored.view(down.codes.dtype), zeros=zeros, scales=torch.full_like(down.scales, 2.0**-30)))
    problem = (x, gate_up, down, chosen, weights)
    want = wide(problem)
    limit = 1e-5 * 2.0**-30 * (abs(code - (zero or 0)) + 8) * 128
    for tiles in (FEW[1], many(kind)[1]):
        assert (triton_quantised_experts.launch(*problem, "silu", tiles, False).double() - want).abs().max() <= limit


@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_round_where_the_plain_functions_do(kind: Kind) -> None:
    from nanovllm.ops.moe import triton_quantised_experts

    x, gate_up, down, chosen, weights = quantised_experts_problem(kind, 5, 2, 6, 256, 128, group=128 if kind == "int4" else None, gpu=True)
    given = (x.half(), gate_up, down, chosen, weights)
    want = experts(x.half(), gate_up.dequantised(torch.float16), down.dequantised(torch.float16), chosen, weights.half())
    for tiles in (FEW[0], many(kind)[1]):
        got = triton_quantised_experts.launch(*given, "silu", tiles, False)
        assert got.dtype == torch.float16
        torch.testing.assert_close(got, want, rtol=2**-8, atol=2**-8)


@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_a_row_do_not_depend_on_the_other_rows(kind: Kind) -> None:
    from nanovllm.ops.moe import triton_quantised_experts

    x, gate_up, down, chosen, weights = quantised_experts_problem(kind, 19, 2, 4, 256, 64, group=128, gpu=True)
    for tiles in (FEW[1], many(kind)[0]):
        every = triton_quantised_experts.launch(x, gate_up, down, chosen, weights, "silu", tiles, False)
        again = triton_quantised_experts.launch(x, gate_up, down, chosen, weights, "silu", tiles, False)
        one = triton_quantised_experts.launch(x[5:6], gate_up, down, chosen[5:6], weights[5:6], "silu", tiles, False)
        assert torch.equal(every, again) and torch.equal(every[5:6], one)


@interpreted
@quiet
@pytest.mark.parametrize("tokens", [1, 2, 30])
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_op_chooses_kernels_that_compute_the_same(kind: Kind, order: bool, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: few tokens, and many. Matrices that are not contiguous run one by one."""
    from nanovllm.ops.moe import quantised_experts as module

    problem = quantised_experts_problem(kind, tokens, 2, 8, 256, 128, group=64, order=order, gpu=True)
    want, asked = wide(problem), list[str]()
    monkeypatch.setattr(module, "PROGRAMS", 1)  # the interpreter is slow per program
    monkeypatch.setattr(module, "own_kernels", lambda device, dtype: not asked.append("asked"))
    monkeypatch.setattr(module, "dependent_launch", lambda device: False)
    monkeypatch.setattr(module, "shared_memory", lambda device: 200_000)
    x, gate_up, down, chosen, weights = problem
    split = replace(down, scales=down.scales.mT.contiguous().mT)
    for second in (down, split):
        got = module._cuda(x, *module._spread(gate_up), *module._spread(second), chosen, weights, "silu")
        assert error(got, want) < 1e-4
    assert len(asked) == 2
    assert module._cuda(x[:0], *module._spread(gate_up), *module._spread(down), chosen[:0], weights[:0], "silu").shape == (0, 256)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", ACTS)
def test_the_references_are_those_of_the_dequantised_matrices(kind: Kind, act: str) -> None:
    x, gate_up, down, chosen, weights = problem = quantised_experts_problem(kind, 9, 2, 4, 72, 40, group=8, order=True)
    want = wide(problem, act)
    residual = torch.randn_like(x)
    assert torch.equal(
        any_experts(x, gate_up, down, chosen, weights, act, residual), residual + any_experts(x, gate_up, down, chosen, weights, act)
    )
    for way in (any_experts, plain_experts):
        assert error(way(*problem, act), want) < 1e-5
    full = gate_up.dequantised(torch.float32)
    assert error(any_experts(x, full, down, chosen, weights, act), want) < 1e-5  # one of the two is quantised


REAL = {"qwen3-30b-a3b": (8, 128, 2048, 768), "mixtral-8x7b": (2, 8, 4096, 14336), "ernie-4.5-21b-a3b": (6, 64, 2560, 1536)}


@pytest.mark.parametrize("group", [None, 32, 128])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REAL)
def test_every_number_of_tokens_has_tiles_that_fit(name: str, kind: Kind, group: int | None) -> None:
    k, num, width, inner = REAL[name]
    gate_up, down = (
        as_shape(quantised_problem(kind, 2, columns, group=group, gpu=True), num, rows)
        for rows, columns in ((2 * inner, width), (width, inner))
    )
    for memory in (200_000, 158_720, 93_184):
        for tokens in (1, 2, 4, 8, 16, 64, 256, 1024, 4096):
            tiles = tiles_of(tokens, k, gate_up, down, memory)
            assert isinstance(tiles, QuantisedFewTiles) == (4 * tokens * k <= num or tokens == 1)
            if isinstance(tiles, QuantisedGroupedTiles):
                assert tiles.gate_up.rows == tiles.down.rows and tiles.gate_up.parts == tiles.down.parts == 1
                for tile, matrix, gated in ((tiles.gate_up, gate_up, True), (tiles.down, down, False)):
                    assert many_fits(tile, matrix, gated, memory, split=False) and scale_form(matrix, tile.depth) != "spread"
    assert few_tile(as_shape(quantised_problem(kind, 2, 12, gpu=True), num, 8), 2, 100) is None  # columns that vectors do not fill
    odd = as_shape(quantised_problem(kind, 2, 200, group=20, gpu=True), num, 64)
    assert grouped_tiles(300, odd, down, 200_000).down.rows == grouped_tiles(300, odd, down, 200_000).gate_up.rows == 64


@pytest.mark.parametrize(
    ("inner", "stages", "down"), [(96, (6, 6), (3, 1)), (192, (6, 4), (3, 1)), (384, (4, 4), (3, 2)), (768, (4, 4), (4, 4))]
)
def test_narrow_experts_have_small_programs(inner: int, stages: tuple[int, int], down: tuple[int, int]) -> None:
    """Gate and up keep more steps on the way while few experts are hit; down products of few steps have few warps."""
    sizes = (2 * inner, 4096), (4096, inner)
    gate_up, second = (as_shape(quantised_problem("fp8", 2, columns, gpu=True), 128, rows) for rows, columns in sizes)
    tiles = [grouped_tiles(tokens * 8 / 128, gate_up, second, 200_000) for tokens in (8, 64)]
    assert tuple(each.gate_up.stages for each in tiles) == stages
    assert all((each.down.stages, each.down.warps) == down and each.gate_up.warps == 4 for each in tiles)
    many = grouped_tiles(9, gate_up, second, 200_000)  # pairs of an expert
    assert many.down.rows == 32 and many.down.warps == many.gate_up.warps == 4


def as_shape(matrix: QuantisedMatrix, num: int, outputs: int) -> QuantisedMatrix:
    """Experts of one more shape, without memory."""
    codes, scales = (torch.empty(num, outputs, each.shape[1], dtype=each.dtype, device="meta") for each in (matrix.codes, matrix.scales))
    return replace(matrix, codes=codes, scales=scales)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"scales": torch.ones(4, 80, 2)}, "have scales \\(4, 80, 2\\), expected \\(4, 80, 9\\)"),
     ({"zeros": torch.ones(4, 80, 1, dtype=torch.int16)}, "have zeros"), ({"order": torch.arange(3).int()}, "have order \\(3,\\)"),
     ({"columns": 64}, "not \\[T, M\\]")],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change: dict[str, Any], said: str) -> None:
    x, gate_up, down, chosen, weights = quantised_experts_problem("int8", 3, 2, 4, 72, 40, group=8)
    with pytest.raises(ExpertsMismatchError, match=said):
        quantised_experts(x, replace(gate_up, **change), down, chosen, weights, "silu")
    with pytest.raises(ExpertsMismatchError, match="relu"):
        quantised_experts(x, gate_up, down, chosen, weights, "relu")
    assert routed(3, 2, 4, torch.float32, "cpu")[0].shape == chosen.shape and joined([gate_up[0], gate_up[1]], dim=0) is not None


@pytest.mark.parametrize("number", [-5, -1, 4])
def test_an_expert_that_does_not_exist_is_refused(number: int) -> None:
    x, gate_up, down, chosen, weights = quantised_experts_problem("int8", 3, 2, 4, 72, 40, group=8)
    chosen[1, 0] = number
    with pytest.raises(ExpertsMismatchError, match=r"valid numbers are 0 \.\.\. 3"):
        quantised_experts(x, gate_up, down, chosen, weights, "silu")
