"""What an exception says about the device: it has too little memory, or it is broken for good."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nanovllm.errors import EngineDeadError
from nanovllm.state.lease import Lease

# CUDA returns these errors in every later call of the process. Errors of a capture or of a launch's arguments are none of them.
STICKY = (
    "illegal memory access",
    "illegal instruction",
    "device-side assert",
    "unspecified launch failure",
    "launch timed out",
    "misaligned address",
    "hardware stack error",
    "invalid program counter",
    "uncorrectable ecc",
    "unknown error",
)
FULL = ("out of memory", "can't allocate memory", "cublas_status_alloc_failed")


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that led to it, newest first."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory of the device ran out. A `MemoryError` is about objects of Python."""
    return any(
        isinstance(one, torch.OutOfMemoryError) or (isinstance(one, RuntimeError) and any(words in str(one).lower() for words in FULL))
        for one in chain(error)
    )


def fatal(error: BaseException) -> str | None:
    """The first line of the CUDA error after which the process cannot use its device any more; None for any other exception."""
    if isinstance(error, EngineDeadError):
        return None
    for one in chain(error):
        text = str(one)
        if isinstance(one, RuntimeError) and "cuda" in text.lower() and any(words in text.lower() for words in STICKY):
            return text.splitlines()[0]
    return None


@contextmanager
def watched(lease: Lease | None) -> Iterator[None]:
    """Let the lease know of an error that breaks the device. None: a call without an engine.

    Raises:
        EngineDeadError: The block has broken the device.
    """
    try:
        yield
    except Exception as error:
        if lease is None or (cause := fatal(error)) is None:
            raise
        raise lease.kill(cause) from error
