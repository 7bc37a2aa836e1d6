"""Ctrl-C between the calls that donate a state, never between such a call and the assignment of what it returned."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noted_interrupts() -> Iterator[list[int]]:
    """Note the first Ctrl-C of the block in the list that it yields, and go on; a second one raises `KeyboardInterrupt`.

    Outside the main thread, and where the program has a handler of its own, nothing changes and the list stays empty.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield came
        return

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            signal.default_int_handler(number, frame)
        came.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield came
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
