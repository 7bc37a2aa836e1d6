"""The kernels of `experts` on a GPU: against float64, at the sizes of published models and odd ones, and captured once for any routing."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nanovllm.entrypoints.cli.bench.graph_timer import captured
from nanovllm.ops import experts, route
from nanovllm.ops.backends import dependent_launch, shared_memory
from nanovllm.ops.elementwise.norm_rope import ACTS, rms_norm
from nanovllm.ops.moe import triton_experts
from nanovllm.ops.moe.experts import _few_tile, _grouped_tiles, every_expert, tiles_of
from nanovllm.ops.moe.route import norm_route
from nanovllm.ops.moe.tiles import FewTiles
from nanovllm.testing.problems import experts_problem, routed

pytestmark = pytest.mark.gpu
BF16, CUDA = torch.bfloat16, torch.device("cuda")
QWEN, MIXTRAL, ERNIE = (8, 128, 2048, 768), (2, 8, 4096, 14336), (6, 64, 2560, 1536)  # k, experts, width, neurons of an expert


def exact(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, act: str = "silu") -> Tensor:
    """In float64, one expert's weights widened at a time."""
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for e in chosen.unique().tolist():
        rows, places = torch.where(chosen == e)
        gate, up = (x[rows].double() @ gate_up[e].double().T).chunk(2, -1)
        total[rows] += weights[rows, places, None].double() * ((ACTS[act](gate) * up) @ down[e].double().T)
    return total


def error(got: Tensor, want: Tensor) -> float:
    """The largest error of a row, of the row's largest value."""
    return float(((got.double() - want).abs().amax(1) / want.abs().amax(1)).max())


def check(problem: tuple[Tensor, ...], act: str, got: Tensor) -> None:
    """No worse than plain torch, which rounds at the same places, by more than the order of sums."""
    x, gate_up, down, chosen, weights = problem
    want = exact(x, gate_up, down, chosen, weights, act)
    assert error(got, want) < 1.5 * error(every_expert(x, gate_up, down, chosen, weights, act), want) + 2e-3


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 17, 64, 70, 300, 1024])
@pytest.mark.parametrize("sizes", [QWEN, MIXTRAL, ERNIE])
def test_at_the_sizes_of_models(sizes: tuple[int, int, int, int], tokens: int) -> None:
    problem = experts_problem(tokens, *sizes, BF16, "cuda")
    check(problem, "silu", experts(*problem))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("routing", ["random", "few", "one"])
@pytest.mark.parametrize("sizes", [(2, 5, 40, 24), (3, 40, 264, 144), (1, 1, 16, 16), (2, 3, 33, 21), (4, 7, 512, 130)])
def test_at_odd_sizes(sizes: tuple[int, int, int, int], routing: str, act: str, dtype: torch.dtype) -> None:
    for tokens in (1, 3, 70, 1500):
        x, gate_up, down, chosen, weights = problem = experts_problem(tokens, *sizes, dtype, "cuda", routing)
        check(problem, act, experts(*problem, act))
        got = experts(x, gate_up, down, chosen.int(), weights.float(), act)
        check((x, gate_up, down, chosen.int(), weights.float()), act, got)


@pytest.mark.parametrize("pairs", [0, 1, 20, 64, 200])
@pytest.mark.parametrize("tokens", [1, 40, 333])
def test_every_tile_serves_any_number_of_tokens(tokens: int, pairs: int) -> None:
    """`pairs`: of an expert, on average, as the tiles expect; 0: every pair by itself."""
    k, _, width, inner = sizes = (4, 9, 768, 400)
    problem = experts_problem(tokens, *sizes, BF16, "cuda")
    first, second = _few_tile(2 * width), _few_tile(k * inner)
    assert first is not None and second is not None
    tiles = _grouped_tiles(pairs, shared_memory(CUDA)) if pairs else FewTiles(gate_up=first, down=second)
    for pdl in {False, dependent_launch(CUDA)}:
        check(problem, "silu", triton_experts.launch(*problem, "silu", tiles, pdl))


@pytest.mark.parametrize(("tokens", "sizes"), [(1, QWEN), (4, QWEN), (16, QWEN), (300, QWEN), (2, ERNIE), (48, ERNIE), (3, MIXTRAL)])
def test_a_captured_call_serves_any_routing(tokens: int, sizes: tuple[int, int, int, int]) -> None:
    """Several calls in a row, as the layers of a step, each fed with what the one before it made."""
    k, num, *_ = sizes
    x, gate_up, down, chosen, weights = experts_problem(tokens, *sizes, BF16, "cuda")

    def layers() -> list[Tensor]:
        rows = [x]
        for _ in range(3):
            rows.append(experts(rows[-1], gate_up, down, chosen, weights))
        return rows

    graph, rows = captured(layers)
    for routing in ("random", "one", "few", "random"):
        ids, shares = routed(tokens, k, num, BF16, "cuda", routing)
        chosen.copy_(ids)
        weights.copy_(shares)
        x.copy_(torch.randn_like(x))
        graph.replay()
        first = [y.clone() for y in rows]
        for given, got in pairwise(first):
            check((given, gate_up, down, chosen, weights), "silu", got)
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(first, rows, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [1, 70])
def test_plain_torch_is_captured_too(tokens: int, dtype: torch.dtype) -> None:
    problem = experts_problem(tokens, 2, 8, 64, 48, dtype, "cuda")
    graph, got = captured(lambda: experts(*problem))
    problem[3].copy_(routed(tokens, 2, 8, dtype, "cuda")[0])
    graph.replay()
    torch.testing.assert_close(got.double(), exact(*problem), atol=1e-2, rtol=1e-2)  # also where float32 products are TF32


def test_no_tokens_are_no_rows() -> None:
    for dtype in (BF16, torch.float32):
        assert experts(*experts_problem(0, 2, 8, 64, 48, dtype, "cuda")).shape == (0, 64)


def test_weights_that_are_not_contiguous_are_served() -> None:
    x, gate_up, down, chosen, weights = problem = experts_problem(5, 2, 8, 64, 48, BF16, "cuda")
    check(problem, "silu", experts(x, gate_up.mT.contiguous().mT, down, chosen, weights))


@pytest.mark.parametrize("sizes", [QWEN, MIXTRAL, ERNIE])
def test_a_row_by_itself_and_among_others_is_near(sizes: tuple[int, int, int, int]) -> None:
    """Both ways to run, few tokens and many, on the same rows."""
    x, gate_up, down, chosen, weights = experts_problem(64, *sizes, BF16, "cuda")
    assert isinstance(tiles_of(1, *sizes, shared_memory(CUDA)), FewTiles)
    many = experts(x, gate_up, down, chosen, weights)
    for row in (0, 17, 63):
        one = slice(row, row + 1)
        alone = experts(x[one], gate_up, down, chosen[one], weights[one])
        assert error(alone, many[one].double()) < 2e-2


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("sizes", [QWEN, MIXTRAL, ERNIE])
def test_route_as_plain_torch(sizes: tuple[int, ...], biased: bool, dtype: torch.dtype) -> None:
    k, num = sizes[:2]
    torch.manual_seed(num)
    logits = torch.randn(1000, num, device=CUDA).mul(2).to(dtype)
    bias = torch.randn(num, device=CUDA) * 0.01 if biased else None
    chosen, weights = route(logits, bias, k, True, 1e-12)
    want, wanted = route(logits.cpu(), None if bias is None else bias.cpu(), k, True, 1e-12)
    assert chosen.dtype == torch.int32
    torch.testing.assert_close(weights.cpu(), wanted, rtol=1e-5, atol=1e-6)
    differ = chosen.cpu() != want  # equal shares, which bfloat16 has, may stand in any order
    assert differ.float().mean() < (0.2 if dtype == BF16 else 0.001)


def test_what_is_no_number_is_routed_to_some_expert() -> None:
    logits = torch.full((2, 60), float("nan"), device=CUDA)
    logits[1, :3] = torch.tensor([float("inf"), float("-inf"), 1.0])
    chosen, _ = route(logits, None, 6, True)
    assert ((chosen >= 0) & (chosen < 60)).all()


@pytest.mark.parametrize("rows", [1, 3, 16, 17])
@pytest.mark.parametrize("wide", [(BF16, BF16), (torch.float32, BF16), (BF16, torch.float32), (torch.float32, torch.float32)])
@pytest.mark.parametrize("sizes", [QWEN, MIXTRAL, ERNIE])
def test_norm_route_as_its_steps(sizes: tuple[int, ...], wide: tuple[torch.dtype, torch.dtype], rows: int) -> None:
    k, num, width = sizes[:3]
    torch.manual_seed(rows)
    x, gain = torch.randn(rows, width, device=CUDA).to(BF16), (torch.rand(width, device=CUDA) + 0.5).to(wide[0])
    router = (torch.randn(num, width, device=CUDA) / width**0.5).to(wide[1])
    h, chosen, weights = norm_route(x, gain, router, None, 1e-6, k, True)
    want = rms_norm(x, gain, 1e-6)
    torch.testing.assert_close(h, want, rtol=2**-7, atol=1e-6)
    shares = (h.double() @ router.double().T).softmax(-1)
    assert chosen.dtype == torch.int32 and all(len(set(row)) == k for row in chosen.tolist())
    least = shares.gather(1, chosen.long()).amin(1)
    others = shares.scatter(1, chosen.long(), 0.0).amax(1)
    assert (others <= least * (1 + 2e-2)).all()  # logits are rounded to the router's dtype before the choice
    mine = shares.gather(1, chosen.long())
    torch.testing.assert_close(weights.double(), mine / mine.sum(1, keepdim=True), rtol=5e-2, atol=1e-3)


def test_a_residual_is_added_to_the_rounded_sum() -> None:
    for tokens in (1, 5, 70):
        problem = experts_problem(tokens, *QWEN, BF16, "cuda")
        residual = torch.randn_like(problem[0])
        torch.testing.assert_close(experts(*problem, residual=residual), residual + experts(*problem), rtol=0, atol=0)
