"""What the processes of a server tell the supervisor while they start, and their exit codes."""

import os

READY = b"\0"  # from an engine that serves, and from a front end that is connected to one
FAILED = 2  # the exit code of a start that failed, after an error was told
DEAD = 3  # that of an engine that failed while it ran


def tell(pipe: int, error: Exception) -> int:
    """Tell an error as one line. Returns the exit code."""
    os.write(pipe, " ".join(str(error).split()).encode()[:4000] + b"\n")
    return FAILED


def first_line(told: str) -> str:
    """The first error of what was told, or ""."""
    return told.strip("\0\n").partition("\n")[0]
