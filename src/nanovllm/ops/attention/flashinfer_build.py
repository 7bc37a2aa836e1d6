"""FlashInfer's kernels on disk: which are missing, and the process that builds them, so that an engine can start before they exist.

FlashInfer builds kernels at their first use and keeps them on disk. It holds a lock of the file system while it builds, so two processes
never write the same files, and the second one waits. A process that ends while it builds would release the lock too early. So kernels are
built by a process of their own, which goes on after the engine's process has ended.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from nanovllm.ops.import_paths import import_paths

MARK = "NANOVLLM_BUILDS_FLASHINFER"  # in the environment of a process that builds
NICENESS = 10  # of the process that builds, so that the engine beside it stays fast


class Kernels(NamedTuple):
    """What FlashInfer builds kernels for."""

    backend: str  # fa2 or fa3
    dtype: torch.dtype
    head_dim: int
    windows: bool
    softcap: bool

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of FlashInfer's functions. Its 0 means that rotary embedding is not part of the kernels."""
        return self.backend, *(self.dtype,) * 3, torch.int32, *(self.head_dim,) * 2, 0, self.windows, self.softcap, False


def load(kernels: Kernels) -> Any:
    """Load kernels, and build them first if they are missing: fa2 in 30 to 45 seconds, fa3 in 90 to 110."""
    from flashinfer.prefill import get_batch_prefill_module  # pyright: ignore[reportMissingImports]

    return get_batch_prefill_module(*kernels.arguments)


def missing(wanted: Seq[Kernels]) -> list[Kernels]:
    """Return the kernels that were never built on this machine."""
    return [each for each in wanted if not _files(each).is_compiled]


def build_apart(wanted: Seq[Kernels]) -> bool:
    """Build kernels in a process of their own, all at once, and wait for it.

    Returns:
        False if that failed, or if this program cannot start another Python: it is a frozen program, or such a process itself.
    """
    if MARK in os.environ or "frozen" in vars(sys) or not sys.executable:
        return False
    given = json.dumps([[*each._replace(dtype=str(each.dtype).removeprefix("torch."))] for each in wanted])
    command, nowhere = [sys.executable, "-P", "-m", __spec__.name, given], subprocess.DEVNULL
    environment = os.environ | {MARK: "1", "PYTHONPATH": import_paths()}
    try:
        return not subprocess.call(command, env=environment, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)
    except (OSError, ValueError):
        return False


def _files(kernels: Kernels) -> Any:
    """FlashInfer's description of the files of these kernels. Writes their sources, one process at a time."""
    from filelock import FileLock  # pyright: ignore[reportMissingImports]
    from flashinfer.jit.env import FLASHINFER_JIT_DIR  # pyright: ignore[reportMissingImports]
    from flashinfer.prefill import gen_batch_prefill_module  # pyright: ignore[reportMissingImports]

    FLASHINFER_JIT_DIR.mkdir(parents=True, exist_ok=True)
    with FileLock(FLASHINFER_JIT_DIR / "nanovllm-sources.lock"):
        return gen_batch_prefill_module(*kernels.arguments)


def main(given: str) -> None:
    """Build the kernels that `build_apart` names."""
    if sys.platform != "win32":
        os.nice(NICENESS)
    wanted = [Kernels(backend, getattr(torch, dtype), *rest) for backend, dtype, *rest in json.loads(given)]
    files = [_files(each) for each in wanted]
    with ThreadPoolExecutor(len(files)) as threads:
        for done in [threads.submit(each.build, verbose=False) for each in files]:
            done.result()


if __name__ == "__main__":
    main(sys.argv[1])
