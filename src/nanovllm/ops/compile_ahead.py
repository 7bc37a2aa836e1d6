"""Compiling Triton kernels at the start of an engine, several at once.

Triton compiles a kernel when it is first launched, one after the other: half a second each, of which most is spent in other programs.
Triton 3.6 also builds a C function for each signature, which launches the kernel: another tenth of a second, in a C compiler. A rehearsal
of the start finds the kernels first: launches of kernels that this process has not loaded are noted and left out. Then all are compiled in
threads and loaded one after the other, and the real start finds them.

Two threads may not load such C functions at the same time. Each is the `launch` of an extension module, and all these modules have one
name. Python loads such a module again by copying it into the module that has the name at present. So a second thread can replace `launch`
before the first one has read it. A kernel is then launched as if it were another one: that raises an exception at best, or writes to any
address. What the threads here load is thrown away, and starts of several engines wait for each other. Triton itself takes no such care: a
thread of the program that launches a new kernel of its own during a first start is not protected.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, cast

import torch

from nanovllm.ops import kernel_keys

THREADS = 16
_LOADING = Lock()  # what it guards belongs to the whole process


class FirstStart:
    """Whether an engine's start compiles kernels, as far as Triton's folder on disk tells.

    A file in that folder tells that such a start has been completed. Whoever empties the folder removes the file too.

    Args:
        device: The GPU of the engine; None if no kernels are compiled ahead.
        properties: Whatever decides which kernels are launched.
    """

    def __init__(self, device: torch.device | None, *properties: object) -> None:
        self._device = device
        self._file: Path | None = None
        if device is not None:
            import triton
            from triton import knobs

            key = hashlib.sha256(repr((triton.__version__, torch.cuda.get_device_properties(device).name, properties)).encode())
            for source in (*kernel_keys.kernel_files(), Path(kernel_keys.__file__)):
                key.update(source.read_bytes())
            self._file = Path(knobs.cache.dir) / f"nanovllm-{key.hexdigest()[:32]}.started"
        self._needed = self._file is not None and not self._file.exists()

    def rehearse(self, call: Callable[[], object]) -> None:
        """Run `call` without the kernels that are not loaded, whose results are then garbage, and compile these."""
        if not self._needed:
            return
        assert self._device is not None
        compile_ahead(self._device, [call])

    def completed(self) -> None:
        """Note on disk that the start has compiled its kernels."""
        if self._file is not None and self._needed:
            with suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.touch()


def compile_ahead(device: torch.device, calls: Iterable[Callable[[], object]]) -> None:
    """Run each call without the kernels that are not loaded, whose results are then garbage, and compile these in threads. Load them here.

    A call that fails, or a kernel that does not compile, fails again where it is really used.
    """
    kernel_keys.hash_kernels()  # not in several threads
    with noted() as kernels:
        for call in calls:
            with suppress(Exception):
                call()
    threads = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
    with _LOADING:
        made, compiled = list[Any](), [threads.submit(_compile, device, function, data) for function, data in kernels]
        try:
            for each in compiled:
                with suppress(Exception):
                    made.append(each.result())
        finally:
            threads.shutdown(cancel_futures=True)  # some are left only after Ctrl-C
        with torch.cuda.device(device):
            for kernel in made:
                with suppress(Exception):
                    _ = kernel.run


def _compile(device: torch.device, function: Any, data: str) -> Any:
    """Compile a kernel, and build what launches it. That is on disk then, and is not used from here."""
    from triton.runtime import driver

    with torch.cuda.device(device):  # a new thread has the first GPU
        kernel, active = function.preload(data), cast(Any, driver.active)
        active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


@contextmanager
def noted() -> Iterator[list[tuple[Any, str]]]:
    """Inside this block, launches of kernels that this process has not loaded are left out. Yields them: function, specialisation.

    Triton has one hook for the whole process. Launches of other threads are compiled and launched as ever. If two threads are inside such
    blocks and the first one leaves first, the second one's end brings back a hook that does nothing any more.
    """
    from triton import knobs

    found: dict[str, tuple[Any, str]] = {}
    before = knobs.runtime.jit_cache_hook
    inside = {get_ident()}

    def note(*, key: str, fn: Any, compile: Any, **rest: Any) -> bool:
        if get_ident() not in inside:
            return False if before is None else bool(before(key=key, fn=fn, compile=compile, **rest))
        found.setdefault(f"{fn.module}.{fn.name} {key}", (fn.jit_function, compile["specialization_data"]))
        return True  # Triton then neither compiles nor launches

    knobs.runtime.jit_cache_hook = note
    kernels: list[tuple[Any, str]] = []
    try:
        yield kernels
    finally:
        inside.clear()
        if knobs.runtime.jit_cache_hook is note:
            knobs.runtime.jit_cache_hook = before
        kernels += found.values()
