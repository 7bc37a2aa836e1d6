"""The collective operations of a model's layers, as custom ops: they take the handle of a group."""

from collections.abc import Callable

import torch

from nanovllm.config import Mesh
from nanovllm.ops.attention.plan_table import lookup
from nanovllm.ops.distributed.group import Group, joined
from nanovllm.ops.linear.linear_add_norm import added_norm
from nanovllm.types import Float, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define("all_reduce(Tensor x, SymInt group) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define("all_reduce_add(Tensor y, Tensor x, SymInt group, SymInt slot) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
    "all_reduce_add_norm(Tensor parts, Tensor? bias, Tensor x, Tensor gain, float eps, SymInt group, SymInt slot) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define("gather_columns(Tensor x, SymInt group, SymInt width) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define("all_gather(Tensor x, SymInt group, SymInt size) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def all_reduce(x: Float[Tensor, "..."], mesh: Mesh | None) -> Float[Tensor, "..."]:
    """The sum of a tensor over the ranks of a mesh, with the same bits on every rank. Without a mesh, `x` itself."""
    return x if mesh is None else torch.ops.nanovllm.all_reduce.default(x, mesh.group)


def all_reduce_add(y: Float[Tensor, "T M"], x: Float[Tensor, "T M"], mesh: Mesh, slot: int) -> Float[Tensor, "T M"]:
    """`x` plus the sum of `y` over the ranks of a mesh, rounded once, with the same bits on every rank.

    Args:
        y: This rank's part of the sum.
        x: The residual, which all ranks have.
        mesh: The ranks.
        slot: 0 or 1; consecutive calls of a program take them in turn, because they use different memory.
    """
    return torch.ops.nanovllm.all_reduce_add.default(y, x, mesh.group, slot)


def all_reduce_add_norm(
    parts: Float[Tensor, "P T M"],
    bias: Float[Tensor, "M"] | None,
    x: Float[Tensor, "T M"],
    gain: Float[Tensor, "M"],
    eps: float,
    mesh: Mesh,
    slot: int,
) -> tuple[Float[Tensor, "T M"], Float[Tensor, "T M"]]:
    """As `all_reduce_add` with the sum of `parts` and `bias`, and the RMS norm of the result with weight `gain`."""
    return torch.ops.nanovllm.all_reduce_add_norm.default(parts, bias, x, gain, eps, mesh.group, slot)


def begin_all_reduce(x: Float[Tensor, "..."], mesh: Mesh) -> Callable[[], Float[Tensor, "..."]]:
    """Donates `x`. Begin the sum of a tensor over the ranks of a mesh, and return the function that waits for it.

    A GPU may do other work meanwhile. All ranks begin the same sums in the same order. Traced code cannot contain the call.
    """
    return lookup(mesh.group, Group).begin_all_reduce(x)


def begin_all_reduce_add_norm(
    parts: Float[Tensor, "P T M"],
    bias: Float[Tensor, "M"] | None,
    x: Float[Tensor, "T M"],
    gain: Float[Tensor, "M"],
    eps: float,
    mesh: Mesh,
) -> Callable[[], tuple[Float[Tensor, "T M"], Float[Tensor, "T M"]]]:
    """Donates `parts`. Begin what `all_reduce_add_norm` computes, as `begin_all_reduce`. The sum is rounded before `x` is added."""
    wait = begin_all_reduce(joined(parts, bias, x.dtype), mesh)
    return lambda: added_norm(wait(), x, gain, eps)


def all_gather(x: Tensor, mesh: Mesh) -> Tensor:
    """The tensors of all ranks, stacked along a new first axis."""
    return torch.ops.nanovllm.all_gather.default(x, mesh.group, mesh.size)


def all_gather_columns(x: Float[Tensor, "R N"], mesh: Mesh | None, width: int) -> Float[Tensor, "R V"]:
    """The ranks' columns side by side, up to `width`, with the same bits on every rank. Without a mesh, `x` itself."""
    return x if mesh is None else torch.ops.nanovllm.gather_columns.default(x, mesh.group, width)


def require_ranks(mesh: Mesh | None) -> None:
    """Require that the results of earlier operations on the device are right.

    Raises:
        EngineDeadError: A rank has gone.
    """
    if mesh is not None:
        lookup(mesh.group, Group).require_all()


@torch.library.register_fake("nanovllm::all_reduce", lib=_LIBRARY)
def _fake_reduced(x: Tensor, group: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("nanovllm::all_reduce_add", lib=_LIBRARY)
def _fake_added(y: Tensor, x: Tensor, group: int, slot: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("nanovllm::all_reduce_add_norm", lib=_LIBRARY)
def _fake_added_norm(
    parts: Tensor, bias: Tensor | None, x: Tensor, gain: Tensor, eps: float, group: int, slot: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.register_fake("nanovllm::gather_columns", lib=_LIBRARY)
def _fake_columns(x: Tensor, group: int, width: int) -> Tensor:
    return x.new_empty((x.shape[0], width))


@torch.library.register_fake("nanovllm::all_gather", lib=_LIBRARY)
def _fake_gathered(x: Tensor, group: int, size: int) -> Tensor:
    return x.new_empty((size, *x.shape))


def _all_reduce(x: Tensor, group: int) -> Tensor:
    return lookup(group, Group).all_reduce(x)


def _all_reduce_add(y: Tensor, x: Tensor, group: int, slot: int) -> Tensor:
    return lookup(group, Group).all_reduce_add(y, x, slot)


def _all_reduce_add_norm(
    parts: Tensor, bias: Tensor | None, x: Tensor, gain: Tensor, eps: float, group: int, slot: int
) -> tuple[Tensor, Tensor]:
    return lookup(group, Group).all_reduce_add_norm(parts, bias, x, gain, eps, slot)


def _gather_columns(x: Tensor, group: int, width: int) -> Tensor:
    return lookup(group, Group).gather_columns(x, width)


def _all_gather(x: Tensor, group: int, size: int) -> Tensor:
    return lookup(group, Group).all_gather(x)


_LIBRARY.impl("all_reduce", _all_reduce, "CompositeExplicitAutograd")
_LIBRARY.impl("all_reduce_add", _all_reduce_add, "CompositeExplicitAutograd")
_LIBRARY.impl("all_reduce_add_norm", _all_reduce_add_norm, "CompositeExplicitAutograd")
_LIBRARY.impl("gather_columns", _gather_columns, "CompositeExplicitAutograd")
_LIBRARY.impl("all_gather", _all_gather, "CompositeExplicitAutograd")
