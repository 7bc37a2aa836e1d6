"""A group of ranks of which only one is there: its share of a model runs on one GPU, and nothing waits for the others.

Sums are made by the launches of ranks that are all there, over the memory of this GPU alone. So a step takes the time of its kernels and
launches, without the exchange. Values are wrong: a sum has one part, and every rank's columns are those of this one.
"""

from collections.abc import Callable

import torch

from nanovllm.config import Mesh
from nanovllm.ops.attention.plan_table import register
from nanovllm.ops.distributed.group import side_by_side
from nanovllm.ops.distributed.process_group import ProcessGroup
from nanovllm.ops.distributed.shared_memory import END, PUSHED, PUSHED_ROWS, Shared, clear
from nanovllm.types import Tensor


class AbsentRanks(ProcessGroup):
    """Rank 0 of a group, whose other ranks do not exist."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.rank, self.device = size, 0, device
        self.pushed, self.pushed_rows = PUSHED // size, PUSHED_ROWS // size  # as with all ranks: they choose the launches
        self._shared = None if device.type == "cpu" else own_memory(device)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The tensor itself, by the launch that sums so many bytes. NCCL's sums are a copy."""
        return x.clone() if self._by_nccl(x) else super().all_reduce(x)

    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Donates `x`. As `all_reduce`."""
        total = x if self._by_nccl(x) else self.all_reduce(x)
        return lambda: total

    def all_gather(self, x: Tensor) -> Tensor:
        """The tensor as that of every rank."""
        return torch.stack([x] * self.size)

    def gather_columns(self, x: Tensor, width: int) -> Tensor:
        """The columns as those of every rank."""
        return side_by_side(self.all_gather(x), width)

    def give_up(self) -> None:
        """Do nothing: nothing waits."""

    def given_up(self, seconds: float) -> bool:
        """True."""
        return True

    def _gathered(self, x: Tensor) -> list[Tensor]:
        return [x]


def own_memory(device: torch.device) -> Shared:
    """Memory that one rank shares with nobody."""
    memory = torch.empty(END, dtype=torch.uint8, device=device)
    clear(memory)
    failed, address = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda"), memory.data_ptr()
    table = torch.tensor([address], device=device)
    return Shared(rank=0, size=1, memory=memory, table=table, peers=(address,), failed=failed, handle=None)


def mesh_of_one(size: int, device: torch.device) -> Mesh:
    """The mesh of rank 0 of so many ranks, of which the others do not exist."""
    group = AbsentRanks(size, device)
    return Mesh(size=size, rank=0, group=register(group), owner=group)
