"""The events of a profiler as a table: kernels on a GPU, ops on a CPU, with shortened names."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.entrypoints.display.tables import aligned

NAME = 58  # characters of a name
NO_OP = "(outside of ops: C kernels, Python)"
SCOPES = re.compile(r"\(anonymous namespace\)::|\b(?!nanovllm)[A-Za-z_]\w*::(?=[A-Za-z_(])")
QUALIFIERS = re.compile(r"^(?:void|static|__global__)\s+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel, or an op without the ops that it calls.

    Attributes:
        name: The shortened name.
        launches: Launches per step, or calls per step of an op.
        us: Microseconds per step.
        share: The share of the time of all kernels.
    """

    name: str
    launches: float
    us: float
    share: float


def kernels(events: Iterable[Any], steps: int, *, cuda: bool, seconds: float) -> tuple[Kernel, ...]:
    """The kernels in a profiler's events, the slowest first; on a CPU the ops, and the time outside of all ops.

    Args:
        events: The events. Each has `name` and `device_type`, and `time_range` (GPU) or `self_cpu_time_total` (CPU, in microseconds).
        steps: The number of profiled steps.
        cuda: Whether the device is a GPU.
        seconds: The time of the whole run.
    """
    times: dict[str, list[float]] = {}
    for event in events:
        if (event.device_type.name == "CUDA") == cuda and not getattr(event, "is_user_annotation", False):
            us = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
            times.setdefault(short(event.name), []).append(us)
    if not cuda:
        times[NO_OP] = [max(0.0, 1e6 * seconds - sum(map(sum, times.values()))) / steps] * steps
    whole = sum(map(sum, times.values())) or 1.0
    rows = [Kernel(name=name, launches=len(us) / steps, us=sum(us) / steps, share=sum(us) / whole) for name, us in times.items()]
    return tuple(sorted(rows, key=lambda kernel: -kernel.us))


def short(name: str) -> str:
    """A kernel's name without namespaces and arguments, truncated to `NAME` characters; a template keeps its first parameters."""
    plain = SCOPES.sub("", QUALIFIERS.sub("", name))
    depth, end = 0, len(plain)
    for i, letter in enumerate(plain):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and not depth and i:
            end = i
            break
    plain = plain[:end].strip()
    return plain if len(plain) <= NAME else plain[: NAME - 1] + "…"


def table(rows: Iterable[Kernel], most: int, *, cuda: bool) -> list[str]:
    """The first `most` rows in aligned columns, and one row for the others."""
    rows = tuple(rows)
    head = ("kernel" if cuda else "op", "launches per step" if cuda else "calls per step", "us each", "us per step", "share")
    rest = rows[most:]
    shown = [*rows[:most]]
    if rest:
        launches, us, share = (sum(getattr(k, name) for k in rest) for name in ("launches", "us", "share"))
        shown.append(Kernel(name=f"{len(rest)} others", launches=launches, us=us, share=share))
    cells = [(k.name, f"{k.launches:,.1f}", f"{k.us / k.launches:,.2f}", f"{k.us:,.1f}", f"{k.share:.1%}") for k in shown]
    return aligned(head, cells)


def as_json(rows: Iterable[Kernel]) -> list[Mapping[str, Any]]:
    """One JSON object per row."""
    return [{"name": k.name, "launches": round(k.launches, 2), "us": round(k.us, 2), "share": round(k.share, 4)} for k in rows]
