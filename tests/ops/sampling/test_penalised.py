"""`penalised` against the sampler's penalties, and its kernel under Triton's interpreter, bit for bit."""

import pytest
import torch

from nanovllm.ops.sampling.penalised import penalised, reference


def problem(rows: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(vocab)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random, dtype=torch.int32)

    def chosen(*values: float) -> torch.Tensor:
        return torch.tensor(values)[ints(0, len(values), rows).long()]

    logits = (torch.randn(rows, vocab, generator=random) * 3).to(dtype)
    logits[:, ::7] = -torch.inf
    slots = torch.randperm(rows + 2, generator=random)[:rows].int()
    slots[::3] = -1
    lines, masks = ints(-1, 2, rows), torch.randint(-(2**31), 2**31, (2, -(-vocab // 32)), generator=random).int()
    biases = torch.where(ints(0, 3, rows + 2, vocab) == 0, torch.randn(rows + 2, vocab, generator=random), 0.0)
    penalties = chosen(1.0, 1.3, 0.7), chosen(0.0, 0.5, -1.0), chosen(0.0, 0.3, -2.0)
    return logits, slots, ints(0, 6, rows + 2, vocab), biases, *penalties, lines, masks


def test_each_penalty_acts_on_its_tokens() -> None:
    logits, none = torch.tensor([[2.0, -2.0, 3.0, 1.0]]), torch.tensor([0.0])
    marks, biases = torch.tensor([[1, 4, 3, 0]], dtype=torch.int32), torch.tensor([[0.0, 0.0, 0.0, 5.0]])
    first, off = torch.tensor([0], dtype=torch.int32), torch.tensor([-1], dtype=torch.int32)
    one, unmasked = torch.tensor([1.0]), (off, torch.zeros(1, 1, dtype=torch.int32))
    assert penalised(logits, first, marks, biases, torch.tensor([2.0]), none, none, *unmasked).tolist() == [[1.0, -4.0, 1.5, 6.0]]
    assert penalised(logits, first, marks, biases, one, one, none, *unmasked).tolist() == [[2.0, -3.0, 2.0, 6.0]]
    assert penalised(logits, first, marks, biases, one, none, one, *unmasked).tolist() == [[2.0, -4.0, 2.0, 6.0]]
    assert penalised(logits, off, marks, biases, torch.tensor([2.0]), one, one, *unmasked).tolist() == logits.tolist()


def test_a_mask_forbids_the_tokens_whose_bits_are_0() -> None:
    rows, vocab = 3, 70
    logits, *given, _, _ = problem(rows, vocab, torch.float32)
    masks = torch.tensor([[-(2**31), 1, 2**30], [-1, -1, -1]], dtype=torch.int32)
    before = penalised(logits, *given, torch.full((rows,), -1, dtype=torch.int32), masks)
    after = penalised(logits, *given, torch.tensor([0, 1, -1], dtype=torch.int32), masks)
    assert torch.equal(after[1:], before[1:])
    allowed = torch.zeros(vocab, dtype=torch.bool)
    allowed[[31, 32]] = True
    assert torch.equal(after[0], torch.where(allowed, before[0], -torch.inf))


@pytest.mark.interpret
@pytest.mark.parametrize(("rows", "vocab", "dtype"), [(1, 5, torch.float32), (4, 2050, torch.bfloat16), (7, 4099, torch.float16)])
def test_the_kernel_interpreted(rows: int, vocab: int, dtype: torch.dtype) -> None:
    from nanovllm.ops.sampling.triton_penalised import launch

    given = problem(rows, vocab, dtype)
    assert torch.equal(launch(*given), reference(*given))
    assert launch(given[0][:0], *(each[:0] if each.dim() == 1 else each for each in given[1:])).shape == (0, vocab)
