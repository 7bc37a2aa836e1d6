"""Memory that the ranks of an engine share: each counts in it, so that rank 0 sees at no cost that the others live."""

import mmap
import os
import threading
import time
from typing import Any

import numpy as np

EVERY = 0.2  # seconds between two beats


class Beats:
    """For each rank two numbers: beats, and calls that have ended."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        """Make the memory, or open that of another process.

        Args:
            size: The number of ranks.
            descriptor: The file of the memory; None: a new one.
        """
        self.descriptor = os.memfd_create("nanovllm-ranks") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, size * 16)
        self.counts: Any = np.frombuffer(mmap.mmap(self.descriptor, size * 16), np.int64).reshape(size, 2)

    def begin(self, rank: int, parent: int) -> None:
        """Beat in a thread from now on, and end this process when its parent has ended, whatever its main thread does."""

        def beat() -> None:
            while os.getppid() == parent:
                self.counts[rank, 0] += 1
                time.sleep(EVERY)
            os._exit(1)

        threading.Thread(target=beat, daemon=True, name="nanovllm-beats").start()
