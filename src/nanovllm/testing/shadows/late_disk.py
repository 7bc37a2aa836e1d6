"""Reads and writes of files that are made when a machine says so, and that fail when it says so."""

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nanovllm.executor.kv_disk import DiskTier
from nanovllm.executor.kv_offload import HostMemory
from nanovllm.executor.page_folder import PageFolder


class LateWorkers:
    """Workers that run jobs when `run` is called, or when the engine waits for them."""

    def __init__(self) -> None:
        self.jobs = list[Callable[[], None]]()

    def submit(self, job: Callable[[], None]) -> bool:
        """Remember a job."""
        self.jobs.append(job)
        return True

    def hold(self, held: bool) -> None:
        """Jobs wait in any case."""

    def run(self, count: int) -> None:
        """Run jobs, the oldest first."""
        for _ in range(min(count, len(self.jobs))):
            self.jobs.pop(0)()

    def drain(self, left: int = 0) -> None:
        """Run jobs until `left` are left."""
        self.run(len(self.jobs) - left)

    def close(self) -> None:
        """Forget all jobs."""
        self.jobs.clear()


class FlakyFolder(PageFolder):
    """A folder whose disk is full, and cannot be read, while `failing` is set."""

    def __init__(self, folder: Path, max_bytes: int, page_bytes: int, identity: Mapping[str, Any]) -> None:
        super().__init__(folder, max_bytes, page_bytes, identity)
        self.failing = False

    def write(self, key: bytes, image: memoryview, used: int | None = None, is_valid: Any = None) -> bool:
        """Write a page, or raise `OSError`."""
        self._require_disk()
        return super().write(key, image, used, is_valid)

    def read(self, key: bytes, image: memoryview, used: int | None = None) -> bool:
        """Read a page, or raise `OSError`."""
        self._require_disk()
        return super().read(key, image, used)

    def _require_disk(self) -> None:
        if self.failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class LateDiskTier(DiskTier):
    """A disk tier whose jobs are run late, and whose time passes whenever it is asked for it."""

    def __init__(self, folder: PageFolder, memory: HostMemory) -> None:
        self.reads, self.writes, self.time = LateWorkers(), LateWorkers(), 0.0
        super().__init__(folder, memory, self.reads, self.writes, self._tick)

    def wait(self, seconds: float) -> None:
        """Make a read."""
        self.reads.run(1)

    def _tick(self) -> float:
        self.time += 0.25
        return self.time
