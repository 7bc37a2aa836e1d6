"""Host memory that a GPU copies from and to without a detour."""

import weakref
from typing import Any

import numpy as np
import torch

from nanovllm.errors import OutOfPagesError
from nanovllm.types import Tensor


def pinned_memory(num_bytes: int, device: torch.device, num_pages: int) -> Tensor:
    """Host memory for the KV of so many pages, as bytes; on a CPU plain memory.

    Raises:
        OutOfPagesError: The machine has too little memory.
    """
    short = (
        f"host_kv_gib needs {num_bytes / 2**30:.1f} GiB of host memory for {num_pages} pages, which this machine does not give: lower it"
    )
    try:
        memory = np.empty(num_bytes, np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: the size exceeds the address space
        raise OutOfPagesError(short) from error
    if device.type == "cuda":
        # not by torch's own allocator of pinned memory, which rounds up to a power of two
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(device):
            if runtime.cudaHostRegister(memory.ctypes.data, num_bytes, 0) != runtime.cudaError.success:
                raise OutOfPagesError(short)
        weakref.finalize(memory, _unpinned, memory.ctypes.data, device).atexit = False  # the driver does it at the end of the process
    return torch.from_numpy(memory)


def _unpinned(start: int, device: torch.device) -> None:
    """Let go of memory that a GPU could copy from and to, once no copy can go on."""
    torch.cuda.synchronize(device)
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(start)
