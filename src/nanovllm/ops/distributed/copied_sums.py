"""Sums of large tensors over two GPUs, of which copy engines do the work: kernels that compute meanwhile keep all multiprocessors.

Each rank copies its tensor into the memory of the other, and then writes the number of the sum there. The stream of the other waits for
this number, which takes no multiprocessor either. NCCL's kernels would take some. A product that divides its work among all of them would
then wait for those that NCCL has, as long as if nothing ran beside.

Sums take four places in turn. Why four are enough, if at most two sums are under way: let a rank begin sum n + 4, whose tensor goes to
where the other has that of sum n.

1. The rank has waited for sum n + 2, because no more than two are under way.
2. The other has begun sum n + 2, before which it has waited for sum n, and has read its place: its copies wait for its earlier kernels.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from nanovllm.types import Tensor

PLACES = 4
FLAG = 256  # bytes of a flag and what separates it from the next
ALIGNED = 512  # bytes of a place are a multiple
GIVEN_UP = 0x7FFFFFFF  # larger than the number of any sum
AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: wait until a value minus that given is not negative, in int32


class CopiedSums:
    """The memory of these sums, seen by one of two ranks."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> None:
        """Allocate this rank's memory for tensors of up to `num_bytes`. Raises `RuntimeError` if there is not enough.

        Then both ranks call `joins`, `tells` and `hears` at the same time. If one of these is false on one rank, there are no such sums.
        """
        import torch.distributed._symmetric_memory as symmetric

        self.num_bytes = -(-num_bytes // ALIGNED) * ALIGNED
        self._flags_at = PLACES * self.num_bytes
        self._group, self._device = group, device
        self._own = symmetric.empty(self._flags_at + (PLACES + 1) * FLAG, dtype=torch.uint8, device=device)
        self._stream, self._count = torch.cuda.Stream(device, priority=-1), 0

    def joins(self) -> bool:
        """Whether this rank can reach the memory of the other."""
        import torch.distributed._symmetric_memory as symmetric

        try:
            self._handle: Any = symmetric.rendezvous(self._own, self._group.group_name)
            self._there: Tensor = self._handle.get_buffer(1 - self._group.rank(), tuple(self._own.shape), torch.uint8)
        except RuntimeError:
            return False
        self._own[self._flags_at :].zero_()
        torch.cuda.synchronize(self._device)
        return True

    def tells(self) -> bool:
        """Write a number into the memory of the other rank, as sums do. Returns whether this is possible."""
        try:
            write_value(self._stream, self._flag(self._there, PLACES), 1)
        except (OSError, AttributeError, RuntimeError):  # no driver, one without these functions, or one that refuses
            return False
        self._stream.synchronize()
        return True

    def hears(self) -> bool:
        """Whether the number of the other rank has come, and a stream can wait for it."""
        if self._own[self._flags_at + PLACES * FLAG :][:4].view(torch.int32).item() != 1:
            return False
        try:
            wait_value(self._stream, self._flag(self._own, PLACES), 1)
        except RuntimeError:
            return False
        self._stream.synchronize()
        return True

    def begin(self, x: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Donates `x`, which is contiguous. Begin a sum, and return the function that waits for it: at most two are under way.

        It returns the tensors of both ranks. They may be read by what the current stream runs until the next but one sum begins.
        """
        place, self._count = self._count % PLACES, self._count + 1
        number, where = self._count, slice(place * self.num_bytes, place * self.num_bytes + x.nbytes)
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            self._there[where].copy_(x.view(-1).view(torch.uint8), non_blocking=True)
            write_value(self._stream, self._flag(self._there, place), number)
            sent = self._stream.record_event()

        def wait() -> tuple[Tensor, Tensor]:
            here = torch.cuda.current_stream(x.device)
            wait_value(here, self._flag(self._own, place), number)
            here.wait_event(sent)  # from here on the memory of `x` may be used again
            return x, self._own[where].view(x.dtype).view(x.shape)

        return wait

    def give_up(self) -> None:
        """End all waits for the other rank, now and later. Their results are wrong."""
        with torch.cuda.stream(torch.cuda.Stream(self._own.device, priority=-1)):
            self._own[self._flags_at :].view(torch.int32).fill_(GIVEN_UP)

    def _flag(self, memory: Tensor, place: int) -> int:
        return memory.data_ptr() + self._flags_at + place * FLAG


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        getattr(driver, name).argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
    return driver


def write_value(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Write an int32 when everything before on the stream has ended and can be seen by all GPUs. Raises `RuntimeError` for an error."""
    _checked("cuStreamWriteValue32_v2", stream.cuda_stream, address, value, 0)


def wait_value(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Let a stream wait until an int32 is at least a value. Raises `RuntimeError` for an error."""
    _checked("cuStreamWaitValue32_v2", stream.cuda_stream, address, value, AT_LEAST)


def _checked(name: str, *arguments: int) -> None:
    if error := getattr(_driver(), name)(*arguments):
        raise RuntimeError(f"CUDA driver: {name} failed with error {error}")
