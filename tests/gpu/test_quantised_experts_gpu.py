"""Mixtures of experts with quantised matrices on a GPU: every form against float64, captured for any routing, and whole steps."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import nanovllm as nv
from nanovllm.entrypoints.cli.bench.graph_timer import captured
from nanovllm.entrypoints.cli.check.report_text import table
from nanovllm.models.check.examine import ROWS, examine
from nanovllm.models.fast import fused
from nanovllm.ops.backends import dependent_launch, shared_memory
from nanovllm.ops.elementwise.norm_rope import ACTS
from nanovllm.ops.linear.quantise import KINDS, Kind
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.moe import triton_quantised_experts
from nanovllm.ops.moe.experts import every_expert
from nanovllm.ops.moe.quantised_experts import few_tile, grouped_tiles, quantised_experts, tiles_of
from nanovllm.ops.moe.tiles import QuantisedFewTiles
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.problems import routed
from nanovllm.testing.quantised_problems import quantised_experts_problem, rounded

pytestmark = pytest.mark.gpu
BF16, CUDA = torch.bfloat16, torch.device("cuda")
# k, experts, width and neurons as of Qwen3-30B-A3B, with fewer experts; Mixtral's widths with fewer neurons; odd ones.
QWEN, MIXTRAL, ODD = (8, 32, 2048, 768), (2, 4, 4096, 1792), (3, 7, 264, 144)
FORMS: list[tuple[Kind, dict[str, Any]]] = [
    ("fp8", {"group": 128, "rows": 128, "scales": BF16}), ("fp8", {"group": None, "spread": 100.0}), ("int8", {"group": None}),
    ("int8", {"group": 64, "zeros": True}), ("int4", {"group": 128, "scales": BF16}),
    ("int4", {"group": 32, "zeros": True, "scales": torch.float16}), ("int4", {"group": 128, "order": True, "zeros": True}),
    ("int4", {"group": 20, "zeros": True}),
]  # fmt: skip
Problem = tuple[torch.Tensor, QuantisedMatrix, QuantisedMatrix, torch.Tensor, torch.Tensor]


def exact(problem: Problem, act: str = "silu") -> torch.Tensor:
    """In float64, one expert's matrices widened at a time."""
    x, gate_up, down, chosen, weights = problem
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for e in chosen.unique().tolist():
        rows, places = torch.where(chosen == e)
        gate, up = (x[rows].double() @ gate_up[e].dequantised(torch.float64).T).chunk(2, -1)
        total[rows] += weights[rows, places, None].double() * ((ACTS[act](gate) * up) @ down[e].dequantised(torch.float64).T)
    return total


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error of a row, of the row's largest value."""
    return float(((got.double() - want).abs().amax(1) / want.abs().amax(1)).max())


def check(problem: Problem, act: str, got: torch.Tensor) -> None:
    """No worse than plain torch over dequantised matrices, by more than the order of sums."""
    x, gate_up, down, chosen, weights = problem
    plain = every_expert(x, gate_up.dequantised(BF16), down.dequantised(BF16), chosen, weights, act)
    want = exact(problem, act)
    assert error(got, want) < 1.5 * error(plain, want) + 2e-3


@pytest.mark.parametrize("tokens", [1, 2, 5, 17, 64, 300, 1024])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [QWEN, MIXTRAL, ODD])
def test_every_form(sizes: tuple[int, int, int, int], form: tuple[Kind, dict[str, Any]], tokens: int) -> None:
    kind, more = form
    problem = quantised_experts_problem(kind, tokens, *sizes, dtype=BF16, device="cuda", **more)
    check(problem, "silu", quantised_experts(*problem, "silu"))


@pytest.mark.parametrize("tokens", [1, 3, 64, 300])
@pytest.mark.parametrize("inner", [384, 192])  # of four ranks, and of eight
@pytest.mark.parametrize(
    "form", [("fp8", {"group": None}), ("fp8", {"group": 64}), ("int4", {"group": 64, "zeros": True}), ("int4", {"group": 16})]
)
def test_parts_of_qwen3_235b(form: tuple[Kind, dict[str, Any]], inner: int, tokens: int) -> None:
    kind, more = form
    problem = quantised_experts_problem(kind, tokens, 8, 32, 4096, inner, dtype=BF16, device="cuda", **more)
    check(problem, "silu", quantised_experts(*problem, "silu"))


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("routing", ["random", "few", "one"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_routing(kind: Kind, routing: str, act: str) -> None:
    for tokens in (1, 70, 500):
        x, gate_up, down, chosen, weights = quantised_experts_problem(
            kind, tokens, 2, 5, 384, 136, dtype=BF16, device="cuda", routing=routing, group=128
        )
        problem = (x, gate_up, down, chosen.int(), weights.float())
        check(problem, act, quantised_experts(*problem, act))


@pytest.mark.parametrize("pairs", [0, 1, 20, 64, 200])
@pytest.mark.parametrize("tokens", [1, 40, 333])
@pytest.mark.parametrize("kind", KINDS)
def test_every_tile_serves_any_number_of_tokens(kind: Kind, tokens: int, pairs: int) -> None:
    """By assembly and by plain operations. `pairs`: of an expert, on average, as the tiles expect; 0: every pair by itself."""
    k, _, width, inner = sizes = (4, 9, 768, 384)
    problem = quantised_experts_problem(kind, tokens, *sizes, dtype=BF16, device="cuda", group=128)
    _, gate_up, down, *_ = problem
    first, second = few_tile(gate_up, 2, tokens * k * inner), few_tile(down, k, tokens * width)
    assert first is not None and second is not None
    tiles = grouped_tiles(pairs, gate_up, down, shared_memory(CUDA)) if pairs else QuantisedFewTiles(gate_up=first, down=second)
    for new in {False, dependent_launch(CUDA)}:
        check(problem, "silu", triton_quantised_experts.launch(*problem, "silu", tiles, new, new))


@pytest.mark.parametrize("tokens", [1, 2, 16, 300])
@pytest.mark.parametrize(("kind", "group"), [("fp8", 128), ("int8", None), ("int4", 128)])
def test_a_captured_call_serves_any_routing(kind: Kind, group: int | None, tokens: int) -> None:
    """Several calls in a row, as the layers of a step, each fed with what the one before it made; the same bits every time."""
    k, num, *_ = QWEN
    x, gate_up, down, chosen, weights = quantised_experts_problem(kind, tokens, *QWEN, dtype=BF16, device="cuda", group=group)

    def layers() -> list[torch.Tensor]:
        rows = [x]
        for _ in range(3):
            rows.append(quantised_experts(rows[-1], gate_up, down, chosen, weights, "silu"))
        return rows

    graph, rows = captured(layers)
    for routing in ("random", "one", "few"):
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


def test_no_tokens_and_tensors_that_are_not_contiguous() -> None:
    x, gate_up, down, chosen, weights = quantised_experts_problem("int4", 5, 2, 8, 256, 128, dtype=BF16, device="cuda", group=64)
    assert quantised_experts(x[:0], gate_up, down, chosen[:0], weights[:0], "silu").shape == (0, 256)
    split = replace(down, scales=down.scales.mT.contiguous().mT)
    problem = (x, gate_up, split, chosen, weights)
    check(problem, "silu", quantised_experts(*problem, "silu"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_by_itself_and_among_others_is_near(kind: Kind) -> None:
    """Both ways to run, few tokens and many, on the same rows."""
    x, gate_up, down, chosen, weights = quantised_experts_problem(kind, 64, *QWEN, dtype=BF16, device="cuda", group=128)
    assert isinstance(tiles_of(1, 8, gate_up, down, shared_memory(CUDA)), QuantisedFewTiles)
    many = quantised_experts(x, gate_up, down, chosen, weights, "silu")
    for row in (0, 17, 63):
        one = slice(row, row + 1)
        alone = quantised_experts(x[one], gate_up, down, chosen[one], weights[one], "silu")
        assert error(alone, many[one].double()) < 2e-2


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_runs_a_quantised_mixture_in_the_fused_kernels(kind: Kind) -> None:
    """All layers pass the numerical check, and captured steps give one reply the same tokens as another time."""
    config = tiny_config(
        "Qwen3MoeForCausalLM", num_layers=3, hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=999, dtype="bfloat16"
    )
    plain = random_model(config, device="cuda", dtype=BF16, std=0.05)
    model = replace(plain, params=rounded(plain.params, kind))
    assert fused.unknown(model.params, config) == "" and fused.serves(model.params, config)
    report = examine(model, 130)
    assert (report.fast, report.rows, report.fallen) == ("fused", ROWS, ()), table(report)
    limit = nv.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    replies = []
    for _ in range(2):
        state = nv.init_state(model, num_pages=64)
        replies.append(nv.generate(model, state, list(range(5, 45)), limit)[1].token_ids)
    assert replies[0] == replies[1] and len(replies[0]) == 24
