"""`route`: the largest shares and their weights, as obvious code finds them; the kernel under Triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.ops import route
from nanovllm.ops.elementwise.norm_rope import rms_norm
from nanovllm.ops.moe.route import norm_route


def obvious(
    logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, normalise: bool, least: float
) -> tuple[list[list[int]], list[list[float]]]:
    chosen, weights = [], []
    for row in logits.double():
        shares = (row - row.max()).exp()
        shares = (shares / shares.sum()).tolist()
        score = shares if bias is None else [s + b for s, b in zip(shares, bias.tolist(), strict=True)]
        best = sorted(range(len(score)), key=lambda e: -score[e])[:top_k]
        total = max(least, sum(shares[e] for e in best)) if normalise else 1.0
        chosen.append(best)
        weights.append([shares[e] / total for e in best])
    return chosen, weights


def check(got: tuple[torch.Tensor, torch.Tensor], want: tuple[list[list[int]], list[list[float]]]) -> None:
    assert got[0].tolist() == want[0]
    torch.testing.assert_close(got[1].double(), torch.tensor(want[1], dtype=torch.float64), rtol=1e-5, atol=1e-6)


@given(
    tokens=st.integers(1, 5), experts=st.integers(1, 40), data=st.data(), biased=st.booleans(), normalise=st.booleans(),
    least=st.sampled_from([0.0, 1e-12, 0.9]),
)  # fmt: skip
@settings(max_examples=60)
def test_the_reference_is_obvious_code(tokens: int, experts: int, data: st.DataObject, biased: bool, normalise: bool, least: float) -> None:
    top_k = data.draw(st.integers(1, experts))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    logits, bias = torch.randn(tokens, experts) * 3, torch.randn(experts) * 0.1 if biased else None
    check(route(logits, bias, top_k, normalise, least), obvious(logits, bias, top_k, normalise, least))


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    logits, bias = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([-5.0, 0.0, 0.0])
    chosen, weights = route(logits, bias, 2, False)
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, logits.softmax(-1)[:, 1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_opcheck(dtype: torch.dtype) -> None:
    torch.library.opcheck(torch.ops.nanovllm.route.default, (torch.randn(3, 6, dtype=dtype), torch.zeros(6), 2, True, 0.0))
    assert route(torch.randn(3, 6, dtype=dtype), None, 2, True)[1].dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.interpret
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (3, 128, 8), (5, 60, 6), (2, 1, 1), (4, 5, 5), (2, 130, 3)])
def test_the_kernel_interpreted(tokens: int, experts: int, top_k: int, biased: bool) -> None:
    from nanovllm.ops.moe import triton_route

    torch.manual_seed(experts)
    logits, bias = torch.randn(tokens, experts) * 3, torch.randn(experts) * 0.1 if biased else None
    for normalise, least in ((False, 0.0), (True, 1e-12), (True, 0.9)):
        check(triton_route.route(logits, bias, top_k, normalise, least, False), obvious(logits, bias, top_k, normalise, least))


@pytest.mark.interpret
@pytest.mark.parametrize("experts", [6, 128, 130])
def test_the_kernel_chooses_distinct_experts_among_ties_and_nan(experts: int) -> None:
    from nanovllm.ops.moe import triton_route

    logits = torch.zeros(3, experts)
    logits[1, 2:] = -torch.inf
    logits[2, 1] = torch.nan
    chosen, _ = triton_route.route(logits, None, 4, True, 0.0, False)
    assert chosen[0].tolist() == [0, 1, 2, 3]
    assert set(chosen[1, :2].tolist()) == {0, 1}
    assert all(0 <= expert < experts for expert in chosen.flatten().tolist())
    assert len(set(chosen[1].tolist())) == 4


def normed(rows: int, width: int, experts: int, wide: bool) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(width)
    gain, router = torch.rand(width) + 0.5, torch.randn(experts, width) / width**0.5
    return torch.randn(rows, width), gain, router.double() if wide else router, torch.randn(experts) * 0.01


def steps(
    x: torch.Tensor, gain: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None, k: int
) -> tuple[torch.Tensor, list[list[int]], list[list[float]]]:
    """`norm_route` as its three steps, in float64."""
    h = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain.double()
    return h, *obvious(h @ router.double().T, None if bias is None else bias.double(), k, True, 0.0)


@pytest.mark.parametrize(("rows", "width", "experts", "wide"), [(1, 8, 4, False), (5, 24, 6, True), (17, 16, 8, False)])
def test_norm_route(rows: int, width: int, experts: int, wide: bool) -> None:
    x, gain, router, bias = normed(rows, width, experts, wide)
    for one in (None, bias):
        h, chosen, weights = norm_route(x, gain, router, one, 1e-6, 3, True)
        want, ids, shares = steps(x, gain, router, one, 3)
        torch.testing.assert_close(h, want.float())
        check((chosen, weights), (ids, shares))
        assert weights.dtype == (torch.float64 if wide else torch.float32)


def test_norm_route_passes_opcheck() -> None:
    torch.library.opcheck(torch.ops.nanovllm.norm_route.default, (*normed(3, 16, 6, False), 1e-6, 2, True, 0.0))


@pytest.mark.interpret
@pytest.mark.parametrize(("rows", "width", "experts"), [(1, 64, 8), (3, 100, 5), (2, 264, 33)])
def test_the_kernel_of_norm_and_router_interpreted(rows: int, width: int, experts: int) -> None:
    from nanovllm.ops.moe import triton_route

    x, gain, router, _ = normed(rows, width, experts, False)
    want, *_ = steps(x, gain, router, None, 1)
    h, logits = triton_route.norm_router(x, gain, router, 1e-6, False)
    torch.testing.assert_close(h, want.float())
    torch.testing.assert_close(logits, (want @ router.double().T).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.interpret
@pytest.mark.parametrize("router", [torch.bfloat16, torch.float32])
def test_the_kernel_of_norm_and_router_with_wide_weights_interpreted(router: torch.dtype) -> None:
    """A float32 norm weight and router beside bfloat16 inputs, as some models have."""
    from nanovllm.ops.moe import triton_route

    x, gain, weight, _ = normed(2, 264, 33, False)
    want = rms_norm(x.bfloat16(), gain, 1e-6)
    h, logits = triton_route.norm_router(x.bfloat16(), gain, weight.to(router), 1e-6, False)
    torch.testing.assert_close(h, want, rtol=2**-7, atol=1e-3)
    assert logits.dtype == router
    torch.testing.assert_close(logits.double(), h.double() @ weight.to(router).double().T, rtol=2**-7, atol=2**-7)
