"""The memory of a device: of a GPU, or of the host as far as this process may use it."""

from dataclasses import dataclass
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # version 2; in a container, of the container


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes of a device's memory: in total, and free."""

    total: int
    free: int


def room(device: torch.device) -> Room | None:
    """The memory of a GPU, or of the host as far as this process may use it. None if the system does not report it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Room(total=total, free=free)
    known = _numbers(MEMINFO)
    if not {"MemTotal", "MemAvailable"} <= known.keys():
        return None
    host = Room(total=1024 * known["MemTotal"], free=1024 * known["MemAvailable"])
    try:
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # not in a container, or in one without a limit
        return host
    # The system frees cached file pages when memory is short.
    free = limit - used + _numbers(CGROUP / "memory.stat").get("inactive_file", 0)
    return Room(total=min(host.total, limit), free=max(0, min(host.free, free)))


def _numbers(file: Path) -> dict[str, int]:
    """The numbers of a file that has a name and a number on every line."""
    try:
        parts = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {part[0].rstrip(":"): int(part[1]) for part in parts if len(part) > 1 and part[1].isdecimal()}
