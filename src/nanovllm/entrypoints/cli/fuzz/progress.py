"""`Progress`: how far the machines are, as a bar on a terminal and as lines elsewhere."""

import sys
from collections.abc import Callable
from math import isinf
from time import monotonic
from typing import Any

from nanovllm.entrypoints.display.terminal import bar, note
from nanovllm.testing.fuzz.hunt import Watch

EVERY = 10.0  # seconds between two lines
FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {remaining} left{postfix}"


class Progress:
    """Shows on stderr which machine runs, its examples and calls, and the time left.

    The bar counts the seconds that were given or, without a limit of time, the examples.

    Args:
        machines: The number of machines.
        seconds: The seconds for all of them; infinity for no limit.
        examples: The examples of each at most; None for no limit.
    """

    def __init__(self, machines: int, seconds: float, examples: int | None):
        self.timed = not isinf(seconds)
        total = seconds if self.timed else machines * (examples or 0)
        self.bar: Any = bar(round(total), "fuzz", "s")
        self.bar.bar_format = FORMAT
        self.seconds, self.machine, self.done = seconds, "", 0.0
        self.began = self.said = monotonic()
        self.spent = 0.0  # seconds of the last machine, without those for making a failure small

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def begin(self, machine: str) -> Callable[[Watch], None]:
        """Begin a machine. Returns what its watch calls after each example."""
        self.machine, self.began = machine, monotonic()
        return self._running

    def end(self) -> None:
        """End the machine's examples."""
        self.spent = monotonic() - self.began
        self.done += self.spent

    def shrinking(self, watch: Watch) -> None:
        """Tell that a failure is made small."""
        self._say(watch, "making a failure small, ")

    def write(self, text: str) -> None:
        """Print on stdout, above the bar."""
        self.bar.write(text, file=sys.stdout)

    def _running(self, watch: Watch) -> None:
        if self.timed:
            self.bar.update(min(self.done + monotonic() - self.began, self.bar.total) - self.bar.n)
        else:
            self.bar.update()
        left = f", {max(0, self.seconds - self.done - (monotonic() - self.began)):.0f} s left" if self.timed and self.bar.disable else ""
        self._say(watch, "", left)

    def _say(self, watch: Watch, doing: str, left: str = "") -> None:
        told = f"{self.machine}: {doing}{watch.examples:,} examples, {watch.calls:,} calls{left}"
        if not self.bar.disable:
            self.bar.set_postfix_str(told, refresh=False)
        elif monotonic() >= self.said + EVERY:
            self.said = monotonic()
            note(told)
