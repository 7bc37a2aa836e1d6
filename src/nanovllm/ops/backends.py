"""The choice of kernels, made once when plans are made, from the GPU and the installed packages."""

import functools
import importlib.util
from typing import Literal

import torch

HALVES = (torch.bfloat16, torch.float16)  # dtypes of our own kernels for decode steps
LARGEST = 200_000  # bytes of shared memory that one program uses at most: more memory was not faster
FLASHINFER_DTYPES = (torch.float16, torch.bfloat16)
FLASHINFER_HEAD_DIMS = (64, 128, 256)  # other sizes are not always refused and can give wrong results without an error


@functools.cache
def installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU. PyTorch takes microseconds for each call, which add up while graphs are captured."""
    return torch.cuda.get_device_capability(device)


def own_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether our own kernels for captured steps run in this dtype on this device: a GPU of compute capability 8.0 or more."""
    return not against_own_kernels(device, dtype)


def against_own_kernels(device: torch.device, dtype: torch.dtype) -> str:
    """Return the reason why our own kernels cannot run, or an empty string if they can."""
    if device.type != "cuda":
        return "no CUDA GPU"
    if dtype not in HALVES:
        return f"the dtype {str(dtype).removeprefix('torch.')}"
    return "" if installed("triton") and capability(device) >= (8, 0) else _missing(device, ("triton",))


def _missing(device: torch.device, packages: tuple[str, ...]) -> str:
    absent = [package for package in packages if not installed(package)]
    if absent:
        return f"{' and '.join(absent)} cannot be imported"
    return f"compute capability {'.'.join(map(str, capability(device)))}"


@functools.cache
def dependent_launch(device: torch.device) -> bool:
    """Return whether the GPU can start a kernel before the previous kernel has ended (compute capability 9.0 or more)."""
    return capability(device) >= (9, 0)


def on_hopper(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kernels in this dtype can be those for bfloat16 on GPUs of compute capability 9.0 or more."""
    return dtype == torch.bfloat16 and dependent_launch(device)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use, minus a reserve for sums."""
    return min(LARGEST, torch.cuda.get_device_properties(device).shared_memory_per_block_optin - 8192)


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def attention_backend(device: torch.device, dtype: torch.dtype, head_dim: int, page_size: int) -> Literal["flashinfer", "reference"]:
    """Choose a model's attention: FlashInfer's kernels, or plain torch if FlashInfer does not support the model.

    FlashInfer needs a GPU of compute capability 8.0 or more, float16 or bfloat16, a head_dim of 64, 128 or 256, and its package.
    `"reference"` means plan handle 0 in every call. On a GPU the caller warns once.
    """
    return "reference" if against_flashinfer(device, dtype, head_dim, page_size) else "flashinfer"


def against_flashinfer(device: torch.device, dtype: torch.dtype, head_dim: int, page_size: int) -> str:
    """Return the reason why FlashInfer's kernels cannot run, or an empty string if they can."""
    if device.type != "cuda":
        return "no CUDA GPU"
    if dtype not in FLASHINFER_DTYPES:
        return f"the dtype {str(dtype).removeprefix('torch.')}"
    if head_dim not in FLASHINFER_HEAD_DIMS:
        return f"head_dim {head_dim}"
    if page_size < 1:
        return f"page_size {page_size}"
    needed = ("flashinfer", "triton")
    available = all(map(installed, needed)) and capability(device) >= (8, 0)
    return "" if available else _missing(device, needed)
