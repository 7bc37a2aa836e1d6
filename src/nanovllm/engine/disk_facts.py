"""What an engine learns from its disk: which reads have ended, which pages there are, and the time.

Ranks have files of their own, and their reads end at different times. All of them must plan alike, so they tell each other: a page or a
frame is there when each rank has its part of it, and the time is that of rank 0.
"""

import numpy as np

from nanovllm.config import Mesh
from nanovllm.executor.distributed import gathered
from nanovllm.executor.kv_disk import DiskTier
from nanovllm.state.disk_reads import WHOLE
from nanovllm.state.engine_state import EngineState

Ended = list[tuple[int, int]]


def mesh_of(state: EngineState) -> Mesh | None:
    """The ranks of an engine; None if it has one."""
    mesh = state.runtime.lease.model.mesh
    return None if mesh is None or mesh.size == 1 else mesh


def told_by_all(disk: DiskTier, mesh: Mesh | None, ended: Ended) -> tuple[Ended, float]:
    """The reads of an engine that have ended, and the time. Ranks call this at the same time.

    Args:
        disk: The disk of this rank.
        mesh: The ranks.
        ended: The host pages whose reads have ended here, in their order, each with what has come of its page.

    Returns:
        Those that have ended on all ranks, in the order of rank 0, with what has come on all of them; and seconds of a monotonic clock.
    """
    now = disk.clock()
    if mesh is None:
        return ended, now
    parts = WHOLE + 1
    own = np.array([now, *(parts * at + part for at, part in ended)])
    first, *others = (np.frombuffer(told) for told in gathered(mesh, own.tobytes()))
    pages, least = np.divmod(first[1:].astype(np.int64), parts)
    for told in others:
        found, part = np.divmod(told[1:].astype(np.int64), parts)
        known = np.full(1 + max(pages.max(initial=-1), found.max(initial=-1)), -1)
        known[found] = part
        least = np.minimum(least, known[pages])
    there = least >= 0
    return [(int(at), int(part)) for at, part in zip(pages[there], least[there], strict=True)], float(first[0])


def on_all_disks(mesh: Mesh | None, had: np.ndarray) -> np.ndarray:
    """What all ranks, which call this at the same time, have of pages in a row, given what this one has of them, uint8."""
    if mesh is None:
        return had
    told = [np.frombuffer(one, np.uint8)[1:] for one in gathered(mesh, b"-" + had.tobytes())]  # never empty
    return np.minimum.reduce([one[: min(map(len, told))] for one in told])
