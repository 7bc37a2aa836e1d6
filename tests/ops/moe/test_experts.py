"""`experts`: right, a row's bits on a CPU free of the other rows, and the kernels under Triton's interpreter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.ops.elementwise.norm_rope import ACTS
from nanovllm.ops.linear.tiles import Tile, WideTile
from nanovllm.ops.moe.experts import ExpertsMismatchError, _few_tile, _grouped_tiles, every_expert, experts, tiles_of
from nanovllm.ops.moe.tiles import FewTiles, GroupedTiles
from nanovllm.testing.problems import experts_problem, routed, wide_experts

SIZES = [(1, 2, 4, 40, 24), (3, 1, 5, 16, 16), (17, 3, 8, 40, 24), (70, 2, 4, 32, 48)]
ROUTINGS = ["random", "few", "one"]
REAL = {"qwen3-30b-a3b": (8, 128, 2048, 768), "mixtral-8x7b": (2, 8, 4096, 14336), "ernie-4.5-21b-a3b": (6, 64, 2560, 1536)}


def close(got: torch.Tensor, want: torch.Tensor, error: float) -> None:
    torch.testing.assert_close(got.double(), want, rtol=error, atol=error)


@pytest.mark.parametrize("plain", [experts, every_expert])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("sizes", SIZES)
def test_the_plain_forms_are_a_loop_over_tokens(sizes, routing: str, act: str, plain: Callable[..., torch.Tensor]) -> None:
    problem = experts_problem(*sizes, torch.float32, routing=routing)
    close(plain(*problem, act), wide_experts(*problem, act), 1e-5)
    wide = [t.double() if t.is_floating_point() else t.int() for t in problem]
    close(plain(*wide, act), wide_experts(*wide, act), 1e-12)


@pytest.mark.parametrize("tokens", [1, 30])
def test_half_precision_errs_no_more_than_the_models_reference_code(tokens: int) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(num_experts=8, num_experts_per_tok=4, hidden_size=64, moe_intermediate_size=48, hidden_act="silu")
    config._experts_implementation = "eager"
    x, gate_up, down, chosen, weights = problem = experts_problem(tokens, 4, 8, 64, 48, torch.bfloat16)
    theirs = Qwen3MoeExperts(config)
    theirs.gate_up_proj.data, theirs.down_proj.data = gate_up, down
    want = wide_experts(*problem)
    mine, other = ((y.double() - want).square().mean() for y in (experts(*problem), theirs(x, chosen, weights)))
    assert mine <= 1.01 * other
    wide = [t.double() if t.is_floating_point() else t for t in problem]
    theirs.gate_up_proj.data, theirs.down_proj.data = wide[1], wide[2]
    close(experts(*wide), theirs(wide[0], chosen, wide[4]), 1e-12)


@given(
    tokens=st.integers(1, 40),
    sizes=st.sampled_from([(2, 4, 32, 48), (3, 8, 64, 16), (1, 3, 80, 32), (1, 1, 16, 2064)]),  # the last in several pieces
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    act=st.sampled_from(sorted(ACTS)),
    data=st.data(),
)
@settings(max_examples=100)
def test_rows_do_not_depend_on_each_other(
    tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, act: str, data: st.DataObject
) -> None:
    x, gate_up, down, chosen, weights = experts_problem(tokens, *sizes, dtype)
    rows = data.draw(st.lists(st.integers(0, tokens - 1), min_size=1, max_size=30))
    torch.set_num_threads(data.draw(st.sampled_from([1, 3])))
    try:
        y, again = experts(x, gate_up, down, chosen, weights, act), experts(x[rows], gate_up, down, chosen[rows], weights[rows], act)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(again, y[rows])


def test_the_order_in_which_a_router_names_experts_does_not_matter() -> None:
    x, gate_up, down, chosen, weights = experts_problem(9, 4, 6, 32, 16, torch.float32)
    assert torch.equal(experts(x, gate_up, down, chosen.flip(1), weights.flip(1)), experts(x, gate_up, down, chosen, weights))


def test_weights_may_be_wider_and_no_tokens_are_no_rows() -> None:
    x, gate_up, down, chosen, weights = experts_problem(5, 2, 4, 32, 16, torch.bfloat16)
    assert torch.equal(experts(x, gate_up, down, chosen, weights.float()), experts(x, gate_up, down, chosen, weights))
    for plain in (experts, every_expert):
        assert plain(x[:0], gate_up, down, chosen[:0], weights[:0], "silu").shape == (0, 32)


def test_what_another_expert_makes_of_a_row_does_not_leak() -> None:
    x, gate_up, down, chosen, weights = experts_problem(6, 1, 3, 16, 16, torch.float32)
    chosen.clamp_(max=1)
    gate_up[2] = torch.inf
    for plain in (experts, every_expert):
        assert plain(x, gate_up, down, chosen, weights, "silu").isfinite().all()


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("change", "said"),
    [({"act": "relu"}, "relu"), ({"x": torch.zeros(3, 8)}, "not \\[T, M\\]"), ({"x": torch.zeros(16)}, "axes"),
     ({"gate_up": torch.zeros(4, 20, 16)}, "not \\[T, M\\]"), ({"down": torch.zeros(3, 16, 24)}, "not \\[T, M\\]"),
     ({"chosen": torch.zeros(2, 2, dtype=torch.int64)}, "not both"), ({"weights": torch.zeros(3, 1)}, "not both"),
     ({"chosen": torch.zeros(3, 0, dtype=torch.int64), "weights": torch.zeros(3, 0)}, "not both"),
     ({"x": torch.zeros(3, 16, dtype=torch.float64)}, "one dtype"), ({"chosen": torch.zeros(3, 2)}, "int32 or int64"),
     ({"chosen": torch.tensor([[0, 1], [0, 4], [1, 2]])}, "0 \\.\\.\\. 4 were"),
     ({"chosen": -torch.ones(3, 2, dtype=torch.int32)}, "-1 \\.\\.\\. -1 were")],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change: dict[str, Any], said: str) -> None:
    given = dict(zip(("x", "gate_up", "down", "chosen", "weights"), experts_problem(3, 2, 4, 16, 24, torch.float32), strict=True))
    with pytest.raises(ExpertsMismatchError, match=said):
        experts(**(given | change))


@pytest.mark.parametrize("memory", [90_000, 155_000, 200_000])
@pytest.mark.parametrize("name", REAL)
def test_every_number_of_tokens_has_tiles_that_fit(name: str, memory: int) -> None:
    for tokens in (1, 2, 4, 8, 16, 64, 256, 1024, 4096):
        tiles = tiles_of(tokens, *REAL[name], memory)
        assert isinstance(tiles, FewTiles) == (2 * tokens * REAL[name][0] <= REAL[name][1] or tokens == 1)
        if isinstance(tiles, GroupedTiles):
            gate_up, down = tiles.gate_up, tiles.down
            assert gate_up.rows == down.rows and gate_up.stages == down.stages >= 2
            assert 2 * down.stages * down.depth * (down.rows + down.outputs) <= memory and down.outputs == 2 * gate_up.outputs


def test_programs_that_would_hold_too_much_are_not_made() -> None:
    assert isinstance(tiles_of(1, 8, 16, 4096, 2048, 200_000), FewTiles)
    assert isinstance(tiles_of(1, 8, 16, 4096, 32768, 200_000), GroupedTiles)


@pytest.mark.compile
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_op_passes_opcheck(dtype: torch.dtype) -> None:
    problem = experts_problem(5, 2, 4, 32, 16, dtype)
    for residual in ((), (torch.randn_like(problem[0]),)):
        torch.library.opcheck(torch.ops.nanovllm.experts.default, (*problem, "gelu", *residual))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_residual_is_added_to_the_rounded_sum(dtype: torch.dtype) -> None:
    problem = experts_problem(5, 2, 4, 32, 16, dtype)
    residual = torch.randn_like(problem[0])
    assert torch.equal(experts(*problem, residual=residual), residual + experts(*problem))


@pytest.mark.unhooked
def test_a_residual_of_another_shape_or_dtype_is_refused() -> None:
    problem = experts_problem(5, 2, 4, 32, 16, torch.float32)
    residual = torch.randn_like(problem[0])
    for wrong in (residual[:4], residual.double()):
        with pytest.raises(ExpertsMismatchError, match="residual"):
            experts(*problem, residual=wrong)


@pytest.mark.compile
def test_traces_as_a_whole_for_any_number_of_tokens() -> None:
    compiled = torch.compile(lambda *given: experts(*given, "gelu_tanh") + 1, fullgraph=True, dynamic=True)
    for tokens in (2, 5, 9):
        problem = experts_problem(tokens, 2, 4, 32, 16, torch.float32)
        assert torch.equal(compiled(*problem), experts(*problem, "gelu_tanh") + 1)


def interpreted(sizes: tuple[int, ...], routing: str, act: str, tiles: FewTiles | GroupedTiles, dtype=torch.float32) -> None:
    from nanovllm.ops.moe import triton_experts

    problem = experts_problem(*sizes, dtype, routing=routing)
    got = triton_experts.launch(*problem, act, tiles, False)
    residual = torch.randn_like(problem[0])
    assert torch.equal(triton_experts.launch(*problem, act, tiles, False, residual), residual + got)
    if dtype == torch.float32:
        close(got, wide_experts(*problem, act), 1e-4)
    else:
        torch.testing.assert_close(got, experts(*problem, act), rtol=2**-9, atol=2**-10)


FEW = [
    FewTiles(gate_up=Tile(outputs=2, warps=2, depth=16), down=Tile(outputs=2, warps=2, depth=8)),
    FewTiles(gate_up=Tile(outputs=4, warps=1, depth=32), down=Tile(outputs=1, warps=1, depth=32)),
]


@pytest.mark.interpret
@pytest.mark.parametrize("tiles", FEW)
@pytest.mark.parametrize(("sizes", "act"), [*((SIZES[0], act) for act in ACTS), (SIZES[1], "silu"), ((17, 2, 4, 20, 12), "silu")])
def test_few_tokens_interpreted(sizes: tuple[int, ...], act: str, tiles: FewTiles) -> None:
    """Inputs that fill the last step of the loop and that do not, outputs likewise."""
    interpreted(sizes, "random", act, tiles)


def grouped(rows: int, outputs: int, depth: int) -> GroupedTiles:
    tile = WideTile(outputs=outputs, rows=rows, depth=depth, stages=2)
    return GroupedTiles(gate_up=tile, down=tile)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("tiles", "act"),
    [
        (grouped(16, 16, 16), "silu"),
        (grouped(32, 32, 32), "gelu"),
        pytest.param(grouped(16, 16, 16), "gelu", marks=pytest.mark.long),
        pytest.param(grouped(32, 32, 32), "silu", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("sizes", [*SIZES, (33, 1, 1, 16, 16), (70, 5, 40, 48, 20)])
def test_many_tokens_interpreted(sizes: tuple[int, ...], routing: str, act: str, tiles: GroupedTiles) -> None:
    """Experts without tokens, with less than a block, and with several; more blocks than run side by side."""
    interpreted(sizes, routing, act, tiles)


@pytest.mark.interpret
@pytest.mark.parametrize("tokens", [1, 8])
def test_the_kernels_round_where_the_plain_functions_do(tokens: int) -> None:
    sizes = (tokens, 2, 8, 32, 48)
    for tiles in (FEW[0], grouped(16, 16, 16)):
        interpreted(sizes, "random", "silu", tiles, torch.float16)


@pytest.mark.interpret
def test_the_tiles_that_are_chosen_interpreted() -> None:
    for tokens, routing in ((1, "random"), (3, "few"), (17, "random"), (70, "one")):
        interpreted((tokens, 2, 16, 48, 80), routing, "silu", tiles_of(tokens, 2, 16, 48, 80, 200_000))
    first, second = _few_tile(2 * 48), _few_tile(2 * 80)
    assert first is not None and second is not None
    interpreted((3, 2, 16, 48, 80), "random", "silu", FewTiles(gate_up=first, down=second))
    for pairs in (64, 200):
        interpreted((70, 2, 3, 48, 80), "random", "silu", _grouped_tiles(pairs, 200_000))


@pytest.mark.interpret
@pytest.mark.parametrize(("tokens", "k", "num"), [(1, 1, 1), (70, 3, 7), (600, 2, 40), (2100, 2, 5)])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_pairs_are_sorted_by_expert_interpreted(tokens: int, k: int, num: int, routing: str) -> None:
    """More pairs than a program looks at together: of either size."""
    from nanovllm.ops.moe import triton_experts

    chosen, rows = routed(tokens, min(k, num), num, torch.float32, "cpu", routing)[0], 32
    pairs = chosen.numel()
    order, table, blocks = triton_experts.sort(chosen.int(), num, rows, False)
    assert torch.equal(order.long(), chosen.flatten().argsort(stable=True))
    want = []
    for e, count in enumerate(chosen.flatten().bincount(minlength=num).tolist()):
        start = sum(entry[2] - entry[1] for entry in want[-1:]) and want[-1][2] if want else 0
        want += [(e, start + at, start + count) for at in range(0, count, rows)]
    assert len(want) <= blocks == triton_experts.most_blocks(pairs, num, rows)
    found = table.view(3, blocks)
    assert [tuple(entry) for entry in found.T[: len(want)].tolist()] == want
    assert not found[1:, len(want) :].any()
