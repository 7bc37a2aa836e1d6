"""Products with quantised matrices on a GPU: every code, every form against float64, captured, and whole steps beside unquantised ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nanovllm as nv
from nanovllm.entrypoints.cli.bench.graph_timer import captured
from nanovllm.loading.quantisation.activations import with_fp8_activations
from nanovllm.loading.quantisation.rounding import Rounding, rounded_params
from nanovllm.models.common.batch import Batch
from nanovllm.models.fast import fused
from nanovllm.ops.attention.fused_plan import FusedDecodePlan
from nanovllm.ops.backends import dependent_launch, shared_memory
from nanovllm.ops.linear import scaled_product
from nanovllm.ops.linear.linear import linear
from nanovllm.ops.linear.linear_add_norm import linear_add_norm
from nanovllm.ops.linear.norm_linear import norm_linear
from nanovllm.ops.linear.quantise import KINDS, Kind
from nanovllm.ops.linear.quantised import QuantisedMatrix, cpu_layout, laid_out
from nanovllm.ops.linear.quantised_tiles import (
    DIRECT_ROWS,
    FUSED_ROWS,
    SPLIT_ROWS,
    SUMMED,
    DirectTile,
    FewTile,
    ManyTile,
    SplitTile,
    split_fits,
    split_tile,
    usual_tile,
)
from nanovllm.state.kv_cache import KVState
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.problems import wide_norm_linear
from nanovllm.testing.quantised_problems import dequantised, quantised_problem, rounded
from tests.gpu.small import SMALL
from tests.gpu.test_fused_gpu import error
from tests.loading.quantisation.encoders import ENCODERS
from tests.loading.quantisation.test_formats import SIZES, folders, leaves

pytestmark = pytest.mark.gpu
BF16, CUDA = torch.bfloat16, torch.device("cuda")
# Checkpoints' usual forms at a model's sizes; then odd ones: other groups, rows that share scales, an order, sizes of no power of two.
FORMS: list[tuple[Kind, int, int, dict[str, Any]]] = [
    ("int4", 2048, 1024, {"group": 128, "scales": BF16}), ("fp8", 1024, 3072, {"group": 128, "rows": 128, "scales": BF16}),
    ("int8", 2048, 1024, {"group": None, "spread": 100.0}), ("int4", 1002, 1152, {"group": 32, "zeros": True, "scales": torch.float16}),
    ("fp8", 514, 648, {"group": None, "spread": 100.0}), ("int4", 512, 768, {"group": 128, "order": True, "zeros": True}),
    ("int4", 1024, 3696, {"group": 16, "zeros": True, "scales": BF16}),  # one of eight ranks of Qwen2.5-72B
]  # fmt: skip


def every_code(kind: Kind) -> tuple[QuantisedMatrix, torch.Tensor]:
    """A row for each code that is a number, of equal columns, and the numbers, of all columns of an element. Rows are a multiple of 16."""
    bits = torch.arange(256).to(torch.uint8)
    codes = bits if kind == "int4" else bits.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    codes = codes[codes.float().isfinite()]
    codes = torch.cat((codes, codes[: -len(codes) % 16]))
    whole = codes.view(torch.uint8)[:, None].repeat(1, 64 if kind == "int4" else 128).view(codes.dtype).cuda()
    matrix = laid_out(QuantisedMatrix(codes=whole, scales=torch.ones(len(codes), 1, device=CUDA), columns=128, group=128))
    return matrix, matrix.dequantised(torch.float32)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_converted_exactly(kind: Kind, dtype: torch.dtype) -> None:
    """By assembly and by plain operations, in every place of a word."""
    from nanovllm.ops.linear import (
        triton_quantised_direct,
        triton_quantised_few,
        triton_quantised_many,
        triton_quantised_split,
    )

    matrix, numbers = every_code(kind)
    ways = (False, True) if dependent_launch(CUDA) else (False,)
    for asm in ways:
        out = torch.empty(matrix.shape, dtype=dtype, device=CUDA)
        triton_quantised_many.dequantise(matrix, 0, out, asm)
        assert torch.equal(out.float(), numbers) and torch.equal(out.signbit(), numbers.signbit())
        for first in (0, 32, 64, 96):
            x = torch.zeros(4, matrix.columns, dtype=dtype, device=CUDA)
            x[range(4), range(first, first + 4)] = 1
            want = numbers[:, first : first + 4].T
            few = triton_quantised_few.launch(x, matrix, None, None, None, 0.0, False, FewTile(outputs=8, warps=1), False, asm=asm)
            assert torch.equal(few.float(), want)
            tile = SplitTile(depth=128 // matrix.fields, warps=1)
            assert torch.equal(triton_quantised_split.product(x, matrix, None, False, tile, False, asm=asm).float(), want)
            many = triton_quantised_many.product(x, matrix, None, False, ManyTile(depth=128 // matrix.fields), False, asm=asm)
            assert torch.equal(many.float(), want)
            if asm and dtype == BF16:
                tile = DirectTile(depth=1, warps=1)
                direct = triton_quantised_direct.launch(x, matrix, None, None, None, 0.0, False, tile, True, "silu", True)
                assert torch.equal(direct.float(), want)


@pytest.mark.parametrize("size", [1e4, 1.0, 1e-4, 1e-6])
@pytest.mark.parametrize("form", [{"group": None}, {"group": 128, "rows": 128}], ids=["rows", "blocks"])
def test_small_inputs_of_fp8_keep_their_bits(form: dict[str, Any], size: float) -> None:
    """The sums are subnormal numbers until they are scaled."""
    from nanovllm.ops.linear import triton_quantised_direct, triton_quantised_many, triton_quantised_split

    if not dependent_launch(CUDA):
        pytest.skip("needs compute capability 9.0")
    matrix, x = quantised_problem("fp8", 512, 4096, **form, device="cuda"), (torch.randn(8, 4096, device=CUDA) * size).to(BF16)
    want = x.double() @ matrix.dequantised(torch.float64).T
    many, split = ManyTile(parts=2), SplitTile(outputs=16, depth=64, parts=2)
    assert error(triton_quantised_many.product(x, matrix, None, False, many, True, asm=True).sum(0), want) < 5e-5
    assert error(triton_quantised_split.product(x, matrix, None, False, split, True, asm=True).sum(0), want) < 5e-5
    tile = DirectTile(depth=2, registers=168)
    direct = triton_quantised_direct.launch(x, matrix, None, None, None, 0.0, False, tile, True, asm=True, dtype=torch.float32)
    assert error(direct, want) < 5e-5


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 13, 16, 24, 64, 128, 256])
@pytest.mark.parametrize(
    ("kind", "zeros", "block"),
    [("int4", False, False), ("int4", True, False), ("fp8", False, False), ("fp8", False, True), ("int8", False, False)],
    ids=["int4", "zeros", "fp8", "fp8-block", "int8"],
)
def test_large_matrices_give_the_same_bits_each_time(kind: Kind, zeros: bool, block: bool, rows: int) -> None:
    """By the default kernels, one launch after another, as near to float64 as bfloat16 is."""
    group: dict[str, Any] = {
        "group": 128 if kind == "int4" or block else None,
        "rows": 128 if block else 1,
        "scales": torch.float16 if zeros else BF16,
        "zeros": zeros,
        "device": "cuda",
    }
    square, gates = (quantised_problem(kind, outputs, 4096, **group) for outputs in (4096, 16384))
    tile = usual_tile(gates, rows, True, 132, shared_memory(CUDA), hopper=dependent_launch(CUDA))
    assert isinstance(tile, DirectTile) or not dependent_launch(CUDA) or rows > DIRECT_ROWS[kind]
    x, residual, gain = (torch.randn(count, 4096, device=CUDA).to(BF16) for count in (rows, rows, 1))
    gain = gain[0].abs() + 0.5
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * gain.double()
    gate, up = (normed @ gates.dequantised(torch.float64).T).chunk(2, -1)
    whole = square.dequantised(torch.float64).T
    calls: list[tuple[Any, torch.Tensor]] = [
        (lambda: norm_linear(x, square, gain=gain, eps=1e-6), normed @ whole),
        (lambda: norm_linear(x, gates, gain=gain, eps=1e-6, gated=True), torch.nn.functional.silu(gate) * up),
        (lambda: norm_linear(x, square, residual=residual), x.double() @ whole + residual.double()),
        (lambda: linear_add_norm(x, square, None, residual, gain, 1e-6)[0], x.double() @ whole + residual.double()),
    ]
    for call, want in calls:
        first, wrong = call(), torch.zeros((), dtype=torch.int64, device=CUDA)
        assert error(first, want) < 2e-2
        for _ in range(400):
            wrong += (call() != first).sum()
        assert not wrong.item()


@pytest.mark.parametrize("name", ["fp8 in blocks", "compressed W8A8, asymmetric", "awq"])
def test_a_checkpoint_is_laid_out_for_the_gpu(tmp_path: Path, name: str) -> None:
    """And stands for the same weights; so does one that is rounded while it is loaded."""
    folder, plain = folders(tmp_path, ENCODERS[name], tiny_config("Qwen3MoeForCausalLM", **SIZES))
    cases: list[tuple[Path, Kind | None]] = [(folder, None), (plain, "fp8"), (plain, "int8")]
    for where, kind in cases:
        here, there = (nv.load_model(where, device, "bfloat16", tokenizer=False, quantization=kind) for device in ("cuda", "cpu"))
        for one, other in zip(leaves(here), leaves(there), strict=True):
            if isinstance(other, QuantisedMatrix):
                assert isinstance(one, QuantisedMatrix) and one.in_gpu_layout
                assert torch.equal(one.dequantised(BF16).cpu(), other.dequantised(BF16))


def test_other_layouts_are_multiplied_all_the_same() -> None:
    """A matrix that a caller moved there as it was."""
    for kind in KINDS:
        matrix, x = quantised_problem(kind, 64, 136, device="cuda"), torch.randn(3, 136, device=CUDA).to(BF16)
        torch.testing.assert_close(linear(x, cpu_layout(matrix)), linear(x, matrix), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rows", [1, 8, 100, FUSED_ROWS + 1])
@pytest.mark.parametrize("form", FORMS)
def test_products(form: tuple[Kind, int, int, dict[str, Any]], rows: int) -> None:
    """No worse than torch over the dequantised matrix, by more than the order of sums; with a norm and a gate, and with a residual."""
    kind, outputs, columns, more = form
    matrix = quantised_problem(kind, outputs, columns, **more, device="cuda")
    exact, plain = matrix.dequantised(torch.float64), matrix.dequantised(BF16)
    x, gain = torch.randn(rows, columns, device=CUDA).to(BF16), (torch.rand(columns, device=CUDA) + 0.5).to(BF16)
    gain[::37] = 9.5
    want = wide_norm_linear(x, exact, gain, None, None, 1e-6, True)
    theirs = norm_linear(x.cpu(), plain.cpu(), gain=gain.cpu(), eps=1e-6, gated=True).cuda()
    assert error(norm_linear(x, matrix, gain=gain, eps=1e-6, gated=True), want) < 1.5 * error(theirs, want) + 2e-3
    residual, bias = (torch.randn(*shape, outputs, device=CUDA).to(BF16) for shape in ((rows,), ()))
    want = wide_norm_linear(x, exact, None, bias, residual, 0.0, False)
    theirs = norm_linear(x.cpu(), plain.cpu(), bias=bias.cpu(), residual=residual.cpu()).cuda()
    assert error(norm_linear(x, matrix, bias=bias, residual=residual), want) < 1.5 * error(theirs, want) + 2e-3
    norm = (torch.rand(outputs, device=CUDA) + 0.5).to(BF16)
    y, h = linear_add_norm(x, matrix, bias, residual, norm, 1e-6)
    normed = want * torch.rsqrt(want.square().mean(-1, keepdim=True) + 1e-6) * norm.double()
    assert error(y, want) < 1.5 * error(theirs, want) + 2e-3 and error(h, normed) < 2e-2
    assert error(linear(x, matrix), wide_norm_linear(x, exact, None, None, None, 0.0, False)) < 1e-2


@pytest.mark.parametrize(("outputs", "columns"), [(256, 512), (48, 200), (4096, 1024)])
def test_activations_in_fp8(outputs: int, columns: int) -> None:
    """The products of many rows are those of the reference, those of few rows do not change, and a row is alone."""
    matrix = quantised_problem("fp8", outputs, columns, group=None, device="cuda")
    rounding = replace(matrix, fp8_activations=True)
    few = scaled_product.ROWS
    x, bias = torch.randn(few + 100, columns, device=CUDA).to(BF16), torch.randn(outputs, device=CUDA).to(BF16)
    x[3], x[5] = 0, x[5] * 1e3
    got, want = linear(x, rounding, bias), scaled_product.reference(x, rounding, bias)
    for one, other in zip(got, want, strict=True):
        assert error(one, other) < 1e-2
    assert torch.equal(linear(x[:few], rounding), linear(x[:few], matrix))
    assert torch.equal(linear(x.flip(0), rounding, bias).flip(0), got)
    residual, norm = torch.randn(len(x), outputs, device=CUDA).to(BF16), torch.ones(outputs, device=CUDA, dtype=BF16)
    y, _ = linear_add_norm(x, rounding, bias, residual, norm, 1e-6)
    assert error(y, want + residual) < 1e-2


def test_a_model_with_activations_in_fp8() -> None:
    """It gives nearly the same probabilities as without the option, by graphs and by calls; with many replies, too."""
    config = tiny_config("Qwen3ForCausalLM", **SMALL, max_position_embeddings=4096)
    plain = random_model(config, 0, "bfloat16", device="cuda", std=0.05)
    plain = replace(plain, params=rounded_params(plain.params, Rounding(kind="fp8")))
    model = with_fp8_activations(plain)
    found = []
    for each in (plain, model):
        state = nv.init_state(each, num_pages=4000, page_size=16, max_model_len=4096, max_num_batched_tokens=2048)
        random = torch.Generator().manual_seed(1)
        params = nv.SamplingParams(temperature=0.0, max_tokens=2, logprobs=1, ignore_eos=True)
        prompts = [torch.randint(config.vocab_size, (n,), generator=random).tolist() for n in (300, 700, 2000)]
        made = list[nv.Generation]()
        for prompt in prompts:
            state, reply = nv.generate(each, state, prompt, params)
            made.append(reply)
        state, more = nv.generate_many(each, state, prompts[:1] * (scaled_product.ROWS + 30), params)
        made.append(more[-1])
        nv.check(state)
        found.append(made)
    for one, other in zip(*found, strict=True):
        assert str(one.logprobs) != str(other.logprobs)  # it does something
        for top, alike in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert abs(top.logprob - alike.logprob) < 0.3
            if top.token_id != alike.token_id:
                break  # from here on the texts differ


@pytest.mark.parametrize("rows", [2, 3, SUMMED])
def test_several_rows_by_the_kernel_for_few(rows: int) -> None:
    """More than it takes by default."""
    from nanovllm.ops.linear import triton_quantised_few

    tile = FewTile(outputs=8, warps=2)
    for kind in KINDS:
        matrix = quantised_problem(kind, 256, 1024, group=128, device="cuda")
        x = torch.randn(rows, 1024, device=CUDA).to(BF16)
        new = dependent_launch(CUDA)
        got = triton_quantised_few.launch(x, matrix, None, None, None, 0.0, False, tile, new, asm=new)
        one = triton_quantised_few.launch(x[:1], matrix, None, None, None, 0.0, False, tile, new, asm=new)
        assert error(got, x.double() @ matrix.dequantised(torch.float64).T) < 5e-3 and torch.equal(got[:1], one)


SPLIT: list[tuple[Kind, dict[str, Any]]] = [
    ("int4", {"group": 128, "scales": BF16}), ("int4", {"group": 64, "zeros": True}), ("int4", {"group": 32, "scales": torch.float16}),
    ("int4", {"group": None, "zeros": True}), ("fp8", {"group": 128, "rows": 128, "scales": BF16}), ("int8", {"group": None}),
]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 7, SPLIT_ROWS])
@pytest.mark.parametrize("form", SPLIT)
def test_warps_that_divide_the_inputs(form: tuple[Kind, dict[str, Any]], rows: int) -> None:
    """For every kind, by assembly and by plain operations, with tiles about the default; the bits of a row are its own."""
    from nanovllm.ops.linear import triton_quantised_split

    kind, more = form
    matrix = quantised_problem(kind, 512, 2048, **more, device="cuda")
    x, exact = torch.randn(rows, 2048, device=CUDA).to(BF16), matrix.dequantised(torch.float64)
    usual, memory = split_tile(matrix, rows, False, 132, shared_memory(CUDA)), shared_memory(CUDA)
    for new in {False, dependent_launch(CUDA)}:
        for change in ({}, {"outputs": 16, "warps": 4}, {"outputs": 64, "warps": 2, "stages": 2}, {"warps": 8, "stages": 3}):
            tile = replace(usual, **change)
            if not split_fits(tile, matrix, rows, True, memory, split=False):
                continue
            got = triton_quantised_split.product(x, matrix, None, False, tile, new, asm=new)
            assert error(got, x.double() @ exact.T) < 5e-3
            others = torch.cat((x[:1], x[1:] + 1))
            assert torch.equal(got[:1], triton_quantised_split.product(others, matrix, None, False, tile, new, asm=new)[:1])
            gated = triton_quantised_split.product(x, matrix, None, True, tile, new, asm=new)
            assert error(gated, wide_norm_linear(x, exact, None, None, None, 0.0, True)) < 1e-2
        parts = triton_quantised_split.product(x, matrix, None, False, replace(usual, parts=2, warps=4), new, asm=new)
        assert error(parts.sum(0), x.double() @ exact.T) < 5e-3


@pytest.mark.parametrize("rows", [1, 8, 100])
@pytest.mark.parametrize("form", FORMS[:2])
def test_a_captured_product_gives_the_same_bits(form: tuple[Kind, int, int, dict[str, Any]], rows: int) -> None:
    kind, outputs, columns, more = form
    matrix = quantised_problem(kind, outputs, columns, **more, device="cuda")
    x, norm = torch.randn(rows, columns, device=CUDA).to(BF16), torch.ones(outputs, device=CUDA, dtype=BF16)
    residual, gain = torch.randn(rows, outputs, device=CUDA).to(BF16), torch.ones(columns, device=CUDA, dtype=BF16)

    def call() -> tuple[torch.Tensor, ...]:
        return norm_linear(x, matrix, gain=gain, residual=residual), *linear_add_norm(x, matrix, None, residual, norm, 1e-6)

    want = call()
    graph, got = captured(call)
    for _ in range(3):
        for each in got:
            each.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, want, strict=True))


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize(("kind", "group"), [("int4", 128), ("fp8", None)])
def test_a_whole_step(kind: Kind, group: int | None, rows: int) -> None:
    """A quantised model beside the model of the matrices that it stands for: logits, and what is likeliest where it leads."""
    config = tiny_config(
        num_layers=3, hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=999, dtype="bfloat16"
    )
    model = random_model(config, device="cuda", dtype=BF16, std=0.05)
    params = rounded(model.params, kind, group)
    assert fused.unknown(params, config) == "" and fused.serves(params, config)
    size, width = 16, 5
    lens = torch.tensor([3 + 29 * (row % 3) for row in range(rows)], dtype=torch.int32)
    tables = torch.randperm(rows * width).view(rows, width).int()
    last = lens - 1
    slots = (tables[torch.arange(rows), (last // size).long()] * size + last % size).int()
    pages = torch.randn(3, rows * width + 1, 2, 2, size, config.head_dim, device=CUDA).to(BF16)
    plan = FusedDecodePlan(rows, 4, 2, config.head_dim, CUDA)
    batch = Batch(
        input_ids=torch.randint(0, 999, (rows,), dtype=torch.int32).cuda(), positions=last.cuda(), slots=slots.cuda(),
        page_tables=tables.cuda(), seq_lens=lens.cuda(), plan=plan.handle,
    )  # fmt: skip

    def run(weights: Any, forward: Any, handle: int) -> torch.Tensor:
        kv = KVState(pools=tuple(pool.clone() for pool in pages.split(config.pool_sizes)))
        return forward(weights, kv, replace(batch, plan=handle), config)[0]

    got, theirs = run(params, fused.forward, plan.handle), run(dequantised(params, BF16), fused.forward, plan.handle)
    plain = run(params, model.spec.forward, 0)
    for other in (theirs, plain):
        assert error(got, other.double()) < 3e-2
    first, second = theirs.float().topk(2).values.unbind(1)
    leads = first - second > 0.15
    assert torch.equal(got.argmax(1)[leads], theirs.argmax(1)[leads])
