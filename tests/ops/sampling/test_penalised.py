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
    biases = torch.where(ints(0, 3, rows + 2, vocab) == 0, torch.randn(rows + 2, vocab, generator=random), 0.0)
    return logits, slots, ints(0, 6, rows + 2, vocab), biases, chosen(1.0, 1.3, 0.7), chosen(0.0, 0.5, -1.0), chosen(0.0, 0.3, -2.0)


def test_each_penalty_acts_on_its_tokens() -> None:
    logits, none = torch.tensor([[2.0, -2.0, 3.0, 1.0]]), torch.tensor([0.0])
    marks, biases = torch.tensor([[1, 4, 3, 0]], dtype=torch.int32), torch.tensor([[0.0, 0.0, 0.0, 5.0]])
    first, off = torch.tensor([0], dtype=torch.int32), torch.tensor([-1], dtype=torch.int32)
    one = torch.tensor([1.0])
    assert penalised(logits, first, marks, biases, torch.tensor([2.0]), none, none).tolist() == [[1.0, -4.0, 1.5, 6.0]]
    assert penalised(logits, first, marks, biases, one, one, none).tolist() == [[2.0, -3.0, 2.0, 6.0]]
    assert penalised(logits, first, marks, biases, one, none, one).tolist() == [[2.0, -4.0, 2.0, 6.0]]
    assert penalised(logits, off, marks, biases, torch.tensor([2.0]), one, one).tolist() == logits.tolist()


@pytest.mark.interpret
@pytest.mark.parametrize(("rows", "vocab", "dtype"), [(1, 5, torch.float32), (4, 2050, torch.bfloat16), (7, 4099, torch.float16)])
def test_the_kernel_interpreted(rows: int, vocab: int, dtype: torch.dtype) -> None:
    from nanovllm.ops.sampling.triton_penalised import launch

    given = problem(rows, vocab, dtype)
    assert torch.equal(launch(*given), reference(*given))
    assert launch(given[0][:0], *(each[:0] if each.dim() == 1 else each for each in given[1:])).shape == (0, vocab)
