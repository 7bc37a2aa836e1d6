"""What a profiler saw, as a table: kernels on a GPU, ops on a CPU, with names that fit on a line."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.entrypoints.display.tables import aligned

NAME = 58  # letters of a name
NO_OP = "(in no op: kernels in C, Python)"
SCOPES = re.compile(r"\(anonymous namespace\)::|\b(?!nanovllm)[A-Za-z_]\w*::(?=[A-Za-z_(])")
QUALIFIERS = re.compile(r"^(?:void|static|__global__)\s+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel, or an op without what it calls: launches and microseconds of a step, and its share of all kernels' time."""

    name: str
    launches: float
    us: float
    share: float


def kernels(events: Iterable[Any], steps: int, *, cuda: bool, seconds: float) -> tuple[Kernel, ...]:
    """The kernels in a profiler's events, the slowest first; without a GPU the ops, and what of the run's `seconds` was in none of them.

    An event has `name`, `device_type`, and on a GPU `time_range`, else `self_cpu_time_total`, in microseconds.
    """
    found: dict[str, list[float]] = {}
    for event in events:
        if (event.device_type.name == "CUDA") == cuda and not getattr(event, "is_user_annotation", False):
            us = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
            found.setdefault(short(event.name), []).append(us)
    if not cuda:
        found[NO_OP] = [max(0.0, 1e6 * seconds - sum(map(sum, found.values()))) / steps] * steps
    whole = sum(map(sum, found.values())) or 1.0
    rows = [Kernel(name=name, launches=len(us) / steps, us=sum(us) / steps, share=sum(us) / whole) for name, us in found.items()]
    return tuple(sorted(rows, key=lambda kernel: -kernel.us))


def short(name: str) -> str:
    """A kernel's name without its namespaces and arguments, cut where it is long: of templates their own name and what comes first."""
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
    """The first rows in aligned columns, the others together in one."""
    rows = tuple(rows)
    head = ("kernel" if cuda else "op", "launches a step" if cuda else "calls a step", "us each", "us a step", "share")
    rest = rows[most:]
    shown = [*rows[:most]]
    if rest:
        launches, us, share = (sum(getattr(k, name) for k in rest) for name in ("launches", "us", "share"))
        shown.append(Kernel(name=f"{len(rest)} others", launches=launches, us=us, share=share))
    cells = [(k.name, f"{k.launches:,.1f}", f"{k.us / k.launches:,.2f}", f"{k.us:,.1f}", f"{k.share:.1%}") for k in shown]
    return aligned(head, cells)


def as_json(rows: Iterable[Kernel]) -> list[Mapping[str, Any]]:
    """JSON objects, a row each."""
    return [{"name": k.name, "launches": round(k.launches, 2), "us": round(k.us, 2), "share": round(k.share, 4)} for k in rows]
