"""The kernels of a fused decode step on a GPU: against float64, on random and extreme weights, and whole steps against plain layers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from nanovllm import models
from nanovllm.config import MoEConfig, RopeConfig
from nanovllm.models.common.batch import Batch
from nanovllm.models.fast import fused
from nanovllm.ops.attention.fused_plan import FusedDecodePlan
from nanovllm.ops.attention.rope_attend import rope_attend
from nanovllm.ops.elementwise.decode_rows import capped_logits, next_places, rotary_angles
from nanovllm.ops.elementwise.norm_rope import soft_cap
from nanovllm.ops.linear.linear_add_norm import linear_add_norm, norm_add
from nanovllm.ops.linear.norm_linear import norm_linear
from nanovllm.ops.sampling.draw import highest
from nanovllm.state.kv_cache import KVState
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.problems import attention_problem, linear_problem, wide_norm_linear

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error, of the largest value."""
    return float((got.double() - want).abs().max() / want.abs().max())


def errors_of(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """The largest error of each row, of the largest value."""
    return (got.double() - want).abs().flatten(1).amax(1) / want.abs().max()


def usual_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The median over rows of the largest error, of the largest value."""
    return float(errors_of(got, want).median())


@pytest.mark.parametrize("gains", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 11, 16])
@pytest.mark.parametrize(
    ("outputs", "width", "gated", "norm", "extras"),
    [(4096, 1024, False, True, False), (1024, 2048, False, False, True), (3072, 1024, True, True, False), (1024, 3072, False, False, True),
     (2048, 5632, False, False, True), (1003, 256, False, True, True)],
)  # fmt: skip
def test_products(
    rows: int, outputs: int, width: int, gated: bool, norm: bool, extras: bool, dtype: torch.dtype, gains: torch.dtype | None
) -> None:
    """No worse than plain torch, which rounds at the same places, by more than the order of sums."""
    act = "silu" if gains is None else "gelu_tanh"
    x, weight, gain, bias, residual, eps, _ = given = linear_problem(rows, outputs, width, gated, norm, extras, dtype, "cuda", gains)
    want = wide_norm_linear(*given, act)
    got = norm_linear(x, weight, gain=gain, bias=bias, residual=residual, eps=eps, gated=gated, act=act)
    plain = norm_linear(*(None if t is None else t.cpu() for t in (x, weight)), gain=None if gain is None else gain.cpu(),
                        bias=None if bias is None else bias.cpu(), residual=None if residual is None else residual.cpu(),
                        eps=eps, gated=gated, act=act)  # fmt: skip
    assert error(got, want) < 1.5 * error(plain.cuda(), want) + 2e-3


@pytest.mark.parametrize("rows", [17, 24, 64, 65, 200])
@pytest.mark.parametrize(("outputs", "width"), [(1024, 2048), (1024, 3072), (4096, 4096), (2048, 5632), (1003, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_many_rows(rows: int, outputs: int, width: int, dtype: torch.dtype) -> None:
    for gated, act in ((False, "silu"), (True, "silu"), (True, "gelu_tanh"), (True, "gelu")):
        x, weight, _, bias, _, eps, _ = linear_problem(rows, outputs, width, gated, False, True, dtype, "cuda")
        want, cpu = wide_norm_linear(x, weight, None, bias, None, eps, gated, act), (None if bias is None else bias.cpu())
        plain = norm_linear(x.cpu(), weight.cpu(), bias=cpu, gated=gated, act=act)
        got = norm_linear(x, weight, bias=bias, gated=gated, act=act)
        assert error(got, want) < 1.5 * error(plain.cuda(), want) + 2e-3
    gain = torch.rand(outputs, device="cuda").to(dtype) + 0.5
    gain[::37] = 96.5
    want = wide_norm_linear(x, weight[:outputs], None, None, None, eps, False) + (r := torch.randn(rows, outputs, device="cuda").to(dtype))
    y, h = linear_add_norm(x, weight[:outputs], None, r, gain, eps)
    plain = linear_add_norm(x.cpu(), weight[:outputs].cpu(), None, r.cpu(), gain.cpu(), eps)
    assert error(y, want) < 1.5 * error(plain[0].cuda(), want) + 2e-3
    normed = want * torch.rsqrt(want.square().mean(-1, keepdim=True) + eps) * gain
    assert error(h, normed) < 1.5 * error(plain[1].cuda(), normed) + 2e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gains", [torch.float32, None])
@pytest.mark.parametrize("rows", [1, 2, 8, 17, 64, 200])
@pytest.mark.parametrize(("outputs", "width"), [(1024, 2048), (2560, 10240), (1152, 1024), (1003, 256)])
def test_norms_of_what_is_added(rows: int, outputs: int, width: int, gains: torch.dtype | None, dtype: torch.dtype) -> None:
    """The norm of a product, the residual and the norm of their sum; and the norms by themselves, with a residual and without."""
    x, weight, _, bias, residual, eps, _ = linear_problem(rows, outputs, width, False, False, True, dtype, "cuda")
    assert residual is not None
    inner, gain = ((torch.rand(outputs, device="cuda") + 0.5).to(gains or dtype) for _ in range(2))
    inner[::37], gain[::31] = 9.5, 96.5

    def normed(y: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * gain.double()

    def require_close(mine: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
        # The largest values are few, those with the largest gains, and rounded five times: they may fall a spacing apart.
        spacing = max(2e-3, torch.finfo(dtype).eps)
        assert error(mine, exact) < 1.5 * error(theirs, exact) + spacing
        assert (mine.double() - exact).abs().mean() < 1.5 * (theirs.double() - exact).abs().mean() + 1e-5

    for each in (bias, None):
        added = normed(wide_norm_linear(x, weight, None, each, None, eps, False), inner)
        want = (residual.double() + added, normed(residual.double() + added, gain))
        near = [None if t is None else t.cpu() for t in (x, weight, each, residual, gain, inner)]
        got, plain = linear_add_norm(x, weight, each, residual, gain, eps, inner=inner), linear_add_norm(*near[:5], eps, inner=near[5])
        for mine, theirs, exact in zip(got, plain, want, strict=True):
            require_close(mine, theirs.cuda(), exact)
    for more in (None, residual):
        exact = normed(residual.double(), gain) + (0 if more is None else more.double())
        theirs = norm_add(residual.cpu(), gain.cpu(), None if more is None else more.cpu(), eps)
        require_close(norm_add(residual, gain, more, eps), theirs.cuda(), exact)


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 24, 100])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads", "head_dim", "size"),
    [([300], 16, 8, 128, 16), ([1, 64, 65, 2500, 17], 16, 8, 128, 16), ([700, 3], 32, 4, 64, 16), ([130, 9, 40], 6, 2, 96, 8),
     ([130, 900, 40], 8, 4, 256, 16), ([2500], 16, 1, 128, 16), ([900, 130], 14, 2, 128, 16)],
)  # fmt: skip
@pytest.mark.parametrize("gains", [None, torch.float32])
def test_attention(
    lens: list[int], heads: int, kv_heads: int, head_dim: int, size: int, norm: bool, rows: int, gains: torch.dtype | None
) -> None:
    """As a batch of so many rows would attend, and as rows of any lengths do."""
    given = attention_problem(lens, heads, kv_heads, head_dim, size, norm, BF16, "cuda", gains)
    qkv, q_gain, k_gain, cos, sin, pages, *rest = given
    double = [t.double().cpu() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in given]
    double = [t.cpu() if isinstance(t, torch.Tensor) else t for t in double]
    want = rope_attend(*double, 0)
    sizes = (max(rows, len(lens)), heads, kv_heads, head_dim, torch.device("cuda"))
    plans = [FusedDecodePlan(*sizes), *([FusedDecodePlan(*sizes, long=True)] if sizes[0] <= 16 else [])]
    for plan in plans * 3:
        got = rope_attend(qkv, q_gain, k_gain, cos, sin, pages, *rest, plan.handle)
        for row in range(len(lens)):  # each by itself: a long row's values are small
            assert error(got[row].cpu(), want[row]) < 2e-2
        assert error(pages[1].cpu(), double[5][1]) < 2e-2
        assert not plan.counts.any()


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 24, 100])
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (63, 0.0), (64, 5.0), (65, 0.0), (1000, 5.0), (4096, 0.0), (0, 5.0)])
@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads", "head_dim", "size"),
    [([300], 16, 8, 128, 16), ([1, 64, 65, 2500, 17], 16, 8, 128, 16), ([700, 3], 32, 4, 64, 16), ([130, 900, 40], 8, 4, 256, 16),
     ([130, 9, 40], 6, 2, 96, 8)],
)  # fmt: skip
def test_attention_in_a_window_of_capped_scores(
    lens: list[int], heads: int, kv_heads: int, head_dim: int, size: int, window: int, softcap: float, rows: int
) -> None:
    """What lies before a row's window is no number, and is not read."""
    given = attention_problem(lens, heads, kv_heads, head_dim, size, True, BF16, "cuda")
    qkv, q_gain, k_gain, cos, sin, pages, layer, tables, seq_lens, slots, scale, eps = given
    double = [t.double().cpu() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in given]
    double = [t.cpu() if isinstance(t, torch.Tensor) else t for t in double]
    want = rope_attend(*double, 0, window, softcap)
    for row, length in enumerate(lens):
        at = torch.arange(max(0, length - window) if window else 0, device="cuda")
        pages[:, tables[row, at // size].long(), :, :, at % size] = torch.nan
    plan = FusedDecodePlan(max(rows, len(lens)), heads, kv_heads, head_dim, torch.device("cuda"))
    for _ in range(3):
        where = (pages, layer, tables, seq_lens, slots, scale, eps, plan.handle, window, softcap)
        got = rope_attend(qkv, q_gain, k_gain, cos, sin, *where)
        for row in range(len(lens)):
            assert error(got[row].cpu(), want[row]) < 2e-2
        assert not plan.counts.any()


def test_what_is_written_before_attention() -> None:
    """As a plan that shares pages needs it: the same k, v and result as in one launch."""
    given = attention_problem([300, 40, 7], 16, 8, 128, 16, True, BF16, "cuda")
    pages, plan = given[5].clone(), FusedDecodePlan(3, 16, 8, 128, torch.device("cuda"))
    got, want = rope_attend(*given, 0), rope_attend(*given[:5], pages, *given[6:], plan.handle)
    torch.testing.assert_close(given[5].float(), pages.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)


def test_small_steps() -> None:
    positions = torch.tensor([0, 7, 40000, 131071], dtype=torch.int32, device="cuda")
    inv_freq = 1e6 ** (-torch.arange(0, 128, 2, device="cuda").float() / 128)
    for got, want in zip(rotary_angles(positions, inv_freq, 1.5), rotary_angles(positions.cpu(), inv_freq.cpu(), 1.5), strict=True):
        torch.testing.assert_close(got.cpu(), want, atol=2e-4, rtol=1e-4)
    seq_lens, active = (torch.tensor(v, dtype=torch.int32) for v in ([1, 8, 15, 16], [0, 1, 1, 1]))
    tables = torch.arange(16, dtype=torch.int32).view(4, 4)
    want = next_places(positions.cpu(), seq_lens, tables, active, 20, 4)
    got = next_places(positions, seq_lens.cuda(), tables.cuda(), active.cuda(), 20, 4)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine.cpu(), theirs)
    logits = torch.randn(5, 151936, device="cuda").to(BF16)
    logits[1, 77] = logits[1, 151935] = 9.0
    logits[2] = -torch.inf
    assert torch.equal(highest(logits).cpu(), highest(logits.cpu()))
    logits[3] = torch.nan
    assert 0 <= int(highest(logits)[3]) < 151936


@pytest.mark.parametrize(("rows", "vocab"), [(1, 256000), (7, 999), (64, 262208), (0, 999)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_capped_logits(rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(rows, vocab, device="cuda") * 40).to(dtype)
    want = soft_cap(logits.double(), 30.0)
    torch.testing.assert_close(capped_logits(logits, 30.0).double(), want, rtol=torch.finfo(dtype).eps, atol=1e-4)


# All experts of a layer are chosen: a rounding may choose another one of some, which is no error.
ROUTED = MoEConfig(num_experts=4, top_k=4, intermediate_size=128, layers=(0, 1, 2))
STEPS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {},
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Phi3ForCausalLM": {"rope": RopeConfig(partial=0.5)},
    "Ernie4_5ForCausalLM": {},
    "Qwen3MoeForCausalLM": {"moe": ROUTED},
    "MixtralForCausalLM": {"moe": replace(ROUTED, intermediate_size=512)},
    "Ernie4_5_MoeForCausalLM": {"moe": replace(ROUTED, layers=(1, 2), wide_router=True, least_sum=1e-12, shared_size=256)},
    "GemmaForCausalLM": {"embed_scale": 16.0},
    "Gemma2ForCausalLM": {"embed_scale": 16.0, "head_dim": 128},
    "Gemma3ForCausalLM": {"embed_scale": 16.0, "head_dim": 256},
}


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 64, 70])
@pytest.mark.parametrize("architecture", STEPS)
def test_a_whole_step(architecture: str, rows: int) -> None:
    """Five kernels a layer, or seven, and those of experts, against the plain layer, both in bfloat16, beside a run in float64."""
    own = {"head_dim": 64, **STEPS[architecture]}
    config = tiny_config(
        architecture=architecture, num_layers=3, hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2,
        vocab_size=999, dtype="bfloat16", **own,
    )  # fmt: skip
    model = random_model(config, device="cuda", dtype=BF16)
    few = 16 if model.params.layers[0].o_norm is None else 2
    assert fused.serves(model.params, model.config) and fused.follows_closely(model.params, rows) == (rows <= few)
    size, width = 16, 5
    lens = torch.tensor([3 + 29 * (row % 3) for row in range(rows)], dtype=torch.int32)
    tables = torch.randperm(rows * width).view(rows, width).int()
    last = lens - 1
    slots = (tables[torch.arange(rows), (last // size).long()] * size + last % size).int()
    pages = torch.randn(3, rows * width + 1, 2, 2, size, config.head_dim).to(BF16)
    ids = torch.randint(0, 999, (rows,), dtype=torch.int32)

    def run(dtype: torch.dtype, device: str, plan: int, forward):
        params = tree_map(lambda t: t if t is None else t.to(device, dtype) if t.dtype == BF16 else t.to(device), model.params)
        batch = Batch(
            input_ids=ids.to(device), positions=last.to(device), slots=slots.to(device), page_tables=tables.to(device),
            seq_lens=lens.to(device), plan=plan,
        )  # fmt: skip
        # Layers with a window have a pool of their own, here with the same tables.
        kv = KVState(pools=tuple(pool.to(device, dtype, copy=True) for pool in pages.split(config.pool_sizes)))
        logits, kv = forward(params, kv, batch, config)
        return logits.cpu(), torch.cat(kv.pools).cpu()[:, tables.long()].transpose(0, 1)

    plan = FusedDecodePlan(rows, 4, 2, config.head_dim, torch.device("cuda"))
    reference = models.REGISTRY[architecture].forward
    got, kv = run(BF16, "cuda", plan.handle, fused.forward)
    plain, plain_kv = run(BF16, "cuda", 0, reference)
    want, want_kv = run(torch.float64, "cpu", 0, reference)
    # Where experts, or the scores of two tokens, are nearly tied, rounding can send a row elsewhere: its error is several times as large,
    # in the plain layers as in the kernels. So the usual row has a close bound, and the worst row a wide one.
    for ours, theirs, exact in ((got, plain, want), (kv, plain_kv, want_kv)):
        assert usual_error(ours, exact) < 1.5 * usual_error(theirs, exact) + 2e-3
        beyond = errors_of(ours, exact) > 1.5 * error(theirs, exact) + 5e-3
        assert beyond.sum() <= 1 + rows // 32 and (config.moe is not None or error(ours, exact) < 4 * error(theirs, exact) + 5e-3)
