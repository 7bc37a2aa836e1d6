"""Ranks that are processes: the collective operations of `torch.distributed`, and of symmetric memory between the GPUs of one host.

On a CPU the tensors of all ranks are gathered and summed in their order. On GPUs each rank stores small tensors into the other GPUs'
memory, and larger ones are summed by kernels that read the other GPUs' memory. NCCL sums the others. NVLink's multicast is not used.
"""

import atexit
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Lock, Thread
from typing import Any

import torch
import torch.distributed as dist

from nanovllm.config import Mesh
from nanovllm.errors import EngineDeadError, InvalidRequestError
from nanovllm.ops.attention.plan_table import register
from nanovllm.ops.backends import capability, dependent_launch
from nanovllm.ops.distributed.group import Group, joined, side_by_side, summed, winners_of_pairs
from nanovllm.ops.distributed.shared_memory import (
    ADDED,
    FLAGS,
    GATHERED,
    NUM_ROWS,
    PUSHED,
    PUSHED_ROWS,
    ROW,
    SHARES,
    STAGE,
    WORD,
    WORDS,
    share_memory,
    slot_of,
)
from nanovllm.ops.linear.linear_add_norm import added_norm, norm_add
from nanovllm.types import Tensor

ALIGNED = 16  # bytes that these kernels read at once
MINUTES = 10  # that a rank waits for the others, a start included


class ProcessGroup(Group):
    """One process of a group, and its device.

    Attributes:
        pushed: The bytes of a tensor that each rank stores into the others' memory, at most.
        pushed_rows: The same for rows whose sum is normed.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, store: Any = None) -> None:
        """Join the collective operations of a group. All ranks call this at the same time. `store` lives as long."""
        self.size, self.rank, self.device = group.size(), group.rank(), device
        self._group: Any = group
        self._store = store
        self._ending: Thread | None = None
        self._once = Lock()
        self._shared = None
        if device.type != "cpu":
            shared = share_memory(group, device)
            self._shared = shared if all_alike(self._gathered(torch.tensor([shared is not None, *capability(device)]))) else None
        self.pushed, self.pushed_rows = PUSHED // self.size, PUSHED_ROWS // self.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors."""
        if not x.is_cuda:
            return summed(self._gathered(x))
        self.require_all()  # launches after the end of a rank would only delay the error
        with self._watched():
            if self._shared is not None and self._fits(x, self.pushed):
                from nanovllm.ops.distributed.triton_pushes import pushed

                return pushed(x.contiguous(), None, self._shared, dependent_launch(self.device))
            if self._shared is not None and self._fits(x, ADDED):
                from nanovllm.ops.distributed.triton_meetings import reduce

                return reduce(x.contiguous(), None, self._shared, 0, GATHERED, dependent_launch(self.device))
            if self._shared is not None and not self._by_nccl(x):
                from nanovllm.ops.distributed.triton_meetings import reduce_in_shares

                return reduce_in_shares(x.contiguous(), self._shared, 0, GATHERED, dependent_launch(self.device))
            out = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(out, group=self._group)
            return out

    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Donates `x`. Begin a sum by NCCL, on its own stream. Smaller sums use memory that only one stream may use, and are taken at once.

        NCCL takes sums in the order in which they begin.
        """
        if not x.is_cuda or not self._by_nccl(x):
            total = self.all_reduce(x)
            return lambda: total
        self.require_all()
        out = x.contiguous()
        with self._watched():
            work = dist.all_reduce(out, group=self._group, async_op=True)
        assert work is not None

        def wait() -> Tensor:
            with self._watched():
                work.wait()  # the current stream waits, not the host
            return out

        return wait

    def all_reduce_add(self, y: Tensor, x: Tensor, slot: int) -> Tensor:
        """The sum of the ranks' tensors and of `x`."""
        if self._shared is None or not self._fits(y, ADDED):
            return x + self.all_reduce(y) if y.is_cuda else summed(self._gathered(y), x)
        if self._fits(y, self.pushed):
            from nanovllm.ops.distributed.triton_pushes import pushed

            return pushed(y.contiguous(), x.contiguous(), self._shared, dependent_launch(self.device))
        from nanovllm.ops.distributed.triton_meetings import reduce

        return reduce(y.contiguous(), x.contiguous(), self._shared, *slot_of(slot), dependent_launch(self.device))

    def all_reduce_add_norm(
        self, parts: Tensor, bias: Tensor | None, x: Tensor, gain: Tensor, eps: float, slot: int
    ) -> tuple[Tensor, Tensor]:
        """The sum of the ranks' tensors and of `x`, and its RMS norm."""
        served = self._shared is not None and len(x) <= FLAGS // (4 * self.size) and self._fits(x, ADDED) and gain.is_contiguous()
        if self._shared is None or not served:
            own = joined(parts, bias, x.dtype)
            if x.nbytes > ADDED:
                return added_norm(self.all_reduce(own), x, gain, eps)
            added = self.all_reduce_add(own, x, slot)
            return added, norm_add(added, gain, None, eps)
        given = parts.contiguous(), bias, x.contiguous(), gain, eps, self._shared
        if len(x) <= NUM_ROWS // self.size and x.nbytes <= min(self.pushed_rows, len(x) * ROW):
            from nanovllm.ops.distributed.triton_pushes import pushed_norm

            return pushed_norm(*given, dependent_launch(self.device))
        from nanovllm.ops.distributed.triton_meetings import reduce_norm

        return reduce_norm(*given, *slot_of(slot), dependent_launch(self.device))

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors, stacked."""
        if not x.is_cuda:
            return torch.stack(self._gathered(x))
        with self._watched():
            out = x.new_empty((self.size, *x.shape))
            dist.all_gather(list(out.unbind()), x.contiguous(), group=self._group)
            return out

    def gather_columns(self, x: Tensor, width: int) -> Tensor:
        """The ranks' columns side by side, up to `width`."""
        a_row = x.shape[1] * x.element_size()
        if self._shared is None or not a_row or a_row > STAGE or not x.shape[0]:
            return side_by_side(self.all_gather(x), width)
        from nanovllm.ops.distributed.triton_meetings import COLUMNS, gather_columns

        most = min(STAGE // a_row, FLAGS // (4 * self.size * -(-x.shape[1] // COLUMNS)))
        pieces = [gather_columns(piece, width, self._shared, 0, GATHERED) for piece in x.contiguous().split(most)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def winners(self, values: Tensor, ids: Tensor) -> Tensor:
        """The ids of the largest values of all ranks."""
        rows = len(values)
        if self._shared is None or values.dtype != torch.float32 or not 0 < rows * self.size * WORD <= FLAGS:
            return winners_of_pairs(values, ids, self.all_gather)
        from nanovllm.ops.distributed.triton_winners import winners

        return winners(values, ids, self._shared, WORDS)

    def require_all(self) -> None:
        """Require that no launch has waited in vain for another rank.

        Raises:
            EngineDeadError: One has, so its results are wrong.
        """
        if self._shared is not None and self._shared.failed.numpy()[0]:
            raise EngineDeadError(f"rank {self.rank} of {self.size} has waited in vain for another rank, which is gone or stands still")

    def give_up(self) -> None:
        """End all waits for other ranks, now and later. Any thread may call this when it finds that a rank has gone.

        NCCL ends its kernels at once, but the call returns only when no graph has its sums, and the caller may own the graphs. So a
        separate thread makes this call.
        """
        if self._shared is not None:
            self._shared.failed.numpy()[0] = 1
        if self.device.type == "cpu":
            _abort(self._group)
            return
        with self._once:
            if self._ending is None:
                ending = Thread(target=_abort, args=(self._group,), daemon=True, name="nanovllm-abort")
                ending.start()
                self._ending = ending

    def given_up(self, seconds: float) -> bool:
        """Wait at most so long for the end of the group, if `give_up` was called. Returns whether it has ended."""
        if (ending := self._ending) is None:
            return True
        ending.join(seconds)
        return not ending.is_alive()

    def release(self) -> None:
        """Let go of the group. Its threads must end before the interpreter does, which aborts the process otherwise."""
        self._group = None

    def _by_nccl(self, x: Tensor) -> bool:
        """Whether NCCL sums the ranks' tensors."""
        return self._shared is None or not self._fits(x, SHARES)

    def _fits(self, x: Tensor, most: int) -> bool:
        floats = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        return floats and 0 < x.nbytes <= most and x.nbytes % (ALIGNED * self.size) == 0

    def _gathered(self, x: Tensor) -> list[Tensor]:
        own = x.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        with self._watched():
            dist.all_gather(parts, own, group=self._group)
        return parts

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Raise `EngineDeadError` for an error of a collective operation. Other errors of the device stay as they are."""
        try:
            yield
        except RuntimeError as error:
            if "CUDA" in str(error) or isinstance(error, torch.OutOfMemoryError):
                raise
            first = (str(error).splitlines() or [""])[0]
            raise EngineDeadError(f"rank {self.rank} of {self.size} cannot reach the others: {first}") from error


def all_alike(ranks: list[Tensor]) -> bool:
    """Whether all ranks reach each other's memory, and have GPUs of one compute capability: `[reached, major, minor]` of each.

    On unlike GPUs the ranks would choose unlike kernels, whose sums use other parts of that memory.
    """
    return all(bool(one[0]) and torch.equal(one, ranks[0]) for one in ranks)


def _abort(group: Any) -> None:
    with suppress(Exception):  # of a group that has ended
        group.abort()


def make_mesh(device: torch.device | str | None = None) -> Mesh:
    """The mesh of this process, which `torchrun` or another launcher has started as one of several.

    Every rank calls it once, and gives the mesh to `load_model`. From then on all ranks make the same calls in the same order.

    Args:
        device: The device of this rank. None: the GPU with the number `LOCAL_RANK`, or the CPU if torch sees no GPU.

    Returns:
        The mesh.

    Raises:
        InvalidRequestError: No launcher has set `RANK` and `WORLD_SIZE`, and no process group is initialised. Or a GPU is not there. Or the
            process group of the program has no backend for this device or for CPUs, whose tensors the ranks exchange, too.

    Examples:
        A program for `torchrun --nproc-per-node 2 program.py`:

        >>> mesh = nv.make_mesh()  # doctest: +SKIP
        >>> model = nv.load_model("Qwen/Qwen3-8B", mesh=mesh)  # doctest: +SKIP
        >>> state = nv.init_state(model, mesh=mesh)  # doctest: +SKIP
    """
    if not dist.is_available():
        raise InvalidRequestError("make_mesh needs a build of torch with torch.distributed, and this one has none")
    where = _device(device)
    if begun := not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
        if missing:
            raise InvalidRequestError(f"make_mesh: {' and '.join(missing)} not set: start the program by torchrun")
        backend = "gloo" if where.type == "cpu" else "cpu:gloo,cuda:nccl"
        timeout = timedelta(minutes=MINUTES)
        own: dict[str, Any] = {} if where.type == "cpu" else {"device_id": where, "pg_options": nccl_options(timeout)}
        dist.init_process_group(backend, timeout=timeout, **own)
    world = dist.group.WORLD
    assert world is not None
    served = {pair.split(":")[0] for pair in dist.get_backend_config(world).split(",")}
    if missing := {"cpu", where.type} - served:
        wanted = "gloo" if where.type == "cpu" else "cpu:gloo,cuda:nccl"
        raise InvalidRequestError(
            f"make_mesh: the process group has no backend for {' and '.join(sorted(missing))} tensors: initialise it with {wanted!r}"
        )
    mesh = mesh_of(world, where)
    atexit.register(_leave, weakref.ref(mesh.owner), ends=begun and where.type == "cpu")  # NCCL would wait for graphs that use it
    return mesh


def nccl_options(timeout: timedelta) -> Any:
    """The options of NCCL for a group whose operations wait for the other ranks for so long.

    Sums that are begun ahead run beside products that fill the GPU. With a high priority they get the next multiprocessors that are free.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def _leave(group: "weakref.ref[Any]", *, ends: bool) -> None:
    """At the end of the program: let go of a group, and end that of `torch.distributed` if it `ends`."""
    if (one := group()) is not None:
        one.release()
    if ends and dist.is_initialized():
        dist.destroy_process_group()


def mesh_of(group: dist.ProcessGroup, device: torch.device, store: Any = None) -> Mesh:
    """The mesh of a process that has joined a group. All ranks call this at the same time. `store` lives as long as the mesh."""
    one = ProcessGroup(group, device, store)
    return Mesh(size=one.size, rank=one.rank, group=register(one), owner=one)


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
