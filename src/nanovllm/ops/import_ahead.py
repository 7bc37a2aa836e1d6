"""The packages of the GPU's kernels, imported in threads while weights are read from the disk, which leaves Python idle."""

from contextlib import suppress
from threading import Thread, enumerate

from nanovllm.ops.backends import installed
from nanovllm.ops.kernel_keys import hash_kernels

HASHING = "nanovllm-triton"  # the name of the thread


def import_ahead() -> list[Thread]:
    """Begin to import Triton and FlashInfer, as far as they are installed.

    Triton also hashes its own files, hundreds of megabytes, before it looks for the first kernel on the disk. Our kernels are imported and
    hashed after that. An import that fails is tried again, and explained, where the package is needed.

    Returns:
        The threads. An import that needs the same module waits by itself. A first launch of a Triton kernel calls `wait_for_triton` before.
    """
    tasks = {"triton": (_triton, HASHING), "flashinfer": (_flashinfer, "nanovllm-flashinfer")}
    threads = [Thread(target=task, name=name, daemon=True) for package, (task, name) in tasks.items() if installed(package)]
    for thread in threads:
        thread.start()
    return threads


def wait_for_triton() -> None:
    """Wait until the threads of `import_ahead` have hashed Triton's files and ours, which the caller would otherwise do by itself."""
    for thread in enumerate():
        if thread.name == HASHING:
            thread.join()


def _triton() -> None:
    with suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()  # is kept by Triton
        hash_kernels()


def _flashinfer() -> None:
    with suppress(Exception):
        import flashinfer.prefill  # pyright: ignore[reportMissingImports]  # noqa: F401
