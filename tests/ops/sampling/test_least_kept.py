"""`least_kept` against the filters written row by row, and the kernels under Triton's interpreter, bit for bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.ops.sampling.fixed_weights import fixed_weights
from nanovllm.ops.sampling.least_kept import least_kept, reference

INF, NAN = float("inf"), float("nan")
FILTERS = [
    (True, True, True), (False, True, False), (True, False, False), (False, False, True), (False, True, True), (True, True, False),
]  # fmt: skip


def slow(logits: list[float], temperature: float, top_k: int, top_p: float, weights: list[int], floor: float) -> float:
    """The least kept logit of one row, by walking down the sorted row."""
    if temperature <= 0 or not math.isfinite(max(logits)):
        return -INF
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    if not (top_k > 0 or top_p < 1):
        return floor
    order = order[: top_k or len(order)]
    last = order[-1]
    if top_p < 1:
        nucleus = [i for i in order if logits[i] >= floor]
        wanted, mass, last = int(float(top_p) * float(sum(weights[i] for i in nucleus))), 0, order[0]
        for i in nucleus:
            if mass >= wanted:
                break
            mass, last = mass + weights[i], i
    return max(logits[last], floor)


@given(st.data())
@settings(deadline=None)
def test_equals_a_walk_down_each_row(data: st.DataObject) -> None:
    vocab, grid = data.draw(st.integers(1, 40)), data.draw(st.booleans())
    spread, noise = data.draw(st.sampled_from([0.01, 1.0, 10.0])), data.draw(st.integers(0, 2**32))
    x = torch.randn(4, vocab, generator=torch.Generator().manual_seed(noise)) * spread
    x = torch.round(x * 2) / 2 if grid else x

    def draw(*values: float) -> torch.Tensor:
        return torch.tensor([data.draw(st.sampled_from(values)) for _ in range(4)])

    temperature, top_k = draw(0.0, 0.3, 1.0, 100.0), draw(0, 1, 3, 20, 10**6).int()
    top_p, min_p = draw(1.0, 1e-9, 0.5, 0.9, 0.9999), draw(0.0, 1e-3, 0.4, 1.0)
    got = least_kept(x, temperature, top_k, top_p, min_p)
    largest = x.amax(1, keepdim=True)
    weights = fixed_weights(x - largest, torch.where(temperature > 0, temperature, 1.0).unsqueeze(1))
    floors = (largest.squeeze(1) + temperature * min_p.log()).tolist()
    for row in range(4):
        options = float(temperature[row]), int(top_k[row]), float(top_p[row])
        assert float(got[row]) == slow(x[row].tolist(), *options, weights[row].tolist(), floors[row] if min_p[row] > 0 else -INF)


def test_weights_are_exponentials() -> None:
    differences = -torch.cat([torch.linspace(0, 30, 10001), torch.tensor([0.0, 1e9, INF])]).unsqueeze(0)
    for temperature in (0.3, 1.0, 2.0):
        got = fixed_weights(differences, torch.tensor([[temperature]])).double() * 2.0**-40
        torch.testing.assert_close(got, (differences.double() / temperature).exp(), rtol=6e-6, atol=2.0**-40)
    assert fixed_weights(torch.zeros(1, 1), torch.tensor([[1e-45]])).item() == 2**40


def problem(vocab: int, dtype: torch.dtype, spread: float) -> tuple[torch.Tensor, ...]:
    """Rows of noise, ties, equal logits, few logits, and rows without a finite maximum, with their options."""
    x = (torch.randn(10, vocab, generator=torch.Generator().manual_seed(vocab)) * spread).to(dtype)
    x[1], x[2], x[3, ::2], x[4, -1], x[5], x[8, 0] = 0, torch.round(x[2] * 2) / 2, -INF, NAN, -INF, INF
    temperature = torch.tensor([0.6, 1, 1, 0.6, 1, 1, 0.3, 2, 1, 0])
    top_k = torch.tensor([20, 5, 7, 1, 3, 3, 0, 10**6, 4, 4], dtype=torch.int32)
    top_p = torch.tensor([0.95, 0.5, 0.9, 0.3, 0.5, 0.5, 0.9, 0.99, 0.5, 0.5])
    min_p = torch.tensor([0, 0.1, 0.05, 0, 0, 0.1, 0, 1e-3, 0.1, 0.1])
    return x, temperature, top_k, top_p, min_p


SHAPES = [
    (1, torch.float32, 1.0), (130, torch.bfloat16, 3.0), (4100, torch.float16, 0.01), (4100, torch.float32, 3.0),
    (9001, torch.bfloat16, 1.0),  # so many equal logits are more than there is room for
]  # fmt: skip


@pytest.mark.interpret
@pytest.mark.parametrize(("vocab", "dtype", "spread"), SHAPES)
def test_the_kernels_interpreted(vocab: int, dtype: torch.dtype, spread: float) -> None:
    from nanovllm.ops.sampling.triton_least_kept import launch

    x, temperature, *options = problem(vocab, dtype, spread)
    for on in FILTERS if vocab < 9000 else FILTERS[:2]:
        chosen = [option if used else None for option, used in zip(options, on, strict=True)]
        assert torch.equal(launch(x, temperature, *chosen), reference(x, temperature, *chosen)), on
    if vocab < 4000:
        none, wide = options[0] * 0, torch.cat((x, x), 1)[:, :vocab]
        assert torch.equal(launch(wide, temperature, none, *options[1:]), reference(x, temperature, none, *options[1:]))


@pytest.mark.interpret
def test_no_rows_interpreted() -> None:
    from nanovllm.ops.sampling.triton_least_kept import launch

    assert launch(torch.zeros(0, 5), torch.zeros(0), None, torch.zeros(0), None).shape == (0,)
