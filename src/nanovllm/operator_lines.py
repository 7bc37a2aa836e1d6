"""Lines for whoever runs a server or an engine, on stderr."""

import sys
from contextlib import suppress


def say(line: str) -> None:
    """Write a line on stderr. One that cannot be written is lost, and the program goes on: its log may be on the disk that is full."""
    with suppress(OSError):
        print(f"nanovllm: {line}", file=sys.stderr, flush=True)
