"""The C form of sampling beside plain torch: the same tokens, filters and penalties bit for bit, log-probabilities within rounding."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm.ops.sampling import adjusted, cpu_sampling, draw, least_kept, token_logprobs, uniforms
from nanovllm.sampling.params import SamplingParams
from nanovllm.sampling.sampler import Sampled, sample
from nanovllm.sampling.tensors import Sampling, build

pytestmark = pytest.mark.skipif(not cpu_sampling.available(), reason="no C compiler")
INF, NAN = float("inf"), float("nan")
VOCABULARIES = [1, 7, 33, 64, 4096]


@st.composite
def batches(draw: Any, vocabularies: list[int] = VOCABULARIES, ordinary: bool = False) -> Tensor:
    """Logits `[B, V]`: wide and narrow, with ties, -inf, rows of -inf, and huge values; unless `ordinary` with NaN and inf, too."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, vocab = draw(st.integers(1, 5)), draw(st.sampled_from(vocabularies))
    x = torch.randn(rows, vocab, generator=random) * draw(st.sampled_from([0.0, 0.01, 1.0, 5.0, 50.0]))
    if draw(st.booleans()):
        x = x.round()
    x[torch.rand(rows, vocab, generator=random) < draw(st.sampled_from([0.0, 0.0, 0.3]))] = -INF
    for value in draw(st.lists(st.sampled_from([-INF, 3e38, -3e38, 40.0] + ([] if ordinary else [NAN, INF])), max_size=2)):
        x[draw(st.integers(0, rows - 1)), draw(st.integers(0, vocab - 1))] = value
    if not ordinary and draw(st.booleans()):
        x[0] = -INF
    return x.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


def column(draw: Any, rows: int, values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(draw(st.lists(st.sampled_from(values), min_size=rows, max_size=rows)), dtype=dtype)


TEMPERATURES = [0.0, 1e-40, 1e-9, 0.001, 0.3, 1.0, 1.7, 100.0, INF]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_filters_keep_the_same(data: st.DataObject) -> None:
    logits = data.draw(batches())
    rows, vocab = logits.shape
    top_k = column(data.draw, rows, [0, 1, 2, 5, 20, vocab, vocab + 3], torch.int32)
    top_p, min_p = column(data.draw, rows, [0.0, 0.01, 0.5, 0.95, 1 - 2**-24, 1.0]), column(data.draw, rows, [0.0, 0.05, 0.5, 1.0])
    filters = [data.draw(st.sampled_from([None, column])) for column in (top_k, top_p, min_p)]
    arguments = (logits, column(data.draw, rows, TEMPERATURES), *filters, data.draw(st.sampled_from([None, 1, 5, 1024])))
    assert same_bits(least_kept.least_kept(*arguments), least_kept.reference(*arguments))


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_the_same_tokens(data: st.DataObject) -> None:
    logits = data.draw(batches())
    rows = len(logits)
    least = data.draw(st.sampled_from([None, column(data.draw, rows, [-INF, -1.0, 0.0, 2.5, NAN])]))
    keys = torch.tensor(data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2 * rows, max_size=2 * rows))).view(-1, 2)
    arguments = (logits, column(data.draw, rows, TEMPERATURES), least, keys)
    assert torch.equal(draw.draw(*arguments), draw._reference(*arguments))
    assert torch.equal(draw.highest(logits), draw._highest(logits))
    num = data.draw(st.integers(0, 200))
    assert torch.equal(uniforms.uniforms(keys, num), uniforms._reference(keys, num))


def test_a_large_vocabulary() -> None:
    logits = torch.randn(3, 151936, generator=torch.Generator().manual_seed(0)) * 3
    temperature, keys = torch.tensor([0.8, 1.0, 0.0]), torch.arange(6).view(3, 2)
    top_k, top_p = torch.tensor([20, 0, 0], dtype=torch.int32), torch.tensor([0.95, 0.9, 1.0])
    least = least_kept.least_kept(logits, temperature, top_k, top_p, None)
    assert torch.equal(least, least_kept.reference(logits, temperature, top_k, top_p, None))
    for kept in (None, least):
        assert torch.equal(draw.draw(logits, temperature, kept, keys), draw._reference(logits, temperature, kept, keys))
    assert torch.equal(draw.highest(logits), draw._highest(logits))


def test_near_ties_are_left_to_torch_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens whose noisy logits differ by one unit in the last place, either way, and the same tokens far apart."""
    keys, temperature, asked = torch.tensor([[5, 9]] * 3), torch.ones(3), []
    noise = draw.gumbel(uniforms.uniforms(keys[:1], 2))[0]
    even = noise[0] - noise[1] + 8.0
    logits = torch.stack([torch.full((3,), 8.0), torch.stack([even, even.nextafter(torch.tensor(99.0)), even + 1])], 1)
    reference = draw._reference
    monkeypatch.setattr(draw, "_reference", lambda *arguments: asked.append(len(arguments[0])) or reference(*arguments))
    ids = draw.draw(logits, temperature, None, keys)
    assert asked == [2]
    assert torch.equal(ids, reference(logits, temperature, None, keys)) and ids[2] == 1


def test_few_rows_are_left_to_torch() -> None:
    logits, keys = torch.randn(2000, 300, generator=torch.Generator().manual_seed(1)) * 3, torch.arange(4000).view(-1, 2)
    rows = []

    def counted(some: Tensor, *others: Tensor | None) -> Tensor:
        rows.append(len(some))
        return draw._reference(some, *others)

    ids = cpu_sampling.draw(logits, torch.ones(2000), None, keys, counted)
    assert torch.equal(ids, draw._reference(logits, torch.ones(2000), None, keys)) and sum(rows) < 5


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_penalties_have_the_same_bits(data: st.DataObject) -> None:
    logits = data.draw(batches())
    rows, vocab = logits.shape
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    bias = torch.randn(rows, vocab, generator=random).where(torch.rand(rows, vocab, generator=random) < 0.5, torch.tensor(0.0))
    counts = torch.randint(0, 3, (rows, vocab), generator=random, dtype=torch.int32)
    tables = (
        counts.roll(1, 1) > 1, counts, column(data.draw, rows, [1.0, 1.3, 0.7]), column(data.draw, rows, [0.0, 0.5, -1.0]),
        column(data.draw, rows, [0.0, 0.3, -2.0]),
    )  # fmt: skip
    for penalties in (tables, (None,) * 5):
        for bias_or_none in (bias, None):
            assert same_bits(adjusted.adjusted(logits, bias_or_none, *penalties), adjusted.reference(logits, bias_or_none, *penalties))


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_logprobs_agree_within_rounding_and_ties_come_in_order(data: st.DataObject) -> None:
    logits, num = data.draw(batches(ordinary=True)), data.draw(st.sampled_from([0, 1, 20]))
    rows, vocab = logits.shape
    ids = torch.tensor(data.draw(st.lists(st.integers(0, vocab - 1), min_size=rows, max_size=rows)), dtype=torch.int32)
    logprobs, top_ids, top = token_logprobs.token_logprobs(logits, ids, num)
    exact = logits.double().log_softmax(1)
    close: Any = {"rtol": 1e-6, "atol": 4e-6, "equal_nan": True}
    torch.testing.assert_close(logprobs.double(), exact.gather(1, ids.long()[:, None])[:, 0], **close)
    expected = token_logprobs.reference(logits, ids, num)
    torch.testing.assert_close(logprobs, expected[0], **close)
    torch.testing.assert_close(top, expected[2], **close)
    for row in range(rows):
        if exact[row].isnan().any():
            continue
        order = logits[row].float().sort(descending=True, stable=True).indices[:num].tolist()
        assert top_ids[row].tolist() == order
        assert top[row].tolist() == [float(token_logprobs.token_logprobs(logits[[row]], torch.tensor([i]).int(), 0)[0]) for i in order]


options = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]), "top_k": st.sampled_from([0, 1, 5, 30]),
        "top_p": st.sampled_from([0.1, 0.9, 1.0]), "min_p": st.sampled_from([0.0, 0.1]), "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "presence_penalty": st.sampled_from([0.0, 0.7]), "frequency_penalty": st.sampled_from([0.0, -0.4]),
        "logit_bias": st.sampled_from([None, {0: 3.0}]), "logprobs": st.sampled_from([None, 0, 3]),
    },
)  # fmt: skip


def alone(sampling: Sampling, row: int) -> Sampling:
    """The options of one row of a batch."""
    own: dict[str, Any] = {name: getattr(sampling, name) for name in Sampling.__dataclass_fields__}
    own |= {name: value[[row]] for name, value in own.items() if isinstance(value, Tensor)}
    if (p := sampling.penalties) is not None:
        own["penalties"] = replace(p, **{name: getattr(p, name)[[row]] for name in type(p).__dataclass_fields__})
    return Sampling(**own)


@given(chosen=st.lists(options, min_size=1, max_size=6), logits=st.data(), threads=st.sampled_from([1, 2]))
@settings(deadline=None, max_examples=60)
def test_a_mixed_batch_gives_the_tokens_of_plain_torch_and_of_each_row_alone(
    chosen: list[dict[str, Any]], logits: st.DataObject, threads: int
) -> None:
    x = logits.draw(batches([7, 33, 4096], ordinary=True))[:1].expand(len(chosen), -1).contiguous()
    ids = np.array([1, 2, 1])
    sampling = build([(SamplingParams(**o), row, ids, ids[1:]) for row, o in enumerate(chosen)], x.shape[1], "cpu")
    positions, before = torch.arange(len(chosen)) + 3, torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        mine = sample(x, sampling, positions)
    finally:
        torch.set_num_threads(before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_sampling, "available", lambda: False)
        theirs = sample(x, sampling, positions)
    assert torch.equal(mine.token_ids, theirs.token_ids)
    for row in range(len(chosen)):
        own = sample(x[[row]], alone(sampling, row), positions[[row]])
        for name in Sampled.__dataclass_fields__:
            whole, part = getattr(mine, name), getattr(own, name)
            assert (whole is None and part is None) or same_bits(whole[[row]], part)


def test_what_c_does_not_read_runs_in_torch() -> None:
    logits, keys = torch.randn(2, 9), torch.arange(4).view(2, 2)
    assert draw.draw(logits.double(), torch.ones(2), None, keys).shape == (2,)
    assert draw.highest(logits.half()).tolist() == logits.half().argmax(1).tolist()
    assert draw.highest(torch.randn(0, 9)).shape == (0,)
    strided = torch.randn(9, 4)[:, ::2].T
    assert torch.equal(draw.draw(strided, torch.ones(2), None, keys), draw._reference(strided, torch.ones(2), None, keys))
    with pytest.raises((RuntimeError, IndexError)):  # torch finds what is wrong
        torch.ops.nanovllm.draw.default(logits, torch.ones(3), None, keys)
    with torch.enable_grad():
        asked = torch.randn(2, 9, requires_grad=True)
        token_logprobs.token_logprobs(asked, torch.zeros(2, dtype=torch.int32), 0)[0].sum().backward()
        assert asked.grad is not None and adjusted.adjusted(asked, torch.ones(2, 9)).requires_grad
