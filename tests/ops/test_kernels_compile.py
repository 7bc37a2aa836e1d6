"""Every Triton kernel compiled for a GPU that need not be there: the interpreter takes what the compiler refuses, and knows no memory."""

import os
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.ops.attention import cascade_plan, fused_plan
from nanovllm.ops.attention.cascade_plan import CascadePlan, CascadeWorkspace, Run
from nanovllm.ops.attention.fused_plan import FusedDecodePlan
from nanovllm.ops.attention.prompt_tiles import TilePlan
from nanovllm.ops.backends import LARGEST
from nanovllm.ops.linear.linear_add_norm import wide_tile
from nanovllm.ops.linear.norm_linear import ROWS, fits, tile_of
from nanovllm.ops.linear.tiles import WideTile
from nanovllm.ops.moe.experts import tiles_of
from nanovllm.ops.moe.tiles import FewTiles
from nanovllm.testing.problems import attention_problem, linear_problem

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.compile, pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")]
BF16, CPU = torch.bfloat16, torch.device("cpu")
OPT_IN = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}  # bytes of shared memory of a program, at most, by compute capability
PROCESSORS = 132
LIMITS = [(0, 0.0), (1000, 50.0)]  # window, soft cap


class Compiled(list[Any]):
    """The kernels compiled so far for one GPU."""

    def __init__(self, capability: int) -> None:
        super().__init__()
        self.capability, self.memory, self.pdl = capability, min(LARGEST, OPT_IN[capability] - 8192), capability >= 90

    def check(self) -> None:
        assert self, "nothing was compiled"
        for kernel in self:
            assert kernel.asm["cubin"] and kernel.metadata.shared <= OPT_IN[self.capability], (kernel.name, kernel.metadata.shared)


# 86 has the least memory, 90 launches early: what compiles for both compiles for 80.
@pytest.fixture(params=[pytest.param(80, marks=pytest.mark.long), 86, 90])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """Launches compile for this compute capability, and do no more."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found, run = Compiled(request.param), JITFunction.run

    class NoGpu:
        """What `JITFunction.run` asks of a driver until a kernel is compiled."""

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", found.capability, 32)

        def get_current_device(self) -> int:
            return -found.capability  # no other's cache of kernels

        def get_current_stream(self, device: int) -> int:
            return 0

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(run(self, *args, grid=grid, warmup=True, **options))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", NoGpu())
    for module in (cascade_plan, fused_plan):  # plans on a CPU are cut for this
        monkeypatch.setattr(module, "LARGEST", found.memory)
    return found


@pytest.mark.parametrize("rows", [1, 2, 8, ROWS])
@pytest.mark.parametrize(("gated", "norm", "extras"), [(False, True, True), (True, True, False), (False, False, True)])
def test_products_of_few_rows(compiled: Compiled, rows: int, gated: bool, norm: bool, extras: bool) -> None:
    from nanovllm.ops.linear import triton_few_rows

    for outputs, width in ((512, 512), (4096, 1024), (1024, 3072), *(((64, 5120), (64, 8192), (64, 18944)) if rows < 8 else ())):
        if not fits(rows, width, gated, compiled.memory):
            continue
        given = linear_problem(rows, outputs, width, gated, norm, extras, BF16)
        triton_few_rows.launch(*given, tile_of(rows, outputs, width, gated, compiled.memory), compiled.pdl)
    compiled.check()


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("act", ["gelu", "gelu_tanh"])
def test_products_of_few_rows_with_wide_gains_and_other_gates(compiled: Compiled, rows: int, act: str) -> None:
    """The last is the shape of Gemma 3 4B's gate and up."""
    from nanovllm.ops.linear import triton_few_rows

    for gated, outputs, width in ((False, 512, 512), (True, 512, 512), (True, 10240, 2560)):
        if fits(rows, width, gated, compiled.memory):
            given = linear_problem(rows, outputs, width, gated, True, False, BF16, gains=torch.float32)
            triton_few_rows.launch(*given, tile_of(rows, outputs, width, gated, compiled.memory), compiled.pdl, act)
    compiled.check()


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh"])
def test_products_of_many_rows_with_other_gates(compiled: Compiled, act: str) -> None:
    from nanovllm.ops.linear import triton_many_rows

    x, weight, *_ = linear_problem(64, 1024, 2048, True, False, False, BF16)
    tile = wide_tile(64, 1024, 2048, True, PROCESSORS, compiled.memory) or WideTile(depth=64, stages=3)
    triton_many_rows.product(x, weight, None, True, tile, compiled.pdl, act)
    triton_many_rows.gate(torch.zeros(64, 2 * 1024, dtype=BF16), compiled.pdl, act)
    compiled.check()


@pytest.mark.parametrize("gains", [BF16, torch.float32])
@pytest.mark.parametrize("width", [96, 2560, 5376])
def test_norms_about_the_residual(compiled: Compiled, width: int, gains: torch.dtype) -> None:
    from nanovllm.ops.linear import triton_many_rows

    rows, gain, bias = torch.zeros(3, width, dtype=BF16), torch.ones(width, dtype=gains), torch.zeros(width, dtype=BF16)
    for parts in (torch.zeros(1, 3, width, dtype=BF16), torch.zeros(4, 3, width)):
        for extra in (None, bias):
            for inner in (None, gain):
                triton_many_rows.sum_norm(parts, extra, rows, gain, 1e-6, compiled.pdl, inner)
            triton_many_rows.summed(torch.zeros(4, 3, width), extra, BF16, compiled.pdl)
    for residual in (None, rows):
        triton_many_rows.norm_add(rows, gain, residual, 1e-6, compiled.pdl)
    compiled.check()


@pytest.mark.parametrize("gated", [False, True])
def test_products_of_many_rows_and_what_follows(compiled: Compiled, gated: bool) -> None:
    from nanovllm.ops.linear import triton_many_rows

    x, weight, _, bias, residual, eps, _ = linear_problem(64, 1024, 2048, gated, True, True, BF16)
    whole = wide_tile(64, 1024, 2048, gated, PROCESSORS, compiled.memory) or WideTile(depth=64, stages=3)
    triton_many_rows.product(x, weight, bias, gated, whole, compiled.pdl)
    if gated:
        triton_many_rows.gate(torch.zeros(64, 2 * 1024, dtype=BF16), compiled.pdl)
    else:
        split = wide_tile(64, 1024, 2048, False, PROCESSORS, compiled.memory, split=True) or WideTile(depth=64, stages=3, parts=4)
        assert residual is not None
        parts = triton_many_rows.partial_product(x, weight, split, compiled.pdl)
        triton_many_rows.sum_norm(parts, bias, residual, residual[0], eps, compiled.pdl)
    compiled.check()


@pytest.mark.parametrize(
    ("rows", "outputs", "width", "gated"),
    [
        (8, 12288, 1024, True), (64, 12288, 1024, True), (24, 4096, 1024, False), (8, 4480, 4096, True),
        (8, 1536, 4096, True), (8, 1280, 4096, False), (24, 1280, 4096, False), (64, 2560, 4096, False),
    ],
)  # fmt: skip
def test_products_of_which_a_multiprocessor_takes_several_and_of_few_rows(
    compiled: Compiled, rows: int, outputs: int, width: int, gated: bool
) -> None:
    """The last five are parts of a model on several GPUs, which have few outputs."""
    from nanovllm.ops.linear import triton_many_rows

    x, weight, *_ = linear_problem(rows, outputs, width, gated, False, False, BF16)
    tile = wide_tile(rows, outputs, width, gated, PROCESSORS, compiled.memory)
    assert tile is not None or compiled.memory < 200_000  # on Hopper there is one
    if tile is not None:
        triton_many_rows.product(x, weight, None, gated, tile, compiled.pdl)
        compiled.check()


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "norm"),
    [
        (1, 16, 8, 128, True), (1, 28, 4, 128, False), (1, 16, 1, 128, True), (4, 32, 4, 64, False), (8, 16, 8, 128, True),
        (16, 16, 8, 128, True), (32, 6, 2, 80, True), (64, 16, 8, 128, True), (8, 8, 1, 128, False), (64, 8, 1, 128, False),
        (2, 8, 4, 256, True), (24, 16, 8, 256, False),
    ],
)  # fmt: skip
def test_attention_of_new_tokens(compiled: Compiled, rows: int, heads: int, kv_heads: int, head_dim: int, norm: bool) -> None:
    from nanovllm.ops.attention import triton_rope_attend

    given = attention_problem([20 + row for row in range(rows)], heads, kv_heads, head_dim, 16, norm, BF16)
    qkv, q_norm, k_norm, cos, sin, pages, layer, tables, lens, slots, scale, eps = given
    plan = FusedDecodePlan(rows, heads, kv_heads, head_dim, CPU)
    near = (qkv, q_norm, k_norm, cos, sin, pages[layer])
    for limits in LIMITS:
        triton_rope_attend.launch(*near, tables, lens, slots, scale, eps, plan, compiled.pdl, *limits)
    for keep in (False, True):
        triton_rope_attend.write(*near, slots, eps, keep, compiled.pdl)
    compiled.check()


@pytest.mark.parametrize(("rows", "heads", "kv_heads", "head_dim"), [(1, 8, 4, 256), (16, 8, 4, 256), (64, 16, 16, 256), (4, 16, 8, 128)])
def test_attention_of_heads_normed_by_wide_gains(compiled: Compiled, rows: int, heads: int, kv_heads: int, head_dim: int) -> None:
    from nanovllm.ops.attention import triton_rope_attend

    given = attention_problem([20 + row for row in range(rows)], heads, kv_heads, head_dim, 16, True, BF16, gains=torch.float32)
    qkv, q_norm, k_norm, cos, sin, pages, layer, tables, lens, slots, scale, eps = given
    near, plan = (qkv, q_norm, k_norm, cos, sin, pages[layer]), FusedDecodePlan(rows, heads, kv_heads, head_dim, CPU)
    for limits in LIMITS:
        triton_rope_attend.launch(*near, tables, lens, slots, scale, eps, plan, compiled.pdl, *limits)
    for keep in (False, True):
        triton_rope_attend.write(*near, slots, eps, keep, compiled.pdl)
    compiled.check()


@pytest.mark.parametrize(("rows", "heads", "kv_heads", "head_dim"), [(4, 16, 8, 128), (3, 32, 4, 64), (2, 6, 2, 80), (3, 8, 4, 256)])
def test_cascade(compiled: Compiled, rows: int, heads: int, kv_heads: int, head_dim: int) -> None:
    from nanovllm.ops.attention import triton_cascade

    q, pages = torch.zeros(rows, heads, head_dim, dtype=BF16), torch.zeros(64, 2, kv_heads, 16, head_dim, dtype=BF16)
    tables, lens = torch.zeros(rows, 8, dtype=torch.int32), torch.full((rows,), 100, dtype=torch.int32)
    plan = CascadePlan(CascadeWorkspace(rows, heads, head_dim, CPU), rows, heads, kv_heads, 16, CPU)
    every = np.arange(rows, dtype=np.int32)
    assert plan.update([Run(rows=every, start=0, stop=4), *(Run(rows=every[row : row + 1], start=4, stop=7) for row in range(rows))])
    for limits in LIMITS:
        triton_cascade.cascade_decode(q, pages, tables, lens, head_dim**-0.5, plan, *limits)
    compiled.check()


@pytest.mark.parametrize(
    ("k", "num", "width", "inner"), [(8, 128, 2048, 768), (2, 8, 4096, 14336), (6, 64, 2560, 1536), (2, 5, 40, 24), (2, 5, 33, 21)]
)
@pytest.mark.parametrize("tokens", [1, 48, 1024, 4096])
def test_experts(compiled: Compiled, tokens: int, k: int, num: int, width: int, inner: int) -> None:
    """The first three are Qwen3-30B-A3B's, Mixtral-8x7B's and ERNIE-4.5-21B-A3B's; of weights only the shapes are asked."""
    from nanovllm.ops.moe import triton_experts

    gate_up, down = (torch.empty(num, *shape, dtype=BF16, device="meta") for shape in ((2 * inner, width), (width, inner)))
    x, weights = torch.empty(tokens, width, dtype=BF16, device="meta"), torch.empty(tokens, k, dtype=BF16, device="meta")
    tiles = tiles_of(tokens, k, num, width, inner, compiled.memory)
    for chosen, act in ((torch.int64, "silu"), *(((torch.int32, "gelu"), (torch.int64, "gelu_tanh")) if tokens < 64 else ())):
        given = (x, gate_up, down, torch.empty(tokens, k, dtype=chosen, device="meta"), weights, act)
        triton_experts.launch(*given, tiles, compiled.pdl)
    triton_experts.launch(*given, tiles, compiled.pdl, x)
    assert {kernel.name for kernel in compiled} == (
        {"_few_gate_up", "_few_down"} if isinstance(tiles, FewTiles) else {"_sort", "_grouped", "_combine"}
    )
    compiled.check()


@pytest.mark.parametrize(("num", "k"), [(128, 8), (8, 2), (64, 6)])
def test_route(compiled: Compiled, num: int, k: int) -> None:
    from nanovllm.ops.moe import triton_route

    for dtype in (BF16, torch.float32):
        router = torch.empty(num, 2560, dtype=dtype, device="meta")
        triton_route.norm_router(torch.zeros(3, 2560, dtype=BF16), torch.zeros(2560, dtype=BF16), router, 1e-6, compiled.pdl)
        for bias in (None, torch.zeros(num)):
            triton_route.route(torch.zeros(3, num, dtype=dtype), bias, k, bias is None, 0.0, compiled.pdl)
    compiled.check()


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_one_kernel_moves_images_wherever_their_ids_begin(compiled: Compiled) -> None:
    """A second kernel would be compiled while an engine runs."""
    from nanovllm.ops.kv_cache import triton_kv

    pages, places = torch.zeros(2, 8, 2, 8, 16, 128, dtype=BF16), torch.arange(8, dtype=torch.int32)
    for start in (0, 1):
        triton_kv.move_images(pages, places[start : start + 3], pages[:, :3].transpose(0, 1).contiguous(), gathered=True)
    assert compiled[0] is compiled[1]


def test_memory_rows_and_sampling(compiled: Compiled) -> None:
    from nanovllm.ops.elementwise import triton_decode_rows
    from nanovllm.ops.kv_cache import triton_kv
    from nanovllm.ops.sampling import triton_sampling

    pages, places = torch.zeros(2, 8, 2, 8, 16, 128, dtype=BF16), torch.arange(3, dtype=torch.int32)
    tokens = torch.zeros(3, 8, 128, dtype=BF16)
    triton_kv.kv_write(pages[0], tokens, tokens, places)
    triton_kv.copy_pages(pages, places, places + 3)
    for gathered in (True, False):
        triton_kv.move_images(pages, places, pages[:, :3].transpose(0, 1).contiguous(), gathered=gathered)
    triton_kv.move_kv(pages, places, places + 16, places, torch.ones(64))
    triton_kv.last_page_lens(places.clone(), places, torch.arange(4, dtype=torch.int32), 16)
    triton_decode_rows.rotary_angles(places, torch.ones(64), 1.0)
    triton_decode_rows.capped_logits(torch.zeros(3, 1000, dtype=BF16), 30.0)
    logits, keys = torch.zeros(3, 151936), torch.zeros(3, 2, dtype=torch.int64)
    triton_sampling.launch_uniforms(keys, 100)
    triton_sampling.launch_highest(logits)
    triton_sampling.launch_draw(logits, torch.ones(3), None, keys)
    compiled.check()


def test_winners_of_ranks(compiled: Compiled) -> None:
    from nanovllm.ops.distributed import triton_winners
    from nanovllm.ops.distributed.shared_memory import WORDS
    from nanovllm.ops.sampling import triton_sampling

    logits, keys = torch.zeros(3, 75968, dtype=BF16), torch.zeros(3, 2, dtype=torch.int64)
    for size, first in ((2, 0), (2, 75968), (4, 75966), (8, 7)):
        shared = shared_by(size)
        triton_winners.winners(*triton_sampling.highest_of_blocks(logits, first, 75960), shared, WORDS)
        triton_winners.winners(*triton_sampling.drawn_of_blocks(logits, torch.ones(3), None, keys, first, 75960), shared, WORDS)
    compiled.check()


@pytest.mark.parametrize(("size", "dtype"), [(2, BF16), (2, torch.float16), (2, torch.float32), (3, BF16), (8, BF16)])
def test_sums_over_ranks(compiled: Compiled, size: int, dtype: torch.dtype) -> None:
    """Tensors are pushed, and polled, by 16 bytes a thread."""
    from nanovllm.ops.distributed import triton_meetings, triton_pushes

    y, gain, shared = torch.zeros(2, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype), shared_by(size)
    for residual in (None, y):
        triton_pushes.pushed(y, residual, shared, compiled.pdl)
    for parts, bias in ((y.unsqueeze(0), None), (torch.zeros(4, 2, 4096), gain)):
        triton_pushes.pushed_norm(parts, bias, y, gain, 1e-6, shared, compiled.pdl)
    for kernel in compiled:
        for access in ("ld.volatile.global.v4.b32", "st.global.v4.b32"):
            assert access in kernel.asm["ptx"], (kernel.name, access)
    for residual in (None, y):
        triton_meetings.reduce(y, residual, shared, 0, 0, compiled.pdl)
    triton_meetings.reduce_norm(y.unsqueeze(0), None, y, gain, 1e-6, shared, 0, 0, compiled.pdl)
    triton_meetings.reduce_in_shares(y, shared, 0, 0, compiled.pdl)
    triton_meetings.gather_columns(y, 8192, shared, 0, 0)
    compiled.check()


def shared_by(size: int) -> Any:
    """Memory that ranks would share."""
    from nanovllm.ops.distributed.shared_memory import Shared

    memory, table, failed = torch.zeros(8, dtype=torch.uint8), torch.zeros(size, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    peers = tuple((1 << 40) + (rank << 30) for rank in range(size))
    return Shared(rank=size - 1, size=size, memory=memory, table=table, peers=peers, failed=failed, handle=None)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_filters(compiled: Compiled, dtype: torch.dtype) -> None:
    from nanovllm.ops.sampling import triton_least_kept, triton_penalised

    logits, ones, some = torch.zeros(3, 151936, dtype=dtype), torch.ones(3), torch.ones(3, dtype=torch.int32)
    for filters in ((some, ones, ones), (None, ones, None), (some, None, None), (None, None, ones)):
        triton_least_kept.launch(logits, ones, *filters)
    assert len({kernel.hash for kernel in compiled}) == 6  # an absent filter needs no kernel of its own; `_weigh` has two
    triton_penalised.launch(logits, some, torch.zeros(3, 151936, dtype=torch.int32), torch.zeros(3, 151936), ones, ones, ones,
                            some, torch.zeros(3, 4748, dtype=torch.int32))  # fmt: skip
    compiled.check()


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "dtype"),
    [(1, 16, 8, 128, BF16), (8, 32, 8, 128, BF16), (32, 6, 2, 80, BF16), (24, 16, 8, 256, BF16), (64, 16, 8, 64, torch.float16)],
)
def test_kernels_over_kv_in_fp8(
    compiled: Compiled, rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kernel that reads or writes KV. GPUs below 8.9 have no e4m3, and engines refuse the option on them."""
    if compiled.capability < 89:
        pytest.skip("no e4m3")
    from nanovllm.ops.attention import triton_cascade, triton_prompts, triton_rope_attend
    from nanovllm.ops.kv_cache import triton_kv

    for module in (triton_cascade, triton_rope_attend):
        monkeypatch.setattr(module, "on_gpu", lambda _: True)
    given = attention_problem([20 + row for row in range(rows)], heads, kv_heads, head_dim, 16, True, dtype)
    qkv, q_norm, k_norm, cos, sin, plain, _, tables, lens, slots, scale, eps = given
    pages = torch.zeros(*plain.shape[:-1], head_dim + 4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    near, tokens = (qkv, q_norm, k_norm, cos, sin, pages[0]), torch.zeros(rows, kv_heads, head_dim, dtype=dtype)
    triton_kv.kv_write(pages[0], tokens, tokens, slots)
    triton_kv.copy_pages(pages.view(torch.uint8), slots, slots)
    for gathered in (True, False):
        triton_kv.move_images(pages.view(torch.uint8), slots, pages.view(torch.uint8)[:, : len(slots)].transpose(0, 1), gathered=gathered)
    triton_kv.move_kv(pages, slots, slots, slots, torch.ones(head_dim // 2))
    for keep in (False, True):
        triton_rope_attend.write(*near, slots, eps, keep, compiled.pdl)
    q, cascade = torch.zeros(rows, heads, head_dim, dtype=dtype), CascadePlan(
        CascadeWorkspace(rows, heads, head_dim, CPU, fp8=True), rows, heads, kv_heads, 16, CPU
    )  # fmt: skip
    assert cascade.update([Run(rows=np.arange(rows, dtype=np.int32), start=0, stop=1)])
    prompts = TilePlan(rows, rows, heads, kv_heads, CPU)
    for limits in LIMITS:
        plan = FusedDecodePlan(rows, heads, kv_heads, head_dim, CPU, fp8=True)
        triton_rope_attend.launch(*near, tables, lens, slots, scale, eps, plan, compiled.pdl, *limits)
        triton_cascade.cascade_decode(q, pages[0], tables, lens, scale, cascade, *limits)
        triton_prompts.attend_tiles(q, pages[0], tables, scale, prompts, *limits)
    compiled.check()
