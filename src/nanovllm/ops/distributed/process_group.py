"""Ranks that are processes: the collective operations of `torch.distributed`, and of symmetric memory between the GPUs of one host.

On a CPU the tensors of all ranks are gathered and summed in their order. On GPUs small tensors are summed by kernels that read the other
GPUs' memory directly, which take half the time of NCCL; NCCL sums the others. NVLink's multicast is not used.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from nanovllm.config import Mesh
from nanovllm.errors import EngineDeadError, InvalidRequestError
from nanovllm.ops.attention.plan_table import register
from nanovllm.ops.distributed.group import summed
from nanovllm.types import Tensor

STAGE = 8 << 20  # bytes of the symmetric memory, the largest tensor that is summed through it
ONE_SHOT = 256 << 10  # most bytes for which each GPU reads the whole tensors of the others
ALIGNED = 16  # bytes that these kernels read at once
MINUTES = 10  # that a rank waits for the others, a start included


class ProcessGroup:
    """One process of a group, and its device."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Join the collective operations of a group. All ranks call this at the same time."""
        self.size, self.rank, self.device = group.size(), group.rank(), device
        self._group, self._stage = group, None if device.type == "cpu" else _stage(group, device)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors."""
        try:
            if self._stage is None:
                return summed(self._gathered(x))
            if x.nbytes > STAGE or x.nbytes % (ALIGNED * self.size) or not x.dtype.is_floating_point or x.dtype == torch.float64:
                out = x.clone(memory_format=torch.contiguous_format)
                dist.all_reduce(out, group=self._group)
                return out
            flat, name = x.reshape(-1), self._group.group_name
            shared = self._stage[: x.nbytes].view(x.dtype)
            if x.nbytes <= ONE_SHOT:
                return torch.ops.symm_mem.one_shot_all_reduce_copy(shared, flat, "sum", name).view(x.shape)
            shared.copy_(flat)
            torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", name)
            return shared.clone().view(x.shape)
        except RuntimeError as error:
            raise _gone(error, self) from error

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors, stacked."""
        try:
            if self._stage is None:
                return torch.stack(self._gathered(x))
            out = x.new_empty((self.size, *x.shape))
            dist.all_gather_into_tensor(out, x.contiguous(), group=self._group)
            return out
        except RuntimeError as error:
            raise _gone(error, self) from error

    def _gathered(self, x: Tensor) -> list[Tensor]:
        own = x.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own, group=self._group)
        return parts


def make_mesh(device: torch.device | str | None = None) -> Mesh:
    """The mesh of this process, which `torchrun` or another launcher has started as one of several.

    Every rank calls it once, and gives the mesh to `load_model`. From then on all ranks make the same calls in the same order.

    Args:
        device: The device of this rank. None: the GPU with the number `LOCAL_RANK`, or the CPU if torch sees no GPU.

    Returns:
        The mesh.

    Raises:
        InvalidRequestError: No launcher has set `RANK` and `WORLD_SIZE`, and no process group is initialised. Or a GPU is not there.

    Examples:
        A program for `torchrun --nproc-per-node 2 program.py`:

        >>> mesh = nv.make_mesh()  # doctest: +SKIP
        >>> model = nv.load_model("Qwen/Qwen3-8B", mesh=mesh)  # doctest: +SKIP
        >>> state = nv.init_state(model, mesh=mesh)  # doctest: +SKIP
    """
    if not dist.is_available():
        raise InvalidRequestError("make_mesh needs a build of torch with torch.distributed, and this one has none")
    where = _device(device)
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
        if missing:
            raise InvalidRequestError(f"make_mesh: {' and '.join(missing)} not set: start the program by torchrun")
        backend = "gloo" if where.type == "cpu" else "cpu:gloo,cuda:nccl"
        own = {} if where.type == "cpu" else {"device_id": where}
        dist.init_process_group(backend, timeout=timedelta(minutes=MINUTES), **own)
    world = dist.group.WORLD
    assert world is not None
    group = ProcessGroup(world, where)
    return Mesh(size=group.size, rank=group.rank, group=register(group), owner=group)


def _device(device: torch.device | str | None) -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    if chosen.type != "cuda":
        return chosen
    chosen = torch.device("cuda", local if chosen.index is None else chosen.index)
    if not torch.cuda.is_available() or chosen.index >= torch.cuda.device_count():
        raise InvalidRequestError(f"make_mesh: there is no {chosen}: torch sees {torch.cuda.device_count()} GPUs")
    torch.cuda.set_device(chosen)
    return chosen


def _stage(group: dist.ProcessGroup, device: torch.device) -> Tensor | None:
    """Symmetric memory: the same size on each GPU, which the others can read. None if the GPUs cannot."""
    import torch.distributed._symmetric_memory as symmetric

    try:
        stage = symmetric.empty(STAGE, dtype=torch.uint8, device=device)
        symmetric.rendezvous(stage, group.group_name)
    except RuntimeError:
        return None
    return stage


def _gone(error: RuntimeError, group: ProcessGroup) -> Exception:
    """What to raise for an error of a collective operation: other errors of the device stay as they are."""
    if "CUDA" in str(error) or isinstance(error, torch.OutOfMemoryError):
        return error
    first = (str(error).splitlines() or [""])[0]
    return EngineDeadError(f"rank {group.rank} of {group.size} cannot reach the others: {first}")
