"""The kernels of a fused decode step against plain functions in float64; their logic under Triton's interpreter."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.models.common import layers
from nanovllm.ops.attention.fused_plan import FusedDecodePlan, attention_fits, cut_of
from nanovllm.ops.attention.paged_decode import paged_decode
from nanovllm.ops.attention.rope_attend import rope_attend, rope_write
from nanovllm.ops.elementwise.norm_rope import ACTS, rms_norm
from nanovllm.ops.linear import norm_linear as few
from nanovllm.ops.linear.linear_add_norm import DEEPEST, SHALLOW, linear_add_norm, norm_add, wide_tile
from nanovllm.ops.linear.norm_linear import norm_linear
from nanovllm.ops.linear.tiles import Tile, WideTile, piece_of
from nanovllm.testing.problems import attention_problem, linear_problem, wide_norm_linear

CASES = [
    (1, 24, 64, False, True, False), (2, 13, 96, False, False, True), (1, 8, 128, True, True, False), (2, 7, 64, True, False, False),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_the_plain_functions(case) -> None:
    x, weight, gain, bias, residual, eps, gated = linear_problem(*case, torch.float64)
    got = norm_linear(x, weight, gain=gain, bias=bias, residual=residual, eps=eps, gated=gated)
    torch.testing.assert_close(got, wide_norm_linear(x, weight, gain, bias, residual, eps, gated))


@pytest.mark.parametrize("gains", [torch.bfloat16, torch.float32])
def test_the_norm_of_the_reference_rounds_as_the_models_do(gains: torch.dtype) -> None:
    x, weight, gain, *_ = linear_problem(3, 16, 64, False, True, False, torch.bfloat16, gains=gains)
    assert gain is not None and gain.dtype == gains
    want = torch.nn.functional.linear(rms_norm(x, gain, 1e-6), weight)
    assert torch.equal(norm_linear(x, weight, gain=gain, eps=1e-6), want)


@pytest.mark.parametrize("act", ACTS)
def test_the_gate_of_the_reference_is_the_plain_functions(act: str) -> None:
    x, weight, gain, *_ = linear_problem(3, 16, 64, True, True, False, torch.bfloat16, gains=torch.float32)
    assert gain is not None
    gate, up = torch.nn.functional.linear(rms_norm(x, gain, 1e-6), weight).chunk(2, -1)
    assert torch.equal(norm_linear(x, weight, gain=gain, eps=1e-6, gated=True, act=act), layers.activation(gate, act) * up)


PIECES = [(1, 5, 600, True, True, False), (2, 3, 1100, False, True, True), (3, 6, 768, True, False, False)]  # of 256 inputs each


@pytest.mark.interpret
@pytest.mark.parametrize("case", [*CASES, (1, 1, 33, False, True, True), (2, 5, 128, False, True, True), *PIECES])
@pytest.mark.parametrize("outputs", [1, 4])
def test_few_rows_interpreted(case, outputs: int) -> None:
    from nanovllm.ops.linear import triton_few_rows

    given = linear_problem(*case, torch.float32)
    got = triton_few_rows.launch(*given, Tile(outputs=outputs, warps=1), False)
    torch.testing.assert_close(got.double(), wide_norm_linear(*given), rtol=1e-4, atol=1e-4)


@given(width=st.integers(1, few.WIDEST), gated=st.booleans())
def test_one_row_of_any_width_has_a_tile_that_wastes_few_registers(width: int, gated: bool) -> None:
    tile = few.tile_of(1, 4096, width, gated, 200_000)
    assert tile.depth == 0 and few.tile_fits(tile, 1, width, gated, 200_000)
    piece = piece_of(width, tile.warps)
    assert piece & (piece - 1) == 0 and 0 <= -width % piece < 256 * tile.warps


@pytest.mark.parametrize(("outputs", "gated"), [(2560, False), (7168, True)])
def test_programs_over_wide_rows_share_the_inputs_among_more_outputs(outputs: int, gated: bool) -> None:
    """Those of Llama-3.3-70B on four GPUs: a tenth of the time of a layer. Two rows would take too many registers."""
    one, two = (few.tile_of(rows, outputs, 8192, gated, 200_000) for rows in (1, 2))
    assert (one.outputs, two.outputs, one.warps) == ((2, 1, 8) if gated else (4, 2, 8))


@pytest.mark.interpret
@pytest.mark.parametrize(
    "case",
    [(1, 16, 64, False, False, False), (3, 32, 128, False, True, False), (5, 20, 192, False, False, True), (8, 33, 64, False, True, True),
     (9, 16, 128, True, True, False), (16, 7, 192, True, False, False)],
)  # fmt: skip
def test_many_rows_interpreted(case) -> None:
    """One step of the loop over the inputs, two and three."""
    from nanovllm.ops.linear import triton_few_rows

    given = linear_problem(*case, torch.float32)
    got = triton_few_rows.launch(*given, Tile(outputs=16, warps=2, depth=32), False)
    torch.testing.assert_close(got.double(), wide_norm_linear(*given), rtol=1e-4, atol=1e-4)


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore:.*overflow encountered in exp")  # of a sigmoid that is 0
@pytest.mark.parametrize("gains", [torch.float16, torch.float32])
@pytest.mark.parametrize("tile", [Tile(outputs=4, warps=1), Tile(outputs=16, warps=2, depth=32)])
@pytest.mark.parametrize(
    ("case", "act"), [((2, 13, 128, False, True, True), "silu"), *(((2, 13, 128, True, True, False), act) for act in ACTS)]
)
def test_the_kernels_round_where_the_plain_functions_do(case, act: str, tile: Tile, gains: torch.dtype) -> None:
    from nanovllm.ops.linear import triton_few_rows

    x, weight, gain, bias, residual, eps, gated = given = linear_problem(*case, torch.float16, gains=gains)
    got = triton_few_rows.launch(*given, tile, False, act)
    want = norm_linear(x, weight, gain=gain, bias=bias, residual=residual, eps=eps, gated=gated, act=act)
    torch.testing.assert_close(got, want, rtol=2**-10, atol=2**-10)
    if not gated:  # a product that was not rounded would leave its last bits
        got = triton_few_rows.launch(x, weight, gain, None, -norm_linear(x, weight, gain=gain, eps=eps), eps, gated, tile, False)
        assert (got == 0).double().mean() > 0.8


def interpreted_attention(given: tuple[Any, ...], tile: int, splits: int, stages: int, limits: tuple[int, float] = (0, 0.0)) -> None:
    """Twice, because the first launch must leave the plan's counters as they were."""
    from nanovllm.ops.attention import triton_rope_attend

    qkv, q_gain, k_gain, cos, sin, pages, layer, *rest = given
    mine, (_, _, _, kv_heads, _, head_dim) = pages.clone(), pages.shape
    want = rope_attend(qkv, q_gain, k_gain, cos, sin, pages, layer, *rest, 0, *limits)
    plan = FusedDecodePlan(len(qkv), want.shape[1] // head_dim, kv_heads, head_dim, torch.device("cpu"))
    plan.tile, plan.splits, plan.stages = tile, splits, stages
    plan.parts, plan.stats = (torch.empty(*like.shape[:2], splits, like.shape[3]) for like in (plan.parts, plan.stats))
    plan.parts.fill_(torch.nan)
    plan.stats.fill_(torch.nan)
    for _ in range(2):
        got = triton_rope_attend.launch(qkv, q_gain, k_gain, cos, sin, mine[layer], *rest, plan, False, *limits)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(mine, pages, equal_nan=True)
        assert not plan.counts.any()


@pytest.mark.interpret
@pytest.mark.parametrize(("splits", "stages"), [(4, 0), (1, 3), (2, 2)])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads", "head_dim", "size"),
    [([1, 5, 40, 17], 4, 2, 16, 4), ([33, 8], 3, 1, 24, 8), ([7, 8, 9, 1], 2, 2, 12, 1), ([31, 32, 33, 64, 65], 8, 1, 16, 4)],
)
def test_attention_interpreted(
    lens: list[int], heads: int, kv_heads: int, head_dim: int, size: int, norm: bool, splits: int, stages: int
) -> None:
    """Lengths on either side of a tile, 8, and of the tiles of all programs, 32."""
    interpreted_attention(attention_problem(lens, heads, kv_heads, head_dim, size, norm, torch.float32), 8, splits, stages)


@pytest.mark.interpret
@pytest.mark.parametrize("splits", [8, 16, 32])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 24), (12, 24), (16, 32)])
def test_a_few_parts_and_many_are_merged_interpreted(heads: int, head_dim: int, splits: int) -> None:
    """Rows of 2 to 33 tiles of 8 tokens, on either side of the numbers of parts whose merge is compiled apart."""
    lens = [9, 64, 65, 128, 129, 260]
    interpreted_attention(attention_problem(lens, heads, 1, head_dim, 8, True, torch.float32), 8, splits, 0)


@pytest.mark.interpret
@pytest.mark.parametrize(("splits", "stages"), [(4, 0), (1, 3), (2, 2)])
@pytest.mark.parametrize("limits", [(1, 0.0), (7, 0.5), (8, 0.0), (9, 30.0), (33, 0.0), (500, 2.0), (0, 0.5)])
@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads", "head_dim", "size"), [([1, 5, 40, 9], 4, 2, 16, 4), ([31, 32, 33, 64, 65], 8, 1, 12, 1)]
)
def test_attention_in_a_window_of_capped_scores_interpreted(
    lens: list[int], heads: int, kv_heads: int, head_dim: int, size: int, limits: tuple[int, float], splits: int, stages: int
) -> None:
    """Windows of part of a tile, a tile, several and more than there is; what lies before them is no number, and is not read."""
    given = attention_problem(lens, heads, kv_heads, head_dim, size, True, torch.float32)
    pages, tables, window = given[5], given[7], limits[0]
    for row, length in enumerate(lens):
        if window and length > window:
            for at in range(length - window):
                pages[:, tables[row, at // size], :, :, at % size] = torch.nan
    want = rope_attend(*given[:5], pages.nan_to_num(), *given[6:], 0, *limits)
    torch.testing.assert_close(rope_attend(*given[:5], pages.clone(), *given[6:], 0, *limits), want)
    interpreted_attention((*given[:5], pages, *given[6:]), 8, splits, stages, limits)


@pytest.mark.interpret
@pytest.mark.parametrize(("splits", "stages"), [(4, 0), (2, 2)])
def test_heads_normed_by_wide_gains_interpreted(splits: int, stages: int) -> None:
    """In float16, where rounding before the gains would show; what is written must be what the plain functions write."""
    from nanovllm.ops.attention import triton_rope_attend

    given = attention_problem([1, 5, 40, 17], 4, 2, 32, 4, True, torch.float16, gains=torch.float32)
    qkv, q_gain, k_gain, cos, sin, pages, layer, *rest = given
    q_gain[::5], k_gain[::7] = 96.5, 40.3
    held, written = pages.clone(), pages.clone()
    want = rope_attend(qkv, q_gain, k_gain, cos, sin, held, layer, *rest, 0)
    plan = FusedDecodePlan(4, 4, 2, 32, torch.device("cpu"), (16, 1, stages, splits))
    got = triton_rope_attend.launch(qkv, q_gain, k_gain, cos, sin, written[layer], *rest, plan, False)
    torch.testing.assert_close(got, want, rtol=2**-8, atol=2**-8)
    assert (written == held).double().mean() > 0.999
    q = triton_rope_attend.write(qkv, q_gain, k_gain, cos, sin, (fresh := pages.clone())[layer], rest[2], rest[4], False, False)
    assert (fresh == held).double().mean() > 0.999
    torch.testing.assert_close(paged_decode(q, fresh, layer, *rest[:2], rest[3], 0).flatten(1), want, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_of_wide_heads_has_registers_and_memory(head_dim: int, rows: int) -> None:
    """Of a tile in registers a thread holds 64 at most, for the next one is there too; tiles in flight fit into shared memory."""
    for memory, kv_heads in product((200_000, 158_720, 93_184), (1, 2, 3, 4, 8)):
        tile, warps, stages, _ = cut = cut_of(rows, kv_heads, head_dim, memory)
        assert attention_fits(cut, head_dim, memory) and bool(stages) == (rows > 16)
        assert stages or tile * head_dim <= 64 * 32 * warps
        assert rows > 16 or attention_fits(cut_of(rows, kv_heads, head_dim, memory, long=True), head_dim, memory)


def test_few_kv_heads_have_as_many_programs_as_many() -> None:
    """One of several GPUs has few KV heads. At least 64 programs read rows of a batch of 4 or more, and 128 those of 24 or more."""
    for rows, kv_heads in product((4, 5, 8, 12, 16, 17, 24, 32, 48, 64, 128, 256), (1, 2, 4, 8)):
        plan = FusedDecodePlan(rows, 8 * kv_heads, kv_heads, 128, torch.device("cpu"))
        assert rows * kv_heads * plan.splits >= (64 if rows < 24 else 128), (rows, kv_heads, plan.splits)
        assert plan.splits == 1 or rows * kv_heads * plan.splits <= 512
    assert [FusedDecodePlan(96, 8, each, 128, torch.device("cpu")).splits for each in (1, 2, 4, 8)] == [4, 2, 1, 1]


def test_how_many_tokens_a_plan_reads_goes_by_its_kv_heads() -> None:
    """A token of one KV head takes an eighth of the time of one with eight, and so leaves room for eight times as many."""
    one, eight = (FusedDecodePlan(16, 8 * heads, heads, 128, torch.device("cpu")) for heads in (1, 8))
    lens = {1024: (True, True), 1025: (True, False), 8192: (True, False), 8193: (False, False)}
    for each, served in lens.items():
        assert tuple(plan.serves(np.full(16, each, np.int32)) for plan in (one, eight)) == served, each
    for heads in (1, 8):  # one row has no more programs than before
        alone = FusedDecodePlan(1, 8 * heads, heads, 128, torch.device("cpu"))
        assert [alone.serves(np.array([each], np.int32)) for each in (16384, 16385)] == [True, False]
    many = FusedDecodePlan(64, 8, 1, 128, torch.device("cpu"))
    for longest in (4096, 4097):  # one row of 64 must not delay the others
        assert many.splits == 4 and many.serves(np.array([longest] + [100] * 63, np.int32)) == (longest == 4096)
    for heads, rows, short, longest in ((4, 96, 500, 4000), (1, 64, 1000, 6000), (1, 64, 2000, 16_000)):  # an eighth of all tokens
        plan = FusedDecodePlan(rows, 8 * heads, heads, 128, torch.device("cpu"))
        assert plan.serves(np.array([longest] + [short] * (rows - 1), np.int32))
        assert not plan.serves(np.array([4 * longest] + [short] * (rows - 1), np.int32))
    eights = [FusedDecodePlan(24, 8 * heads, heads, 128, torch.device("cpu"), fp8=True) for heads in (1, 8)]  # were not measured
    assert all(plan.serves(np.array([5000] + [1000] * 23, np.int32)) for plan in eights)


def test_a_plan_for_long_rows_takes_any_lengths() -> None:
    """One row alone gives every multiprocessor work: its KV heads have at least 128 programs."""
    for rows in (1, 2, 8, 16):
        plan = FusedDecodePlan(rows, 16, 8, 128, torch.device("cpu"), long=True)
        assert plan.stages and plan.splits * 8 >= 128 and plan.parts.shape == (rows, 16, plan.splits, 128)
        assert plan.serves(np.array([100_000] + [1] * (rows - 1), np.int32))


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 64, 256])
def test_a_plan_holds_parts_only_where_rows_are_split(rows: int) -> None:
    plan = FusedDecodePlan(rows, 16, 8, 128, torch.device("cpu"))
    assert plan.parts.data_ptr() and plan.stats.data_ptr() and (plan.splits == 1) == (rows > 16)
    assert plan.parts.numel() + plan.stats.numel() == (130 if rows > 16 else rows * 16 * plan.splits * 130)


def test_rows_of_unlike_lengths_are_left_to_another_kernel() -> None:
    """Few rows of many tokens: in FP8 those that differ in length, and otherwise all."""
    plain, eight = (FusedDecodePlan(4, 16, 8, 128, torch.device("cpu"), fp8=fp8) for fp8 in (False, True))
    rows = {
        (4000, 50, 40, 6): (True, True), (4000, 50, 40, 7): (True, False), (2000, 1100, 900, 900): (True, True),
        (16000, 9000, 9000, 9000): (False, True), (16000, 5000, 5000, 5000): (False, False),
    }  # fmt: skip
    for lens, both in rows.items():
        assert tuple(plan.serves(np.array(lens, np.int32)) for plan in (plain, eight)) == both, lens


def test_long_rows_in_fp8_need_programs_enough() -> None:
    few, many = (FusedDecodePlan(1, 16, kv_heads, 128, torch.device("cpu"), fp8=True) for kv_heads in (2, 4))
    assert many.serves(np.array([50_000], np.int32)) and not few.serves(np.array([4097], np.int32))
    assert few.serves(np.array([4096], np.int32))


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_tiles_in_fp8_have_registers_and_memory(head_dim: int, rows: int) -> None:
    for memory in (200_000, 158_720, 93_184):
        tile, warps, stages, splits = cut_of(rows, 8, head_dim, memory, fp8=True)
        assert stages * tile * 2 * head_dim <= memory and 1 <= splits <= 64
        assert stages or 2 * tile * head_dim <= 64 * 4 * 32 * warps  # bytes of a tile, in 64 registers of each thread


@pytest.mark.interpret
def test_a_plan_without_parts_interpreted() -> None:
    """As it is made for many rows of many KV heads; what it holds is never read, and the memory behind it never written."""
    from nanovllm.ops.attention import triton_rope_attend

    given = attention_problem([1, 70, 3, *range(20, 34)], 6, 6, 16, 4, True, torch.float32)
    plan = FusedDecodePlan(17, 6, 6, 16, torch.device("cpu"))
    held = [torch.full((1000,), torch.nan), torch.full((1000,), torch.nan)]
    plan.parts, plan.stats = (whole[: like.numel()].view(like.shape) for whole, like in zip(held, (plan.parts, plan.stats), strict=True))
    mine = given[5].clone()
    want = rope_attend(*given, 0)
    got = triton_rope_attend.launch(*given[:5], mine[given[6]], *given[7:], plan, False)
    torch.testing.assert_close(got, want)
    assert all(whole.isnan().all() for whole in held) and not plan.counts.any()


@pytest.mark.interpret
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "size"), [(4, 2, 16, 4), (24, 12, 24, 1), (8, 1, 12, 8)])
def test_what_is_written_before_attention_interpreted(heads: int, kv_heads: int, head_dim: int, size: int, norm: bool) -> None:
    """q is that which attends; k and v lie in the pages, and nothing else does."""
    from nanovllm.ops.attention import triton_rope_attend

    given = attention_problem([9, 1, 30], heads, kv_heads, head_dim, size, norm, torch.float32)
    qkv, q_gain, k_gain, cos, sin, pages, layer, tables, lens, slots, scale, eps = given
    want = rope_attend(*given, 0)
    turned, held = qkv.clone(), pages.clone()
    _, k, v = rope_write(turned, q_gain, k_gain, cos, sin, held, layer, slots, eps)
    torch.testing.assert_close(held, pages)
    for keep in (False, True):
        mine, fresh = pages.clone().fill_(7), qkv.clone()
        q = triton_rope_attend.write(fresh, q_gain, k_gain, cos, sin, mine[layer], slots, eps, keep, False)
        assert int((mine != 7).any(-1).sum()) == 3 * 2 * kv_heads  # the slots of three tokens
        mine = torch.where(mine == 7, pages, mine)
        torch.testing.assert_close(mine, pages)
        torch.testing.assert_close(paged_decode(q, mine, layer, tables, lens, scale, 0).flatten(1), want)
        torch.testing.assert_close(fresh, turned if keep else qkv)
    torch.testing.assert_close(v.flatten(1), qkv[:, -kv_heads * head_dim :])
    torch.testing.assert_close(k.flatten(1), turned[:, heads * head_dim : -kv_heads * head_dim])


@pytest.mark.interpret
@pytest.mark.parametrize("length", [1, 16, 17, 100])
def test_attention_of_one_row_interpreted(length: int) -> None:
    """A row that writes; the second one of the problem only reads, and is left out."""
    given = attention_problem([length, 1], 6, 2, 24, 16, True, torch.float32)
    qkv, q_gain, k_gain, cos, sin, pages, layer, tables, lens, slots, *rest = given
    interpreted_attention((qkv[:1], q_gain, k_gain, cos[:1], sin[:1], pages, layer, tables[:1], lens[:1], slots[:1], *rest), 16, 4, 0)


def test_what_the_kernels_serve() -> None:
    gpu = torch.device("cuda")
    assert not few.serves(torch.device("cpu"), torch.bfloat16, 1, 1024, False)
    if torch.cuda.is_available():
        assert few.serves(gpu, torch.bfloat16, 1, 1024, False) and not few.serves(gpu, torch.float32, 1, 1024, False)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
@pytest.mark.parametrize(("outputs", "width", "gated"), [(4096, 1024, False), (1024, 3072, False), (3072, 1024, True), (2048, 5632, False)])
def test_a_tile_covers_its_product(rows: int, outputs: int, width: int, gated: bool) -> None:
    """On an H200, an A100 and a small card; what does not fit is not served."""
    for memory in (200_000, 158_720, 93_184):
        if few.fits(rows, width, gated, memory):
            tile = few.tile_of(rows, outputs, width, gated, memory)
            held = tile.outputs * (2 if gated else 1) + max(8, rows)
            assert rows <= few.FEW or (width % (tile.depth * tile.warps) == 0 and 2 * width * held <= memory)
    assert few.fits(rows, 1024, gated, 200_000)
    assert few.fits(rows, 5632, gated, 200_000) == (rows <= few.FEW)


WIDE = [(5, 64, 128, False), (17, 32, 64, False), (20, 64, 192, True), (70, 32, 256, False), (64, 96, 64, True)]


@pytest.mark.interpret
@pytest.mark.parametrize("extras", [True, False])
@pytest.mark.parametrize(("rows", "outputs", "width", "gated"), WIDE)
def test_products_of_many_rows_interpreted(rows: int, outputs: int, width: int, gated: bool, extras: bool) -> None:
    from nanovllm.ops.linear import triton_many_rows

    x, weight, _, bias, *_ = linear_problem(rows, outputs, width, gated, False, extras, torch.float32)
    got = triton_many_rows.product(x, weight, bias, gated, WideTile(outputs=32, rows=16, depth=64, stages=2), False)
    torch.testing.assert_close(got.double(), wide_norm_linear(x, weight, None, bias, None, 0.0, gated), rtol=1e-4, atol=1e-4)


@pytest.mark.interpret
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("rows", [3, 33])
def test_a_sum_of_parts_and_its_norm_interpreted(rows: int, parts: int) -> None:
    """In float16, so that rounding elsewhere than the plain functions do shows."""
    from nanovllm.ops.linear import triton_many_rows

    x, weight, _, bias, residual, eps, _ = linear_problem(rows, 96, 192, False, False, True, torch.float16)
    gain = (torch.rand(96) + 0.5).half()
    gain[::7] = 96.5
    assert residual is not None
    sums = triton_many_rows.partial_product(x, weight, WideTile(outputs=32, rows=32, depth=32, parts=parts, stages=2), False)
    assert sums.shape == (parts, rows, 96)
    y, h = triton_many_rows.sum_norm(sums, bias, residual, gain, eps, False)
    want, normed = linear_add_norm(x, weight, bias, residual, gain, eps)
    torch.testing.assert_close(y, want, rtol=2**-10, atol=2**-10)
    torch.testing.assert_close(h, normed, rtol=2**-8, atol=2**-8)
    assert (h == rms_norm(y, gain, eps)).double().mean() > 0.98
    y, _ = triton_many_rows.sum_norm(sums, None, -torch.nn.functional.linear(x, weight), gain, eps, False)
    assert (y == 0).double().mean() > 0.8


@pytest.mark.interpret
@pytest.mark.parametrize("gains", [torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "parts", "extras"), [(3, 2, True), (5, 1, True), (2, 3, False)])
def test_a_sum_of_parts_between_two_norms_interpreted(rows: int, parts: int, extras: bool, gains: torch.dtype) -> None:
    """Its own norm first, then the residual, then the next norm; a width that is no power of two."""
    from nanovllm.ops.linear import triton_many_rows

    x, weight, _, bias, _, eps, _ = linear_problem(rows, 96, 192, False, False, extras, torch.float16)
    inner, gain, residual = torch.rand(96).to(gains) + 0.5, torch.rand(96).to(gains) + 0.5, torch.randn(rows, 96).half()
    inner[::7], gain[::5] = 96.5, 40.3
    want, normed = linear_add_norm(x, weight, bias, residual, gain, eps, inner=inner)
    if parts > 1:
        sums = triton_many_rows.partial_product(x, weight, WideTile(outputs=32, rows=32, depth=32, parts=parts, stages=2), False)
    else:
        sums, bias = torch.nn.functional.linear(x, weight, bias).unsqueeze(0), None
    y, h = triton_many_rows.sum_norm(sums, bias, residual, gain, eps, False, inner)
    torch.testing.assert_close(y, want, rtol=2**-9, atol=2**-7)
    torch.testing.assert_close(h, normed, rtol=2**-7, atol=2**-7)
    assert (y == want).double().mean() > 0.95 and (h == rms_norm(y, gain, eps)).double().mean() > 0.98


@pytest.mark.interpret
@pytest.mark.parametrize("gains", [torch.float16, torch.float32])
@pytest.mark.parametrize("width", [64, 100])
def test_a_norm_by_itself_interpreted(width: int, gains: torch.dtype) -> None:
    from nanovllm.ops.linear import triton_many_rows

    x, residual, gain = torch.randn(3, width).half(), torch.randn(3, width).half(), torch.rand(width).to(gains) + 0.5
    gain[::7] = 96.5
    for added in (None, residual):
        got = triton_many_rows.norm_add(x, gain, added, 1e-6, False)
        want = norm_add(x, gain, added, 1e-6)
        torch.testing.assert_close(got, want, rtol=2**-10, atol=2**-8)
        assert (got == want).double().mean() > 0.98


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore:.*overflow encountered in exp")
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(("rows", "outputs"), [(1, 5), (3, 64), (4, 3000)])
def test_a_gate_interpreted(rows: int, outputs: int, act: str) -> None:
    from nanovllm.ops.linear import triton_many_rows

    both = torch.randn(rows, 2 * outputs).half() * 3
    gate, up = both.chunk(2, -1)
    torch.testing.assert_close(triton_many_rows.gate(both, False, act), ACTS[act](gate) * up, rtol=2**-9, atol=2**-10)
    x, weight, *_ = linear_problem(rows, 32, 64, True, False, False, torch.float32)
    got = triton_many_rows.product(x, weight, None, True, WideTile(outputs=32, rows=16, depth=64, stages=2), False, act)
    torch.testing.assert_close(got.double(), wide_norm_linear(x, weight, None, None, None, 0.0, True, act), rtol=1e-4, atol=1e-4)


def test_the_reference_of_a_sum_and_its_norm_is_the_plain_functions() -> None:
    x, weight, gain, bias, residual, eps, _ = linear_problem(9, 48, 48, False, True, True, torch.float64)
    assert gain is not None and residual is not None
    y, h = linear_add_norm(x, weight, bias, residual, gain, eps)
    torch.testing.assert_close(y, wide_norm_linear(x, weight, None, bias, residual, eps, False))
    torch.testing.assert_close(h, rms_norm(y, gain, eps))
    y, h = linear_add_norm(x, weight, bias, residual, gain, eps, inner=gain * 2)
    added = rms_norm(torch.nn.functional.linear(x, weight, bias), gain * 2, eps)
    torch.testing.assert_close(y, residual + added)
    torch.testing.assert_close(h, norm_add(y, gain, None, eps))
    torch.testing.assert_close(norm_add(added, gain, residual, eps), residual + rms_norm(added, gain, eps))


@pytest.mark.parametrize("processors", [132, 46])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("rows", [8, 17, 64, 65, 256, 300])
@pytest.mark.parametrize(
    ("outputs", "width"), [(4096, 1024), (1024, 2048), (1024, 3072), (6144, 4096), (12288, 4096), (4096, 12288), (1000, 512), (96, 100)]
)
def test_a_wide_tile_covers_its_product(rows: int, outputs: int, width: int, split: bool, processors: int) -> None:
    tile = wide_tile(rows, outputs, width, not split, processors, 200_000, split=split)
    if tile is not None:
        assert outputs % tile.outputs == 0 and width % (tile.parts * tile.depth) == 0 and (split or tile.parts == 1)
        held = 2 * tile.stages * tile.depth * (tile.rows + tile.outputs * (1 if split else 2))
        at_once = 200_000 // held if tile.depth == SHALLOW else 4 if tile.warps == 2 else 1  # programs of a multiprocessor, or in turn
        assert outputs // tile.outputs * tile.parts * -(-rows // tile.rows) <= processors * at_once
        assert rows <= 64 or width // tile.parts <= DEEPEST
    if outputs == 1024 and split and processors == 132 and rows < 300:
        assert tile is not None and tile.parts == (4 if rows < 256 else 2)
    if processors == 132 and rows <= 64 and (outputs, width) == (12288, 4096):  # gate and up of Qwen3-8B
        assert split or (tile is not None and (tile.warps == 2 if rows <= 16 else tile.depth == SHALLOW))


@pytest.mark.parametrize("rows", [3, 8, 16])
@pytest.mark.parametrize(
    ("outputs", "width", "gated", "split"),
    [
        (1280, 8192, False, False), (8192, 1024, False, True), (3584, 8192, True, False), (8192, 3584, False, True),
        (2560, 5120, False, False), (5120, 2048, False, True), (6400, 5120, True, False), (5120, 6400, False, True),
        (1536, 4096, False, False), (3072, 4096, True, False), (4096, 3072, False, True), (12288, 4096, True, False),
    ],
)  # fmt: skip
def test_programs_of_few_rows_keep_the_memory_busy(rows: int, outputs: int, width: int, gated: bool, split: bool) -> None:
    """Of Llama-3.3-70B on eight GPUs, Qwen3-32B on four, and Qwen3-8B on four and one. 4.8 TB/s with a latency of 0.8 us are 4 MB."""
    tile = wide_tile(rows, outputs, width, gated, 132, 200_000, split=split)
    assert tile is not None and tile.rows == 16
    at_once = min(outputs // tile.outputs * tile.parts, 132)
    asked = at_once * (tile.stages - 1) * tile.depth * tile.outputs * (4 if gated else 2)  # bytes of weights
    assert asked >= 4_000_000
    if outputs == 12288:  # 384 programs, of which a multiprocessor takes two at once
        assert (tile.outputs, tile.depth, tile.warps) == (32, 128, 2)
    else:
        assert (tile.depth, tile.warps) == (256, 4) and (not gated or tile.outputs == 32)


def test_what_other_cards_choose() -> None:
    """An A100 has memory for fewer loads in flight, and an RTX 4090 leaves what it has no room for to cuBLAS."""
    a100, small = (108, 158_720), (128, 93_184)
    assert wide_tile(64, 3072, 4096, True, *a100) == WideTile() and wide_tile(64, 3072, 4096, True, 132, 200_000) == WideTile(stages=5)
    assert wide_tile(8, 3072, 4096, True, *a100) == WideTile(rows=16, depth=256, stages=3)
    assert wide_tile(8, 6144, 4096, False, *small) is None and wide_tile(8, 12288, 4096, True, *small) is None
    assert wide_tile(12, 14336, 4096, True, 132, 200_000) is None and wide_tile(8, 14336, 4096, True, 132, 200_000) is not None


@pytest.mark.parametrize("memory", [200_000, 158_720, 93_184])
@pytest.mark.parametrize("gated", [True, False])
def test_what_is_in_flight_fits_into_a_program(memory: int, gated: bool) -> None:
    """On an H200, an A100 and a small card; what does not fit is not cut so."""
    sizes = (1024, 2048), (3072, 1024), (5632, 2048), (11008, 4096), (1280, 8192), (3584, 8192), (8192, 3584), (6144, 4096)
    for rows, (outputs, width), split in product((8, 17, 64, 200), sizes, (False, True)):
        tile = wide_tile(rows, outputs, width, gated, 128, memory, split=split and not gated)
        if tile is not None:
            assert 2 * tile.stages * tile.depth * (tile.rows + tile.outputs * (2 if gated else 1)) <= memory and tile.stages >= 3
    for rows in (1, 16, 17, 64, 256):
        for head_dim, kv_heads in product((64, 96, 128, 256), (1, 8)):
            tokens, _, stages, _ = cut_of(rows, kv_heads, head_dim, memory)
            assert bool(stages) == (rows > 16) and tokens * stages * 4 * head_dim <= memory
