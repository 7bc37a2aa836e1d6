"""The packages of the GPU's kernels, imported in a thread while weights are read from the disk, which leaves Python idle."""

from contextlib import suppress
from threading import Thread

from nanovllm.ops.backends import installed


def import_ahead() -> Thread:
    """Begin to import Triton and FlashInfer, as far as they are installed.

    Triton also hashes its own files, hundreds of megabytes, before it looks for the first kernel on the disk. An import that fails is
    tried again, and explained, where the package is needed.

    Returns:
        The thread. Nobody has to wait for it: an import that needs the same module waits by itself.
    """
    thread = Thread(target=_import, name="nanovllm-imports", daemon=True)
    thread.start()
    return thread


def _import() -> None:
    if installed("triton"):
        with suppress(Exception):
            from triton.runtime.cache import triton_key

            triton_key()  # is kept by Triton
    if installed("flashinfer"):
        with suppress(Exception):
            import flashinfer.prefill  # pyright: ignore[reportMissingImports]  # noqa: F401
