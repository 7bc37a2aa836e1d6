"""`EngineMetrics`: what an engine's process measures of its requests and steps.

A step costs one entry in a list, whatever the number of its rows; the lists become histograms when they are long or are read.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanovllm.entrypoints.memory.report import host_pages_of
from nanovllm.executor.disk_counts import DiskCounts
from nanovllm.executor.executor import runtime_of
from nanovllm.state.engine_state import EngineState
from nanovllm.state.request import Queue, RequestOutput

SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0
)  # fmt: skip
GAPS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0
)  # fmt: skip
WAITS = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
COUNTS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
BUCKETS = {
    "time_to_first_token": SECONDS,
    "inter_token": GAPS,
    "end_to_end": WAITS,
    "queue": WAITS,
    "prefill": WAITS,
    "decode": WAITS,
    "inference": WAITS,
    "prompt_tokens": COUNTS,
    "reply_tokens": COUNTS,
}
PIECE = 4096  # steps whose gaps are held as lists
MOST_HTTP = 1024  # combinations of path, method and status
REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Counts of values by bucket. An edge belongs to the bucket below it, as Prometheus has it.

    Attributes:
        counts: The counts, of which the last is of values above all edges.
        sum: The sum of all values.
    """

    __slots__ = ("_edges", "_floats", "counts", "sum")

    def __init__(self, edges: Seq[float | int]) -> None:
        self._edges, self._floats = np.asarray(edges, float), tuple(map(float, edges))
        self.counts, self.sum = np.zeros(len(edges) + 1, np.int64), 0.0

    def add(self, value: float | int) -> None:
        """Count one value."""
        self.counts[bisect_left(self._floats, value)] += 1
        self.sum += value

    def add_many(self, values: Seq[float | int], weights: Seq[int]) -> None:
        """Count values, each as often as its weight says."""
        array, times = np.asarray(values, float), np.asarray(weights, np.int64)
        np.add.at(self.counts, np.searchsorted(self._edges, array), times)
        self.sum += float(array @ times)


@dataclass(slots=True, eq=False)
class Timeline:
    """When things happened to one request, in seconds of a monotonic clock; 0: not yet."""

    arrival: float
    num_prompt: int
    scheduled: float = 0.0
    first: float = 0.0


class EngineMetrics:
    """Counts and histograms since the engine's start. Mutable; only the engine's thread uses it."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(edges) for name, edges in BUCKETS.items()}
        self.finished = Counter[str](dict.fromkeys(REASONS, 0))
        self.prompt_tokens = self.generation_tokens = self.queried_tokens = self.hit_tokens = 0
        self.http: dict[tuple[str, str, int], list[float]] = {}
        self._queued: dict[int, Timeline] = {}
        self._last, self._gaps, self._rows = 0.0, list[float](), list[int]()

    def submitted(self, request_id: int, line: Timeline) -> None:
        """A request is queued."""
        self._queued[request_id] = line

    def left_queue(self, waiting: Queue, begin: float) -> None:
        """A step that began then has changed the queue: those that are not in it any more run. Usually they are the oldest."""
        left = len(self._queued) - len(waiting)
        if left <= 0:
            return
        gone = []
        for request_id in self._queued:
            if request_id not in waiting.items:
                gone.append(request_id)
                if len(gone) == left:
                    break
        for request_id in gone:
            self._run(self._queued.pop(request_id), begin)

    def _run(self, line: Timeline, begin: float) -> None:
        line.scheduled = max(begin, line.arrival)
        self.histograms["queue"].add(line.scheduled - line.arrival)

    def began(self, request_id: int, line: Timeline, begin: float, now: float) -> None:
        """A request has its first token, from a step that began at `begin`. If it was not seen to leave the queue, it left it then."""
        if (queued := self._queued.pop(request_id, None)) is not None:
            self._run(queued, begin)
        line.first = now
        self.prompt_tokens += line.num_prompt
        self.histograms["time_to_first_token"].add(now - line.arrival)
        self.histograms["prefill"].add(now - line.scheduled)

    def stepped(self, now: float, tokens: int, firsts: int) -> None:
        """A step gave tokens, some of them the first ones of their requests. The others have waited since the step before."""
        self.generation_tokens += tokens
        if tokens > firsts:
            self._gaps.append(now - self._last)
            self._rows.append(tokens - firsts)
            if len(self._gaps) == PIECE:
                self._settle()
        self._last = now

    def _settle(self) -> None:
        self.histograms["inter_token"].add_many(self._gaps, self._rows)
        self._gaps.clear()
        self._rows.clear()

    def ended(self, request_id: int, line: Timeline, output: RequestOutput, now: float) -> None:
        """A request has ended."""
        self._queued.pop(request_id, None)
        self.finished[output.finish_reason] += 1
        if not line.first:
            return
        add = self.histograms
        add["end_to_end"].add(now - line.arrival)
        add["inference"].add(now - line.scheduled)
        add["decode"].add(now - line.first)
        add["prompt_tokens"].add(line.num_prompt)
        add["reply_tokens"].add(len(output.token_ids))
        self.queried_tokens += line.num_prompt
        self.hit_tokens += output.num_cached_tokens

    def forgotten(self, request_id: int) -> None:
        """A request that is not counted has ended or was cancelled."""
        self._queued.pop(request_id, None)

    def cancelled(self, request_id: int) -> None:
        """A request was cancelled."""
        self._queued.pop(request_id, None)
        self.finished["abort"] += 1

    def add_http(self, counts: Seq[Seq[Any]]) -> None:
        """Add what a front end has answered: path, method, status, number of answers, and their seconds."""
        for path, method, status, count, seconds in counts:
            key = (str(path), str(method), int(status))
            if key in self.http or len(self.http) < MOST_HTTP:
                entry = self.http.setdefault(key, [0, 0.0])
                entry[0] += count
                entry[1] += seconds

    def figures(self, state: EngineState, num_chunks: int) -> dict[str, Any]:
        """All that was measured, and the state's own figures, as plain values."""
        self._settle()
        held = np.zeros(state.config.num_pages, bool)
        for chunk in state.chunks.values():
            held[chunk.pages.array()] = True
        chunks, free, idle, total = int(held.sum()), state.pages.num_free, state.prefix.num_idle, state.config.num_pages
        stats, (host_pages, host_pages_used) = state.stats, host_pages_of(state)
        return {
            "num_running": len(state.running),
            "num_waiting": len(state.waiting),
            "num_chunks": num_chunks,
            "page_size": state.config.page_size,
            "pages": {"running": total - free - idle - chunks, "chunks": chunks, "index": idle, "free": free},
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "queried_tokens": self.queried_tokens,
            "hit_tokens": self.hit_tokens,
            "prefill_tokens": stats.prefill_tokens,
            "reused_tokens": stats.reused_tokens,
            "rerun_tokens": stats.rerun_tokens,
            "preemptions": stats.preemptions,
            "memory_shortages": stats.memory_shortages,
            "offloaded_tokens": stats.offloaded_tokens,
            "loaded_tokens": stats.loaded_tokens,
            "host_pages": host_pages,
            "host_pages_used": host_pages_used,
            "read_tokens": stats.read_tokens,
            **disk_figures(state),
            "steps": state.num_steps,
            "finished": dict(self.finished),
            "histograms": {name: (one.counts.tolist(), one.sum) for name, one in self.histograms.items()},
            "http": [[*key, *value] for key, value in self.http.items()],
        }


def disk_figures(state: EngineState) -> dict[str, int]:
    """The figures of KV on disk; all are 0 without `kv_dir`."""
    disk = runtime_of(state).disk
    counts = DiskCounts() if disk is None else disk.counts
    return {
        "disk_bytes": 0 if disk is None else disk.folder.size,
        "disk_bytes_written": counts.bytes_written,
        "disk_bytes_read": counts.bytes_read,
        "disk_pages_damaged": counts.pages_damaged,
        "disk_pages_missed": counts.pages_missed,
        "disk_pages_dropped": counts.pages_dropped,
        "disk_frames_damaged": counts.frames_damaged,
        "disk_frames_missed": counts.frames_missed,
        "disk_frames_dropped": counts.frames_dropped,
        "disk_errors": counts.errors,
    }
