"""The launch that exchanges winners, in Triton's interpreter: the ranks run one after another over memory of one process."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.ops.distributed.group import winners_of_pairs

pytestmark = pytest.mark.interpret
INF, NAN = float("inf"), float("nan")
VALUES = [-INF, -3e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 1.0 + 2.0**-23, 3e38, INF]
PLACE = 32  # where the words are


def exchanged(candidates: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """The winners that the ranks find, each in its second turn: in its first it gets words of ours for those that are not there yet."""
    from nanovllm.ops.distributed import triton_winners
    from nanovllm.ops.distributed.shared_memory import Shared

    size, rows = len(candidates), len(candidates[0][0])
    memories = [torch.zeros(PLACE // 8 + rows * size, dtype=torch.int64) for _ in candidates]
    table, failed = torch.tensor([memory.data_ptr() for memory in memories]), torch.zeros(1, dtype=torch.int32)
    found: list[torch.Tensor] = []
    for turn in range(2):
        for rank, (values, ids) in enumerate(candidates):
            words = memories[rank][PLACE // 8 :].view(rows, size)
            if not turn:
                words[:, rank + 1 :] = -(2**63) + 1
            shared = Shared(rank=rank, size=size, memory=memories[rank], table=table, peers=(), failed=failed, handle=None)
            out = triton_winners.winners(values, ids, shared, PLACE)
            assert not words.any(), "a rank has taken all its words"
            found += [out] if turn else []
    assert not failed.item()
    return found


@given(data=st.data(), size=st.sampled_from([2, 3]), rows=st.integers(1, 3), blocks=st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_the_largest_value_wins_and_the_lowest_id_of_a_tie(data: st.DataObject, size: int, rows: int, blocks: int) -> None:
    shape = size, rows, blocks
    count = int(np.prod(shape))
    values = torch.tensor(data.draw(st.lists(st.sampled_from(VALUES), min_size=count, max_size=count))).view(shape)
    ids = torch.arange(size * blocks, dtype=torch.int32).view(size, 1, blocks).expand(shape) * 50_000
    together = values.transpose(0, 1).flatten(1), ids.transpose(0, 1).flatten(1)
    expected = winners_of_pairs(*together, lambda own: own.unsqueeze(0))
    assert all(torch.equal(one, expected) for one in exchanged(list(zip(values, ids, strict=True))))


def test_nan_gives_some_id_of_the_row_on_all_ranks() -> None:
    values = [torch.tensor([[NAN, 1.0]]), torch.tensor([[2.0, NAN]])]
    ids = [torch.tensor([[3, 8]], dtype=torch.int32), torch.tensor([[10, 14]], dtype=torch.int32)]
    first, second = exchanged(list(zip(values, ids, strict=True)))
    assert torch.equal(first, second) and first.item() in (3, 8, 10, 14)


def test_a_host_that_gives_up_ends_the_wait() -> None:
    from nanovllm.ops.distributed import triton_winners
    from nanovllm.ops.distributed.shared_memory import END, GIVEN_UP, WORDS, Shared

    memories = [torch.zeros(END, dtype=torch.uint8) for _ in range(2)]  # whole: a launch that waits in vain notes it near the end
    table = torch.tensor([memory.data_ptr() for memory in memories])
    shared = Shared(rank=0, size=2, memory=memories[0], table=table, peers=(), failed=torch.ones(1, dtype=torch.int32), handle=None)
    out = triton_winners.winners(torch.tensor([[5.0]]), torch.tensor([[4]], dtype=torch.int32), shared, WORDS)
    assert out.item() == 4 and shared.failed.item() == 1
    assert memories[0][GIVEN_UP:].view(torch.int32)[0] == 1 and not memories[1][GIVEN_UP:].any(), "its own memory, not the other's"
