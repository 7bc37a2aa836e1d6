"""Ctrl-C between the calls that donate a state, never between such a call and the assignment of what it returned."""

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class _Noting:
    """A handler of SIGINT that notes it; unless `every`, a second one raises `KeyboardInterrupt`."""

    def __init__(self, every: bool):
        self.every, self.came = every, list[int]()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.came and not self.every:
            signal.default_int_handler(number, frame)
        self.came.append(number)


@contextmanager
def noted_interrupts(*, every: bool = False) -> Iterator[list[int]]:
    """Note the first Ctrl-C of the block in the list that it yields, and go on; a second one raises `KeyboardInterrupt`, unless `every`.

    Within such a block another one yields the same list. Outside the main thread, and where the program has a handler of its own, nothing
    changes and the list stays empty.
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
    """Let Ctrl-C wait for the end of the block, where it raises `KeyboardInterrupt`; a second one does not wait."""
    came: list[int] = []
    try:
        with noted_interrupts() as came:
            yield
    finally:
        if came:
            raise KeyboardInterrupt


def freeze() -> None:
    """Collect now, and never look again at what is alive: torch, compiled code, the engine.

    A full collection walks all of it, 0.1 to 0.25 s in the middle of some step, and an engine's persistent maps set one off every few
    thousand pages. What is in a cycle now is not freed before the process ends, so a program calls this once, after it is set up.
    """
    gc.collect()
    gc.freeze()
