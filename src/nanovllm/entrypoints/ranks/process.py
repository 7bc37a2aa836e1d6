"""The program of a rank other than 0. It begins what takes long before it imports the package, so it is run as a file, not as a module.

`python -P process.py CUDA SOCKET MEMORY RANK SIZE PARENT` is started by rank 0, with open files by their numbers. `CUDA` is 1 for a rank on
a GPU. Without `-P` the other files of this folder would hide modules of the same names.
"""

import sys
from contextlib import suppress
from ctypes import CDLL
from threading import Thread

NVML = "libnvidia-ml.so.1"


def begin_nvml() -> Thread:
    """Begin to initialise NVIDIA's management library in a thread, which takes seconds on some hosts. Shared memory and NCCL need it.

    A library that is missing changes nothing.
    """
    thread = Thread(target=_initialise, name="nanovllm-nvml", daemon=True)
    thread.start()
    return thread


def _initialise() -> None:
    with suppress(OSError, AttributeError):  # there is no such library, or another one of this name
        CDLL(NVML).nvmlInit_v2()  # stays initialised until the process ends


if __name__ == "__main__":
    cuda, *given = map(int, sys.argv[1:])
    if cuda:
        begin_nvml()
    from nanovllm.entrypoints.ranks.follower import run

    run(*given)
