"""What a thread did in its longest steps: counters before and after each step, and the longest steps in a table of fixed size.

A thread spends the time of a step in three ways, and the longest of them is where a long step comes from:

- `engine`: it ran, and did not wait for the device. Garbage collections, which are also counted by themselves, belong to this.
- `device`: it ran, and waited for the device. CUDA's waits spin, so they take the processor's time.
- `no processor`: it did not run. With involuntary context switches, others had the processor. With voluntary ones it slept, for a lock
  or for a page that had to be read (a major fault).
"""

import gc
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

COUNTERS = (
    "processor", "device_wait", "device_wait_processor", "collection",  # seconds
    "collections", "voluntary_switches", "involuntary_switches", "minor_faults", "major_faults",
)  # fmt: skip
NUM_TIMES = 4  # how many of the counters are seconds
STEP = ("over", "at", "seconds", "prompt_tokens", "decode_rows")


class Watch:
    """Counters of the calling thread. They only grow; their difference over a step says what the thread did in it."""

    def __init__(self) -> None:
        self.device_wait, self.device_wait_processor, self.collection, self.collections = 0.0, 0.0, 0.0, 0
        self._collecting = 0.0

    def now(self) -> tuple[float, ...]:
        """The counters, in the order of `COUNTERS`. It takes about two microseconds."""
        used = resource.getrusage(resource.RUSAGE_THREAD)
        waits = time.thread_time(), self.device_wait, self.device_wait_processor, self.collection, self.collections
        return (*waits, used.ru_nvcsw, used.ru_nivcsw, used.ru_minflt, used.ru_majflt)

    def collected(self, phase: str, _: object) -> None:
        """A callback of `gc`."""
        if phase == "start":
            self._collecting = time.perf_counter()
        else:
            self.collection += time.perf_counter() - self._collecting
            self.collections += 1

    def waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """A function that waits for the device, with its time counted."""

        def counted(*arguments: Any, **options: Any) -> Any:
            start, processor = time.perf_counter(), time.thread_time()
            try:
                return wait(*arguments, **options)
            finally:
                self.device_wait += time.perf_counter() - start
                self.device_wait_processor += time.thread_time() - processor

        return counted

    @contextmanager
    def installed(self, places: Sequence[tuple[Any, str]] = ()) -> Iterator[None]:
        """Count garbage collections, and calls of the functions in these places (owner and name), which wait for the device."""
        kept = [(owner, name, getattr(owner, name)) for owner, name in places]
        gc.callbacks.append(self.collected)
        try:
            for owner, name, function in kept:
                setattr(owner, name, self.waiting(function))
            yield
        finally:
            gc.callbacks.remove(self.collected)
            for owner, name, function in kept:
                setattr(owner, name, function)


class Longest:
    """The steps that took the most time beside their prompts' share, in a fixed number of bytes.

    Attributes:
        least: Seconds beside its prompts' share that a step must pass to be kept.
    """

    def __init__(self, most: int = 10):
        self.rows, self.count, self.least = np.zeros((most, len(STEP) + len(COUNTERS))), 0, -np.inf

    def add(self, step: Sequence[float], did: Sequence[float]) -> None:
        """Add a step: the values of `STEP`, and by how much the counters grew in it. The shortest kept step makes room for it."""
        if step[0] <= self.least:
            return
        full = self.count == len(self.rows)
        place = int(self.rows[:, 0].argmin()) if full else self.count
        self.count += not full
        self.rows[place] = (*step, *did)
        self.least = float(self.rows[:, 0].min()) if self.count == len(self.rows) else -np.inf

    def told(self) -> list[dict[str, Any]]:
        """The steps for a JSON file, the longest first."""
        return [_told(row) for row in sorted(self.rows[: self.count].tolist(), reverse=True)]


def _told(row: list[float]) -> dict[str, Any]:
    over, at, seconds, tokens, rows, *did = row
    processor, _, spinning, *_ = did
    parts = {"engine": processor - spinning, "device": spinning, "no processor": seconds - processor}
    step = {"second": round(at, 1), "ms": round(1e3 * seconds, 2), "ms_beyond_prompts": round(1e3 * over, 2)}
    times = {f"{name}_ms": round(1e3 * value, 2) for name, value in zip(COUNTERS[:NUM_TIMES], did[:NUM_TIMES], strict=True)}
    counts = {name: int(value) for name, value in zip(COUNTERS[NUM_TIMES:], did[NUM_TIMES:], strict=True)}
    return step | {"prompt_tokens": int(tokens), "decode_rows": int(rows), "mostly": max(parts, key=parts.__getitem__)} | times | counts


def device_waits() -> tuple[tuple[Any, str], ...]:
    """Where an engine on a GPU waits for the results of a step."""
    from nanovllm.executor import captured_step, carry, row_tables

    return (captured_step.Fetched, "wait"), (carry, "to_host"), (row_tables, "to_host")
