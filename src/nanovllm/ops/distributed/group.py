"""What a group of ranks can do. Ops find their group by an integer handle, as they find attention plans.

Every operation is called by all ranks in the same order. Sums are taken in the order of the ranks, so all ranks get the same bits.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from nanovllm.types import Tensor


class Group(ABC):
    """The ranks of one model, seen by one of them.

    Attributes:
        size: The number of ranks.
        rank: The number of this one.
    """

    size: int
    rank: int

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors, in a new tensor. Raises `EngineDeadError` if a rank has gone."""

    @abstractmethod
    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Donates `x`. Begin the sum of the ranks' tensors. The function that is returned waits for it, and is called once.

        Between the two calls a GPU may do other work, and other sums may begin. Both raise `EngineDeadError` if a rank has gone.
        """

    @abstractmethod
    def all_reduce_add(self, y: Tensor, x: Tensor, slot: int) -> Tensor:
        """`x` plus the sum of the ranks' `y`, rounded once. Consecutive calls have the slots 0 and 1 in turn."""

    @abstractmethod
    def all_reduce_add_norm(
        self, parts: Tensor, bias: Tensor | None, x: Tensor, gain: Tensor, eps: float, slot: int
    ) -> tuple[Tensor, Tensor]:
        """As `all_reduce_add` with the sum of `parts` and `bias`, and the RMS norm of the result with weight `gain`."""

    @abstractmethod
    def gather_columns(self, x: Tensor, width: int) -> Tensor:
        """The ranks' columns side by side, up to `width`."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors, stacked along a new first axis. Raises `EngineDeadError` if a rank has gone."""

    @abstractmethod
    def winners(self, values: Tensor, ids: Tensor) -> Tensor:
        """For each row the id of the largest of all ranks' values, int32 `[R]`; the lowest id of a tie.

        `values` `[R, K]` are float32 or float64. `ids` `[R, K]` are int32, ascend in each row, and ascend with the ranks.
        """

    @abstractmethod
    def require_all(self) -> None:
        """Raise `EngineDeadError` if an earlier operation has failed on the device, because a rank has gone."""

    @abstractmethod
    def give_up(self) -> None:
        """End all waits for other ranks, now and later. Any thread may call this. It returns at once."""

    @abstractmethod
    def given_up(self, seconds: float) -> bool:
        """Wait at most so long until all that `give_up` began has ended. Returns whether it has."""


def side_by_side(stacked: Tensor, width: int) -> Tensor:
    """The columns of the ranks' tensors `[ranks, R, N]` side by side, up to `width`."""
    return stacked.transpose(0, 1).flatten(1)[:, :width].contiguous()


def winners_of_pairs(values: Tensor, ids: Tensor, all_gather: Callable[[Tensor], Tensor]) -> Tensor:
    """`Group.winners` by `all_gather`: the ranks exchange a value and an id per row, in float64, which holds both exactly."""
    if not len(values):
        return ids.new_empty(0)
    at = values.argmax(1, keepdim=True)  # the first one of a tie; NaN is the largest
    everyone = all_gather(torch.cat([values.gather(1, at).double(), ids.gather(1, at).double()], 1))  # [ranks, R, 2]
    first = everyone[..., 0].argmax(0, keepdim=True)
    return everyone[..., 1].gather(0, first).squeeze(0).int()


def joined(parts: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum of parts `[P, T, M]`, plus a bias if given, rounded once."""
    if len(parts) == 1 and bias is None:
        return parts[0].to(dtype)
    total = parts.double().sum(0) if dtype == torch.float64 else parts.float().sum(0)
    return (total if bias is None else total + bias).to(dtype)


def summed(parts: Sequence[Tensor], plus: Tensor | None = None) -> Tensor:
    """The sum of tensors, in their order, plus another one: in float64 for float64, else in float32, rounded once at the end."""
    dtype = parts[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part.to(wide)
    return (total if plus is None else plus.to(wide) + total).to(dtype)
