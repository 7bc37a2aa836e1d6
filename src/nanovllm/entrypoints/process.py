"""A program that runs an engine: Ctrl-C only between calls that donate a state, SIGTERM in order, and a garbage collector that leaves the
engine alone."""

import gc
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class _Noting:
    """A SIGINT handler that records the signal. A second signal raises `KeyboardInterrupt`, unless `every` is set."""

    def __init__(self, every: bool):
        self.every, self.came = every, list[int]()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.came and not self.every:
            signal.default_int_handler(number, frame)
        self.came.append(number)


@contextmanager
def noted_interrupts(*, every: bool = False) -> Iterator[list[int]]:
    """Record Ctrl-C in the yielded list instead of raising. A second Ctrl-C raises `KeyboardInterrupt`, unless `every` is set.

    A nested block yields the same list. Outside the main thread, or if the program has its own handler, nothing changes and the list stays
    empty.
    """
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Noting):
        yield handler.came
        return
    if threading.current_thread() is not threading.main_thread() or handler is not signal.default_int_handler:
        yield []
        return
    noting = _Noting(every)
    signal.signal(signal.SIGINT, noting)
    try:
        yield noting.came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block, where it raises `KeyboardInterrupt`. A second one raises at once."""
    came: list[int] = []
    try:
        with noted_interrupts() as came:
            yield
    finally:
        if came:
            raise KeyboardInterrupt


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Turn SIGTERM into `SystemExit` inside this block, so that temporary files are removed and processes that were started end too."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may install a signal handler
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def freeze() -> None:
    """Run a garbage collection now, and exclude all living objects (torch, compiled code, the engine) from later ones.

    A full collection over these objects takes 0.1 to 0.25 s in the middle of a step. The engine's persistent maps cause one every few
    thousand pages. Reference cycles that exist now are not freed before the process ends, so call this once, after the setup.
    """
    gc.collect()
    gc.freeze()
