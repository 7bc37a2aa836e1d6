"""Python's cyclic garbage collector beside an engine: for programs that run one, not for libraries that hold one."""

import gc


def freeze() -> None:
    """Collect now, and never look again at what is alive: torch, compiled code, the engine.

    A full collection walks all of it, 0.1 to 0.25 s in the middle of some step, and an engine's persistent maps set one off every few
    thousand pages. What is in a cycle now is not freed before the process ends, so a program calls this once, after it is set up.
    """
    gc.collect()
    gc.freeze()
