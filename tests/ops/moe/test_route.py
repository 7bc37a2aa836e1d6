"""`route`: the largest shares and their weights, as obvious code finds them; the kernel under Triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.ops import route


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
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (3, 128, 8), (5, 60, 6), (2, 1, 1), (4, 5, 5)])
def test_the_kernel_interpreted(tokens: int, experts: int, top_k: int, biased: bool) -> None:
    from nanovllm.ops.moe import triton_experts

    torch.manual_seed(experts)
    logits, bias = torch.randn(tokens, experts) * 3, torch.randn(experts) * 0.1 if biased else None
    for normalise, least in ((False, 0.0), (True, 1e-12), (True, 0.9)):
        check(triton_experts.route(logits, bias, top_k, normalise, least, False), obvious(logits, bias, top_k, normalise, least))
