"""`draw` against the Gumbel-max trick in double precision, row by row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.ops.sampling.draw import draw, gumbel, highest
from nanovllm.ops.sampling.philox import to_unit
from nanovllm.ops.sampling.uniforms import uniforms

INF, NAN = float("inf"), float("nan")


def reference(logits, temperature, least, seed, position):
    """The scores of one row, in float64; a token left out is -inf."""
    if temperature == 0:
        return logits.astype(np.float64)
    u = uniforms(torch.tensor([[seed, position]]), len(logits))[0].double().numpy()
    y = logits.astype(np.float64) / temperature
    return np.where(logits < least, -np.inf, y - np.log(-np.log1p(-u)))


def test_gumbel_is_accurate_over_the_whole_range():
    words = torch.cat(
        [torch.arange(2000), 2**23 + torch.arange(-2000, 2000), 2**32 - 1 - torch.arange(2000), torch.arange(0, 2**32, 65537)]
    )
    u = to_unit(words)
    expected = -torch.log(-torch.log1p(-u.double()))
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(gumbel(u).double(), expected, rtol=2e-7, atol=4e-7)


@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0.0, 0.1, 1.0, 7.5]), st.integers(0, 2**63 - 1), st.integers(0, 10**6)), min_size=1, max_size=5
    ),
    vocab=st.integers(1, 40),
    spread=st.sampled_from([0.01, 1.0, 10.0]),
    cut=st.booleans(),
    noise=st.integers(0, 2**32),
)
@settings(deadline=None)
def test_equals_the_reference(rows, vocab, spread, cut, noise):
    logits = np.random.default_rng(noise).normal(0, spread, (len(rows), vocab)).astype(np.float32)
    temperature = np.array([t for t, *_ in rows], np.float32)
    least = np.array([np.median(x) for x in logits], np.float32)
    keys = torch.tensor([[seed, position] for _, seed, position in rows])
    found = draw(torch.from_numpy(logits), torch.from_numpy(temperature), torch.from_numpy(least) if cut else None, keys)
    assert found.dtype == torch.int32
    for row, (_, seed, position) in enumerate(rows):
        scores = reference(logits[row], temperature[row], least[row] if cut else -INF, seed, position)
        assert scores[found[row]] >= scores.max() - 1e-4 * max(1.0, abs(scores.max()))


def test_greedy_takes_the_lowest_id_of_a_tie_and_reads_any_float():
    keys, zero = torch.tensor([[1, 1]]), torch.zeros(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert draw(torch.tensor([[1.0, 3.0, 3.0, 2.0]], dtype=dtype), zero, None, keys).item() == 1


def test_rows_without_a_proper_maximum():
    keys = torch.tensor([[5, 5]])
    for temperature in (torch.zeros(1), torch.ones(1)):
        assert draw(torch.full((1, 5), -INF), temperature, None, keys).item() == 0
        assert draw(torch.full((1, 5), -INF), temperature, torch.tensor([-INF]), keys).item() == 0
        for bad in ([NAN] * 5, [0.0, NAN, 1.0, 2.0, 3.0], [INF, INF, 0.0, NAN, -INF]):
            assert 0 <= draw(torch.tensor([bad]), temperature, torch.tensor([0.5]), keys).item() < 5
        assert draw(torch.tensor([[-INF, -INF, -5.0, -INF]]), temperature, None, keys).item() == 2


def test_no_rows():
    assert draw(torch.zeros(0, 5), torch.zeros(0), None, torch.zeros(0, 2, dtype=torch.int64)).shape == (0,)


def test_opcheck():
    logits, temperature, keys = torch.randn(3, 9), torch.tensor([0.0, 1.0, 2.0]), torch.tensor([[1, 2], [3, 4], [5, 6]])
    for least in (None, torch.zeros(3)):
        torch.library.opcheck(torch.ops.nanovllm.draw.default, (logits, temperature, least, keys))


SIZES = [1, 3, 2047, 2048, 2049, 4099]  # on either side of the 2,048 of a program


@pytest.mark.interpret
@pytest.mark.parametrize("num", SIZES)
def test_drawing_interpreted(num):
    from nanovllm.ops.sampling import triton_sampling

    keys = torch.tensor([[0, 0], [2**63 - 1, 2**31 - 1], [12345678901234, 77], [5, 2**40]])
    logits = torch.randn(4, num, generator=torch.Generator().manual_seed(num))
    temperature, least = torch.tensor([0.0, 0.7, 1.0, 3.0]), torch.tensor([0.5, 0.5, -0.5, -INF])
    for x in (logits, logits.bfloat16(), logits.t().contiguous().t()):
        for cut in (None, torch.minimum(least, x.amax(1).float())):
            assert torch.equal(triton_sampling.launch_draw(x, temperature, cut, keys), draw(x, temperature, cut, keys))
    one = (logits[1:2], temperature[1:2], None, keys[1:2])
    assert torch.equal(triton_sampling.launch_draw(*one), draw(*one))
    assert triton_sampling.launch_draw(logits[:0], temperature[:0], None, keys[:0]).shape == (0,)


@pytest.mark.interpret
@pytest.mark.parametrize("num", SIZES)
def test_the_highest_interpreted(num):
    from nanovllm.ops.sampling import triton_sampling

    logits = torch.randn(5, num, generator=torch.Generator().manual_seed(num))
    logits[1, num // 2 :: num] = logits[1, num - 1] = 9.0  # a tie, of two blocks where there are two
    logits[2] = -INF
    logits[3, num - 1] = INF
    for x in (logits, logits.bfloat16(), logits.t().contiguous().t(), logits[:1], logits[:0]):
        assert torch.equal(triton_sampling.launch_highest(x), highest(x))


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # the interpreter's maximum leaves NaN out, as a GPU's does
@pytest.mark.parametrize("num", [2048, 2049])
def test_rows_without_a_proper_maximum_interpreted(num):
    from nanovllm.ops.sampling import triton_sampling

    keys = torch.tensor([[5, 5]])
    for bad in ([NAN] * num, [0.0, NAN] + [1.0] * (num - 2), [INF, INF, NAN] + [-INF] * (num - 3)):
        logits = torch.tensor([bad])
        assert 0 <= triton_sampling.launch_highest(logits).item() < num
        for temperature in (torch.zeros(1), torch.ones(1)):
            assert 0 <= triton_sampling.launch_draw(logits, temperature, torch.tensor([0.5]), keys).item() < num
    for temperature in (torch.zeros(1), torch.ones(1)):
        assert triton_sampling.launch_draw(torch.full((1, num), -INF), temperature, torch.tensor([-INF]), keys).item() == 0
